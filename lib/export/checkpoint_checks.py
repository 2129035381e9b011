"""Check that the checkpoint of an export is undamaged, and that it stays the same meanwhile."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

from lib.checkpoints import commit
from lib.core import commands
from lib.core.errors import ArtifactError


def start_hashing(checkpoint: commit.Checkpoint, for_export: bool) -> Future[list[str]]:
    """Start to hash a checkpoint in threads, while libraries are imported.

    The result of the future lists the problems. for_export: skip the optimizer's files.
    """

    def hash_files() -> list[str]:
        parts = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(parts) as threads:
            by_part = threads.map(
                lambda part: checkpoint.content_problems(part, parts, for_export), range(parts)
            )
            return [problem for problems in by_part for problem in problems]

    thread = ThreadPoolExecutor(1)
    future = thread.submit(hash_files)
    thread.shutdown(wait=False)
    return future


def require_undamaged(checkpoint: commit.Checkpoint, problems: list[str]) -> None:
    """Raise ArtifactError if a checkpoint has problems, or was deleted; suggest another one.

    Call this before anything is unpickled.
    """
    require_present(checkpoint)
    if not problems:
        return
    checkpoints = checkpoint.path.parent
    other = commit.find_newest(checkpoints, checkpoint.step - 1) or commit.find_newest(checkpoints)
    remedy = {"hint": "no other checkpoint is complete; stage 04 can train a new one"}
    if other and other.step != checkpoint.step:
        remedy = {
            "hint": "to use the newest complete one instead:",
            "run": commands.as_typed("--step", other.step),
        }
    raise ArtifactError(
        f"checkpoint {checkpoint.path} is damaged", found="\n".join(problems), **remedy
    )


def require_present(checkpoint: commit.Checkpoint) -> None:
    """Raise ArtifactError if a checkpoint was deleted before its files were open."""
    if not checkpoint.path.exists():
        raise ArtifactError(
            f"{checkpoint.path} was deleted in the meantime: its run is still training, and keeps "
            "only the newest checkpoints",
            run=commands.as_typed(),
        )


def require_not_replaced(checkpoint: commit.Checkpoint, digest: str) -> None:
    """Raise ArtifactError if a checkpoint was replaced by another one during the export.

    digest: the digest of the manifest when the checkpoint was chosen. A checkpoint that was only
    deleted is not an error, because its files were open.
    """
    try:
        actual = checkpoint.commit()["manifest"]
    except FileNotFoundError:
        return
    if actual != digest:
        raise ArtifactError(
            f"{checkpoint.path} was replaced in the meantime by a checkpoint of another run; "
            "nothing was exported",
            run=commands.as_typed(),
        )
