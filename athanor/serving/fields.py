"""Fields of a request: llama.cpp's setting for each, its range, and what is ignored or refused.

A field that would change the answer and is not supported is refused by name, unless its value asks for nothing. Every
other unknown field is ignored, since clients send bookkeeping that no list can follow; the reply's header
`X-Athanor-Ignored` names them. An unknown name that is nearly that of a field which changes answers is refused with the
name that was probably meant: ignored, it would be a wrong answer.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from athanor.base.errors import suggest
from athanor.serving.requests import Refused, flag, kind, number, text, texts, wrong

HEADER = "X-Athanor-Ignored"
MAX_FIELDS, MAX_NAMES, NAME_CHARS, TYPO_LIKENESS = 100, 40, 100, 0.86
SCHEMA_BYTES, SCHEMA_DEPTH = 1 << 15, 32
MAX_BIASES = 1024
BIASES = f'an object of at most {MAX_BIASES:,} ids with a number each, as {{"42": -100}}'
MAX_STATES = 2000  # of a pattern; llama.cpp's one loop takes minutes over a million
RANDOM_SEED = 2**32 - 1  # to llama.cpp

# Numbers: name, kind, least, most. A whole number of -1 leaves a setting to the model where it is below the least.
NUMBERS = """
n_predict          whole  0    10000000
t_max_predict_ms   whole  1    3600000
temperature        number 0    100
dynatemp_range     number 0    100
dynatemp_exponent  number 0    100
top_k              whole  0    10000000
top_p              number 0    1
min_p              number 0    1
typical_p          number 0    1
top_n_sigma        number -1   100
xtc_probability    number 0    1
xtc_threshold      number 0    1
min_keep           whole  0    1000
repeat_penalty     number 0.01 100
repeat_last_n      whole  0    100000
presence_penalty   number -2   2
frequency_penalty  number -2   2
dry_multiplier     number 0    100
dry_base           number 0    100
dry_allowed_length whole  0    100000
dry_penalty_last_n whole  0    100000
mirostat           whole  0    2
mirostat_tau       number 0    100
mirostat_eta       number 0    1
seed               whole  -9223372036854775808 9223372036854775807
n                  whole  1    8
top_logprobs       whole  0    20
"""
# Other names of the same settings. Where several are given, the first one of the body counts.
ALIASES = {
    "max_completion_tokens": "n_predict",
    "max_output_tokens": "n_predict",
    "max_tokens": "n_predict",
    "num_predict": "n_predict",  # Ollama
    "max_new_tokens": "n_predict",  # Hugging Face
    "repetition_penalty": "repeat_penalty",
    "typ_p": "typical_p",
    "mirostat_lr": "mirostat_eta",
}
SAMPLERS = ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "typ_p", "top_p", "min_p", "xtc"]
BESIDE = ("options", "extra_body")  # of Ollama, and of OpenAI's Python client: their fields count as fields of the body
# Fields that would change an answer and are not supported.
UNSUPPORTED = """
    tools functions audio prediction suffix previous_response_id conversation background
    prompt echo instructions response_format text n_probs modalities web_search_options best_of
    use_beam_search early_stopping min_tokens stop_token_ids bad_words include_stop_str_in_output prompt_logprobs
    allowed_token_ids logits_processors documents chat_template guided_json guided_regex guided_choice guided_grammar
    structured_outputs format images system top_a return_full_text watermark lora
    skip_special_tokens truncate_prompt_tokens add_generation_prompt
""".split()
# Values that ask for nothing: these of a field, or else what is empty, false or 0.
NOTHING: dict[str, list[Any]] = {
    "add_generation_prompt": [True],
    "best_of": [1],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
    "skip_special_tokens": [True],
    "text": [{}, {"format": {"type": "text"}}],
    "truncate_prompt_tokens": [-1],
    "web_search_options": [],
}
EMPTY = [False, "", [], {}]
# A model whose tools may not be called does what this one does; a begun answer has its opening.
EXCUSED = {"tools": ("tool_choice", "none"), "add_generation_prompt": ("continue_final_message", True)}
FORM = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'
FORMAT_KEYS = {"type", "json_schema", "schema", "value", "name", "description", "strict"}
# As json.dumps writes it: with free white space a small model never ends.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
REPEAT = re.compile(r"(\)?)\{(?:\d*,)?(\d{1,7})")  # of a group or of one character: how often at most


@dataclass(frozen=True)
class Route:
    """A way to ask. `own`: fields that it reads itself; `json`: where it takes a schema."""

    question: str
    own: frozenset[str]
    json: str = "response_format"


COMMON = {"model", "stream", "stream_options"}
CHAT = Route("messages", frozenset({"messages", *COMMON}))
COMPLETION = Route("prompt", frozenset({"prompt", "echo", *COMMON}), "json_schema")
RESPONSE = Route("input", frozenset({"input", "instructions", *COMMON}), "text.format")
PAGE = Route("messages", frozenset())  # the page's `sampling`


def asked(body: Mapping[str, Any], route: Route) -> tuple[list[dict[str, Any]], list[str]]:
    """Bodies of llama.cpp's /completion, one for each of the `n` answers and without prompt; and the ignored names.

    `n_probs` is 0 for the log-probability of each token alone.
    """
    for name in BESIDE:
        if isinstance(body.get(name), dict):
            body = {**body, **body[name], **body}
            del body[name]
    if len(body) > MAX_FIELDS:
        raise Refused(400, f"the body has {len(body):,} fields", f"send {MAX_FIELDS} at most")
    settings: dict[str, Any] = {}
    ignored = []
    for name, value in body.items():
        setting = ALIASES.get(name, name)
        if setting in CHECKS:
            check, *more = CHECKS[setting]
            found = None if value is None else check(name, value, *more)
        elif name == route.json.split(".")[0]:
            setting, found = "json_schema", _format(route, value)
        else:
            if name not in route.own:
                _check_unsupported(name, body, route)
                ignored.append(name)
            continue
        if found is not None:
            settings.setdefault(setting, found)
    if {"grammar", "json_schema"} <= set(settings):
        raise wrong("grammar", f"left out where there is {route.json}")
    top = settings.pop("top_logprobs", 0)
    if (wanted := settings.pop("logprobs", top > 0)) is not False:
        settings["n_probs"] = top if wanted is True else wanted
    count, seed = settings.pop("n", 1), settings.get("seed", secrets.randbelow(2**31))
    return [{**settings, "seed": (seed + each) % RANDOM_SEED} for each in range(count)], ignored


def header(ignored: Sequence[str]) -> dict[str, str]:
    """The reply's header that names what was ignored; none for nothing."""
    names = [re.sub(r"[^ -+\--~]", "?", name[:NAME_CHARS]) for name in ignored]
    return {HEADER: ", ".join(names[:MAX_NAMES])} if names else {}


def _check_unsupported(name: str, body: Mapping[str, Any], route: Route) -> None:
    """Refused for a field that would change the answer, and for what may be a slip of one that would."""
    value, shown = body[name], name[:NAME_CHARS]
    if name not in UNSUPPORTED:
        if meant := suggest(shown, [*CHECKS, *ALIASES, *UNSUPPORTED], cutoff=TYPO_LIKENESS):
            raise Refused(400, f"{shown}: unknown option; {meant}", code="unknown_parameter")
        return
    other, excuse = EXCUSED.get(name, ("", True))
    if value is not None and value not in NOTHING.get(name, EMPTY) and body.get(other) != excuse:
        what = f"{name}: not supported here; leave it out (for JSON there is {route.json})"
        raise Refused(400, what, code="unsupported_parameter")


# -- values --------------------------------------------------------------------------------------------------------


def _logprobs(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else number(name, value, True, 0, 20)


def _samplers(name: str, value: Any) -> list[str] | None:
    names = texts(name, value, 30, 40)
    if not set(SAMPLERS).issuperset(names or ()):
        raise wrong(name, f"a list of {', '.join(SAMPLERS)}")
    return names


def _biases(name: str, value: Any) -> list[list[Any]] | None:
    if len(kind(name, value, dict, BIASES)) > MAX_BIASES or not all(re.fullmatch("[0-9]{1,9}", key) for key in value):
        raise wrong(name, BIASES)
    return [[int(key), number(name, bias, False, -100, 100)] for key, bias in value.items()] or None


def _grammar(name: str, value: Any) -> str | None:
    if _states(text(name, value, SCHEMA_BYTES)) > SCHEMA_BYTES:
        raise wrong(name, "a grammar with fewer repeats")
    return value or None


# -- JSON ----------------------------------------------------------------------------------------------------------


def _format(route: Route, value: Any) -> dict[str, Any] | None:
    """The schema of a response_format: llama.cpp's and Hugging Face's forms, too."""
    if value is not None and route is RESPONSE:
        value = kind("text", value, dict, "an object").get("format")
    if value is None:
        return None
    value = kind(route.json, value, dict, "an object")
    if odd := set(value) - FORMAT_KEYS:
        raise Refused(400, f"{route.json}.{min(odd)[:NAME_CHARS]}: unknown option; send {FORM}")
    nested = kind(f"{route.json}.json_schema", value.get("json_schema") or {}, dict, "an object")
    asked_kind, schema = value.get("type"), nested.get("schema", value.get("schema", value.get("value")))
    if asked_kind == "text" and schema is None:
        return None
    if asked_kind == "json_object":
        schema = schema or {"type": "object"}
    if asked_kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise Refused(400, f"{route.json}: no form of it that is known here; send {FORM}")
    return followed(route.json, schema)


def followed(name: str, schema: Any) -> dict[str, Any] | None:
    """A schema with our layout, within the bounds that keep llama.cpp answering."""
    closed = _closed(name, kind(name, schema, dict, "a schema, as an object"), SCHEMA_DEPTH)
    text(name, json.dumps(schema, ensure_ascii=False), SCHEMA_BYTES)
    return {**closed, "x-guidance": LAYOUT} if schema else None


def _closed(name: str, part: Any, depth: int) -> Any:
    """The schema, where objects with named properties have no others unless it says so.

    A small model would make names of its own without end.
    """
    if not depth:
        raise wrong(name, f"a schema of at most {SCHEMA_DEPTH} levels")
    if isinstance(part, list):
        return [_closed(name, each, depth - 1) for each in part]
    if not isinstance(part, dict):
        return part
    if _states(str(part.get("pattern"))) > MAX_STATES:
        raise wrong(name, f"a schema whose patterns have at most {MAX_STATES:,} steps with their repeats written out")
    closed = {key: each if key == "allOf" else _closed(name, each, depth - 1) for key, each in part.items()}
    if part.get("type") == "object" and "properties" in part:
        closed.setdefault("additionalProperties", False)
    return closed


def _states(pattern: str) -> int:
    """At most so many characters and classes has a pattern once its repeats are written out."""
    repeats = [(group, int(times)) for group, times in REPEAT.findall(pattern)]
    once = len(pattern) + sum(times for group, times in repeats if not group)
    return once * math.prod(times for group, times in repeats if group)


# How a setting's value is read: the function, and what it takes besides name and value.
CHECKS: dict[str, tuple[Any, ...]] = {
    "logprobs": (_logprobs,),
    "stop": (texts, 16, 1000),
    "dry_sequence_breakers": (texts, 16, 100),
    "samplers": (_samplers,),
    "logit_bias": (_biases,),
    "grammar": (_grammar,),
    "json_schema": (followed,),
    "ignore_eos": (flag,),
    "cache_prompt": (flag,),
}
for _name, _kind, *_range in (row.split() for row in NUMBERS.strip().splitlines()):
    CHECKS[_name] = (number, _kind == "whole", *map(json.loads, _range))
