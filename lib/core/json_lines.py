"""Read a file of JSON Lines that a person wrote, and report all of its problems at once."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.core import placeholders, records, units
from lib.core.errors import ArtifactError, UsageError

_LARGEST = 1 << 30  # bytes of a file, decompressed
_LONGEST_LINE = 16 << 20  # bytes


class CheckedLines:
    """Yields the JSON objects of a file with their line numbers, and collects its problems.

    path: may end with `.gz`. kind: what the file should be, such as `task`. item: what it contains.
    most: problems that the error shows.
    """

    def __init__(self, path: Path, kind: str, item: str, most: int) -> None:
        self.path = path
        self._kind = kind
        self._item = item
        self._most = most
        self._problems: list[str] = []
        self._more = 0
        self._damage = ""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if placeholder := placeholders.find_in_file(self.path):
            self._damage = f"it is {placeholder}"
            return
        size = 0
        number = 0
        try:
            with (
                gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file
            ):
                while line := file.readline(_LONGEST_LINE + 1):
                    number += 1
                    size += len(line)
                    if len(line) > _LONGEST_LINE or size > _LARGEST:
                        self.add(number, "the line or the file is too large")
                        return
                    if line.strip():
                        yield from self._parse(number, line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._damage = str(error)

    def _parse(self, number: int, line: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            content = records.parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            self.add(number, "it is not UTF-8")
        except ValueError as error:
            self.add(number, f"it is not JSON ({error})")
        else:
            if isinstance(content, dict):
                yield number, content
            else:
                self.add(number, f"expected a JSON object, found {name_type(content)}")

    def add(self, number: int, problem: str) -> None:
        """Add a problem of a line. number: 0 for a problem of several lines."""
        if len(self._problems) < self._most:
            self._problems.append(f"line {number}: {problem}" if number else problem)
        else:
            self._more += 1

    def raise_if_any(self, items: int) -> None:
        """Raise one error with all problems of the file, or return if there are none.

        items: number of items read from it. Raises ArtifactError if the file is damaged, and
        UsageError if lines of it are wrong or if it contains no item.
        """
        if self._damage:
            raise ArtifactError(f"{self.path} is damaged", found=self._damage)
        more = [f"and {units.counted(self._more, 'further problem')}"] if self._more else []
        if self._problems:
            raise UsageError(
                f"{self.path} is not a valid {self._kind}", found="\n".join(self._problems + more)
            )
        if not items:
            raise UsageError(f"{self.path} contains no {self._item}")


def name_type(value: Any) -> str:
    """Return a text that names the JSON type of a value."""
    kinds = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), "a number")
