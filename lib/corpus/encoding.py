"""Decode and encode text; invalid bytes and lone surrogates become U+FFFD and are counted."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Iterable, Iterator

from lib.corpus import kinds
from lib.corpus.kinds import UTF8_BOM

REPLACEMENT = "\ufffd"
# Python codecs for notations instead of encodings of files. They cannot replace invalid bytes.
_NOTATIONS = {"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"}


def parse_encoding_name(text: str) -> str:
    """Return the canonical name of the encoding in a value of --fallback-encoding."""
    try:
        "".encode(text)
        name = codecs.lookup(text).name
    except (LookupError, ValueError):
        name = ""
    if not name or name.replace("-", "_") in _NOTATIONS:
        raise argparse.ArgumentTypeError(f"unknown text encoding {text!r}")
    return name


def decode_text(data: bytes, fallback: str = "") -> tuple[str, int]:
    """Return the text of bytes in UTF-8 or UTF-16 (with a BOM), and the number of replacements.

    fallback: encoding for other bytes; a text decoded with it counts as one replacement.
    """
    if kinds.is_utf16(data):
        text = data.decode("utf-16", "replace")
        in_file = data.decode("utf-16", "ignore").count(REPLACEMENT)  # the text itself has these
        return text, text.count(REPLACEMENT) - in_file
    data = data.removeprefix(UTF8_BOM)
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        if fallback:
            return data.decode(fallback, "replace"), 1
        text = data.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def encode_text(text: str) -> tuple[bytes, int]:
    """Return a text as UTF-8 and the number of lone surrogates that were replaced in it."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        repaired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        replaced = repaired.count(REPLACEMENT) - text.count(REPLACEMENT)
        return repaired.encode(), replaced


def needs_whole_text(fallback: str) -> bool:
    """Return whether an encoding may use several bytes for a character, such as gb18030.

    Invalid bytes of UTF-8 cannot be decoded with it one by one.
    """
    if not fallback:
        return False
    decoder = codecs.getincrementaldecoder(fallback)
    return not all(decoder("replace").decode(bytes([byte])) for byte in range(256))


def drop_cut_character(data: bytes) -> bytes:
    """Return bytes without a character of UTF-8 at their end that is incomplete."""
    for size in range(1, min(3, len(data)) + 1):
        byte = data[-size]
        if byte & 0xC0 != 0x80:  # not a continuation
            length = 8 - (byte ^ 0xFF).bit_length()  # the leading ones; 0 for ASCII
            return data[:-size] if length > size else data
    return data


class DecodedText:
    """Decodes chunks of bytes to chunks of text.

    head: the first bytes of the file. fallback: encoding for single bytes that are not UTF-8, or
    for all bytes if is_fallback is true. replaced: number of replacements so far; a text that is
    decoded with the fallback counts as one.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        head: bytes,
        fallback: str = "",
        is_fallback: bool = False,
    ) -> None:
        self.replaced = int(is_fallback)
        self._chunks = chunks
        self._fallback = fallback
        self._codec = "utf-16" if kinds.is_utf16(head) else "utf-8-sig"
        self._errors = "lib.corpus"
        if is_fallback:
            self._codec = fallback
            self._errors = "replace"

    def __iter__(self) -> Iterator[str]:
        codecs.register_error("lib.corpus", self._repair)
        decoder = codecs.getincrementaldecoder(self._codec)(self._errors)
        for data in self._chunks:
            if text := decoder.decode(data):
                yield text
        if text := decoder.decode(b"", True):
            yield text

    def _repair(self, error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeDecodeError):
            raise error
        self.replaced += 1
        if self._fallback and self._codec != "utf-16":
            return error.object[error.start : error.end].decode(
                self._fallback, "replace"
            ), error.end
        return REPLACEMENT, error.end


class Locator:
    """Converts positions in a text to byte offsets and line numbers in its file.

    The positions must be passed in increasing order. head: the first bytes of the file.
    """

    def __init__(self, text: str, head: bytes) -> None:
        self._text = text
        self._position = 0
        self._line = 1
        self._offset = len(UTF8_BOM) if head.startswith(UTF8_BOM) else 0
        self._has_offsets = not kinds.is_utf16(head)

    def at(self, position: int) -> tuple[int | None, int]:
        """Return the offset in bytes (None in UTF-16) and the line (from 1) of a position.

        position: not below that of the previous call.
        """
        passed = self._text[self._position : position]
        self._offset += len(passed.encode("utf-8", "surrogatepass"))
        self._line += passed.count("\n")
        self._position = max(position, self._position)
        return self._offset if self._has_offsets else None, self._line

    def end(self) -> int:
        """Return the position at the end of the text."""
        return len(self._text)

    def move(self, position: int, text: str) -> None:
        """Set a new text, whose first character is at `position` of the old text."""
        self.at(position)
        self._text = text
        self._position = self._position - position
