"""Mark directories that a stage is building, so that it never deletes a user's directory.

The mark is a file whose name contains a digest of the directory's own name. One system call
creates it, and it is deleted last. So after a kill at any moment our directory contains the mark or
is empty. A copy under another name, or a finished artifact beside it, does not count as ours.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lib.core import hashing
from lib.core.errors import UsageError


def mark_path(directory: Path) -> Path:
    """Return the path of the mark that makes a directory ours."""
    return directory / f".unfinished-{hashing.fingerprint(directory.name)[:12]}"


def is_ours(directory: Path) -> bool:
    """Return whether we created a directory and may delete it; False for a link."""
    return not directory.is_symlink() and mark_path(directory).is_file()


def is_bare(directory: Path) -> bool:
    """Return whether a directory is empty: a kill just before or after its mark leaves it so."""
    return not directory.is_symlink() and directory.is_dir() and not any(directory.iterdir())


def claim_directory(directory: Path) -> None:
    """Mark a directory that is ours or empty. Raises UsageError for any other."""
    # The third check is for a process that has just marked it, the last for one that deleted it.
    if not (is_ours(directory) or is_bare(directory) or is_ours(directory)) and directory.exists():
        raise UsageError(
            f"{directory} is in the way, and this program did not create it",
            expected="no directory of that name: unfinished work would be kept there",
            hint="move it away; or delete it, if an earlier version of this program "
            "left it unfinished",
        )
    mark_path(directory).touch()


def delete_marked(directory: Path, mark: Path | None = None) -> None:
    """Delete a directory of ours, its mark last. The mark stays if anything else cannot be deleted.

    mark: the file that shows that it is ours, if not the mark of a partial directory.
    """
    mark = mark or mark_path(directory)
    for path in [path for path in directory.iterdir() if path != mark]:
        delete_tree(path)
    if [path for path in directory.iterdir() if path != mark]:
        return
    mark.unlink(missing_ok=True)
    directory.rmdir()


def delete_bare(directory: Path) -> None:
    """Delete a directory that contains nothing but its mark."""
    if list(directory.iterdir()) == [mark_path(directory)]:
        delete_marked(directory)


def has_links(directory: Path) -> bool:
    """Return whether a directory is, or contains, a symbolic link."""
    return directory.is_symlink() or any(
        Path(folder, name).is_symlink()
        for folder, folders, names in os.walk(directory)
        for name in folders + names
    )


def delete_tree(path: Path) -> None:
    """Delete a file, a link or a tree, as far as possible. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
