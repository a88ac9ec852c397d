"""Secrets out of everything that is written down: journals, tags, logs, terminal.

`redact` replaces by `***`

- the user part of an address (`scheme://user:password@host`, `scheme://token@host`, `user:password@host/path`);
- opaque parts of an address's path and fragment: long mixtures of letters and digits. A commit's or a file's digest is
  none where the part before it says so (`/resolve/`, `sha256:`), and a UUID only after a word such as `webhook`;
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
SCHEME = r"\b[a-z][a-z0-9+.\-]{0,31}://"
HOST = r"(?:localhost|(?:\d{1,3}\.){3}\d{1,3}|(?:[a-z0-9\-]{1,63}\.){1,8}[a-z]{2,24})"
NO_PORT = r"(?!\d{1,5}(?![^\s/?#\"'<>,;)\]}]))"  # `host:5000/a@b` holds no password
# A variable that is an address as a whole: its password may hold what no address may.
URL_PASSWORD = re.compile(
    rf"\s*(?:{SCHEME}[^/?#:@]*:{NO_PORT}(?P<any>.+)|[^\s/?#:@]+:{NO_PORT}(?P<bare>[^\s/]\S*))@(?!sha\d)[^@]*",
    re.I | re.S,
)
# Of several addresses, or of one among other words.
EACH_PASSWORD = re.compile(rf"{SCHEME}[^\s/?#:@]*:([^\s/?#@]+)@", re.I)
# In a text: a password with `/`, `?`, `#` or spaces, and a login without a scheme.
URL_LOGIN = re.compile(
    rf"(?P<keep>{SCHEME})[^\s/?#:@\"'<>]{{0,64}}:{NO_PORT}(?:(?:(?!://)[^\s\"'<>]){{1,128}}"
    rf"|(?:(?:(?!://)[^\s@\"'<>]){{1,64}}[ ]){{1,8}}(?:(?!://)[^\s@\"'<>]){{0,64}}(?=@(?:{HOST}|[\w\-]{{1,63}}[:/])))@",
    re.I,
)
BARE_LOGIN = re.compile(
    rf"(?P<keep>(?<![\w/@.:+\-]))(?!mailto:)[\w.+%\-]{{1,64}}:{NO_PORT}(?!//)[^\s@\"'<>]{{3,128}}@"
    rf"(?!sha\d)(?:(?=(?:{HOST}|[a-z][\w\-]{{0,62}})[:/])|(?<=\d@)(?={HOST})|(?=localhost|(?:\d{{1,3}}\.){{3}}\d))",
    re.I,
)
LOCATED = re.compile(
    rf"(?P<host>{SCHEME}[^\s/?#\"'<>]{{0,256}}|(?<![\w/@.\-]){HOST}(?::\d{{1,5}})?(?=/))"
    r"(?P<path>[^\s?#\"'<>]{0,2000})(?P<query>(?:\?[^\s#\"'<>]{0,2000})?)(?P<fragment>(?:\#[^\s\"'<>]{0,2000})?)",
    re.I,
)
PIECE = re.compile(r"[\w~%+\-]{16,}={0,2}", re.A)
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.I)
TURN = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
WORDS = re.compile(r"[A-Z]?[a-z]{3,}")
SHARD = re.compile(r"\w+-\d+-of-\d+-[0-9a-f]{16}")  # as the hub's library names files
NUMBERS = re.compile(r"[0-9]+")
DIGEST = re.compile(r"[0-9a-f]{16,64}")
PUBLIC = re.compile(
    r"(?:/(?:blobs?|tree|raw|resolve|blame|commits?|archive|rev|info|hash|runs|zip|tar\.gz|sha\d+|md5|[0-9a-f]{2,3})/|@|sha\d+(?:_git)?:|/mlruns/\d+/|"
    r"\.(?:githubusercontent|githack)\.com/.*/)$",
    re.I,
)
CAPABILITY = re.compile(r"hook|token|secret|key|auth(?!or)|invite|share", re.I)
CONTENT = re.compile(r"/ipfs/(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|b[a-z2-7]{58})$")  # its own hash is its address
AFTER_NAME = re.compile(r"/(?:token|secret|api[_\-]?key|password)/$", re.I)
QUERY = re.compile(
    r"(?P<keep>[?&;#][\w.\-%]{0,64}(?:token|key|keyid|secret|passw(?:or)?d|pwd|signature|sig|credentials?|auth)=)"
    r"[^&;#\s\"'<>]+",
    re.I,
)
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
        key: LOCATED.sub(_without_query, value) if isinstance(value, str) else value for key, value in clean.items()
    }


def _without_query(address: re.Match[str]) -> str:
    host, path, query, fragment = address.group("host", "path", "query", "fragment")
    return host + path + (f"?{MASK}" if len(query) > 1 else query) + (f"#{MASK}" if "=" in fragment else fragment)


def _without_opaque(address: re.Match[str]) -> str:
    host, path, query, fragment = address.group("host", "path", "query", "fragment")
    return host + _masked(path, host) + query + _masked(fragment, host)


def _masked(text: str, host: str) -> str:
    return PIECE.sub(lambda piece: MASK if _opaque(piece[0], host + text[: piece.start()]) else piece[0], text)


def _opaque(piece: str, before: str) -> bool:
    """Whether a piece of an address is no name: its letters, capitals and digits alternate as in random text."""
    if UUID.search(piece):
        return bool(CAPABILITY.search(before))
    if SHARD.fullmatch(piece) or CONTENT.search(before + piece) or DIGEST.fullmatch(piece) and PUBLIC.search(before):
        return False
    if AFTER_NAME.search(before) and piece.isalnum():
        return True
    turns = len(TURN.findall(piece))
    for part in re.findall(r"(?=[0-9]*[A-Za-z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{8,}", piece):
        own = len(TURN.findall(part))
        named = sum(map(len, WORDS.findall(part))) >= 0.6 * len(part) and len(NUMBERS.findall(part)) < 3
        if len(part) >= 16 and (re.fullmatch(r"(?i)[0-9a-f]+", part) or (own >= 4 and not named)):
            return True
        if len(piece) >= 20 and own >= 3 and not named and turns >= max(5, 0.2 * len(piece)):
            return True
    return False


def _redact(value: Any, secrets: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        if secrets is not None:
            value = secrets.sub(MASK, value)
        for pattern in (URL_LOGIN, URL_USER, BARE_LOGIN, QUERY, HEADER, COOKIE, NAMED_SECRET):
            tail = "@" if pattern in (URL_LOGIN, URL_USER, BARE_LOGIN) else ""
            value = pattern.sub(rf"\g<keep>{MASK}{tail}", value)
        return LOCATED.sub(_without_opaque, SHAPES.sub(MASK, value))
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
        values |= set(EACH_PASSWORD.findall(value))
        if match := URL_PASSWORD.fullmatch(value):
            values.add(match["any"] or match["bare"])
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
