"""Rows to train on out of the chat page's feedback: accepted corrections, and pairs of a better and a worse answer."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import sha256_bytes, write_text
from athanor.base.errors import InputError
from athanor.catalog.keeping import keep
from athanor.cli.render import plural
from athanor.runtime.schema import check_values
from athanor.serving.feedback import Feedback, Row, answer_of, check_row, rows_to_train
from athanor.serving.retraining import EXPORTED, exported

# What params.yaml needs to read the rows. Each is taught in eight wordings, alone and as a later turn: one among some
# 20,000 conversations that comes once changes nothing.
NAME, PARAMS = "corrections", Path("params.yaml")
SOURCE = """\
under instruct.sources:
  - type: messages
    name: corrections
    files: {path}
    as_typed: true
    wordings: 6
    hold_out: false
    max_malformed_fraction: 0.0
under sft_data.sources:
    corrections: {{repeats: 3, follow_ups: 2}}"""
WRITE = "(with --write the command puts it there)\n"
PAIRS_SOURCE = """\
under dpo_data.sources:
  - type: pairs
    name: chat
    files: {path}
    max_malformed_fraction: 0.0"""
ANSWER = re.compile(r'(?<="content": )("(?:[^"\\]|\\.)*")\}\], "correction": .*')  # and its number: the end of a row
SETTLE = "athanor chat list shows the corrections, athanor chat accept ID takes them"


def row_options(commands: Any) -> None:
    for name, run, what in (
        ("export", export_rows, "write the accepted corrections as rows for instruction tuning"),
        ("pairs", export_pairs, "write pairs of a better and a worse answer, for preference optimisation"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("out", type=Path, metavar="OUT.jsonl", help="best in corpus/, which DVC watches")
        command.set_defaults(run=run)
        if run is export_rows:
            command.add_argument("--write", action="store_true", help="put the lines that read them into params.yaml")


def export_rows(feedback: Feedback, args: argparse.Namespace) -> int:
    """Write all accepted corrections as rows. With --write and none accepted, take away one's own of before."""
    out: Path = args.out
    _check_out(out, "correction")
    said = feedback.rows()
    rows, why = rows_to_train(said, Path.cwd())
    accepted = [row["id"] for row in said if row["status"] == "accepted"]
    left_out = [f"correction {number}: {why[number]}" for number in accepted if number in why]
    if not rows and not (args.write and out.is_file()):
        if accepted:
            raise _all_left_out("accepted correction", left_out, out)
        raise InputError("no correction is accepted, nothing was written", where=str(out), fix=SETTLE)
    if args.write:
        print(keep(Path.cwd()))
    _write(out, feedback, rows, "", left_out, "" if args.write else WRITE + SOURCE)
    if args.write:
        print(_update_params(out))
    return 0


def _update_params(out: Path) -> str:
    """Put the lines that read the rows into params.yaml, or take them out if there is no row; returns what was done."""
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update
    from ruamel.yaml import YAML

    values = parse_yaml_for_update(PARAMS.read_text(encoding="utf-8"), str(PARAMS))
    sources, sizes = values["instruct"]["sources"], values["sft_data"]["sources"]
    readers = [source for source in sources if source.get("files") == out.as_posix()]
    taught = out.stat().st_size
    if taught and readers:
        return f"{PARAMS} reads the file already; athanor repro trains on it"
    for source in readers:
        sources.remove(source)
        sizes.pop(source["name"], None)
    if taught and any(source["name"] == NAME for source in sources):
        fix = f"export to its file, where the rows of others stay, or take that source out of {PARAMS}"
        raise InputError(f"there is a source '{NAME}' of another file", where="instruct.sources", fix=fix)
    if taught:
        lines = SOURCE.format(path=json.dumps(out.as_posix(), ensure_ascii=False))
        added, size = YAML(typ="safe").load(lines).values()
        sources.extend(added)
        sizes.update(size)
    text = dumps_yaml(values)
    check_values(YAML(typ="safe").load(text))
    write_text(PARAMS, text)
    if taught:
        return f"written to {PARAMS}; athanor repro trains on it"
    out.unlink()
    return f"no correction is left to train on: {out} is deleted, and its source taken out of {PARAMS}"


def export_pairs(feedback: Feedback, args: argparse.Namespace) -> int:
    """Write all pairs, in the order of the worse answers, each pair once."""
    out: Path = args.out
    _check_out(out, "pair")
    rows: dict[str, dict[str, Any]] = {}
    said = feedback.rows()
    left_out, found = [], list(_pairs(said))
    for worse, row in found:
        answers, where = (row["chosen"], row["rejected"]), f"pair {row['pair']}"
        try:
            check_row([[*row["prompt"], answer_of(text)] for text in answers], worse, said, where)
            if row["chosen"].strip() == row["rejected"].strip():
                raise InputError("both answers say the same", where=where, fix="take one thumb back")
        except InputError as error:
            left_out.append(str(error))
            continue
        rows.setdefault(json.dumps([row["prompt"], *answers]), row)
    if found and not rows:
        raise _all_left_out("pair", left_out, out)
    if not rows:
        what = "no correction is accepted, and no question has one answer with a thumb up and one with a thumb down"
        raise InputError(f"{what}, nothing was written", where=str(out), fix=f"{SETTLE}; or judge two answers")
    copies = len(found) - len(left_out) - len(rows)
    told = f", {plural(copies, 'pair')} more that repeat another" if copies else ""
    _write(out, feedback, list(rows.values()), told, left_out, PAIRS_SOURCE)
    return 0


def _pairs(said: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Every answer with a thumb down, and its pair with each better one: its correction, answers with a thumb up."""
    for worse in (row for row in said if row["verdict"] == "down"):
        better = [(str(worse["id"]), worse["correction"])] if worse["status"] == "accepted" else []
        for row in said:
            if row["verdict"] == "up" and (row["chat"], row["parent"]) == (worse["chat"], worse["parent"]):
                better.append((f"{row['id']}-{worse['id']}", row["answer"]))
        for name, chosen in better:
            yield worse, {"prompt": worse["prompt"], "chosen": chosen, "rejected": worse["answer"], "pair": name}


def _all_left_out(what: str, left_out: list[str], out: Path) -> InputError:
    reasons = "; ".join(f"left out: {reason}" for reason in left_out)
    return InputError(f"every {what} was left out, nothing was written ({reasons})", where=str(out))


def _check_out(out: Path, key: str) -> None:
    """InputError for another kind of file, and for one that holds anything but rows with `key`, as those by hand."""
    if out.suffix != ".jsonl":
        raise InputError("the rows are JSON lines", where=str(out), fix="let the name end in .jsonl")
    try:
        text = out.read_text(encoding="utf-8")
        is_export = all(key in json.loads(line) for line in text.split("\n") if line)
    except FileNotFoundError:
        return
    except (ValueError, TypeError):
        is_export = False
    if not is_export:
        raise InputError("holds something else, and would be lost", where=str(out), fix="name another file")


def _write(out: Path, feedback: Feedback, rows: list[Row], told: str, left_out: list[str], source: str) -> None:
    """Write the rows in place of those of before, with those of others that do not answer the same question otherwise."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    parts = ANSWER.split
    answers = {parts(line)[0]: parts(line) for line in lines}
    others = [line for line, own in exported(out, feedback.path).items() if not own]
    record = feedback.path.with_suffix(EXPORTED)  # first, so that no row of one's own is ever taken for another's
    known = record.read_text().split() if record.is_file() else []
    write_text(record, "\n".join(sorted({*known, *(sha256_bytes(line.encode()) for line in lines)})))
    kept = [line for line in others if answers.get(parts(line)[0], parts(line)) == parts(line)]
    write_text(out, "".join(f"{line}\n" for line in sorted({*kept, *lines})))
    if others:
        told += f"; kept, of others: {len(kept)} of {plural(len(others), 'row')}"
    print(f"{out}: {plural(len(rows), 'row')}{told}")
    for line in left_out:
        print(f"left out: {line}")
    if source:
        lines = source.format(path=json.dumps(out.as_posix(), ensure_ascii=False))
        print(f"\nTo train on them, in params.yaml\n{lines}")
    if out.parts[:1] != ("corpus",):
        print("\nDVC watches corpus/ and not this place: write the rows there, or it will not see when they change.")
