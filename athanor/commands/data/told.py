"""What `trace` found, in words."""

from __future__ import annotations

from typing import Any

from athanor.commands.data import show
from athanor.commands.data.peek import scores
from athanor.commands.data.read import KEPT


def text(told: dict[str, Any]) -> str:
    came, gone = told["downloaded"], told["fate"] != KEPT
    names = told["id"] if told["clean_id"] in (None, told["id"]) else f"{told['id']}, now {told['clean_id']}"
    lines = [f"document   {names}"]
    lines.append(
        f"download   source {came['source']}, {came['kind']}, licence {came['license']}, split {came['split']}"
    )
    if came["file"]:
        lines.append(f"           {came['file']} row {came['row']}, {show.size(came['bytes'])}")
    for name, facts in (("meta", came["meta"]), ("source", came["source_facts"])):
        if facts:
            told_facts = ", ".join(f"{key} {value}" for key, value in sorted(facts.items()))
            lines.append(f"           {name}: {told_facts}")
    lines += _change_lines(told["changed"], gone)
    weak = dict.fromkeys(told["weak_labels"], True)
    lines.append(f"scores     {scores(told['scores'], weak)}")
    lines += _verdict_lines(told["verdict"])
    if not gone:
        clean = told["clean"]
        lines.append(f"clean      kept: {clean['file']} row {clean['row']}, {show.size(clean['bytes'])}")
        lines += _token_lines(told["tokenizer"], told["token_files"])
    return "\n".join(lines)


def _change_lines(changed: dict[str, Any], gone: bool) -> list[str]:
    lines = [f"changed    {changed['note']}"] if "note" in changed else []
    for name in ("normalised", "redacted"):
        if changed.get(name):
            what = (
                ", ".join(f"{count} {kind}" for kind, count in changed["redactions"].items())
                if name == "redacted"
                else ""
            )
            lines.append(
                f"{name:<10} {what}".rstrip() + ("  (for the rules; the text went with the document)" if gone else "")
            )
            lines += [f"           {line}" for line in changed[name]]
    return lines or ["changed    nothing: the text is as it came"]


def _verdict_lines(verdict: dict[str, Any]) -> list[str]:
    if "rule" not in verdict:
        return []
    limit = f", the limit is {verdict['limit']} ({verdict['param']})" if "limit" in verdict else ""
    if "twin" in verdict:
        twin = verdict["twin"]
        then = twin["fate"] + (f" by {twin['rule']}" if twin.get("rule") else "")
        lines = [f"dropped    {verdict['rule']} of {twin['id']} ({then}, {twin.get('source')}, {twin.get('split')})"]
        if "jaccard" in verdict:
            lines.append(f"           {verdict['jaccard']:.1%} of their word 5-grams are common{limit}")
        lines += [f"           {line}" for line in verdict.get("differs") or ["the same text, once normalised"]]
        return lines
    if "item" in verdict:
        item = verdict["item"]
        if "prompt" not in item:
            return [f"dropped    {verdict['rule']} {item['id']} ({item['note']})"]
        prompt, more = show.cut(item["prompt"], 300)
        told = f"           it holds the question: {prompt}{' …' if more else ''}"
        return [f"dropped    {verdict['rule']} {item['id']} of category {item['category']}", told]
    return [f"dropped    {verdict['rule']}: measured {verdict['detail']}{limit}"]


def _token_lines(sample: dict[str, Any], found: dict[str, Any]) -> list[str]:
    times = {None: sample["note"], 0: "not in its training sample"}.get(sample["in_sample"], "")
    times = times or f"in its training sample, {show.plural(sample['in_sample'], 'time')}"
    lines = [f"tokenizer  {times}" + (f" ({sample['note']})" if sample["in_sample"] == 0 and sample["note"] else "")]
    if "tokens" in found:
        lines[-1] += f"; {found['tokens']:,} tokens, {found['bytes_per_token']:.2f} bytes each"
    if "note" in found:
        lines.append(f"shards     {found['note']}")
    for part, stream in found.get("streams", {}).items():
        places = stream if isinstance(stream, list) else stream["places"]
        epochs = (
            "" if isinstance(stream, list) else f"; the stream takes {stream['source_epochs']:.3g} epochs of the source"
        )
        lines.append(f"{part:<10} {show.plural(len(places), 'time')}{epochs}")
        lines += [f"           {p['file']} document {p['document']:,} at token {p['token']:,}" for p in places]
    return lines
