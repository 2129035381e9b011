"""Define what an extractor returns, and the exception that it raises."""

from __future__ import annotations

import re
from typing import NamedTuple

# Kinds of problems in errors.jsonl. DAMAGED, ENCRYPTED, TIMEOUT, CRASH and TOO_LARGE count the file
# as failed, see tally.FAILURES.
DAMAGED = "damaged"
ENCRYPTED = "encrypted"
TOO_LARGE = "too large"
TIMEOUT = "timeout"
CRASH = "crash"
NO_TEXT = "no text"

_LINE_ENDS = re.compile(r"\r\n?")


class Extracted(NamedTuple):
    """Contains the text of a file.

    replaced: number of invalid bytes that were replaced or decoded by the fallback encoding. lost:
    a description of the parts of the file that could not be read, "" if all of it was read.
    """

    text: str
    replaced: int = 0
    lost: str = ""


class Refusal(Exception):
    """Raised if a file yields no text. kind, message: problem and cause for errors.jsonl."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def clean_text(text: str) -> str:
    """Return a text with `\\n` as the only line end, and without NUL and lone surrogates.

    Surrounding white space is removed as well.
    """
    text = _LINE_ENDS.sub("\n", text).replace("\0", "").strip()
    return text.encode("utf-8", "ignore").decode()
