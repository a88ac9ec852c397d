"""What GRPO learns from: questions, the present model's answers, and what each earned beside the others of its group.

A round is drawn with the weights that a step begins with, and serves `steps_per_round` steps. It is a function of these
weights, the seed and the round's number, so a run that goes on from a checkpoint draws the same. Where the checkpoint
lies inside a round, its weights are others: the round is read from a file then, which was written before the checkpoint.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from athanor.base.artifacts import digest, new_dir, read_manifest, verify_files, write_manifest
from athanor.base.errors import AthanorError, GateError
from athanor.data.order import permutation
from athanor.data.rows import pack
from athanor.data.sampler import NO_DOCUMENT
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.decoding.sampling import GREEDY, Sampling
from athanor.model.loss import targets, token_losses
from athanor.model.precision import autocast
from athanor.model.transformer import Transformer
from athanor.policy.paid import Rollout, total
from athanor.policy.params import GrpoParams
from athanor.text.conversations import Item
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training import checkpoint

ROUNDS = "rounds"
ARRAYS = ("tokens_BS", "mask_BS", "document_BS", "values_BSK")
SCORED_ROWS = 8  # in one pass
SCALE_FLOOR = 1e-4  # added to a group's standard deviation, as TRL does


class PolicyBatch(NamedTuple):
    """Rows of S ids, each with some answers and their questions, as SftBatch; values_BSK: see objectives.Grpo."""

    tokens_BS: np.ndarray
    mask_BS: np.ndarray
    document_BS: np.ndarray
    values_BSK: np.ndarray
    known: Mapping[str, float]


class Group(NamedTuple):
    """A question with its answers."""

    prompt: list[int]
    answers: list[list[int]]  # ids with the one that ended it
    rewards: list[float]
    correct: int  # answers
    well_formed: int
    cut: int  # answers that reached the limit

    @property
    def tied(self) -> bool:
        return max(self.rewards) - min(self.rewards) < 1e-9

    @property
    def advantages(self) -> np.ndarray:
        rewards = np.asarray(self.rewards)
        if self.tied:  # exactly 0: an optimiser that divides by the size of gradients would make a step of any rest
            return np.zeros(len(rewards))
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + SCALE_FLOOR)


@dataclass
class Asker:
    """Draws answers of a model and has them rewarded."""

    tokenizer: Tokenizer
    params: GrpoParams
    workers: int
    threads: int

    def ask(self, model: Transformer, items: Sequence[Item], copies: int, sampling: Sequence[Sampling]) -> list[Group]:
        """A group of `copies` answers for each item; `sampling` for each answer."""
        prompts = [prompt_ids(self.tokenizer, item.prompt) for item in items for _ in range(copies)]
        generations = generate(
            FusedDecoder(model),
            prompts,
            max_new_tokens=self.params.max_new_tokens,
            stop_ids=end_ids(self.tokenizer),
            sampling=sampling,
            threads=self.threads,
        )
        stop, opening = self.tokenizer.stop, (None, self.tokenizer.stop)
        rollouts = [
            Rollout(
                items[index // copies],
                self.tokenizer.decode(each.ids),
                ended=each.end == stop,
                fake_turn=each.end not in opening,
            )
            for index, each in enumerate(generations)
        ]
        rewards = total(rollouts, self.params.rewards, self.workers)
        groups = []
        for start in range(0, len(prompts), copies):
            here = slice(start, start + copies)
            answers = [[*each.ids, *([] if each.end is None else [each.end])] for each in generations[here]]
            groups.append(
                Group(
                    prompts[start],
                    answers,
                    [reward.total for reward in rewards[here]],
                    sum(reward.correct == 1 for reward in rewards[here]),
                    sum(reward.format == 1 for reward in rewards[here]),
                    sum(not each.stopped for each in generations[here]),
                )
            )
        return groups

    def greedy(self, model: Transformer, items: Sequence[Item]) -> list[Group]:
        return self.ask(model, items, 1, [GREEDY] * len(items))


class Rollouts:
    """The sampler of a GRPO training: see `Sampler` of athanor/training/loop.py. `model` is the one that trains."""

    def __init__(
        self,
        asker: Asker,
        items: Sequence[Item],
        model: Transformer,
        reference: Transformer,
        folder: Path,
        batch_tokens: int,
        precision: str,
    ) -> None:
        self.asker, self.items, self.params = asker, items, asker.params
        self.model, self.reference, self.precision = model, reference, precision
        self.folder, self.batch_tokens = folder / ROUNDS, batch_tokens
        self._round: tuple[int, list[PolicyBatch]] | None = None

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> PolicyBatch:
        """The batch of the step at this position; draws a round where one begins."""
        number, index = divmod(position_tokens // self.batch_tokens, self.params.steps_per_round)
        if self._round is None or self._round[0] != number or index == 0:
            self._round = number, self._draw(number) if index == 0 else self._read(number)
        return self._round[1][index]

    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str:
        return f"answer {document} of step {position_tokens // self.batch_tokens + 1}"

    # -- drawing --------------------------------------------------------------

    def _draw(self, number: int) -> list[PolicyBatch]:
        params = self.params
        wanted = params.questions_per_step * params.steps_per_round
        candidates = self._questions(number, max(wanted, int(wanted * params.question_tries)))
        drawn: list[Group] = []
        while candidates and (untied := sum(not group.tied for group in drawn)) < wanted:
            # As many as it will take: small rounds of drawing cost nearly what large ones do.
            share = max(untied / len(drawn), 1 / params.question_tries) if drawn else 1.0
            count = math.ceil((wanted - untied) / share)
            now, candidates = candidates[:count], candidates[count:]
            sampling = [
                Sampling(1.0, seed=int(digest([params.seed, number, len(drawn) + index, copy])[:12], 16))
                for index in range(len(now))
                for copy in range(params.answers_per_question)
            ]
            drawn += self.asker.ask(self.model, now, params.answers_per_question, sampling)
        used = [group for group in drawn if not group.tied]
        # Where too few differ, the others hold the model to the reference and teach nothing else.
        used = (used + [group for group in drawn if group.tied])[:wanted]
        known = _facts(drawn)
        parts = [used[step :: params.steps_per_round] for step in range(params.steps_per_round)]
        context_tokens, by_answer = self.model.config.context_tokens, params.mean_over == "answers"
        pad = self.asker.tokenizer.pad
        batches = [self._scored(_rows(part, context_tokens, pad, known, by_answer)) for part in parts]
        self._write(number, batches)
        return batches

    def _questions(self, number: int, count: int) -> list[Item]:
        """The questions of a round, one pass over all of them after the other, each in an order of its own."""
        size, first = len(self.items), number * count
        epochs = range(first // size, (first + count - 1) // size + 1)
        order = np.concatenate([permutation(size, self.params.seed, "questions", epoch) for epoch in epochs])
        return [self.items[index] for index in order[first - epochs[0] * size :][:count].tolist()]

    def _scored(self, batch: PolicyBatch) -> PolicyBatch:
        """With the log probabilities of the drawing model and of the reference."""
        device = self.model.head_weight.device

        def score(task: tuple[int, Transformer, slice]) -> None:
            column, model, rows = task
            tokens_BS, mask_BS, document_BS = (part[rows] for part in batch[:3])
            inputs = targets(tokens_BS, document_BS, mask_BS, document_mask=True)
            with torch.no_grad(), autocast(self.precision, device):
                logp_N = -token_losses(model, inputs.to(device))
            places = np.divmod(inputs.where_N.numpy(), tokens_BS.shape[1] - 1)
            batch.values_BSK[rows][places[0], places[1] + 1, column] = logp_N.cpu().numpy()

        cuts = [slice(start, start + SCORED_ROWS) for start in range(0, len(batch.tokens_BS), SCORED_ROWS)]
        tasks = [(column, model, cut) for column, model in ((1, self.model), (2, self.reference)) for cut in cuts]
        workers = self.asker.threads if device.type == "cpu" and torch.get_num_threads() == 1 else 1
        with ThreadPoolExecutor(workers, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
            for _ in pool.map(score, tasks):
                pass
        return batch

    # -- files ----------------------------------------------------------------

    def clear(self) -> None:
        """Remove the files of all rounds, when nothing will be trained on them any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"round_{number:06d}"

    def _write(self, number: int, batches: list[PolicyBatch]) -> None:
        with new_dir(self._path(number)) as folder:
            for index, batch in enumerate(batches):
                for name in ARRAYS:
                    np.save(folder / f"{index}_{name}.npy", getattr(batch, name))
            counts, known = {"steps": len(batches)}, dict(batches[0].known)
            write_manifest(folder, kind=ROUNDS, version=1, counts=counts, known=known)
        parents = (self.folder.parent, self.folder.parent / checkpoint.ANCHORS)
        steps = [checkpoint.step_of(path) for parent in parents for path in checkpoint.steps(parent)]
        needed = self._path(min(steps, default=0) // self.params.steps_per_round)
        for old in self.folder.glob("round_*"):
            if old < needed:
                shutil.rmtree(old)

    def _read(self, number: int) -> list[PolicyBatch]:
        path = self._path(number)
        try:
            verify_files(path)
            known = read_manifest(path, ROUNDS, 1)["known"]
        except (OSError, AthanorError) as error:
            fix = "athanor slots drop, and begin this stage again"
            raise GateError("answers of a round", f"cannot be read: {error}", where=str(path), fix=fix) from None
        return [
            PolicyBatch(**{name: np.load(path / f"{index}_{name}.npy") for name in ARRAYS}, known=known)
            for index in range(self.params.steps_per_round)
        ]


def scores(groups: Sequence[Group], items: Sequence[Item]) -> dict[str, Any]:
    """Mean reward and share of right answers, over all items and by category."""
    by_category: dict[str, list[int]] = {}
    for group, item in zip(groups, items, strict=True):
        by_category.setdefault(item.category, []).append(group.correct)
    return {
        "reward": float(np.mean([group.rewards for group in groups])),
        "correct": float(np.mean([group.correct for group in groups])),
        "categories": {name: float(np.mean(right)) for name, right in sorted(by_category.items())},
    }


def _facts(groups: Sequence[Group]) -> dict[str, float]:
    """What is to be known of the answers drawn for a round, of the tied groups as well."""
    rewards = np.array([group.rewards for group in groups])
    lengths = [len(answer) for group in groups for answer in group.answers]
    return {
        "policy.reward": float(rewards.mean()),
        "policy.reward_std": float(rewards.std(axis=1, ddof=1).mean()),
        "policy.tied_groups": float(np.mean([group.tied for group in groups])),
        "policy.answer_tokens": float(np.mean(lengths)),
        "policy.cut_answers": sum(group.cut for group in groups) / len(lengths),
        "policy.format_share": sum(group.well_formed for group in groups) / len(lengths),
    }


def _rows(
    groups: Sequence[Group], context_tokens: int, pad: int, known: Mapping[str, float], by_answer: bool
) -> PolicyBatch:
    """Answers behind their questions, packed; of the values only advantage and weight are there yet."""
    answers = [
        (group.prompt, answer, float(advantage))
        for group in groups
        for answer, advantage in zip(group.answers, group.advantages, strict=True)
    ]
    numbers_R = pack([len(prompt) + len(answer) for prompt, answer, _ in answers], context_tokens + 1, 0)
    shape = (len(numbers_R), context_tokens + 1)
    tokens_BS, mask_BS = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=np.uint8)
    document_BS, values_BSK = np.full(shape, NO_DOCUMENT, dtype=np.int64), np.zeros((*shape, 4), dtype=np.float32)
    mean_length = float(np.mean([len(answer) for _, answer, _ in answers]))
    for row, numbers in enumerate(numbers_R):
        start = 0
        for document, number in enumerate(numbers):
            prompt, answer, advantage = answers[number]
            begin, end = start + len(prompt), start + len(prompt) + len(answer)
            tokens_BS[row, start:end] = [*prompt, *answer]
            mask_BS[row, begin:end], values_BSK[row, begin:end, 0] = 1, advantage
            values_BSK[row, begin:end, 3] = mean_length / len(answer) if by_answer else 1.0
            document_BS[row, start:end], start = document, end
    return PolicyBatch(tokens_BS, mask_BS, document_BS, values_BSK, dict(known))
