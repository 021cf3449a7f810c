"""Tells plain text from other files, and how to make text of them."""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from io import StringIO

# magic bytes of files that are not text, and what to do with them
_DOCUMENTS = {
    b"%PDF-": "it is a PDF: extract its text, for example with pdftotext",
    b"PK\x03\x04": "it is a ZIP archive, as DOCX, ODT and EPUB are: save it as plain text in UTF-8",
    b"\xd0\xcf\x11\xe0": "it is a document of an older version of Office: save it as plain text in UTF-8",
    b"{\\rtf": "it is RTF: save it as plain text in UTF-8",
    b"\x89PNG": "it is an image: write its text into a file in UTF-8",
    b"\xff\xd8\xff": "it is an image: write its text into a file in UTF-8",
    b"\x1f\x8b": "it is compressed by gzip: decompress it by gunzip",
    b"GGUF\x02\0": "it is a model, as --model takes it: give a text file in UTF-8",
    b"GGUF\x03\0": "it is a model, as --model takes it: give a text file in UTF-8",
}
_TO_KANJI = b"\x1b$B", b"\x1b$@"  # of ISO-2022-JP, all of whose bytes are ASCII


def as_read(text: str) -> str:
    """Return a text as `csattn build` reads it from a file: lines end with \\n, and a byte order mark is left out."""
    return StringIO(text.removeprefix("\ufeff"), newline=None).read()


def why_not_plain(data: bytes) -> str | None:
    """Return what UTF-8 is if it is not plain text, and what to do with it; None if it is plain text."""
    if (advice := _of_document(data)) is not None:
        return advice
    if b"\0" in data:
        return _of_utf16(data) or f"it has a NUL at byte {data.index(0)}; remove it: tr -d '\\0' < FILE"
    if any(mark in data for mark in _TO_KANJI):
        return "it is ISO-2022-JP, as used in mail: convert it: iconv -f ISO-2022-JP -t UTF-8 FILE"
    return None


def how_to_convert(data: bytes) -> str:
    """Return advice on making UTF-8 text of bytes that are not UTF-8."""
    known = "GB18030, BIG5, SHIFT_JIS, EUC-KR, CP1252, ..."
    other = f"convert it from the encoding that it has ({known}): iconv -f ENCODING -t UTF-8 FILE"
    return _of_document(data) or _of_utf16(data) or other


def _of_document(data: bytes) -> str | None:
    start = data.removeprefix(BOM_UTF8)
    return next((advice for magic, advice in _DOCUMENTS.items() if start.startswith(magic)), None)


def _of_utf16(data: bytes) -> str | None:
    """Return advice if the bytes are UTF-16: by their byte-order mark, or if most even or odd bytes are 0."""
    order = "" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else None
    if order is None:
        zeros = [half.count(0) / max(1, len(half)) for half in (data[:4096:2], data[1:4096:2])]
        order = next((order for order, at in (("BE", 0), ("LE", 1)) if zeros[at] > 0.75 and zeros[1 - at] < 0.5), None)
    if order is None:
        return None
    return f"if it is UTF-16, as Windows writes, convert it: iconv -f UTF-16{order} -t UTF-8 FILE"
