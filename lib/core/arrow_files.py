"""Find the splits of Arrow files that the library `datasets` caches, without save_to_disk.

`wikitext-train.arrow` and `json-validation-00000-of-00002.arrow` name their split. A file with
another name, or one that is named alone, belongs to train. `cache-….arrow` are results of a map.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SUFFIX = ".arrow"
_SPLIT = re.compile(r"(?:.*[-_.])?(train|validation|valid|val|dev|test)(?:-\d+-of-\d+)?\.arrow")
_RESULTS = "cache-"
_OURS = {"valid": "validation", "val": "validation", "dev": "validation"}
_FILE_FORMAT = b"ARROW1"  # other files are streams, as `datasets` writes them


def find_splits(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split in order, for a directory or one file; may be empty."""
    if path.is_file():
        return {"train": [path]} if path.suffix == SUFFIX else {}
    files = [
        file
        for file in sorted(path.glob(f"*{SUFFIX}"))
        if not file.name.startswith(_RESULTS) and file.is_file()
    ]
    splits: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        named = _SPLIT.fullmatch(file.name)
        splits[_OURS.get(named[1], named[1]) if named else "train"].append(file)
    return dict(splits)


def has_file_format(path: Path) -> bool:
    """Return whether a file has Arrow's format for random access, not the one for streams."""
    with path.open("rb") as file:
        return file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
