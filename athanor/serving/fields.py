"""Fields of a request: llama.cpp's setting for each, its range, and what is ignored or refused.

A field that would change the answer and is not supported is refused by name, unless its value asks for nothing. Fields
that only describe a request are ignored. So are unknown ones, since clients send bookkeeping that no list can follow;
the reply's header `X-Athanor-Ignored` names them. An unknown name that is nearly that of a field which changes answers
is refused with the name that was probably meant: ignored, it would be a wrong answer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from athanor.base.errors import suggest
from athanor.serving.requests import Refused, flag, kind, number, text, texts, wrong

HEADER = "X-Athanor-Ignored"
MAX_FIELDS, MAX_NAMES, NAME_CHARS, TYPO_LIKENESS = 100, 40, 100, 0.8
SCHEMA_BYTES, SCHEMA_DEPTH = 1 << 15, 32
MAX_BIASES = 1024
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
# Other names of the same settings. Where several are given, the first one here counts.
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
# Fields that would change an answer and are not supported. First those that ask for nothing when they are false, 0 or
# empty; then others, with such values.
REFUSED = """
    tools functions audio prediction suffix previous_response_id conversation background
    prompt echo instructions response_format text n_probs
    use_beam_search early_stopping min_tokens stop_token_ids bad_words include_stop_str_in_output prompt_logprobs
    allowed_token_ids logits_processors documents chat_template guided_json guided_regex guided_choice guided_grammar
    structured_outputs format images system top_a return_full_text watermark
""".split()
OFF: dict[str, list[Any]] = {
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "web_search_options": [],
    "response_format": [{"type": "text"}],
    "text": [{}, {"format": {"type": "text"}}],
    "best_of": [1],
    "length_penalty": [1],
    "skip_special_tokens": [True],
    "truncate_prompt_tokens": [-1],
    "add_generation_prompt": [True],
    "detokenize": [True],
    "tfs_z": [1],
}
JSON = {"guided_json", "structured_outputs", "format", "response_format", "text"}
PASSED_OVER = """
    metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store user
    reasoning_effort verbosity reasoning include truncation max_tool_calls chat_template_kwargs continue_final_message
    add_special_tokens spaces_between_special_tokens priority request_id cache_salt kv_transfer_params vllm_xargs
    return_token_ids return_tokens_as_token_ids mm_processor_kwargs guided_decoding_backend guided_whitespace_pattern
    include_reasoning id_slot slot_id n_keep timings_per_token return_progress return_tokens penalize_nl keep_alive
    num_ctx num_keep num_batch num_gpu num_thread think thinking enable_thinking ttl draft_model chat_id session_id id
    parent_id message_id features background_tasks model_item params tool_ids tool_servers filter_ids files variables
    extra_headers drop_params timeout num_retries models provider route transforms usage plugins do_sample details
""".split()
FORM = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'
FORMAT_KEYS = {"type", "json_schema", "schema", "value", "name", "description", "strict"}
# As json.dumps writes it: with free white space a small model never ends.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
REPEAT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


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
            body = {**body[name], **{other: value for other, value in body.items() if other != name}}
    if len(body) > MAX_FIELDS:
        raise Refused(400, f"the body has {len(body):,} fields", f"send {MAX_FIELDS} at most")
    settings: dict[str, Any] = {}
    ignored = []
    order = [*ALIASES, "tools", *body]  # a client that has tools adds tool_choice by itself
    for name in sorted(body, key=order.index):
        setting, value = ALIASES.get(name, name), body[name]
        if name in route.own or (setting in CHECKS and value is None):
            continue
        if setting in CHECKS:
            found = CHECKS[setting](name, value)
        elif name == route.json.split(".")[0]:
            setting, found = "json_schema", _format(route, value)
        else:
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


def header(ignored: Iterable[str]) -> dict[str, str]:
    """The reply's header that names what was ignored; none for nothing."""
    names = [name[:NAME_CHARS] for name in ignored]
    plain = ["".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in n) for n in names[:MAX_NAMES]]
    return {HEADER: ", ".join(plain)} if plain else {}


def _check_unsupported(name: str, body: Mapping[str, Any], route: Route) -> None:
    """Refused for a field that would change the answer."""
    value, shown = body[name], name[:NAME_CHARS]
    if name in REFUSED or name in OFF:
        off = value is None or value in OFF.get(name, ()) or (name in REFUSED and not value)
        # A model whose tools may not be called does what this one does; a begun answer has its opening.
        off = off or (name == "tools" and body.get("tool_choice") == "none")
        off = off or (name == "add_generation_prompt" and bool(body.get("continue_final_message")))
        if not off:
            tools = ": no tools are called" if "tool" in name or "function" in name else ""
            instead = f"; ask the client for JSON by schema ({route.json})" if tools or name in JSON else ""
            what = f"{name}: not supported here{tools}{instead or '; leave it out'}"
            raise Refused(400, what, code="unsupported_parameter")
    elif name not in PASSED_OVER:
        known = [*route.own, *CHECKS, *ALIASES, *REFUSED, *OFF]
        if meant := suggest(shown, known, cutoff=TYPO_LIKENESS):
            raise Refused(400, f"{shown}: unknown option; {meant}", code="unknown_parameter")


# -- values --------------------------------------------------------------------------------------------------------


def _samplers(name: str, value: Any) -> list[str] | None:
    names = texts(name, value, 30, 40)
    if not set(SAMPLERS).issuperset(names or ()):
        raise wrong(name, f"a list of {', '.join(SAMPLERS)}")
    return names


def _biases(name: str, value: Any) -> list[list[Any]] | None:
    """OpenAI's object of ids, or llama.cpp's list of pairs; false is never."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    try:
        ids = [int(i) for i, _ in pairs] if len(pairs) <= MAX_BIASES else [-1]
    except (TypeError, ValueError):
        ids = [-1]
    if not all(0 <= i < 1 << 31 for i in ids):
        raise wrong(name, f'at most {MAX_BIASES:,} ids with a number each, as {{"42": -100}}')
    biases = [bias if bias is False else number(name, bias, False, -100, 100) for _, bias in pairs]
    return [[i, bias] for i, bias in zip(ids, biases, strict=True)] or None


def _lora(name: str, value: Any) -> list[dict[str, Any]] | None:
    rows = [kind(name, row, dict, "a list of objects") for row in kind(name, value, list, "a list of id and scale")]
    ranges = {"id": (True, 0, 64), "scale": (False, -100, 100)}
    return [{key: number(f"{name}.{key}", row.get(key), *ranges[key]) for key in ranges} for row in rows] or None


def _grammar(name: str, value: Any) -> str | None:
    if _states(text(name, value, SCHEMA_BYTES)) > SCHEMA_BYTES:
        raise wrong(name, "a grammar with fewer repeats")
    return value or None


# -- JSON ----------------------------------------------------------------------------------------------------------


def _format(route: Route, value: Any) -> dict[str, Any] | None:
    """The schema of a response_format: llama.cpp's and Hugging Face's forms, too."""
    if value is not None and route is RESPONSE:
        value = _known("text", value, {"format", "verbosity"}).get("format")
    if value is None:
        return None
    nested, asked_kind = _known(route.json, value, FORMAT_KEYS).get("json_schema"), value.get("type")
    given = [nested.get("schema") if isinstance(nested, dict) else nested, value.get("schema"), value.get("value")]
    schema = next((each for each in given if each is not None), None)
    if asked_kind == "text" and schema is None:
        return None
    if asked_kind == "json_object" and not schema:
        schema = {"type": "object"}
    if asked_kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        what = f"'{str(asked_kind)[:50]}' with {'no' if schema is None else 'such a'} schema"
        raise Refused(400, f"{route.json}: {what}; send {FORM}")
    return followed(route.json, schema)


def _known(name: str, value: Any, keys: set[str]) -> dict[str, Any]:
    if odd := set(kind(name, value, dict, "an object")) - keys:
        raise Refused(400, f"{name}.{min(odd)[:NAME_CHARS]}: unknown option; send {FORM}")
    return dict(value)


def followed(name: str, schema: Any) -> dict[str, Any] | None:
    """A schema with our layout, within the bounds that keep llama.cpp answering."""
    try:
        text(name, json.dumps(kind(name, schema, dict, "a schema, as an object"), ensure_ascii=False), SCHEMA_BYTES)
    except RecursionError:
        raise wrong(name, f"a schema of at most {SCHEMA_DEPTH} levels") from None
    return {**_closed(name, schema, SCHEMA_DEPTH), "x-guidance": LAYOUT} if schema else None


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
    if isinstance(pattern := part.get("pattern"), str) and _states(pattern) > MAX_STATES:
        raise wrong(name, f"a schema whose patterns have at most {MAX_STATES:,} steps with their repeats written out")
    closed = {key: each if key == "allOf" else _closed(name, each, depth - 1) for key, each in part.items()}
    return (
        {"additionalProperties": False, **closed} if "properties" in part and part.get("type") == "object" else closed
    )


def _states(pattern: str) -> int:
    """Characters and classes of a pattern once its repeats are written out."""
    groups, last = [0], 0
    for part in REPEAT.finditer(pattern):
        if part[0] == "(":
            groups.append(0)
        elif part[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif part[1]:
            times = int((part[2] or part[1])[:7])
            groups[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "logprobs": lambda name, value: value if isinstance(value, bool) else number(name, value, True, 0, 20),
    "stop": lambda name, value: texts(name, value, 16, 1000),
    "dry_sequence_breakers": lambda name, value: texts(name, value, 16, 100),
    "samplers": _samplers,
    "logit_bias": _biases,
    "lora": _lora,
    "grammar": _grammar,
    "json_schema": followed,
    "ignore_eos": flag,
    "cache_prompt": flag,
}


def _number_check(whole: bool, least: float, most: float) -> Callable[[str, Any], Any]:
    return lambda name, value: number(name, value, whole, least, most)


for _name, _kind, _least, _most in (row.split() for row in NUMBERS.strip().splitlines()):
    _read = int if _kind == "whole" else float
    CHECKS[_name] = _number_check(_kind == "whole", _read(_least), _read(_most))
