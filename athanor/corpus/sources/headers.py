"""What the headers of an HTTP answer say, read so that an odd one is as good as none."""

from __future__ import annotations

import email.utils
import re
import time
from typing import Any


def validator(headers: Any) -> str | None:
    """A strong ETag, or the time of the last change; weak ETags promise no equal bytes."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else (headers.get("Last-Modified") if not tag else None)


def count(value: str | None) -> int | None:
    """A number of a header; digits of other scripts, which int() refuses or reads, are none."""
    return int(value) if value is not None and re.fullmatch(r"\s*[0-9]{1,18}\s*", value) else None


def retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait: a number or a date."""
    if value is None:
        return None
    if (seconds := count(value)) is not None:
        return float(seconds)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
