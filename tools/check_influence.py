"""Whether what `athanor trace --influence` names does push towards an answer: fine-tuning again without it.

    python -m tools.check_influence --ask "QUESTION" ... [--questions FILE] [--epochs E] [--top 10] [--seed 1]

In a built checkout. Of each question the answer is that of models/sft. Fine-tuning runs from models/base as params.yaml has
it, with this machine's settings: once as it is, once with nothing supervised in as many conversations drawn at random, and
for each question once without its top ones. Only the loss mask differs, in all copies, so rows and batches
stay what they were; the mean of a step is over the targets that are left. The table has the answer's log
probability in nats in the first of these trainings, how it differs in the others, and `*` where the greedy answer is another.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from athanor.base.strict import load_section
from athanor.model.transformer import Transformer
from athanor.model.validation import sequence_nats
from athanor.model.weights import load_config, load_model
from athanor.origins.documents import SFT
from athanor.origins.influence import Influence, greedy_answer, question_and_answer
from athanor.runtime.choices import COMPILED, choose
from athanor.runtime.machine import anchor, machine
from athanor.runtime.progress import Progress
from athanor.training.finetuning import FineTuning
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.setup import tuned
from athanor.training.sft_params import SftParams
from athanor.training.world import SINGLE

BASE = Path("models/base")


def trained_without(entries: Iterable[int], params: SftParams) -> Transformer:
    """The model that fine-tuning makes when nothing is supervised in these entries."""
    with tempfile.TemporaryDirectory() as name:
        data, slot = Path(name) / "sft", Path(name) / "slot"
        _copy(data, entries)
        config, local = load_config(BASE)[0], machine()
        tuning = FineTuning(params, data, config.context_tokens)
        total = tuning.schedule.total_tokens
        execution, _ = choose([slot], config, params.precision, params.batch_tokens, total // params.batch_tokens)
        plan = tuning.execution_plan(local, SINGLE, execution, config)
        model, _ = load_model(BASE, plan.device)
        with Progress(total, "sft", "tokens") as bar:
            hooks = Hooks(
                lambda model: tuning.validate(model, plan), on_step=lambda row: bar.update(params.batch_tokens)
            )
            with tuned(model, execution, plan.footprint, plan.settings, hooks, anchor() / COMPILED):
                adam, key = OptimizerSettings.of(params), tuning.selection_key
                train(model, tuning.sampler, adam, tuning.schedule, plan.settings, slot, hooks, selection_key=key)
    return model


def _copy(folder: Path, entries: Iterable[int]) -> None:
    """data/sft with nothing supervised in these entries."""
    shutil.copytree(SFT, folder)
    starts, mask = np.load(folder / "train_idx.npy").astype(int), np.fromfile(folder / "train_mask.bin", np.uint8)
    for number in entries:
        mask[starts[number] : starts[number + 1]] = 0
    (folder / "train_mask.bin").write_bytes(mask.tobytes())


class Asked(NamedTuple):
    """A question after a training: log probability in nats of the answer that is checked, and the model's own answer."""

    log_p: float
    said: str


def check(questions: Sequence[str], params: SftParams, most: int, seed: int) -> Iterator[tuple[str, str, list[Asked]]]:
    """Each question with its answer, as it is after training with all, without random conversations, without its top ones."""
    influence = Influence(anchor())
    tokenizer = influence.tokenizer
    answers = {question: greedy_answer(influence.model, tokenizer, question) for question in questions}
    top = {}
    for question, answer in answers.items():
        named = influence.top(influence.scores(question, answer), most)
        top[question] = [entry for row in named for entry in row["entries"]]
    taken = {entry for entries in top.values() for entry in entries}
    others = [entries for entries in influence.copies if entries[0] not in taken]
    drawn = np.random.Generator(np.random.PCG64(seed)).permutation(len(others))[:most]

    def asked(model: Transformer, question: str) -> Asked:
        ids, mask = question_and_answer(tokenizer, question, answers[question])
        nats, _ = sequence_nats(model, [ids], [mask], model.config.context_tokens)
        return Asked(-float(nats[0]), greedy_answer(model, tokenizer, question))

    plain = trained_without([], params)
    random = trained_without([entry for number in drawn for entry in others[number]], params)
    for question, answer in answers.items():
        models = (plain, random, trained_without(top[question], params))
        yield question, answer, [asked(model, question) for model in models]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_influence", description="train without what is named")
    parser.add_argument("--ask", nargs="+", default=[], metavar="QUESTION")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="one a line")
    parser.add_argument("--epochs", type=float, help="of each training (default: as params.yaml has it)")
    parser.add_argument("--top", type=int, default=10, help="conversations that are left out (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the random ones")
    args = parser.parse_args()
    questions = [*args.ask, *(args.questions.read_text(encoding="utf-8").splitlines() if args.questions else [])]
    params = load_section("params.yaml", "sft", SftParams)
    params = replace(params, epochs=args.epochs or params.epochs)
    print("   all   random      top   question: answer")
    for question, answer, (plain, *without) in check(questions, params, args.top, args.seed):
        changes = (f"{each.log_p - plain.log_p:+8.2f}{' *'[each.said != plain.said]}" for each in without)
        print(f"{plain.log_p:6.2f}{''.join(changes)}  {question}: {answer!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
