"""Secrets out of everything that is written down: journals, tags, logs, terminal.

`redact` replaces by `***`

- the user part of a URL (`scheme://user:password@host`, `scheme://token@host`);
- the values of query parameters whose name ends in token, key, secret, sig, ...;
- well-known shapes of tokens and keys, `Bearer ...` and `password=...`;
- the values of environment variables whose name says that they are secret,
  and the passwords in environment variables that hold a URL;
- what was passed to `hide`.

Numbers are not text and pass untouched, so journal lines of scalars cost nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

MASK = "***"
MIN_CHARS = 8  # a shorter value would match by chance
# TOKENIZERS_PARALLELISM is no token.
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.I)
COUNT_NAME = re.compile(r"TOKENS(_|$)", re.I)  # MAX_TOKENS and its like hold numbers
# Every run that can begin at many places is bounded, or a long text without a secret would take quadratic time.
URL_USER = re.compile(r"(?P<keep>\b[a-z][a-z0-9+.\-]{0,31}://)[^\s/?#\"'<>]+@", re.I)
URL_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.\-]{0,31}://[^\s/?#:@]*:(?P<password>[^\s/?#]+)@", re.I)
QUERY = re.compile(
    r"(?P<keep>[?&;#][\w.\-%]{0,64}(?:token|key|keyid|secret|passw(?:or)?d|pwd|signature|sig|credentials?|auth)=)"
    r"[^&;#\s\"'<>]+",
    re.I,
)
ADDRESS = re.compile(r"(?P<keep>\bhttps?://[^\s?#\"'<>]{1,2000}\?)[^\s\"'<>]+", re.I)
NAMED_SECRET = re.compile(
    r"(?P<keep>(?:password|passwd|secret|(?:api|access|account)[_\-]?key|"
    r"(?:auth|access|refresh|hf|api)[_\-]?token)[\"']?\s{0,16}[=:]\s{0,16}[\"']?)[^\s\"',;&<>]{6,}",
    re.I,
)
HEADER = re.compile(
    r"(?P<keep>\b(?:Bearer\s{1,16}|Authorization[\"']?\s{0,16}[:=]\s{0,16}[\"']?(?:Basic|Token)\s{1,16}))"
    r"[\w.~+/=\-]{8,}", re.I
)  # fmt: skip
COOKIE = re.compile(r"(?P<keep>\bCookie[\"']?\s{0,16}[:=]\s{0,16}[\"']?)[^\s=;\"']{1,256}=[^\r\n\"']+", re.I)
SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|sk-[\w\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w\-]{35}|xox[abeprs]-[\w\-]{10,}|pypi-[\w\-]{32,}|"
    r"eyJ[\w\-]{8,1024}\.[\w\-]{8,}\.[\w\-]*|npm_[A-Za-z0-9]{20,}|dckr_pat_[\w\-]{16,}|"
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,}|ya29\.[\w\-]{20,}|hooks\.slack\.com/(?:services|workflows|triggers)/[\w/\-]{8,}|"
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r")",
    re.S,
)


_hidden: set[str] = set()


def hide(secret: str) -> None:
    """From now on this text is a secret in this process, too: one whose environment variable may have any name."""
    _hidden.add(secret.strip())


def redact(value: Any) -> Any:
    """The text without secrets; in nested mappings and lists every text is treated, anything else is left as it is."""
    return _redact(value, _secrets())


def redact_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `redact`, and without the query of any address: that of a source may be a secret of any name."""
    clean = redact(dict(values))
    return {
        key: ADDRESS.sub(rf"\g<keep>{MASK}", value) if isinstance(value, str) else value for key, value in clean.items()
    }


def _redact(value: Any, secrets: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        if secrets is not None:
            value = secrets.sub(MASK, value)
        for pattern in (URL_USER, QUERY, HEADER, COOKIE, NAMED_SECRET):
            tail = "@" if pattern is URL_USER else ""
            value = pattern.sub(rf"\g<keep>{MASK}{tail}", value)
        return SHAPES.sub(MASK, value)
    if isinstance(value, Mapping):
        return {key: _redact(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, secrets) for item in value]
    return value


def _secrets() -> re.Pattern[str] | None:
    """Matches every secret that this process's environment names, in plain and in URL form."""
    values = set(_hidden)
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and not (COUNT_NAME.search(name) and value.isdigit()):
            values.add(value.strip())
        values |= {match["password"] for match in URL_PASSWORD.finditer(value)}
    values |= {unquote(value) for value in values}
    return _pattern(frozenset(value for value in values if len(value) >= MIN_CHARS))


@functools.lru_cache(maxsize=4)
def _pattern(values: frozenset[str]) -> re.Pattern[str] | None:
    forms = values | {quote(value, safe="") for value in values} | {quote(value) for value in values}
    # The longest first: one secret may begin with another.
    return re.compile("|".join(map(re.escape, sorted(forms, key=lambda form: (-len(form), form))))) if forms else None


class Stream:
    """A text stream that redacts whole lines on their way to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        complete, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._stream.write(redact(complete) + newline)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._line:  # the start of a line may hold half a secret, so nobody sees it before the line is whole
            return
        self._stream.flush()

    def finish(self) -> None:
        """The rest of a line. A log that cannot be written is no failure of what was done."""
        line, self._line = self._line, ""
        with contextlib.suppress(OSError):
            if line:
                self._stream.write(redact(line))
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Standard output and error redacted, whoever writes to them."""
    original = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = redacted = Stream(original[0]), Stream(original[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original
        for stream in redacted:
            stream.finish()


def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """sys.excepthook: an unexpected error's traceback without secrets."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
