"""The text of EPUB books and DOCX documents: archives of XHTML and XML, of which no more is unpacked than a text may have.

What comes out is Markdown. Entities that a file declares are refused, and nothing outside of it is read.
"""

from __future__ import annotations

import io
import lzma
import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from urllib.parse import unquote
from xml.parsers import expat

from athanor.base.errors import InputError

UNPACKED_BYTES, UNPACKED_FACTOR = (
    1 << 20,
    100,
)  # a part that unpacks to more than both is no text: XHTML packs 3 to 10 to 1
OLE = b"\xd0\xcf\x11\xe0"  # how the files of older programs begin
# What is there a second time, what was deleted, and where tabs stop.
HIDDEN = frozenset(("Fallback", "del", "moveFrom", "tabs"))
SIGNS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
HEADING = re.compile(r"heading (\d)$")


class Archive:
    """A ZIP file whose parts together may unpack to `budget` bytes."""

    def __init__(self, data: bytes, where: str, budget: int) -> None:
        self.where, self.budget, self.limit = where, budget, budget
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
            self.names = set(self._zip.namelist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self.damaged(error) from None

    def read(self, name: str) -> bytes:
        if name not in self.names:
            raise self.damaged(f"it has no {name}")
        info = self._zip.getinfo(name)
        if info.flag_bits & 1:
            raise InputError(
                "protected by a password", where=self.where, fix="save it without, or leave it out of the glob"
            )
        packed, unpacked = info.compress_size, info.file_size
        if unpacked > max(UNPACKED_BYTES, UNPACKED_FACTOR * packed):
            what, fix = (
                f"{name}: {packed:,} bytes unpack to {unpacked:,}",
                "look at what wrote the file; no text is packed like that",
            )
            raise InputError(what, where=self.where, fix=fix)
        try:
            with self._zip.open(info) as part:
                data = part.read(self.budget + 1)  # the size in the header may be a lie
        except (
            zipfile.BadZipFile,
            zlib.error,
            lzma.LZMAError,
            EOFError,
            OSError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise self.damaged(error) from None
        self.budget -= len(data)
        if self.budget < 0:
            what, fix = f"more than {self.limit:,} bytes of text", "split the document, or raise max_document_bytes"
            raise InputError(what, where=self.where, fix=fix)
        return data

    def damaged(self, why: object) -> InputError:
        return InputError(f"not a readable archive ({why})", where=self.where, fix="repair or replace the file")

    def parse(
        self, name: str, start: Callable[[str, dict[str, str]], None], end: Callable[[str], None] = lambda tag: None,
        text: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """Parse a part as XML; tags and attributes without their namespaces' prefixes."""
        parser = expat.ParserCreate()
        parser.StartElementHandler = lambda tag, attributes: start(
            tag.rpartition(":")[2], {key.rpartition(":")[2]: value for key, value in attributes.items()}
        )
        parser.EndElementHandler = lambda tag: end(tag.rpartition(":")[2])
        parser.CharacterDataHandler, parser.buffer_text = text, True

        def entity(name: str, *_: object) -> None:
            raise self.damaged(f"it declares the entity '{name}'")

        parser.EntityDeclHandler = entity
        try:
            parser.Parse(self.read(name), True)
        except expat.ExpatError as error:
            raise self.damaged(f"{name}: {error}") from None


def epub(data: bytes, where: str, max_document_bytes: int, page: Callable[[bytes], str]) -> str:
    """The chapters of a book in their order; `page` makes the text of one."""
    archive = Archive(data, where, max_document_bytes)
    packages: list[str] = []
    archive.parse(
        "META-INF/container.xml",
        lambda tag, values: packages.append(values.get("full-path", "")) if tag == "rootfile" else None,
    )
    if not packages:
        raise archive.damaged("META-INF/container.xml names no book")
    parts: dict[str, str] = {}
    spine: list[str] = []

    def start(tag: str, values: Mapping[str, str]) -> None:
        is_page = (
            re.search("html|oeb", values.get("media-type", "")) and "nav" not in values.get("properties", "").split()
        )
        if tag == "item" and is_page:
            path = posixpath.join(posixpath.dirname(packages[0]), unquote(values.get("href", "")))
            parts[values.get("id", "")] = posixpath.normpath(path)
        elif tag == "itemref":
            spine.append(values.get("idref", ""))

    archive.parse(packages[0], start)
    protected: set[str] = set()
    if "META-INF/encryption.xml" in archive.names:  # lists fonts as well
        archive.parse(
            "META-INF/encryption.xml",
            lambda tag, values: protected.add(unquote(values.get("URI", ""))) if tag == "CipherReference" else None,
        )
    chapters = [parts[name] for name in spine if name in parts]
    if protected.intersection(chapters):
        raise InputError(
            "protected against copying (DRM)", where=where, fix="bring a copy without, or leave it out of the glob"
        )
    texts = [page(archive.read(name)).strip("\n") for name in chapters]
    text = "\n\n".join(text for text in texts if text.strip())
    if not text:
        fix = "bring another edition, or recognise its text first (for example with ocrmypdf)"
        raise InputError("a book without text, perhaps of pictures", where=where, fix=fix)
    return text


def docx(data: bytes, where: str, max_document_bytes: int) -> str:
    """The paragraphs of a document: headings and lists as Markdown, cells of a table in a line."""
    if data.startswith(OLE):
        fix = "save it as .docx, without a password"
        raise InputError("protected by a password, or a .doc under another name", where=where, fix=fix)
    archive = Archive(data, where, 8 * max_document_bytes)  # of XML, most of which is not text
    levels: dict[str, int] = {}  # of styles that are headings: their ids are words of the writer's language
    style = [""]

    def of_style(tag: str, values: Mapping[str, str]) -> None:
        if tag == "style":
            style[0] = values.get("styleId", "")
        elif tag == "name" and style[0]:
            name = values.get("val", "").lower()
            if match := HEADING.match(name):
                levels[style[0]] = int(match[1])
            elif name == "title":
                levels[style[0]] = 1

    if "word/styles.xml" in archive.names:
        archive.parse("word/styles.xml", of_style)
    writer = _Paragraphs(levels)
    archive.parse("word/document.xml", writer.start, writer.end, writer.data)
    text = "\n\n".join(writer.blocks)
    if not text.strip():
        raise InputError("a document without text", where=where, fix="leave it out of the glob")
    return text


class _Paragraphs:
    def __init__(self, levels: Mapping[str, int]) -> None:
        self.levels = levels
        self.blocks: list[str] = []
        self._open: list[list[str]] = []  # paragraphs: one in a text box is within another
        self._prefixes: list[str] = []
        self._cells: list[list[str]] = []  # of the rows of tables within each other
        self._is_text, self._hidden = False, 0

    def start(self, tag: str, values: Mapping[str, str]) -> None:
        if tag in HIDDEN:
            self._hidden += 1
        if self._hidden:
            return
        if tag == "p":
            self._open.append([])
            self._prefixes.append("")
        elif tag == "tr":
            self._cells.append([])
        elif tag == "tc" and self._cells:
            self._cells[-1].append("")
        elif self._open:
            if tag == "t":
                self._is_text = True
            elif tag in SIGNS:
                self._open[-1].append(SIGNS[tag])
            elif tag == "pStyle" and values.get("val") in self.levels:
                self._prefixes[-1] = "#" * min(self.levels[values["val"]], 6) + " "
            elif tag == "numPr" and not self._prefixes[-1]:
                self._prefixes[-1] = "- "

    def data(self, text: str) -> None:
        if self._is_text and not self._hidden:
            self._open[-1].append(text)

    def end(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden -= 1
        elif self._hidden:
            return
        elif tag == "t":
            self._is_text = False
        elif tag == "p" and self._open:
            text, prefix = "".join(self._open.pop()).strip("\n"), self._prefixes.pop()
            if not text.strip():
                return
            if self._cells and self._cells[-1]:
                self._cells[-1][-1] = f"{self._cells[-1][-1]} {text}".strip()
            elif prefix == "- " and self.blocks and self.blocks[-1].startswith("- "):
                self.blocks[-1] += f"\n- {text}"
            else:
                self.blocks.append(prefix + text)
        elif tag == "tr" and self._cells:
            row = " | ".join(cell.replace("\n", " ") for cell in self._cells.pop())
            if row.strip(" |"):
                self.blocks.append(row)
