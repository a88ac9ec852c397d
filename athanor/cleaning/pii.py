"""Personal data and secrets, replaced by fixed placeholders: e-mail and public IP addresses, phones, cards, keys.

A pattern finds a candidate, and a check on the candidate and on what stands
before it decides: the top-level domain, the address range, the check digit,
the brand, the name of the variable. What is written to stand for nobody stays:
example domains, private and documentation addresses. Placeholders are the same
everywhere, so the order of documents changes nothing.

Measured. Recall of 300 planted per category, in the spellings of
tests/cleaning/test_pii.py: all found. Written otherwise they are missed: "ann at
kale dot com", national phone numbers without a word like "tel" before them
(outside North America), cards without their usual grouping, passwords. False
alarms, read one by one: in the 15 MB of code and prose of Python 3.11's
standard library none of 2 addresses, and no phone, card or key at all; in 60 MB
of files of installed packages one version number as an address and one seed of
15 digits as a card. Speed: 20 MB per CPU-second and more for both.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

from athanor.cleaning.params import PiiParams

CATEGORIES = ("email", "ip", "phone", "card", "key")
PLACEHOLDERS = {name: f"<{name}>" for name in CATEGORIES}
MAX_ROUNDS = 100

Span = tuple[int, int]


def redact(text: str, params: PiiParams) -> tuple[str, dict[str, int]]:
    """The text with personal data replaced, and how many of each category; the same object when there is none.

    Searched again until nothing is found, because what stands beside a
    placeholder may read differently than before; so redacting twice changes
    nothing. Each round takes away an @, a digit or the beginning of a key; two
    are the rule, and the bound is for texts made to need more.
    """
    counts: Counter[str] = Counter()
    for _ in range(MAX_ROUNDS):
        spans: list[tuple[int, int, str]] = []
        for name in CATEGORIES:
            if getattr(params, name):
                spans += [(start, end, name) for start, end in _FINDERS[name](text)]
        if not spans:
            break
        text = _replace(text, sorted(spans, key=lambda span: (span[0], -span[1])), counts)
    return text, dict(counts)


def _replace(text: str, spans: list[tuple[int, int, str]], counts: Counter[str]) -> str:
    """Replace the spans. Of overlapping ones the first counts, of those with the same start the longest."""
    pieces, position = [], 0
    for start, end, name in spans:
        if start < position:
            continue
        placeholder = PLACEHOLDERS[name]
        if text[start - 1 : start] == "<" and text[end : end + 1] == ">":
            placeholder = placeholder[1:-1]  # "Ann <ann@home.net>" has the brackets already
        pieces += [text[position:start], placeholder]
        position = end
        counts[name] += 1
    return "".join([*pieces, text[position:]])


# --- e-mail -------------------------------------------------------------------------------------------------------

_GENERIC = (
    "com|org|net|edu|gov|mil|int|info|biz|name|pro|mobi|asia|jobs|museum|travel|coop|aero|dev|app|tech|online|site|xyz|"
    "email|cloud|blog|shop|store|club|academy|systems|solutions|software|company|agency|digital|media|world|live|life|"
    "today|network|group|consulting|engineering|science|university|london|berlin|page|space|website|tools|zone|work"
)
# The top-level domain tells an address from `image@2x.png` and from the matrix product `self.a@b.conj()`.
_DOMAIN = re.compile(rf"@((?:[A-Za-z0-9-]+\.)+(?:{_GENERIC}|[A-Za-z]{{2}}))(?![\w(@\[]|-\w|\.\w)", re.IGNORECASE)
_LOCAL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?\Z")
_RESERVED_DOMAIN = re.compile(
    r"(?:^|\.)example(?:\.[a-z]+)?$|\.(?:test|invalid|local)$|^(?:open)?ssh\.com$", re.IGNORECASE
)


def _emails(text: str) -> Iterator[Span]:
    if "@" not in text:
        return
    for match in _DOMAIN.finditer(text):
        start = match.start()
        local = _LOCAL.search(text, max(start - 64, 0), start)
        # Domains reserved for examples (RFC 2606) are nobody's, git@host is how one writes the host of a repository,
        # and what stands before @openssh.com and @ssh.com is the name of a cipher (RFC 4251).
        ending = match[1].rpartition(".")[2]  # `a@b.mT` is a transposed matrix
        if (
            local
            and local[0] != "git"
            and not _RESERVED_DOMAIN.search(match[1])
            and (ending.islower() or ending.isupper())
        ):
            yield local.start(), match.end()


# --- addresses ----------------------------------------------------------------------------------------------------

_IPV4_LIKE = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w-]|\.\w)")
_IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,40}(?![\w.])")
_VERSION = re.compile(
    r"(?:\b(?:version|ver|v|release|rev|revision|build|update|firmware|sections?|chapter|oid|ObjectIdentifier)\W{0,3}"
    r"|[=<>~^@]\s?)$",
    re.IGNORECASE,
)


def _addresses(text: str) -> Iterator[Span]:
    """Find public addresses; private, reserved and documentation ones are no personal data.

    "1.2.3.4" may be a version. It is taken for one after words like "version"
    and after signs like "==", as part of a name ("lib-1.2.3.4") or of a longer
    number, and when all four parts are below 32: that loses one public address
    in four thousand, and nearly every version looks so.
    """
    for match in _IPV4.finditer(text) if _IPV4_LIKE.search(text) else ():
        start, end = match.span()
        *_, third, largest = sorted(map(int, match[0].split(".")))
        if _continues_word(text, start) or largest < 32 or third < 10:
            continue
        try:  # refuses parts above 255 and leading zeros
            address = ipaddress.IPv4Address(match[0])
        except ValueError:
            continue
        if address.is_global and not address.is_multicast and not _VERSION.search(text, max(start - 24, 0), start):
            yield start, end
    for match in _IPV6.finditer(text) if ":" in text else ():
        start = match.start()
        candidate = match[0] if match[0].endswith("::") else match[0].rstrip(":")
        try:
            address = ipaddress.IPv6Address(candidate)
        except ValueError:
            continue
        if address.is_global and not _continues_word(text, start) and text[start - 1 : start] != ":":
            yield start, start + len(candidate)


def _continues_word(text: str, start: int) -> bool:
    """Whether a match that begins at `start` continues a word, a name or a number."""
    before = text[start - 1 : start]  # empty at the beginning
    return before.isalnum() or before in ("_", "-", ".", "+")


# --- cards and phones ---------------------------------------------------------------------------------------------

# All of them hold seven digits with at most two other characters between two; most texts have no such run.
_DIGIT_RUN = re.compile(r"[0-9](?:[ ().-]{0,2}[0-9]){6}")
_CARD = re.compile(
    r"[2-6][0-9]{3}(?:([ -]?)[0-9]{4}(?:\1[0-9]{4}){2}|([ -]?)[0-9]{6}\2[0-9]{4,5})"
    r"(?!\w|\*|[.,][0-9]|,? ?-?[0-9]{1,8}(?![0-9]))"
)


def _cards(text: str) -> Iterator[Span]:
    """Numbers of 14 to 16 digits with the prefix of a brand and a right check digit, which a tenth has by chance."""
    last_end = -1
    for match in _CARD.finditer(text) if _DIGIT_RUN.search(text) else ():
        start = match.start()
        digits = match[0].replace(" ", "").replace("-", "")
        before = text[max(start - 2, 0) : start]
        in_a_table = len(before) == 2 and before[0].isdigit() and before[1] in " ," and start != last_end + 1
        if _continues_word(text, start) or in_a_table or before[-1:] in ("/", "$"):
            continue
        if _brand(digits, len(digits) < len(match[0])) and luhn(digits):
            last_end = match.end()
            yield match.span()


def _brand(digits: str, grouped: bool) -> bool:
    """Whether a card number may begin like this. One of 14 digits counts only when grouped: most others are times (20210304050607)."""
    prefix = int(digits[:4])
    if len(digits) == 16:
        return (
            4000 <= prefix < 5000
            or 5100 <= prefix < 5600
            or 2221 <= prefix < 2721
            or 3528 <= prefix < 3590
            or prefix == 6011
            or 6200 <= prefix < 6300
            or 6440 <= prefix < 6600
        )
    if len(digits) == 15:
        return prefix // 100 in (34, 37)
    return grouped and (3000 <= prefix < 3060 or prefix // 100 in (36, 38, 39))


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[::-2])) + sum(doubled)) % 10 == 0


_INTERNATIONAL = re.compile(r"\+[1-9](?:[ ().-]{0,2}[0-9]){7,14}(?!\w|[.,][0-9]|[ -][0-9])")
_NORTH_AMERICAN = re.compile(
    r"[(2-9](?:(?<=\()[2-9][0-9]{2}\)[ .-]?[2-9][0-9]{2}[ .-]|[0-9]{2}([.-])[2-9][0-9]{2}\1)[0-9]{4}(?!\w|[.,-][0-9])"
)
_TRUNK = re.compile(r"(?<![\w.+-])1[ .-]$")
_NATIONAL = re.compile(r"[0-9](?:[ ()./-]{0,2}[0-9]){6,13}(?!\w|[.,-][0-9])")
_PHONE_WORD = re.compile(
    r"(?<![A-Za-z0-9])(?:phone|tel|telephone|mobile|fax|whatsapp)(?:\s(?:no\.?|number|at|on|is)){0,2}[\s.:#]{1,3}\(?$",
    re.IGNORECASE,
)


def _phones(text: str) -> Iterator[Span]:
    """Numbers with a country code, in the North American form, or after a word like "phone"."""
    if not _DIGIT_RUN.search(text):
        return
    for match in _INTERNATIONAL.finditer(text):
        if not _continues_word(text, match.start()) and _dialled(match[0]):
            yield match.span()
    for match in _NORTH_AMERICAN.finditer(text):
        start = match.start()
        trunk = _TRUNK.search(text, max(start - 3, 0), start)
        if trunk:
            yield trunk.start(), match.end()
        elif not _continues_word(text, start) and text[start - 1 : start] not in ("/", "="):
            yield match.span()
    for match in _NATIONAL.finditer(text):
        start = match.start()
        if _PHONE_WORD.search(text, max(start - 40, 0), start):
            bracket = text[start - 1 : start] == "(" and match[0].find(")") > match[0].find("(")
            yield start - bracket, match.end()


def _dialled(number: str) -> bool:
    """Whether a number is written like a phone number, not like a signed decimal fraction or a short integer."""
    groups = re.findall(r"[0-9]+", number)
    if len(groups) == 1:
        return len(groups[0]) >= 11  # shorter ones are mostly signed integers, as +2147483647
    if "." in number:
        return " " not in number and min(map(len, groups[1:])) >= 2 and len(groups) >= 3
    return len(groups[0]) > 1 or groups[0] in "17"


# --- keys ---------------------------------------------------------------------------------------------------------

# Issuer, a literal to look for first, and the pattern of the key.
_PREFIXED_KEYS = tuple(
    (literal, re.compile(rf"(?<![A-Za-z0-9])(?:{pattern})"))
    for _, literal, pattern in map(
        str.split,
        r"""
        Amazon           AKIA             AKIA[A-Z0-9]{16}(?![A-Za-z0-9])
        Amazon           ASIA             ASIA[A-Z0-9]{16}(?![A-Za-z0-9])
        Google           AIza             AIza[A-Za-z0-9_-]{35}
        Google           GOCSPX-          GOCSPX-[A-Za-z0-9_-]{28}
        Google           ya29.            ya29\.[A-Za-z0-9_-]{40,}
        GitHub           ghp_             ghp_[A-Za-z0-9]{36,}
        GitHub           gho_             gho_[A-Za-z0-9]{36,}
        GitHub           ghs_             ghs_[A-Za-z0-9]{36,}
        GitHub           ghu_             ghu_[A-Za-z0-9]{36,}
        GitHub           ghr_             ghr_[A-Za-z0-9]{36,}
        GitHub           github_pat_      github_pat_[A-Za-z0-9_]{22,}
        GitLab           glpat-           glpat-[A-Za-z0-9_-]{20,}
        Slack            xox              xox[abeoprs]-[A-Za-z0-9-]{10,}
        Slack            hooks.slack.com/ https://hooks\.slack\.com/services/[A-Z0-9]+/[A-Z0-9]+/[A-Za-z0-9]+
        Stripe           _live_           [rs]k_live_[A-Za-z0-9]{16,}
        OpenAI/Anthropic sk-              sk-[A-Za-z0-9_-]{32,200}
        Hugging-Face     hf_              hf_[A-Za-z0-9]{34,}
        npm              npm_             npm_[A-Za-z0-9]{36,}
        PyPI             pypi-AgE         pypi-AgE[A-Za-z0-9_-]{40,}
        SendGrid         SG.              SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}
        JSON-web-token   eyJ              eyJ[A-Za-z0-9_-]{8,4000}+\.eyJ[A-Za-z0-9_-]{8,4000}+\.[A-Za-z0-9_-]{8,}
        """.strip().splitlines(),
    )
)
_PRIVATE = re.compile(
    r"-----BEGIN ((?:[A-Z0-9]+ ){0,3})PRIVATE KEY( BLOCK)?-----(?:"
    r"(?=[^<]{0,400}?[A-Za-z0-9+/=]{32})[^<]{40,20000}?-----END \1PRIVATE KEY\2?-----|"
    r"(?:[\s\"'\\n]{1,40}[A-Za-z0-9+/=]{32,}+){2,})"
)
# A random value in quotes, or after an = at the end of a line, of a variable whose name says that it is secret.
_QUOTED = re.compile(r"[\"'][A-Za-z0-9+/_=~.-]{20,200}(?=[\"'])")
_SETTING = re.compile(r"=(?!=)[A-Za-z0-9+/_=~.-]{20,200}+$", re.MULTILINE)
_SECRET = re.compile(
    r"(?:secret|token|passwd|password|api_?key|access_?key|auth_?key)[a-z_]{0,20}[\"']?\]?\s{0,3}(?:=|:|=>)?\s{0,3}$",
    re.IGNORECASE,
)
_CLASSES = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", "a" * 26 + "A" * 26 + "0" * 10, "+/_=~.-"
)


def _keys(text: str) -> Iterator[Span]:
    """Keys with an issuer's prefix, private keys, and random values of variables with a telling name.

    A private key of many lines becomes one placeholder; all other lines stay as they are.
    """
    for literal, pattern in _PREFIXED_KEYS:
        if literal in text:
            yield from (m.span() for m in pattern.finditer(text) if literal != "sk-" or _looks_random(m[0]))
    if "PRIVATE KEY" in text:
        yield from (match.span() for match in _PRIVATE.finditer(text))
    for pattern in (_QUOTED, _SETTING):
        for match in pattern.finditer(text):
            start, end = match.start() + 1, match.end()
            if _looks_random(text[start:end]) and _SECRET.search(text, max(start - 50, 0), start - 1):
                yield start, end


def _looks_random(value: str) -> bool:
    """Whether a value looks randomly generated: it has digits, many changes of character class and high entropy."""
    classes = value.translate(_CLASSES)
    changes = sum(first != second for first, second in zip(classes, classes[1:], strict=False))
    counts = Counter(value).values()
    entropy = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return "0" in classes and changes >= len(classes) / 4 and entropy >= 3.0


_FINDERS: dict[str, Callable[[str], Iterator[Span]]] = {
    "key": _keys,
    "email": _emails,
    "ip": _addresses,
    "card": _cards,
    "phone": _phones,
}
