"""Measure the base and the chat model: bits per byte of held-out text, and the battery of held-out items."""

from __future__ import annotations

import json
import time
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, read_json, write_manifest, write_text
from athanor.base.errors import InputError, Interrupted
from athanor.decoding.sampling import Sampling
from athanor.evaluation.battery import ask
from athanor.evaluation.compression import bpb_facts, choose, compression_rates, encode, model_rates
from athanor.evaluation.item_gate import check_items
from athanor.evaluation.pages import battery_markdown, left_out_line, samples_markdown
from athanor.evaluation.params import EvalParams
from athanor.evaluation.report import (
    GREEDY_NAME,
    answer_rows,
    battery_facts,
    condition_rows,
    development_sample,
    findings,
    table_rows,
)
from athanor.evaluation.sandbox import isolation
from athanor.evaluation.scoring import scorable
from athanor.evaluation.taught import marked, taught_facts, taught_items
from athanor.model.device import prepare
from athanor.model.transformer import Transformer
from athanor.model.weights import load_model
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.conversations import read_items
from athanor.text.documents import read_documents
from athanor.tokenizer.chat import check_made_with
from athanor.tokenizer.tokenizer import Tokenizer

CLEAN, BATTERY, TOKENIZER, OUT = Path("data/clean"), Path("data/battery"), Path("models/tokenizer"), Path("data/eval")
INSTRUCT = Path("data/instruct")
SFT_DATA = Path("metrics/sft_data.json")  # a file of its own: one inside data/sft would have DVC pull all of that
MODELS = {"base": Path("models/base"), "sft": Path("models/sft")}


def run(run: Run) -> None:
    measure(run, MODELS, OUT)


def measure(run: Run, models: dict[str, Path], out: Path) -> None:
    """Measure two models by their names; the second one is compared with the first, and also decoded in other ways."""
    params, settings = run.params("eval", EvalParams), machine()
    # One thread per operation, several batches at once: no result depends on the cores, a busy one delays its batch only.
    device = prepare(settings.device, 1)
    clock = Clock(run)

    # A scorer that cannot distinguish right from wrong answers must not give any figure.
    items, left_out = scorable(read_items(BATTERY / "items.jsonl"))
    run.fact(code_isolation=isolation())
    run.note(left_out_line(left_out) or f"sandbox for programs that the model writes: {isolation() or 'none'}")
    if not items:
        raise InputError("the battery has no items", where=str(BATTERY), fix="run dvc repro download")
    check_items(items, workers=settings.workers)
    clock.lap("check_items_seconds")

    tokenizer = Tokenizer.load(TOKENIZER)
    held_out = choose(read_documents(CLEAN / "val.parquet"), params.bpb_max_bytes_per_source, params.seed)
    compressors = compression_rates({source: [doc.text for doc in docs] for source, docs in held_out.items()})
    encoded = {source: encode(tokenizer, docs) for source, docs in held_out.items()}
    clock.lap("compression_seconds")

    rates, answers = {}, {}
    with run.progress(2 * len(models), run.stage, "parts") as progress:
        for name, folder in models.items():
            if run.stop_requested():
                raise Interrupted("stopped on request; nothing is kept, the next run measures again")
            model = load(folder, tokenizer).to(device)
            rates[name] = model_rates(model, tokenizer, encoded, settings.threads)
            clock.lap(f"{name}_bpb_seconds")
            progress.update(1)
            options = {"batch_rows": params.batch_rows, "workers": settings.workers, "threads": settings.threads}
            options["max_new_tokens"] = params.max_new_tokens
            answers[name] = ask(name, model, tokenizer, items, **options)
            seconds = clock.lap(f"{name}_battery_seconds")
            run.fact(**{f"{name}_battery_tokens_per_second": round(sum(a.tokens for a in answers[name]) / seconds)})
            progress.update(1)

        # The last model is the chat model.
        subset = development_sample(items, params.condition_items, params.seed) if params.conditions else []
        ids = {item.id for item in subset}
        by_condition = {GREEDY_NAME: [answer for answer in answers[name] if answer.item in ids]} if subset else {}
        for condition, setting in params.conditions.items() if subset else ():
            if run.stop_requested():
                raise Interrupted("stopped on request; nothing is kept, the next run measures again")
            penalty = setting.repetition_penalty
            sampling = Sampling(setting.temperature, top_p=setting.top_p, seed=params.seed, repetition_penalty=penalty)
            by_condition[condition] = ask(name, model, tokenizer, subset, **options, sampling=sampling, gold=False)
        clock.lap("conditions_seconds")
        own = taught_items(INSTRUCT, tokenizer, model.config.context_tokens)
        own_answers = marked(own, ask(name, model, tokenizer, own, **options, gold=False))

    conditions = condition_rows(subset, by_condition, params.seed)
    penalties = {key: setting.repetition_penalty for key, setting in params.conditions.items() if key in by_condition}
    for text in findings(conditions, penalties):
        run.note(text)
    dropped = [read_json(path).get("contaminated_items") for path in (CLEAN / "manifest.json", SFT_DATA)]
    facts = battery_facts(items, answers, params.seed, dropped[0] or {}, dropped[1], left_out)
    (pair,) = facts["paired"].values()
    all_answers = [answer for name in models for answer in answers[name]]
    rows = answer_rows([*items, *own], [*all_answers, *own_answers], *dropped)
    pages = {
        "battery.jsonl": "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows),
        "battery.md": battery_markdown(facts["battery"], pair, facts["gold"], conditions, left_out),
        "samples.md": samples_markdown(items, all_answers, params.samples_per_category),
    }
    parents = {str(path): manifest_digest(path) for path in (CLEAN, BATTERY, TOKENIZER, *models.values())}
    counts = {"items": len(items), "answers": len(all_answers)}
    with new_dir(out) as folder:
        for page, text in pages.items():
            write_text(folder / page, text)
        write_manifest(folder, kind="eval", version=1, counts=counts, parents=parents)
    facts |= {"taught": taught_facts(own, own_answers)} if own else {}
    run.metrics({"bpb": bpb_facts(rates, compressors), **facts, "conditions": conditions})
    run.plot(f"{run.name}_battery", table_rows(facts["battery"]))
    for page in ("battery.md", "samples.md"):
        run.attach(out / page)


def load(folder: Path, tokenizer: Tokenizer) -> Transformer:
    """Load a model; InputError unless it was made with this tokenizer and chat template."""
    model, facts = load_model(folder)
    check_made_with(facts, tokenizer, where=str(folder), fix="run dvc repro")
    return model


class Clock:
    """Measures the times of the stage's parts, for the leaf file."""

    def __init__(self, run: Run) -> None:
        self.run, self.last = run, time.monotonic()

    def lap(self, name: str) -> float:
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        self.run.fact(**{name: round(seconds, 2)})
        return max(seconds, 1e-9)


if __name__ == "__main__":
    stage_main("eval", run)
