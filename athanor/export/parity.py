"""Do the exported files behave like the model? Checked on the files themselves, by the runtimes that will run them.

A file can load, answer fluently and still be wrong, so nothing here trusts
that something loaded: token ids, logits and greedy answers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from athanor.base.artifacts import rounded
from athanor.base.errors import GateError
from athanor.decoding.generate import generate
from athanor.decoding.sampling import GREEDY
from athanor.export.huggingface import DTYPES
from athanor.export.llamacpp import asking
from athanor.export.perplexity import TooCoarse, load_directory
from athanor.export.probes import Probe
from athanor.export.source import Source
from athanor.export.vocabulary import SPACE
from athanor.model.transformer import Transformer
from athanor.model.weights import fill
from athanor.tokenizer.chat import prompt_ids

FULL_SCALE = 10.0
FIX = "do not use the files; run `python -m pytest tests/export` and report what it says"
# f32 has agreed to 1e-4 by then, so order and meaning of all tensors are right, and this is rounding alone.
ROUNDED = (
    "the rounding to f16 costs this model more than it may: leave f16 out of export.gguf_types, or allow more with"
    " export.margin_logits"
)


@dataclass(frozen=True)
class Answer:
    """One greedy answer: ids with the end token if one was made; at each step the margin between the two
    best logits and the log probability of the chosen id."""

    ids: list[int]
    margins: list[float]
    logprobs: list[float]


@dataclass(frozen=True)
class Expected:
    """What our own code gives for a probe; every runtime is compared with it."""

    texts: list[list[int]]  # with <|bos|> in front, as every runtime must add it
    conversations: list[list[int]]
    limits: list[int]
    answers: list[Answer]
    logits: list[Tensor]  # per window: [T, V]


@dataclass(frozen=True)
class Limits:
    """What may differ where logits stay below `FULL_SCALE`; rounding errors grow with larger ones, and so do these."""

    logit_tolerance: float
    margin_logits: float
    kl: float = math.inf  # of the mean; stays as it is

    def scaled(self, expected: Expected) -> Limits:
        peak = max(float(logits_TV.abs().max()) for logits_TV in expected.logits)
        factor = max(1.0, peak / FULL_SCALE)
        return replace(self, logit_tolerance=self.logit_tolerance * factor, margin_logits=self.margin_logits * factor)


def rebuilt(source: Source, dtype: str) -> Transformer:
    """The model with its weights rounded to `dtype` as the export stores them, computing in fp32."""
    with torch.device("meta"):
        model = Transformer(source.config)
    fill(model, {name: weight.to(DTYPES[dtype]).float() for name, weight in source.weights.items()}, source.name)
    return model.eval()


@torch.inference_mode()
def expect(source: Source, model: Transformer, probe: Probe, new_tokens: int) -> Expected:
    """What our own tokenizer, template, sampler and model give for the probe."""
    tokenizer, context = source.tokenizer, source.config.context_tokens
    limits = [min(new_tokens, context - len(ids)) for ids in probe.prompts]
    stops = (tokenizer.eos, tokenizer.stop)
    generations = generate(model, probe.prompts, max_new_tokens=new_tokens, stop_ids=stops, sampling=GREEDY)
    answers = []
    for prompt, generation in zip(probe.prompts, generations, strict=True):
        ids = [*generation.ids, *([] if generation.end is None else [generation.end])]
        logits_TV = model(torch.tensor([[*prompt, *ids][:-1]]))[0, len(prompt) - 1 :]
        top_two = logits_TV.topk(2).values
        logprobs = logits_TV.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        answers.append(Answer(ids, (top_two[:, 0] - top_two[:, 1]).tolist(), logprobs.tolist()))
    return Expected(
        texts=[[tokenizer.bos, *ids] for ids in tokenizer.encode_batch(probe.texts)],
        conversations=[prompt_ids(tokenizer, messages) for messages in probe.conversations],
        limits=limits,
        answers=answers,
        logits=[model(torch.tensor([ids]))[0] for ids in probe.windows],
    )


def check_transformers(
    folder: str | Path,
    probe: Probe,
    expected: Expected,
    limits: Limits,
    reference: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """Load the directory with transformers and compare everything; GateError on the first difference.

    reference: logits of the windows before any rounding, for the divergence; absent, those that are expected.
    """
    limits = limits.scaled(expected)
    gate = "transformers parity"
    model, tokenizer = load_directory(folder, gate)
    max_difference, divergence = 0.0, Divergence()
    with torch.inference_mode():
        for number, (ids, logits_TV) in enumerate(zip(probe.windows, expected.logits, strict=True)):
            actual_TV = model(torch.tensor([ids])).logits[0]
            max_difference = max(max_difference, float((actual_TV - logits_TV).abs().max()))
            unrounded_TV = logits_TV if reference is None else reference[number]
            divergence.add(unrounded_TV.log_softmax(-1), actual_TV.log_softmax(-1))
    if not max_difference <= limits.logit_tolerance:
        raise GateError(gate, f"logits differ by {max_difference:.3g}, allowed {limits.logit_tolerance:g}", fix=FIX)

    # The split: control symbols in a text are text, as our encoder has it.
    actual = [tokenizer.encode(text, split_special_tokens=True) for text in probe.texts]
    _check_same_ids(gate, "text", probe.texts, expected.texts, actual)
    for text, ids in zip(probe.texts, expected.texts, strict=True):
        if tokenizer.decode(ids, skip_special_tokens=True) != text:
            raise GateError(gate, f"decoding does not give back {_short(text)}", fix=FIX)
    chats = [[{"role": m.role, "content": m.content} for m in messages] for messages in probe.conversations]
    actual = [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))
        for chat in chats
    ]
    _check_same_ids(gate, "conversation", chats, expected.conversations, actual)

    ties = 0
    for number, continuation in enumerate(_continuations(model, probe.prompts, expected.limits)):
        ties += _count_tie(gate, number, expected.answers[number], continuation, 2 * limits.logit_tolerance)
    return {
        "windows": len(probe.windows),
        "logit_difference_below": bound(max_difference),
        **divergence.facts(),
        "texts": len(probe.texts),
        "conversations": len(chats),
        "prompts": len(probe.prompts),
        "prompts_with_ties": ties,
    }


@torch.inference_mode()
def _continuations(model: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
    """What `generate` of transformers makes of all prompts at once with the directory's own settings, end included."""
    width = max(len(prompt) for prompt in prompts)
    pad, ends = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    ids_BT = torch.tensor([[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts])
    mask_BT = torch.tensor([[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts])
    rows = model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=max(limits))[:, width:].tolist()
    ends = set(ends) if isinstance(ends, list) else {ends}
    continuations = []
    for row, limit in zip(rows, limits, strict=True):
        end = next((index for index, token in enumerate(row) if token in ends), len(row))
        continuations.append(row[: min(end + 1, limit)])
    return continuations


def check_llama_cpp(
    path: str | Path,
    file_type: str,
    source: Source,
    probe: Probe,
    expected: Expected,
    limits: Limits,
    *,
    threads: int,
    timeout_seconds: float,
    positions: int = 1,
) -> dict[str, Any]:
    """Load a GGUF file in llama.cpp and compare; GateError on the first difference, NotInstalled without it.

    f32 runs in llama.cpp's exact mode and must agree to `logit_tolerance`;
    other types run with its defaults. f16 may differ where two ids nearly tie; q8_0 and the K types anywhere, and are
    TooCoarse if their probabilities diverge.
    Probabilities are compared at so many `positions` of each window: each takes the whole vocabulary as text.
    """
    gate, exact, rounds = f"llama.cpp parity of {file_type}", file_type == "f32", file_type not in ("f32", "f16")
    limits = limits.scaled(expected)
    # llama.cpp reads a literal U+2581 as a space, and no key can stop it.
    text_numbers = [number for number, text in enumerate(probe.texts) if SPACE not in text]
    chat_numbers = [n for n, chat in enumerate(probe.conversations) if not any(SPACE in m.content for m in chat)]
    # A full window has no id that follows it.
    cut_windows = [ids[: source.config.context_tokens - 1] for ids in probe.windows]
    lengths = [prefix_lengths(len(ids), positions) for ids in cut_windows]
    vocab_size = source.config.vocab_size
    questions = {
        "tokens": [[probe.texts[number]] for number in text_numbers],
        "chat_tokens": [[[asdict(message) for message in probe.conversations[number]]] for number in chat_numbers],
        "greedy": list(zip(probe.prompts, expected.limits, strict=True)),
        "score": [[[*ids, 0], vocab_size, places] for ids, places in zip(cut_windows, lengths, strict=True)],
    }
    reply = asking.ask(
        path,
        questions,
        context_tokens=source.config.context_tokens,
        exact=exact,
        threads=threads,
        timeout_seconds=timeout_seconds,
    )
    _check_same_ids(
        gate, "text", [probe.texts[n] for n in text_numbers], [expected.texts[n] for n in text_numbers], reply["tokens"]
    )
    expected_ids = [expected.conversations[number] for number in chat_numbers]
    _check_same_ids(
        gate, "conversation", [probe.conversations[n] for n in chat_numbers], expected_ids, reply["chat_tokens"]
    )

    max_difference, divergence = 0.0, Divergence()
    for logits_TV, places, rows in zip(expected.logits, lengths, reply["score"], strict=True):
        for length, (_, _, top) in zip(places, rows, strict=True):
            expected_V = logits_TV[length - 1].log_softmax(-1)
            actual_V = torch.empty_like(expected_V)
            actual_V[[number for number, _ in top]] = torch.tensor([logprob for _, logprob in top])
            max_difference = max(max_difference, float((expected_V - actual_V).abs().max()))
            divergence.add(expected_V[None], actual_V[None])
    if exact and not max_difference <= limits.logit_tolerance:
        raise GateError(
            gate, f"log probabilities differ by {max_difference:.3g}, allowed {limits.logit_tolerance:g}", fix=FIX
        )

    if not divergence.mean <= limits.kl:
        fix = FIX if exact else f"leave {file_type} out of export.gguf_types, or allow more with export.kl_limit"
        what = f"mean divergence {divergence.mean:.3g} nats per token, allowed {limits.kl:g}"
        raise (TooCoarse if rounds else GateError)(gate, what, fix=fix)

    ties = 0
    margin = 2 * limits.logit_tolerance if exact else math.inf if rounds else limits.margin_logits
    for number, (answer, (actual_ids, ended)) in enumerate(zip(expected.answers, reply["greedy"], strict=True)):
        # Its answers leave out the token that ended them.
        if ended and len(actual_ids) < len(answer.ids) and answer.ids[: len(actual_ids)] == actual_ids:
            last = answer.ids[len(actual_ids)]
            actual_ids = [*actual_ids, last if last in (source.tokenizer.eos, source.tokenizer.stop) else -1]
        ties += _count_tie(gate, number, answer, actual_ids, margin, FIX if exact else ROUNDED)
    return {
        "texts": len(text_numbers),
        "conversations": len(chat_numbers),
        "windows": len(cut_windows),
        "logprob_difference_below": bound(max_difference),
        **divergence.facts(),
        "prompts": len(probe.prompts),
        "prompts_apart" if rounds else "prompts_with_ties": ties,
    }


def bound(value: float) -> float:
    """The power of ten that a maximum stays under: the same on every run, also where the last digit is not."""
    return 0.0 if value == 0 else float(f"1e{math.ceil(math.log10(value))}")


def _check_same_ids(
    gate: str, kind: str, inputs: Sequence[Any], expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]
) -> None:
    wrong = [n for n, (ours, theirs) in enumerate(zip(expected, actual, strict=True)) if list(ours) != list(theirs)]
    if wrong:
        first = wrong[0]
        start = next(
            (n for n, (a, b) in enumerate(zip(expected[first], actual[first], strict=False)) if a != b),
            min(len(expected[first]), len(actual[first])),
        )
        raise GateError(
            gate,
            f"{len(wrong)} of {len(inputs)} {kind}s give other token ids, "
            f"first {_short(inputs[first])} at token {start}: "
            f"{list(expected[first][start : start + 4])} here, {list(actual[first][start : start + 4])} there",
            fix=FIX,
        )


def _count_tie(gate: str, number: int, answer: Answer, actual: Sequence[int], margin: float, fix: str = FIX) -> int:
    """0 for the same ids, 1 if they part at a near-tie; GateError otherwise."""
    for step, ours in enumerate(answer.ids):
        theirs = actual[step] if step < len(actual) else None
        if theirs == ours:
            continue
        if answer.margins[step] <= margin:
            return 1
        raise GateError(
            gate,
            f"greedy answer {number} parts at token {step}: {ours} here, {theirs} there, "
            f"with a margin of {answer.margins[step]:.3g} between the two best logits (allowed {margin:g})",
            fix=fix,
        )
    if len(actual) > len(answer.ids):
        raise GateError(gate, f"greedy answer {number} goes on after token {len(answer.ids)}", fix=fix)
    return 0


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


FLOOR = -60.0  # of log probabilities: what is below weighs nothing
KL_FLOOR = 1e-7  # nats; below it is the noise of fp32 logarithms


def prefix_lengths(length: int, positions: int) -> list[int]:
    """At most so many prefix lengths of a window, evenly spread, the whole window always among them."""
    count = min(length, positions)
    return [(number + 1) * length // count for number in range(count)]


@dataclass
class Divergence:
    """KL(model || file) in nats and whether both put the same id first, over positions."""

    nats: list[float] = field(default_factory=list)
    same_best: int = 0

    def add(self, model_NV: Tensor, file_NV: Tensor) -> None:
        """Add the log probabilities of some positions.

        Summed to one again: an error in fp32 of that sum would count in full, all others only by their square.
        """
        model_NV, file_NV = (logprobs.double().clamp(min=FLOOR).log_softmax(-1) for logprobs in (model_NV, file_NV))
        self.nats += (model_NV.exp() * (model_NV - file_NV)).sum(-1).clamp(min=0).tolist()
        self.same_best += int((model_NV.argmax(-1) == file_NV.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        return math.fsum(self.nats) / len(self.nats)

    def facts(self) -> dict[str, Any]:
        """Figures of two digits, zero below the floor: they repeat even where the last bits do not."""
        mean, maximum = (rounded(value, 2) if value > KL_FLOOR else 0.0 for value in (self.mean, max(self.nats)))
        share = self.same_best / len(self.nats)
        return {"positions": len(self.nats), "kl_mean": mean, "kl_max": maximum, "same_best": rounded(share)}
