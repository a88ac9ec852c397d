"""Have another model write conversations about the corpus. No stage needs it; it may cost money: athanor synthesize."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from athanor.base.artifacts import manifest_digest, new_dir, write_manifest, write_text
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.chat_data.params import SftDataParams, SftDecontaminationParams
from athanor.runtime import redact
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.synthesis import replies
from athanor.synthesis.collect import Collected, Collector
from athanor.synthesis.endpoint import Answer, Endpoint, address, key_from
from athanor.synthesis.ledger import Ledger
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request, plan_requests
from athanor.synthesis.sift import DROPS, Row, check, measure, sift
from athanor.words.decontaminate import ItemIndex

CLEAN, BATTERY, SEEDS, OUT = Path("data/clean"), Path("data/battery"), Path("corpus/seeds"), Path("data/synthetic")
LOG = Path(".athanor/synthetic")  # no slot, for those are pruned, and no output, for DVC removes those: it was paid for
KIND, VERSION = "synthetic", 1


def run(run: Run) -> None:
    params, rules = run.params("synthetic", SyntheticParams), run.params("sft_data", SftDataParams).decontamination
    if params.model is None:
        raise ParamsError("names no model", where="synthetic.model", fix="set it to one that synthetic.base_url serves")
    url = address(params.api, params.base_url)
    parents = {"battery": manifest_digest(BATTERY), "clean": manifest_digest(CLEAN)}
    requests = plan_requests(params, CLEAN / "train", SEEDS)
    folder = run.anchor / LOG
    with run.slot({"synthetic": asdict(params)}, parents) as slot:
        with Ledger(folder, params.name, params.budget, params.max_output_tokens) as ledger:
            outcome = collect(run, params, requests, ledger)
        stored_answers = {r.identity: ledger.answers[r.identity] for r in requests if r.identity in ledger.answers}
        answered = [
            (request, stored_answers[request.identity].answer)
            for request in requests
            if request.identity in stored_answers
        ]
        rows, malformed = replies.parse_answers(params, answered, outcome.failed)
        reasons = left_out(rows, rules)
        pairs = list(zip(rows, reasons, strict=True))
        rejected = [{**replies.row_facts(row), "reason": reason} for row, reason in pairs if reason]
        write_text(folder / f"{params.name}.rejected.jsonl", replies.lines(rejected))
        measures, drops = measure(rows), Counter(reason for reason in reasons if reason)
        run.note(f"answers are in {ledger.path}, conversations left out in {params.name}.rejected.jsonl there")
        check(params.gates, measures, drops, len(rows), malformed.total(), len(answered) + len(outcome.failed))
        accepted = [row for row, reason in pairs if not reason]
        counts = {
            "requests": len(requests),
            "answers": len(answered),
            "malformed": dict(sorted(malformed.items())),
            "conversations": len(rows),
            "left_out": {name: drops[name] for name in DROPS},
            "categories": dict(sorted(Counter(row.request.category for row in accepted).items())),
            "kept": len(accepted),
        }
        licenses = Counter(row.request.passage.license for row in accepted if row.request.passage)
        facts = {
            "api": params.api,
            "url": url,
            "model": params.model,
            "served_by": sorted({answer.model for _, answer in answered if answer.model}),
            "license": params.license,
            "document_licenses": dict(sorted(licenses.items())),
            "measures": asdict(measures),
            "stopped_by_budget": outcome.limit,
        }
        with new_dir(OUT) as out:
            write_text(out / f"{params.name}.jsonl", replies.lines(map(replies.row_facts, accepted)))
            write_manifest(out, kind=KIND, version=VERSION, counts=counts, parents=parents, **facts)
            if any(left_out(accepted, rules)):
                raise GateError("synthetic data", "what is left still holds what was to be left out", where=OUT)
        run.metrics({**counts, "measures": facts["measures"], "stopped_by_budget": outcome.limit})
        days = sorted(answer.day for answer in stored_answers.values())
        spent = {f"spent_{name}": value for name, value in asdict(ledger.spent).items()}
        run.fact(first_day=days[0], last_day=days[-1], **spent)
        slot.mark_done()


def left_out(rows: Sequence[Row], rules: SftDecontaminationParams) -> list[str | None]:
    return sift(rows, ItemIndex.read(BATTERY / "items.jsonl", rules), rules.max_ngram_conversations)


def collect(run: Run, params: SyntheticParams, requests: Sequence[Request], ledger: Ledger) -> Collected:
    """Send the requests without an answer. The key is needed only if there are any."""
    answered = [request for request in requests if request.identity in ledger.answers]
    if len(answered) == len(requests):
        return Collected(None, {})
    key = key_from(os.environ, params.key_env)
    if key is not None:
        redact.hide(key.reveal())
    malformed_gate = replies.MalformedGate(params, len(requests))
    for request in answered:
        malformed_gate.add(request, ledger.answers[request.identity].answer)
    with run.progress(len(requests), "synthesize", "requests") as bar:
        if answered:
            bar.resume_at(len(answered))

        def tick(request: Request, answer: Answer) -> None:
            bar.update(1, spending(params, ledger))
            run.log(int(bar.done), requests=ledger.spent.requests, tokens=ledger.spent.tokens, money=ledger.spent.money)
            malformed_gate.add(request, answer)

        collector = Collector(
            ask=Endpoint(params, key).ask,
            ledger=ledger,
            concurrency=params.concurrency,
            max_tries=params.max_tries,
            tick=tick,
            stop=run.stop_requested,
        )
        outcome = collector.collect(requests)
    for reason, count in Counter(outcome.failed.values()).most_common(3):
        run.note(f"{count} requests have no answer: {reason}")
    if outcome.limit:
        run.note(f"stopped before budget.{outcome.limit} is passed: {spending(params, ledger)}")
    if not any(request.identity in ledger.answers for request in requests):
        reason = next(iter(outcome.failed.values()), f"budget.{outcome.limit} is less than one request may use")
        raise InputError(f"no request was answered: {reason}", where="synthetic", fix="athanor synthesize --dry-run")
    return outcome


def spending(params: SyntheticParams, ledger: Ledger) -> str:
    spent, budget = ledger.spent, params.budget
    money = f", {spent.money:.4g}{f' of {budget.money:g}' if budget.money is not None else ''} in money"
    return f"{spent.tokens:,} of {budget.tokens:,} tokens{money if budget.input_price is not None else ''}"


if __name__ == "__main__":
    stage_main("synthesize", run)
