"""Requests as clients send them, recorded from their code or from what goes over the wire: who, what, what is ignored.

Each is answered; `REFUSED` are those that a hosted endpoint may take and this server refuses, by name.
"""

from __future__ import annotations

from typing import Any

from tests.serving.parrot import PLAIN, SYSTEM, WHO

ASK = [{"role": "user", "content": PLAIN[0]}]
PLAIN_ANSWER = {"role": "assistant", "content": PLAIN[1]}
ASK_WHO = {"role": "user", "content": WHO[0]}
RULES = {"role": "system", "content": SYSTEM}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


# name -> (body beside the question, names in the header)
EXTRAS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "curl, nothing else": ({}, set()),
    "curl, no model": ({"model": None}, set()),
    "openai, its defaults in words": (
        {"n": 1, "temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "stop": None},
        set(),
    ),
    "openai, reasoning model's options": (
        {"reasoning_effort": "low", "verbosity": "medium", "max_completion_tokens": 50, "store": False},
        {"reasoning_effort", "verbosity", "store"},
    ),
    "openai, bookkeeping": (
        {
            "user": "u1",
            "metadata": {"a": "b"},
            "safety_identifier": "x",
            "service_tier": "auto",
            "prompt_cache_key": "k",
        },
        {"user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key"},
    ),
    "openai, text only": ({"response_format": {"type": "text"}, "modalities": ["text"]}, {"modalities"}),
    "openai, tools that may not be called": (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools", "tool_choice"},
    ),
    "openai, top_p 0": ({"temperature": 1, "top_p": 0}, set()),
    "openai, negative seed": ({"seed": -17, "temperature": 0}, set()),
    "langchain, tiny temperature for zero": ({"temperature": 1e-8}, set()),
    "langchain, invoke": ({"model": "parrot", "temperature": 0.0, "n": 1, "stream": False}, set()),
    "langchain, stream": ({"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}, set()),
    "langchain, tools left empty": ({"tools": [], "parallel_tool_calls": None}, {"tools", "parallel_tool_calls"}),
    "litellm, extras of its proxy": (
        {"drop_params": True, "num_retries": 2, "timeout": 30, "extra_body": {}, "litellm_session_id": "s"},
        {"drop_params", "num_retries", "timeout", "litellm_session_id"},
    ),
    "litellm, logprobs off": ({"logprobs": False, "top_logprobs": None}, set()),
    "huggingface_hub, no model": ({"model": "dummy", "stream": False, "top_logprobs": None}, {"model"}),
    "huggingface_hub, address as model": ({"model": "http://127.0.0.1:8080/v1"}, {"model"}),
    "huggingface_hub, generation's names": (
        {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.0, "return_full_text": False},
        {"do_sample", "return_full_text"},
    ),
    "open-webui, chat": (
        {
            "stream": True,
            "params": {},
            "features": {"web_search": False, "code_interpreter": False},
            "variables": {"{{USER_NAME}}": "me"},
            "model_item": {"id": "parrot"},
            "session_id": "s",
            "chat_id": "c",
            "id": "m",
            "background_tasks": {"title_generation": True},
        },
        {"params", "features", "variables", "model_item", "session_id", "chat_id", "id", "background_tasks"},
    ),
    "open-webui, title task": (
        {"stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title_generation"}},
        {"metadata"},
    ),
    "open-webui, tools switched off": (
        {"tool_ids": [], "tool_servers": [], "files": []},
        {"tool_ids", "tool_servers", "files"},
    ),
    "open-webui, Ollama's options": (
        {"keep_alive": "5m", "options": {"num_ctx": 2048, "num_predict": 40}, "temperature": 0, "think": False},
        {"keep_alive", "num_ctx", "think"},
    ),
    "vllm, sampling switched off": (
        {"top_k": -1, "min_p": 0.0, "best_of": 1, "use_beam_search": False, "ignore_eos": False, "min_tokens": 0},
        {"best_of", "use_beam_search", "min_tokens"},
    ),
    "vllm, template": (
        {
            "add_generation_prompt": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "continue_final_message": False,
        },
        {
            "add_generation_prompt",
            "chat_template_kwargs",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "continue_final_message",
        },
    ),
    "vllm, no guide": (
        {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None, "echo": False},
        {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "echo"},
    ),
    "vllm, length and stops": (
        {"length_penalty": 1.0, "stop_token_ids": [], "bad_words": [], "logits_processors": None, "priority": 0},
        {"length_penalty", "stop_token_ids", "bad_words", "logits_processors", "priority"},
    ),
    "llama.cpp, its page": (
        {
            "stream": True,
            "cache_prompt": True,
            "samplers": "",
            "temperature": 0,
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "typical_p": 1,
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "max_tokens": -1,
            "timings_per_token": False,
        },
        {"timings_per_token"},
    ),
    "llama.cpp, a slot": ({"id_slot": -1, "n_predict": -1, "seed": -1, "n_probs": 0}, {"id_slot", "n_probs"}),
    "llama.cpp, older samplers": (
        {"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "tfs_z": 1, "penalize_nl": False},
        {"tfs_z", "penalize_nl"},
    ),
    "llama.cpp, mirostat": ({"mirostat": 2}, set()),
    "llama.cpp, no adapter": ({"lora": []}, set()),
    "llama.cpp, samplers by name": ({"samplers": ["top_k", "temperature"], "min_keep": 1, "ignore_eos": False}, set()),
    "lm studio": ({"max_tokens": -1, "seed": -1, "repeat_penalty": 1.0, "ttl": 300, "stream": False}, {"ttl"}),
    "ollama's users": ({"keep_alive": -1, "num_predict": 30, "format": None}, {"keep_alive", "format"}),
    "openrouter": (
        {"provider": {"order": ["x"]}, "transforms": [], "usage": {"include": True}},
        {"provider", "transforms", "usage"},
    ),
    "continue.dev": ({"temperature": 0.01, "max_tokens": 400, "prediction": None, "stream": True}, {"prediction"}),
    "aider": ({"temperature": 0, "stream": True, "extra_headers": {}}, {"extra_headers"}),
    "llama-index": ({"temperature": 0.1, "stream": False, "top_logprobs": 0, "logprobs": False}, set()),
    "lm_eval, local-chat-completions": (
        {"max_tokens": 40, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
        set(),
    ),
    "an option of nobody": ({"x_trace": {"span": 1}, "sessionTag": "a"}, {"x_trace", "sessionTag"}),
}

# name -> (messages, the answer, names in the header)
HISTORIES: dict[str, tuple[list[dict[str, Any]], str, set[str]]] = {
    "langchain, documents and the question apart": ([{"role": "user", "content": "Who are"}, *ASK], "", set()),
    "a client that sends empty turns": ([{"role": "user", "content": ""}, *ASK], PLAIN[1], set()),
    "system in two pieces": ([RULES, {"role": "system", "content": " "}, *ASK], PLAIN[1], set()),
    "system after the question": ([*ASK, RULES], PLAIN[1], set()),
    "developer in the middle": (
        [
            *ASK,
            PLAIN_ANSWER,
            {**RULES, "role": "developer"},
            ASK_WHO,
        ],
        WHO[1],
        set(),
    ),
    "system alone": ([{"role": "system", "content": PLAIN[0]}], PLAIN[1], set()),
    "a page's greeting first": (
        [RULES, {"role": "assistant", "content": "Hello, ask me!"}, *ASK],
        PLAIN[1],
        {"messages.1"},
    ),
    "assistant in two pieces": (
        [
            *ASK,
            PLAIN_ANSWER,
            {"role": "assistant", "content": ""},
            ASK_WHO,
        ],
        WHO[1],
        set(),
    ),
    "an answer begun": ([*ASK, {"role": "assistant", "content": "3 + 4 ="}], " 7.", set()),
    "an answer begun after a history": (
        [
            *ASK,
            PLAIN_ANSWER,
            ASK_WHO,
            {"role": "assistant", "content": "I am a parrot,"},
        ],
        " a very small model.",
        set(),
    ),
    "an empty answer to fill": ([*ASK, {"role": "assistant", "content": ""}], PLAIN[1], set()),
    "anthropic's parts": (
        [{"role": "user", "content": [part(PLAIN[0], cache_control={"type": "ephemeral"})]}],
        PLAIN[1],
        set(),
    ),
    "parts that are texts": ([{"role": "user", "content": [PLAIN[0]]}], PLAIN[1], set()),
    "what came back, with all its fields": (
        [
            *ASK,
            {
                "role": "assistant",
                "content": PLAIN[1],
                "refusal": None,
                "annotations": [],
                "audio": None,
                "tool_calls": None,
                "reasoning_content": "thought",
            },
            {"role": "user", "name": "me", "content": WHO[0]},
        ],
        WHO[1],
        set(),
    ),
}

# name -> (body beside the question, a word of the refusal)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a picture": (
        {"messages": [{"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "pictures cannot be read here",
    ),
    "sound": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "sound cannot be read here"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "a tool's result": ({"messages": [*ASK, {"role": "tool", "content": "5", "tool_call_id": "a"}]}, "tool"),
    "tools and a choice": ({"tool_choice": "required", "tools": [{}]}, "tools: not supported here: no tools"),
    "Ollama's settings": ({"options": {"temperature": 200}}, "temperature: should be"),
    "no opening of the answer": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "TGI's JSON": ({"response_format": {"type": "json", "value": {}}}, 'send {"type": "json_schema"'),
    "a schema under no known name": (
        {"response_format": {"type": "json_object", "schma": {}}},
        "response_format.schma",
    ),
    "a schema for a text": ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    "another route's format": ({"text": {"format": {"type": "json_object"}}}, "text: not supported here; ask"),
    "a number for a text": (
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: should be a valid string or a valid array",
    ),
    "nobody": ({"messages": []}, "nobody asks anything"),
    "a typo": ({"temprature": 0}, "did you mean 'temperature'"),
    "another template": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "too many answers": ({"n": 9}, "n: "),
    "a search of the web": ({"web_search_options": {}}, "web_search_options"),
    "a system text beside the messages": ({"system": "You are a pirate."}, "system"),
}
