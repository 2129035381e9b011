"""Directories in the making: told from those of a user by a mark inside, never by their name.

The mark is an empty file whose name holds a digest of the directory's own name. It is made in one
system call and deleted last, so that after a kill at any moment a directory of ours has it or is
empty; a copy that a user gave another name, or a finished artifact beside it, does not count.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lib.core import hashing
from lib.core.errors import UsageError


def mark_of(directory: Path) -> Path:
    """Return the path of the mark that makes a directory ours."""
    return directory / f".unfinished-{hashing.fingerprint(directory.name)[:12]}"


def is_ours(directory: Path) -> bool:
    """Tell whether a directory is one that we began and may delete; a link never is."""
    return not directory.is_symlink() and mark_of(directory).is_file()


def is_bare(directory: Path) -> bool:
    """Tell whether a directory is empty, as a kill before or after its mark leaves it."""
    return not directory.is_symlink() and directory.is_dir() and not any(directory.iterdir())


def claim(directory: Path) -> None:
    """Mark a directory that is ours or empty; UsageError for any other, which is left alone."""
    # The third look is for another process that has marked it between the first two.
    if not (is_ours(directory) or is_bare(directory) or is_ours(directory)):
        raise UsageError(
            f"{directory} is in the way, and this program did not make it",
            expected="a name that is free: unfinished work would be kept there",
            hint="move it away; or delete it, if an earlier version of this program "
            "left it unfinished",
        )
    mark_of(directory).touch()


def remove(directory: Path, mark: Path | None = None) -> None:
    """Delete a directory that is ours, its mark last; what cannot be deleted keeps the mark.

    mark: what tells that it is ours, if not the mark of something unfinished.
    """
    mark = mark or mark_of(directory)
    for path in [path for path in directory.iterdir() if path != mark]:
        delete(path)
    if [path for path in directory.iterdir() if path != mark]:
        return
    mark.unlink(missing_ok=True)
    directory.rmdir()


def remove_bare(directory: Path) -> None:
    """Delete a directory that holds nothing but its mark, as far as the disk lets."""
    if list(directory.iterdir()) == [mark_of(directory)]:
        remove(directory)


def has_links(directory: Path) -> bool:
    """Tell whether a directory is, or holds, a symbolic link."""
    return directory.is_symlink() or any(
        Path(folder, name).is_symlink()
        for folder, folders, names in os.walk(directory)
        for name in folders + names
    )


def delete(path: Path) -> None:
    """Delete a file, a link or a tree, as far as that is possible; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
