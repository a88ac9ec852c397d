"""The loss of the first step, beside TRL's, on the exported model and with equal inputs; where TRL is installed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from athanor.export.huggingface import write_huggingface
from athanor.export.parity import rebuilt
from athanor.policy.objectives import Dpo, Grpo
from tests.export.conftest import qwen, tokenizer_dir  # noqa: F401  (fixtures)
from tests.policy.batches import answers, loss_and_gradient, reference_log_probs, rows_of

pytestmark = pytest.mark.extra
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl==1.16.0")
PAD, PROMPT = 0, 7
COUNT = 12


@pytest.fixture(scope="module")
def models(qwen, tmp_path_factory):  # noqa: F811
    """The model, and one beside it as the reference: for equal ones all log ratios are 0 and hide mistakes."""
    folder = tmp_path_factory.mktemp("hf")
    write_huggingface(folder, qwen.source, "float32")
    policy = rebuilt(qwen.source, "float32")
    reference = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
    return folder, policy, reference


def padded(sequences):
    width = max(map(len, sequences))
    ids = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in sequences])
    return ids, torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in sequences])


def close(ours, theirs):
    (loss, gradient), (their_loss, their_gradient) = ours, theirs
    assert abs(loss) > 1e-3 and loss == pytest.approx(their_loss, abs=1e-5)
    assert torch.linalg.norm(gradient - their_gradient) < 2e-3 * torch.linalg.norm(their_gradient)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_grpo(models, drift, loss_type, tmp_path):
    """Also with answers of another model, whose ratios are clipped on both sides."""
    folder, policy, reference = models
    prompts, completions = answers(policy, COUNT, PROMPT)
    rng = np.random.default_rng(1)
    advantages = rng.standard_normal(COUNT).astype(np.float32)
    of_reference, of_policy = (reference_log_probs(model, prompts, completions) for model in (reference, policy))
    lengths = np.array([len(completion) for completion in completions])
    weights = lengths.mean() / lengths if loss_type == "grpo" else np.ones(COUNT)
    drawn = [logp + drift * rng.standard_normal(len(logp)).astype(np.float32) for logp in of_policy]
    values = [
        np.stack((np.full(len(logp), advantage), logp, theirs, np.full(len(logp), weight)), 1)
        for advantage, logp, theirs, weight in zip(advantages, drawn, of_reference, weights, strict=True)
    ]
    ours = loss_and_gradient(policy, Grpo(0.05, 0.2, 0.28), rows_of(prompts, completions, values))
    arguments = {"beta": 0.05, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": loss_type, "num_generations": 2}
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, per_device_train_batch_size=2,
        gradient_checkpointing=False, max_completion_length=32, **arguments,
    )  # fmt: skip
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    trainer = trl.GRPOTrainer(
        model=str(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(rows),
    )  # fmt: skip
    trainer.model.eval()
    trainer.current_gradient_accumulation_steps = 1
    completion_ids, completion_mask = padded(completions)
    prompt_ids, prompt_mask = padded(prompts)
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask, "advantages": torch.from_numpy(advantages),
        "old_per_token_logps": padded_floats(drawn), "ref_per_token_logps": padded_floats(of_reference),
        "num_items_in_batch": completion_mask.sum(),
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    close(ours, (loss.item(), trainer.model.get_input_embeddings().weight.grad))


def padded_floats(rows):
    width = max(map(len, rows))
    return torch.tensor(np.stack([np.pad(row, (0, width - len(row))) for row in rows]), dtype=torch.float32)


@pytest.mark.parametrize("normalised, loss_type", [(False, "sigmoid"), (True, "sigmoid_norm")])
def test_dpo(models, normalised, loss_type, tmp_path):
    folder, policy, reference = models
    prompts, completions = answers(policy, COUNT, PROMPT)
    prompts = [prompts[2 * (index // 2)] for index in range(COUNT)]  # chosen and rejected answer the same
    theirs = reference_log_probs(reference, prompts, completions)
    values = [
        np.stack([[index // 2] * len(logp), [1 - 2 * (index % 2)] * len(logp), [1 / len(logp)] * len(logp), logp], 1)
        for index, logp in enumerate(theirs)
    ]
    ours = loss_and_gradient(policy, Dpo(0.3, normalised), rows_of(prompts, completions, values, pairs=COUNT // 2))
    config = trl.DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, beta=0.3, loss_type=loss_type,
        gradient_checkpointing=False, precompute_ref_log_probs=False,
    )  # fmt: skip
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    trainer = trl.DPOTrainer(
        model=str(folder), args=config, train_dataset=pytest.importorskip("datasets").Dataset.from_list([row])
    )
    trainer.model.eval()
    trainer.precompute_ref_logps = True
    order = [*range(0, COUNT, 2), *range(1, COUNT, 2)]
    ids, mask = padded([[*prompts[index], *completions[index]] for index in order])
    completion_mask = mask.clone()
    completion_mask[:, :PROMPT] = 0
    sums = torch.tensor([theirs[index].sum() for index in order])
    inputs = {
        "input_ids": ids, "attention_mask": mask, "completion_mask": completion_mask,
        "ref_chosen_logps": sums[: COUNT // 2], "ref_rejected_logps": sums[COUNT // 2 :],
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs, False)
    loss.backward()
    close(ours, (loss.item(), trainer.model.get_input_embeddings().weight.grad))
