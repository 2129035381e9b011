"""Arrow files as the library `datasets` caches them, where no save_to_disk says what they are.

`wikitext-train.arrow` and `json-validation-00000-of-00002.arrow` are of a split; a file of another
name, or one that is named by itself, is text to train on. `cache-….arrow` are results of a map.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SUFFIX = ".arrow"
_SPLIT = re.compile(r"(?:.*[-_.])?(train|validation|valid|val|dev|test)(?:-\d+-of-\d+)?\.arrow")
_RESULTS = "cache-"
_OURS = {"valid": "validation", "val": "validation", "dev": "validation"}
_FILE_FORMAT = b"ARROW1"  # what does not begin so is a stream, as `datasets` writes it


def splits(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split in order, of a directory or of one file; empty for none."""
    if path.is_file():
        return {"train": [path]} if path.suffix == SUFFIX else {}
    files = [
        file
        for file in sorted(path.glob(f"*{SUFFIX}"))
        if not file.name.startswith(_RESULTS) and file.is_file()
    ]
    found: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        named = _SPLIT.fullmatch(file.name)
        found[_OURS.get(named[1], named[1]) if named else "train"].append(file)
    return dict(found)


def has_file_format(path: Path) -> bool:
    """Tell whether a file has Arrow's format for random access instead of a stream's."""
    with path.open("rb") as file:
        return file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
