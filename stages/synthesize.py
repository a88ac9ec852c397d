"""Have another model write conversations about the corpus. No stage needs it; it may cost money: athanor synthesize."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.chat_data.params import SftDataParams
from athanor.runtime import redact
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.synthesis.endpoint import Halt, Ledger, asker, key_from
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request, plan_requests
from athanor.synthesis.sift import check, parse, sift
from athanor.text.conversations import write_rows
from athanor.words.decontaminate import ItemIndex

CLEAN, BATTERY, OUT = Path("data/clean"), Path("data/battery"), Path("data/synthetic")
LOG = Path(".athanor/synthetic")  # no slot, for those are pruned, and no output, for DVC removes those: it was paid for
KIND, VERSION = "synthetic", 2
FAILURES = 5  # in a row, before the server is left alone
POLL_SECONDS = 0.1


def run(run: Run) -> None:
    params, rules = run.params("synthetic", SyntheticParams), run.params("sft_data", SftDataParams).decontamination
    if params.model is None:
        raise ParamsError("names no model", where="synthetic.model", fix="set it to one that synthetic.base_url serves")
    requests, ledger = plan_requests(params, CLEAN / "train"), Ledger(run.anchor / LOG, params)
    failed = ask(run, params, requests, ledger).total()
    parsed = {request: parse(text) for request in requests if (text := ledger.replies.get(request.identity))}
    malformed = failed + sum(not found for found in parsed.values())
    rows = sift(parsed, ItemIndex.read(BATTERY / "items.jsonl", rules), rules.max_ngram_conversations)
    write_rows(ledger.path.with_name(f"{params.name}.left-out.jsonl"), (row for row in rows if row.left_out))
    run.note(f"replies and conversations left out are in {LOG}")
    measures = check(params.gates, rows, len(parsed) + failed, malformed)
    counts = {"requests": len(requests), "replies": len(parsed), "malformed": malformed, "conversations": len(rows)}
    with new_dir(OUT) as out:
        counts["kept"] = write_rows(out / f"{params.name}.jsonl", (row for row in rows if not row.left_out))
        facts = {name: getattr(params, name) for name in ("api", "base_url", "model", "license")}
        write_manifest(out, kind=KIND, version=VERSION, counts=counts, measures=measures, **facts)
    run.metrics({**counts, "measures": measures})
    run.fact(spent_requests=ledger.requests, spent_tokens=ledger.tokens)


def ask(run: Run, params: SyntheticParams, requests: Sequence[Request], ledger: Ledger) -> Counter[str]:
    """Send the requests without a reply, until none is left or the budget ends it; returns how often and why one failed.

    Those in flight are always waited for, as they are paid for.
    """
    failed, in_a_row = Counter[str](), 0
    unanswered = {request.identity: request for request in requests if request.identity not in ledger.replies}
    if not unanswered:
        return failed
    redact.hide(key := key_from(params.key_env))
    send = asker(params, key, ledger)
    with run.progress(len(unanswered), "synthesize", "requests") as bar, ThreadPoolExecutor(params.concurrency) as pool:
        waiting = {pool.submit(send, request) for request in unanswered.values()}
        try:
            while waiting:
                done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                if run.stop_requested():
                    raise Interrupted("stopped; every reply is kept, the same command asks for the rest")
                for why in (future.result() for future in done if not isinstance(future.exception(), Halt)):
                    bar.update(1, f"{ledger.tokens:,} of {params.budget.tokens:,} tokens")
                    in_a_row = in_a_row + 1 if why else 0
                    failed += Counter(filter(None, [why]))
                    if in_a_row == FAILURES:
                        fix = "check synthetic.base_url, the model, the key and the account; every reply is kept"
                        raise InputError(f"{in_a_row} requests in a row failed: {why}", where="synthetic", fix=fix)
        finally:
            ledger.halt.set()
    for why, count in failed.most_common(3):
        run.note(f"{count} requests have no reply: {why}")
    return failed


if __name__ == "__main__":
    stage_main("synthesize", run)
