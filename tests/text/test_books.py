"""EPUB and DOCX give their text, and no archive unpacks to more than a text may have."""

from __future__ import annotations

import io
import zipfile

import pytest

from athanor.base.errors import InputError
from tests.sources.world import read

CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
OPF = """<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="x"><metadata><dc:title>T</dc:title></metadata>
<manifest><item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="two" href="two.xhtml" media-type="application/xhtml+xml"/><item id="css" href="a.css" media-type="text/css"/>
<item id="one" href="text/chapter%201.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="nav"/><itemref idref="one"/><itemref idref="two"/><itemref idref="gone"/></spine></package>"""
PAGE = "<html><head><title>no</title></head><body>{}</body></html>"
BOOK = {
    "mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": OPF,
    "OEBPS/nav.xhtml": PAGE.format("<nav>Contents</nav>"), "OEBPS/a.css": "a {}",
    "OEBPS/text/chapter 1.xhtml": PAGE.format("<h1>Глава 1</h1><p>Стало <i>тихо</i>.</p>"),
    "OEBPS/two.xhtml": ("<?xml version='1.0' encoding='windows-1251'?>" + PAGE.format("<p>Конец.</p>")).encode("cp1251"),
}  # fmt: skip
WORD = '<w:document xmlns:w="w" xmlns:mc="mc"><w:body>{}</w:body></w:document>'
STYLES = '<w:styles xmlns:w="w"><w:style w:styleId="berschrift2"><w:name w:val="heading 2"/></w:style></w:styles>'


def paragraph(text, inside=""):
    return f'<w:p>{inside}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


NOTE = {
    "word/styles.xml": STYLES,
    "word/document.xml": WORD.format(
        paragraph("Über uns", '<w:pPr><w:pStyle w:val="berschrift2"/></w:pPr>')
        + "<w:p><w:r><w:t>One </w:t></w:r><w:del><w:r><w:t>lost</w:t></w:r></w:del><w:r><w:t>line</w:t><w:br/><w:t>next &amp; "
        "last</w:t></w:r><w:instrText>PAGE</w:instrText></w:p><w:p/>"
        + "".join(paragraph(text, "<w:pPr><w:tabs><w:tab/></w:tabs><w:numPr/></w:pPr>") for text in ("first", "second"))
        + f"<w:tbl><w:tr><w:tc>{paragraph('a')}{paragraph('b')}</w:tc><w:tc>{paragraph('c')}</w:tc></w:tr></w:tbl>"
        + f"<mc:AlternateContent><mc:Choice>{paragraph('box')}</mc:Choice><mc:Fallback>{paragraph('box')}</mc:Fallback>"
        "</mc:AlternateContent>"
    ),
}
NOTE_TEXT = "## Über uns\n\nOne line\nnext & last\n\n- first\n- second\n\na b | c\n\nbox"


def archive(parts, **changes):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in (parts | changes).items():
            file.writestr(name, data)
    return made.getvalue()


def test_a_book_is_its_chapters_in_their_order(tmp_path):
    (tmp_path / "a.epub").write_bytes(archive(BOOK))
    (document,) = read(tmp_path / "*")
    assert document.text == "# Глава 1\n\nСтало *тихо*.\n\nКонец."


def test_a_document_is_its_paragraphs(tmp_path):
    (tmp_path / "a.docx").write_bytes(archive(NOTE))
    (tmp_path / "~$a.docx").write_bytes(b"\x05Me")  # of an open document
    assert [document.text for document in read(tmp_path / "*")] == [NOTE_TEXT]


ENTITY = '<!DOCTYPE a [<!ENTITY x "y">]><w:document xmlns:w="w"><w:p><w:t>&x;</w:t></w:p></w:document>'
DRM = '<encryption><CipherReference URI="OEBPS/two.xhtml"/></encryption>'
BAD = {
    "a.epub": (b"PK no more", "not a readable archive"),
    "b.epub": (archive({"x": "y"}), "it has no META-INF/container.xml"),
    "c.epub": (archive(BOOK, **{"OEBPS/book.opf": "<package>"}), "OEBPS/book.opf: "),
    "d.epub": (archive(BOOK, **{"META-INF/encryption.xml": DRM}), r"protected against copying \(DRM\)"),
    "e.epub": (archive(BOOK, **{"OEBPS/two.xhtml": "<p>a</p>" * 400_000}), "two.xhtml: .* bytes unpack to 3,200,000"),
    "f.epub": (archive(BOOK, **{name: PAGE.format("<img/>") for name in BOOK if name.endswith("html")}), "without text"),
    "g.docx": (archive(NOTE, **{"word/document.xml": ENTITY}), "it declares the entity 'x'"),
    "h.docx": (archive(NOTE, **{"word/document.xml": WORD.format("")}), "a document without text"),
    "i.docx": (b"\xd0\xcf\x11\xe0\xa1", "protected by a password"),
    "j.docx": (archive(NOTE, **{"word/document.xml": "a" * 900_000}), "more than 800,000 bytes of text"),
    "k.docx": (archive(NOTE)[:-40], "not a readable archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_book_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name][0])
    with pytest.raises(InputError, match=f"{name}: .*{BAD[name][1]}.* Fix: "):
        read(tmp_path / name, max_document_bytes=100_000)
