"""The model card: what the model is, was made from, can do and cannot, all of it read from manifests and metrics.

No times, hosts or commits: equal inputs make an equal card. The tracking run
that made it knows those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from athanor.export.parity import summary
from athanor.export.source import Source

CLEAR_STDERRS = 3.0  # a score counts as above its floor from this many standard errors on


@dataclass(frozen=True)
class CardInputs:
    """manifests, metrics, params: by stage or artifact name, as read. files: name to size and SHA-256. digests: SHA-256
    of every manifest and metrics file that the card draws on."""

    manifests: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Mapping[str, Any]]
    params: Mapping[str, Mapping[str, Any]]
    parity: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    digests: Mapping[str, str]


def model_card(source: Source, inputs: CardInputs) -> str:
    """The card as Markdown."""
    kind = "Llama-shaped with a norm on queries and keys (Qwen3)" if source.config.qk_norm else "Llama-shaped"
    intro = (
        f"A {kind} chat model of {source.config.parameter_count():,} parameters, trained from random weights by this "
        "pipeline. This card is written by the export stage from the manifests and metrics listed at its end."
    )
    sections = [
        [f"# {source.name}", "", intro],
        ["## Shape", "", *_table(("property", "value"), _shape(source))],
        ["## Use", "", *_use(source, inputs)],
        ["## Scores", "", *_scores(inputs.metrics["eval"])],
        ["## Limits", "", *_limits(source, inputs.metrics["eval"])],
        ["## Data", "", *_data(inputs.manifests)],
        ["## Tokenizer", "", *_tokenizer(source, inputs)],
        ["## Training", "", *_training(inputs)],
        ["## Agreement between runtimes", "", *_agreement(inputs.parity)],
        ["## Files", "", *_files(inputs.files)],
        ["## Lineage", "", *_table(("input", "SHA-256"), [(n, f"`{d}`") for n, d in sorted(inputs.digests.items())])],
    ]
    return "\n\n".join("\n".join(lines).strip() for lines in sections) + "\n"


def _shape(source: Source) -> list[tuple[str, str]]:
    config = source.config
    return [
        ("parameters", f"{config.parameter_count():,} (input and output embeddings tied, counted once)"),
        ("layers, width", f"{config.layers}, {config.dim}"),
        ("heads", f"{config.heads} query, {config.kv_heads} key-value, {config.head_dim} wide"),
        ("feed-forward", f"SwiGLU, {config.ffn_dim}"),
        ("norms", f"RMSNorm before each block, eps {config.norm_eps:g}" + (", on q and k" if config.qk_norm else "")),
        ("positions", f"rotary, base {config.rope_theta:g}"),
        ("context", f"{config.context_tokens:,} tokens"),
        ("vocabulary", f"{config.vocab_size:,}"),
    ]


def _use(source: Source, inputs: CardInputs) -> list[str]:
    ggufs = sorted(name for name in inputs.files if name.endswith(".gguf"))  # none without a quantiser
    return [
        "From a checkout of the pipeline: `make chat`.",
        "",
        "With transformers (run where this card lies):",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("hf")',
        'model = AutoModelForCausalLM.from_pretrained("hf")',
        'chat = [{"role": "user", "content": "Hello"}]',
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ")",
        "answer = model.generate(**inputs)[0, inputs['input_ids'].shape[1] :]",
        "print(tokenizer.decode(answer, skip_special_tokens=True))",
        "```",
        "",
        *(f"With llama.cpp: `llama-server -m {name}`. With Ollama: `ollama create {source.name} -f Modelfile`.\n"
          for name in ggufs[-1:]),
        "Decoding is greedy by default and ends at `<|stop|>`. Plain text, not chat: the tokenizer puts `<|bos|>` "
        "in front by itself, the chat template brings its own, so render with the template or encode text, never both.",
    ]


def _error(value: float | None) -> str:
    """A standard error; one held-out document has none."""
    return "?" if value is None else f"{value:.3f}"


def _scores(metrics: Mapping[str, Any]) -> list[str]:
    lines = ["Held-out text, bits per byte (± standard error); lower is better. gzip and xz: the same documents."]
    rows = [
        (
            name,
            *(f"{row[m]['bpb']:.3f} ± {_error(row[m]['stderr'])}" for m in ("base", "sft")),
            *(f"{row[c]:.3f}" for c in ("gzip", "xz")),
        )
        for name, row in (*sorted(metrics["bpb"]["sources"].items()), ("all", metrics["bpb"]["all"]))
    ]
    lines += ["", *_table(("source", "base", "sft", "gzip", "xz"), rows)]
    lines += ["", "Held-out items, exact answers (± standard error). Floor: the best answer without thought."]
    battery = metrics["battery"]
    rows = []
    for category, row in sorted(battery["sft"].items(), key=lambda item: (item[0] == "all", item[0])):
        base = battery["base"][category]
        rows.append((category, str(row["n"]), _share(base), _share(row), f"{row['floor']:.1%}", row["floor_answer"]))
    lines += ["", *_table(("category", "items", "base", "sft", "floor", "reached by"), rows)]
    health = metrics.get("health", {}).get("sft", {})
    rates = {name: row for name, row in sorted(health.items()) if isinstance(row, Mapping)}
    rows = [(name.replace("_", " "), _share(row, "rate")) for name, row in rates.items()]
    if rows:
        lines += ["", "Behaviour of the chat model on the same items.", "", *_table(("", "share of answers"), rows)]
    return lines


def _share(row: Mapping[str, Any], key: str = "score") -> str:
    return f"{row[key]:.1%} ± {row['stderr']:.1%}"


def _limits(source: Source, metrics: Mapping[str, Any]) -> list[str]:
    rows = metrics["battery"]["sft"]
    constant = sorted(name for name, row in rows.items() if name != "all" and row["floor"] == 1)
    weak = sorted(
        name for name, row in rows.items()
        if name not in ("all", *constant) and row["margin_stderrs"] <= CLEAR_STDERRS
    )
    lines = [
        f"- It is a small model ({source.config.parameter_count() / 1e6:.1f} million parameters) that knows only the "
        "data below. Outside of it, expect fluent nonsense and invented facts.",
        f"- It sees {source.config.context_tokens:,} tokens at once; older turns of a chat have to be dropped.",
        "- It was not trained to refuse anything and not checked for bias. Do not rely on its code or its arithmetic.",
        "- Scores hold for greedy decoding; `conditions` of metrics/eval.json has others, on items for development.",
    ]
    if metrics.get("left_out"):
        lines.append(f"- Not measured, as the machine that evaluated runs no code: {', '.join(metrics['left_out'])}.")
    if weak:
        lines.append(
            f"- Not clearly above its floor (within {CLEAR_STDERRS:g} standard errors): {', '.join(weak)}. "
            "Read these scores as chance."
        )
    if constant:
        lines.append(f"- One answer passes every item of {', '.join(constant)}: a check of habit, not knowledge.")
    lines += [
        "- transformers and llama.cpp parse control symbols such as `<|user|>` out of message text, so text typed by "
        "others can forge turns there; filter it. Our own chat encodes every message on its own and cannot be forged.",
        "- llama.cpp reads a literal U+2581 as a space. Our tokenizer and the one for transformers keep it.",
    ]
    return lines


def _data(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    raw, clean = manifests["raw"], manifests["clean"]
    rows = []
    for name, count in sorted(raw["counts"].items()):
        facts = raw["sources"][name]
        train, val = (clean["counts"][split].get(name, {"documents": 0, "bytes": 0}) for split in ("train", "val"))
        rows.append(
            (
                name,
                f"{count['documents']:,}",
                f"{count['bytes']:,}",
                f"{train['documents']:,}",
                f"{train['bytes']:,}",
                f"{val['documents']:,}",
                str(facts.get("license", "not stated")),
            )
        )
    header = ("source", "documents", "bytes", "train documents", "train bytes", "held-out documents", "licence")
    lines = ["Documents as fetched, and after cleaning.", "", *_table(header, rows)]
    origins = {name: {k: v for k, v in raw["sources"][name].items() if k != "license"} for name in raw["sources"]}
    lines += ["", "Where they come from.", "", *_table(("source and fact", "value"), _flat(origins))]
    rows = [
        (name, *(f"{count[key]:,}" for key in ("rows", "train", "val")), ", ".join(count["licenses"]))
        for name, count in sorted(manifests["instruct"]["counts"].items())
    ]
    header = ("source", "conversations", "train", "held out", "licence")
    lines += ["", "Conversations.", "", *_table(header, rows)]
    header = ("source", "tokens", "share", "wanted share", "passes over it")
    streams = {"Pretraining mixture as written to the shards.": manifests["shards"]}
    if "cooldown" in manifests["shards"]:
        streams["Mixture of the cooldown."] = manifests["shards"]["cooldown"]
    for title, stream in streams.items():
        rows = [
            (name, f"{row['tokens']:,}", f"{row['share']:.1%}", f"{row['target_share']:.1%}", f"{row['epochs']:.2f}")
            for name, row in sorted(stream["sources"].items())
        ]
        lines += ["", title, "", *_table(header, rows)]
    return lines


def _tokenizer(source: Source, inputs: CardInputs) -> list[str]:
    facts = [
        ("kind", "SentencePiece BPE, byte fallback, single digits, lossless"),
        ("vocabulary", f"{source.tokenizer.vocab_size:,}"),
        ("control symbols", ", ".join(f"`{source.vocabulary.pieces[i].text}` {i}" for i in source.controls.values())),
        ("digest", f"`{source.tokenizer.digest}`"),
        ("chat template hash", f"`{source.template_hash}`"),
    ]
    return _table(("property", "value"), [*facts, *_flat(inputs.metrics["train_tokenizer"])])


def _training(inputs: CardInputs) -> list[str]:
    lines: list[str] = []
    for stage, title in (("pretrain", "Pretraining"), ("sft", "Supervised fine-tuning")):
        lines += ["", f"{title}: settings.", "", *_table(("parameter", "value"), _flat(inputs.params[stage]))]
        lines += ["", f"{title}: outcome.", "", *_table(("metric", "value"), _flat(inputs.metrics[stage]))]
    return lines[1:]


def _agreement(parity: Mapping[str, Any]) -> list[str]:
    lines = _table(("runtime", "compared with torch"), summary(parity))
    rows = []
    for name, facts in sorted(parity.items()):
        if isinstance(facts, Mapping):
            nats = ("below 1e-07" if not facts[key] else f"{facts[key]:.2g}" for key in ("kl_mean", "kl_max"))
            parted = facts.get("prompts_with_ties", 0) + facts.get("prompts_apart", 0)
            equal = f"{facts['prompts'] - parted} of {facts['prompts']}"
            rows.append((name, f"{facts['positions']:,}", *nats, f"{facts['same_best']:.1%}", equal))
    header = ("runtime and type", "positions", "mean KL", "largest KL", "same best token", "equal greedy answers")
    text = "What rounding costs: KL(model ‖ file) in nats per token on held-out text, against the fp32 weights."
    lines += ["", text, "", *_table(header, rows)]
    for name, facts in sorted(parity.items()):
        if isinstance(facts, Mapping) and facts.get("fallback_tensors"):
            kinds = ", ".join(f"{count} {kind}" for kind, count in facts["tensors"].items())
            lines += [
                "",
                f"{name}: {facts['fallback_tensors']} matrices have rows that are no multiple of 256, which no K type "
                f"can pack; the quantiser gave them a plain type with more bits. Tensors: {kinds}.",
            ]
    return lines


def _files(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [(f"`{name}`", f"{facts['bytes']:,}", f"`{facts['sha256']}`") for name, facts in sorted(files.items())]
    return _table(("file", "bytes", "SHA-256"), rows)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested facts as rows; absent values are left out."""
    if isinstance(value, Mapping):
        rows = [_flat(value[key], f"{prefix}.{key}" if prefix else str(key)) for key in sorted(value)]
        return [row for part in rows for row in part]
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, (Mapping, list, tuple)) for item in value):
            return [row for number, item in enumerate(value) for row in _flat(item, f"{prefix}[{number}]")]
        return [(prefix, ", ".join(map(_text, value)) or "none")]
    return [] if value is None else [(prefix, _text(value))]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]
