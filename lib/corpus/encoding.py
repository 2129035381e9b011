"""From bytes of a file to text and back; what is no text becomes U+FFFD and is counted."""

from __future__ import annotations

from lib.corpus import kinds

REPLACEMENT = "\ufffd"
UTF8_BOM = b"\xef\xbb\xbf"


def decode(data: bytes) -> tuple[str, int]:
    """Return the text of UTF-8 (BOM or not) or UTF-16 (BOM) bytes, and the replacements made."""
    if kinds.is_utf16(data):
        text = data.decode("utf-16", "replace")
        return text, text.count(REPLACEMENT) - _in_utf16(data)
    data = data.removeprefix(UTF8_BOM)
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def encode(text: str) -> tuple[bytes, int]:
    """Return the UTF-8 of a text and how many lone surrogates had to be replaced in it."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        repaired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        replaced = repaired.count(REPLACEMENT) - text.count(REPLACEMENT)
        return repaired.encode(), replaced


def _in_utf16(data: bytes) -> int:
    """Count the U+FFFD that a UTF-16 file itself holds."""
    text = data.decode("utf-16", "ignore")
    return text.count(REPLACEMENT)


class Locator:
    """Tells where in its file a place in a text lies; places must be asked for in order.

    head: the first bytes of the file.
    """

    def __init__(self, text: str, head: bytes) -> None:
        self._text, self._position, self._line = text, 0, 1
        self._offset = len(UTF8_BOM) if head.startswith(UTF8_BOM) else 0
        self._has_offsets = not kinds.is_utf16(head)

    def at(self, position: int) -> tuple[int | None, int]:
        """Return the offset in bytes (None in UTF-16) and the line, counted from 1."""
        passed = self._text[self._position:position]
        self._offset += len(passed.encode())
        self._line += passed.count("\n")
        self._position = max(position, self._position)
        return self._offset if self._has_offsets else None, self._line
