"""The text of files that hold more than text: HTML pages, Jupyter notebooks, PDF, EPUB and DOCX.

What comes out is Markdown, or for PDF plain text. A page gives its main part
without navigation, scripts and addresses of links; a notebook its cells
without their outputs, code between fences; a PDF the text of its pages.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from typing import Any

from athanor.base.errors import InputError
from athanor.text import books, encodings

# A converted file may be larger than its text by this factor: notebooks and PDF hold pictures.
RAW_FACTOR = {".html": 1, ".htm": 1, ".xhtml": 1, ".ipynb": 8, ".pdf": 8, ".epub": 8, ".docx": 8}
PAGES, BINARY = frozenset((".html", ".htm", ".xhtml")), frozenset((".pdf", ".epub", ".docx"))
_DECLARED = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
_NO_TEXT = ["script", "style", "template", "noscript", "nav", "footer", "aside", "iframe", "svg", "a.headerlink"]


def to_text(kind: str, data: bytes | str, where: str, max_document_bytes: int) -> str:
    """The text of a file of one of the kinds in RAW_FACTOR: BINARY as bytes, the others decoded; InputError names the place."""
    try:
        if kind == ".pdf":
            return _pdf(data, where, max_document_bytes)
        if isinstance(data, bytes):
            if kind == ".docx":
                return books.docx(data, where, max_document_bytes)
            return books.epub(data, where, max_document_bytes, lambda page: _html(_page(page)))
        return _notebook(json.loads(data), where) if kind == ".ipynb" else _html(str(data))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        kind_name = {".ipynb": "notebook", ".epub": "book", ".docx": "document"}.get(kind, "page")
        raise InputError(
            f"not a readable {kind_name} ({error})", where=where, fix="repair or replace the file"
        ) from None


def declared(data: bytes) -> str | None:
    """The encoding that a page names at its beginning."""
    match = _DECLARED.search(data[:2048])
    return match[1].decode("ascii", "ignore") if match else None


def _page(data: bytes) -> str:
    for encoding in filter(None, (encodings.marked(data), encodings.UTF_8, declared(data))):
        try:
            return data.decode(encoding)
        except (UnicodeError, LookupError):
            continue
    return data.decode("utf-8", "replace")


def _html(text: str) -> str:
    from bs4 import BeautifulSoup, ParserRejectedMarkup, XMLParsedAsHTMLWarning
    from markdownify import MarkdownConverter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        try:
            soup: Any = BeautifulSoup(text, "html.parser")
        except ParserRejectedMarkup as error:
            raise ValueError(error) from None
    for tag in soup.select(", ".join(_NO_TEXT)):
        tag.decompose()
    main = soup.select_one("main, [role=main]") or soup.body or soup
    escape_options = dict.fromkeys(("escape_asterisks", "escape_underscores", "escape_misc"), False)
    return (
        MarkdownConverter(heading_style="ATX", bullets="-", strip=["a", "img"], **escape_options)
        .convert_soup(main)
        .strip("\n")
    )


def _notebook(notebook: Any, where: str) -> str:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise InputError("not a notebook of format 4", where=where, fix="open it in Jupyter and save it again")
    meta = notebook.get("metadata") or {}
    names = [(meta.get(key) or {}).get(name) for key, name in (("language_info", "name"), ("kernelspec", "language"))]
    language = next((name for name in names if name), "python")
    blocks = []
    for cell in cells:
        source = cell.get("source") or ""
        text = "".join(source) if isinstance(source, list) else str(source)
        if text.strip():
            longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
            fence = "`" * (longest + 1)
            blocks.append(f"{fence}{language}\n{text}\n{fence}" if cell.get("cell_type") == "code" else text)
    return "\n\n".join(blocks)


def _pdf(data: bytes | str, where: str, max_document_bytes: int) -> str:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its remarks name no file
    fix = "save it again as PDF, or leave it out of the glob"
    pages, size = [], 0
    try:
        for page in pypdf.PdfReader(io.BytesIO(data)).pages:  # type: ignore[arg-type]
            pages.append(page.extract_text().encode("utf-8", "replace").decode())
            size += len(pages[-1])
            if size > max_document_bytes:
                break  # the caller refuses it
    except Exception as error:  # of any kind, where the file is damaged
        encrypted = "FileNotDecryptedError" in {kind.__name__ for kind in type(error).__mro__}
        what = "protected by a password" if encrypted else f"not a readable PDF ({type(error).__name__}: {error})"
        raise InputError(what, where=where, fix=fix) from None
    text = "\n".join(pages)
    if not text.strip():
        fix = "recognise its text first (for example with ocrmypdf), or leave it out of the glob"
        raise InputError("a PDF without text, perhaps scanned pages", where=where, fix=fix)
    return text
