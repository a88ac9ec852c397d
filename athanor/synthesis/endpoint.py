"""One question to a server of either API, and what its answer or its error means.

The key goes into one header of one request: no redirect is followed, no
~/.netrc is asked, an address that would send it in the clear is refused, and
every text that a server sent is searched for it before anybody sees the text.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from athanor.base.errors import AthanorError, InputError, ParamsError
from athanor.base.work import Facts
from athanor.sources.http import RetryableError, retry_after
from athanor.synthesis.params import SyntheticParams
from athanor.synthesis.requests import Request

PATHS = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
ANTHROPIC_VERSION = "2023-06-01"
CONNECT_SECONDS = 30.0
MAX_REPLY_BYTES = 64 << 20
MIN_KEY_CHARS = 8  # a shorter one could not be searched for: it stands in ordinary text
RETRYABLE_STATUSES = frozenset((408, 409, 425, 429))
CUT_OFF = frozenset(("max_tokens", "length", "model_context_window_exceeded"))
# Of error bodies: codes of a spent account, which OpenAI sends with the status of a busy server.
SPENT = frozenset(("insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active"))
SPENT_TEXT = re.compile(r"credit balance|payment required", re.I)
MASK = "***"


class Rejected(Exception):
    """This request is refused as it stands; another one may pass. Nothing is charged."""


class Key:
    """A secret whose value goes into one header and never into a repr or a log."""

    def __init__(self, value: str) -> None:
        self._value = value
        forms = {value, quote(value, safe=""), quote(value), json.dumps(value)[1:-1]}
        self._forms = re.compile("|".join(map(re.escape, sorted(forms, key=lambda form: (-len(form), form)))))

    def __repr__(self) -> str:
        return "Key(***)"

    def reveal(self) -> str:
        return self._value

    def scrub(self, text: str) -> str:
        return self._forms.sub(MASK, text)


def key_from(environment: Mapping[str, str], name: str | None) -> Key | None:
    """The key in the named environment variable; InputError says what is wrong and never shows a value."""
    if name is None:
        return None
    where = f"environment variable {name}"
    value = environment.get(name, "").strip()
    if not value:
        fix = f"export {name}=..., or set synthetic.key_env to null for a server that wants no key"
        raise InputError("holds no key", where=where, fix=fix)
    if len(value) < MIN_KEY_CHARS or not re.fullmatch(r"[\x21-\x7e]+", value):
        what = f"is no key: one is {MIN_KEY_CHARS} or more visible ASCII characters without spaces"
        raise InputError(what, where=where, fix="copy the key again")
    return Key(value)


@dataclass(frozen=True)
class Answer:
    """What a server said. Without `text` it was no answer of its API, and `why` says so."""

    text: str | None
    why: str
    cut: bool  # ended by the limit on its length
    input_tokens: int | None
    output_tokens: int | None
    model: str  # by the server's own word, or ""


def address(api: str, base_url: str) -> str:
    """Where questions go; ParamsError for a base that cannot be meant or would not keep the key."""

    def invalid(what: str, fix: str) -> ParamsError:
        return ParamsError(what, where="synthetic.base_url", fix=fix)

    example = "use one like https://host or http://127.0.0.1:8080"
    try:
        parts = urlsplit(base_url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise invalid(f"no usable address ({error})", example) from None
    if parts.scheme not in ("http", "https") or not host or re.search(r"\s", base_url):
        raise invalid("no usable address", example)
    if parts.username is not None or parts.query or parts.fragment:
        raise invalid("holds a user, a query or a fragment", "leave them out; a key goes into the environment")
    if parts.scheme == "http" and not local(host):
        raise invalid(f"plain http to {host} would send key and text in the clear", "use https")
    base, path = base_url.rstrip("/"), PATHS[api]
    if base.endswith(path):
        raise invalid(f"ends in {path}, which is added", f"leave {path} out")
    return base + (path.removeprefix("/v1") if base.endswith("/v1") else path)


def local(host: str) -> bool:
    """Whether a host is this machine or its own network, which no proxy is asked for."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local"))
    return ip.is_loopback or ip.is_private or ip.is_link_local


class Endpoint:
    """Asks one server. Threads may share it."""

    def __init__(self, params: SyntheticParams, key: Key | None) -> None:
        self.api, self.url = params.api, address(params.api, params.base_url)
        self.host = urlsplit(self.url).hostname or ""
        self._params, self._key = params, key

    def ask(self, request: Request) -> Answer:
        """One try. RetryableError and Rejected concern this request; an AthanorError concerns all requests."""
        import requests

        deadline = time.monotonic() + self._params.timeout_seconds
        limits = (min(CONNECT_SECONDS, self._params.timeout_seconds), self._params.timeout_seconds)
        sent = False
        try:
            with requests.Session() as session:
                session.trust_env = not local(self.host)
                # A function, for without one requests would look for a login in ~/.netrc.
                session.auth = self._sign
                options: Facts = {"timeout": limits, "stream": True, "allow_redirects": False}
                with session.post(self.url, json=self._body(request), **options) as reply:
                    sent = True
                    return self._read(reply.status_code, reply.headers, self._receive(reply, deadline))
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise self._fatal(f"no usable address ({self._describe(error)})", "correct synthetic.base_url") from None
        except requests.exceptions.SSLError as error:
            raise self._fatal(
                f"no secure connection ({self._describe(error)})", "check the host's certificate"
            ) from None
        except requests.exceptions.RequestException as error:
            not_sent = isinstance(error, (requests.exceptions.ConnectTimeout, requests.exceptions.ProxyError))
            raise RetryableError(
                self._describe(error), charged=sent or not (not_sent or _never_connected(error))
            ) from None
        except OSError as error:
            raise RetryableError(self._describe(error), charged=True) from None

    def _sign(self, prepared: Any) -> Any:
        if self.api == "anthropic":
            prepared.headers["anthropic-version"] = ANTHROPIC_VERSION
        if self._key is not None and self.api == "anthropic":
            prepared.headers["x-api-key"] = self._key.reveal()
        elif self._key is not None:
            prepared.headers["Authorization"] = f"Bearer {self._key.reveal()}"
        prepared.headers.update({"User-Agent": "athanor", "Accept-Encoding": "identity"})
        return prepared

    def _body(self, request: Request) -> Facts:
        params = self._params
        body: Facts = {"model": params.model}
        if params.temperature is not None:
            body["temperature"] = params.temperature
        user_messages = [{"role": "user", "content": request.user}]
        if self.api == "anthropic":
            return {**body, "max_tokens": params.max_output_tokens, "system": request.system, "messages": user_messages}
        system_messages = [{"role": "system", "content": request.system}]
        return {**body, params.output_limit: params.max_output_tokens, "messages": [*system_messages, *user_messages]}

    def _receive(self, reply: Any, deadline: float) -> bytes:
        """The complete body; RetryableError for one that ends early or takes too long."""
        from urllib3.exceptions import HTTPError

        charged = reply.status_code == 200
        body = bytearray()
        try:
            while piece := reply.raw.read1(1 << 16, decode_content=True):
                body += piece
                if time.monotonic() > deadline:
                    raise RetryableError(
                        f"the answer took more than {self._params.timeout_seconds:g} s", charged=charged
                    )
                if len(body) > MAX_REPLY_BYTES:
                    raise self._fatal(f"an answer of more than {MAX_REPLY_BYTES >> 20} MiB", "check synthetic.base_url")
        except HTTPError as error:
            raise RetryableError(self._describe(error), charged=charged) from None
        return bytes(body)

    def _read(self, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
        text = body.decode("utf-8", errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        error_body = isinstance(value, dict) and value.get("error") and not {"content", "choices"} & value.keys()
        if status == 200 and not error_body:
            return self._answer(value)
        kinds, message = _error(value, text)
        what = self._scrub(f"HTTP {status}{': ' if message else ''}{' '.join(message.split())[:300]}")
        if 300 <= status < 400:
            raise self._fatal(f"{what} (sent elsewhere, where the key must not go)", "correct synthetic.base_url")
        if status == 402 or kinds & SPENT or (status < 429 and SPENT_TEXT.search(message)):
            raise self._fatal(f"the account is out of credit ({what})", "pay or raise its limit, then run this again")
        if status in (401, 403):
            name = self._params.key_env
            fix = f"check the key in {name}, and what it may use" if name else "set synthetic.key_env: it wants a key"
            raise self._fatal(f"the server does not let us in ({what})", fix)
        if status in (404, 405):
            raise self._fatal(what, "correct synthetic.model or synthetic.base_url")
        if status in RETRYABLE_STATUSES or status >= 500:
            raise RetryableError(what, retry_after(headers.get("Retry-After")))
        if status == 200:  # a router whose server failed when the answer had begun
            raise RetryableError(what, charged=True)
        raise Rejected(what)

    def _answer(self, value: Any) -> Answer:
        usage = value.get("usage") if isinstance(value, dict) else None
        usage = usage if isinstance(usage, dict) else {}
        names = ("input_tokens", "output_tokens") if self.api == "anthropic" else ("prompt_tokens", "completion_tokens")
        input_tokens, output_tokens = (usage.get(name) for name in names)
        if _count(input_tokens) is not None:  # what a server kept from earlier questions is read all the same
            input_tokens += sum(_count(usage.get(f"cache_{name}_input_tokens")) or 0 for name in ("creation", "read"))
        tokens = {"input_tokens": _count(input_tokens), "output_tokens": _count(output_tokens)}
        model = value.get("model") if isinstance(value, dict) else None
        # A local server may name its model by its file; the folder is private and left out.
        model = self._scrub(model)[:200] if isinstance(model, str) else ""
        model = model.rpartition("/")[2] if model.startswith("/") else model
        try:
            text, end = _anthropic(value) if self.api == "anthropic" else _openai(value)
        except (KeyError, IndexError, TypeError, AttributeError):
            return Answer(None, f"not an answer of the {self.api} API", cut=False, model=model, **tokens)
        return Answer(self._scrub(text), "", cut=end in CUT_OFF, model=model, **tokens)

    def _fatal(self, what: str, fix: str) -> AthanorError:
        return InputError(what, where=self._scrub(self.url), fix=fix)

    def _describe(self, error: BaseException) -> str:
        return self._scrub(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _scrub(self, text: str) -> str:
        return text if self._key is None else self._key.scrub(text)


def _never_connected(error: BaseException) -> bool:
    """Whether no connection to the server was made: no such name, no route, or no listener."""
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return isinstance(reason, (NewConnectionError, ConnectTimeoutError))


def _anthropic(value: Any) -> tuple[str, str]:
    blocks = [block["text"] for block in value["content"] if block["type"] == "text"]
    return _text("".join(blocks)), str(value.get("stop_reason"))


def _openai(value: Any) -> tuple[str, str]:
    choice = value["choices"][0]
    return _text(choice["message"]["content"]), str(choice.get("finish_reason"))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _error(value: Any, text: str) -> tuple[set[str], str]:
    """Type and code of an error body, and its message; both APIs hold them in `error`."""
    details = value.get("error") if isinstance(value, dict) else None
    if isinstance(details, str):
        return set(), details
    if not isinstance(details, dict):
        return set(), text[:300]
    message = details.get("message")
    return {str(details[name]) for name in ("type", "code") if details.get(name)}, message if isinstance(
        message, str
    ) else ""
