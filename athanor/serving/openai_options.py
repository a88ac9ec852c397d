"""Options that clients send beside those that are honoured: which are passed over, and which are refused.

An option that would change the answer and is not honoured is refused by name,
unless its value asks for nothing ("off"). What only describes a request, or
steers a machine that is not this one (a slot, a cache, a chat template of
another model), is passed over.

A name that nobody here knows is passed over, too, and named in the reply's
header `X-Athanor-Ignored`. OpenAI's own endpoint refuses such names, because it
knows every client's options; vLLM, llama.cpp, Ollama and LM Studio take them,
and the clients that people point at a server of their own (open-webui, LiteLLM,
agents) send bookkeeping of theirs that no list can keep up with. A wrong
refusal loses the user, while the header tells who looks. Only a name that is
nearly that of an option which changes answers is refused, with what was
probably meant: there silence would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from athanor.base.errors import suggest

HEADER = "X-Athanor-Ignored"
MAX_NAMES, NAME_CHARS, TYPO_LIKENESS = 40, 100, 0.8
# Other servers' names for what is here.
ALIASES = {
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama, LM Studio
    "n_predict": "max_tokens",  # llama.cpp
    "num_predict": "max_tokens",  # Ollama
    "max_new_tokens": "max_tokens",  # Hugging Face
    "max_completion_tokens": "max_tokens",  # other routes of OpenAI's
    "max_output_tokens": "max_tokens",
}
BESIDE = (
    "options",
    "extra_body",
)  # Ollama's settings, and those of OpenAI's Python client where somebody sent them as they are
# Options that would change an answer and are not there, with the values that ask for nothing. Null always does.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt": ("", []),
    "suffix": ("",),
    "echo": (False,),
    "previous_response_id": ("",),
    "conversation": ("",),
    "instructions": ("",),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "background": (False,),
    # vLLM
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (-1,),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "detokenize": (True,),
    "chat_template": ("",),
    "guided_json": ("", {}),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "structured_outputs": ({},),
    # llama.cpp, Ollama, LM Studio
    "grammar": ("",),
    "json_schema": ("", {}),
    "format": ("",),
    "images": ([],),
    "system": ("",),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "top_a": (0,),
    "n_probs": (0,),
    "samplers": ([], ""),
    "lora": ([],),
    "typ_p": (1,),
    "t_max_predict_ms": (0, -1),
    # Hugging Face
    "return_full_text": (False,),
    "watermark": (False,),
}
JSON = {"json_schema", "guided_json", "structured_outputs", "format", "response_format", "text"}
# What only describes a request, or steers what is not here.
PASSED_OVER = (
    # OpenAI
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store user "
    "reasoning_effort verbosity reasoning include truncation max_tool_calls "
    # vLLM
    "chat_template_kwargs continue_final_message add_special_tokens spaces_between_special_tokens "
    "priority request_id cache_salt kv_transfer_params vllm_xargs return_token_ids "
    "return_tokens_as_token_ids mm_processor_kwargs guided_decoding_backend guided_whitespace_pattern include_reasoning "
    # llama.cpp, Ollama, LM Studio
    "cache_prompt id_slot slot_id n_keep timings_per_token return_progress return_tokens "
    "repeat_last_n penalize_nl mirostat_tau mirostat_eta mirostat_lr dynatemp_exponent dry_base dry_allowed_length "
    "dry_penalty_last_n dry_sequence_breakers xtc_threshold keep_alive num_ctx num_keep num_batch num_gpu "
    "num_thread think thinking enable_thinking ttl draft_model "
    # open-webui, LiteLLM, OpenRouter, Hugging Face
    "chat_id session_id id parent_id message_id features background_tasks model_item params tool_ids tool_servers "
    "filter_ids files variables extra_headers drop_params timeout num_retries models provider route "
    "transforms usage plugins do_sample details"
).split()


def sort_out(extras: Mapping[str, Any], known: Iterable[str], format_field: str) -> list[str]:
    """The names of `extras` that are passed over; an error for one that may not be, with OpenAI's code for it.

    `known`: options that are honoured, which a name may be meant for. `format_field`: where JSON is asked for.
    """
    ignored = []
    changing = [*known, *ALIASES, *REFUSED]
    for name in sorted(extras, key=lambda each: each != "tools"):  # a client that has tools adds tool_choice by itself
        value, shown = extras[name], name[:NAME_CHARS]
        if name in REFUSED:
            # A model that is told not to call tools does what this one does.
            off = value is None or value in REFUSED[name] or (name == "tools" and extras.get("tool_choice") == "none")
            # An answer that is begun is gone on with.
            if not off and not (name == "add_generation_prompt" and extras.get("continue_final_message")):
                tools = ": no tools are called" if "tool" in name or "function" in name else ""
                instead = f"; ask the client for JSON by schema ({format_field})" if tools or name in JSON else ""
                raise _refusal("unsupported", f"{name}: not supported here{tools}{instead or '; leave it out'}")
        elif name not in PASSED_OVER:
            meant = suggest(shown, changing, cutoff=TYPO_LIKENESS)
            if meant:
                raise _refusal("unknown", f"{shown}: unknown option; {meant}")
        ignored.append(name)
    return ignored


def _refusal(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(f"{kind}_parameter", "{message}", {"message": message})


def header(ignored: Iterable[str]) -> dict[str, str]:
    """The reply's header that names what was passed over; none for nothing."""
    names = [name[:NAME_CHARS] for name in ignored]
    plain = ["".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in n) for n in names[:MAX_NAMES]]
    return {HEADER: ", ".join(plain)} if plain else {}
