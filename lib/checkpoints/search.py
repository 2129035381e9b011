"""Find the newest complete checkpoint, verified before unpickling and agreed by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands
from lib.core.errors import ArtifactError, StageError
from lib.core.retry import retry
from lib.parallel.layout import on_all_ranks, on_rank_0

_PAUSES_S = (1.0, 3.0)  # before the ranks compare again what they see


def find_newest_valid(
    checkpoints: Path,
    group: dist.ProcessGroup,
    on_quarantine: Callable[[int, str], None],
    before: int | None = None,
) -> Checkpoint | None:
    """Return the newest checkpoint whose files all match their digests; all ranks must call this.

    before: consider only this step and earlier ones. A damaged checkpoint is moved to quarantine,
    `on_quarantine(step, why)` is called on rank 0, and the next older one is tried. Returns None if
    the run never saved. Raises ArtifactError if there are checkpoints, in quarantine or not, but
    none is valid: training must not silently start from the beginning. Raises StageError, and moves
    nothing, if a rank cannot read the files.
    """
    candidates, in_quarantine = on_rank_0(
        lambda: (commit.list_checkpoints(checkpoints), commit.list_quarantined(checkpoints)), group
    )
    refused = [f"{path.name}: in quarantine" for path in in_quarantine]
    for candidate in candidates:
        if before is not None and candidate.step > before:
            continue
        problems = _find_problems(candidate, group)
        if not problems:
            return candidate
        refused.append(f"{candidate.path.name}: {problems[0]}")
        if dist.get_rank(group) == 0:
            commit.quarantine(candidate, problems[0])
            on_quarantine(candidate.step, problems[0])
    if refused:
        raise ArtifactError(
            f"no valid checkpoint in {checkpoints}",
            found="\n".join(refused[-8:]),
            **_suggest_recovery(checkpoints, group),
        )
    return None


def _suggest_recovery(checkpoints: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """Return the hint and the command for an error message. All ranks must call this."""
    for candidate in on_rank_0(lambda: commit.list_unreadable(checkpoints), group):
        if not _find_problems(candidate, group):
            return {
                "hint": f"step {candidate.step:,} in quarantine is intact; it was moved there "
                "after a disk failed to read it. To restore it and continue:",
                "run": commit.restore_command(candidate) + "\n" + commands.as_typed(),
            }
    return {
        "expected": "at least one valid checkpoint",
        "hint": "inspect checkpoints/quarantine/. To train from the beginning, use another "
        "experiment name or --overwrite",
    }


def verify_checkpoint(checkpoint: Checkpoint, group: dist.ProcessGroup) -> None:
    """Raise ArtifactError if a file of a checkpoint is damaged. All ranks must call this."""
    if problems := _find_problems(checkpoint, group):
        raise ArtifactError(f"checkpoint {checkpoint.path} is damaged", found="\n".join(problems))


class _FilesDifferError(StageError):
    """Some ranks do not see files of a checkpoint that others see."""


def _find_problems(checkpoint: Checkpoint, group: dist.ProcessGroup) -> list[str]:
    """Return the problems that any rank finds; the ranks share the hashing.

    Raises StageError on all ranks if one cannot read its share, or does not see the same files.
    """
    # A network file system can show new files late.
    by_rank = retry(
        lambda: _problems_by_rank(checkpoint, group),
        _PAUSES_S,
        when=lambda error: isinstance(error, _FilesDifferError),
    )
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    if not any(by_rank):
        by_rank = on_all_ranks(lambda: checkpoint.content_problems(rank, ranks), group)
    return list(dict.fromkeys(problem for problems in by_rank for problem in problems))


def _problems_by_rank(checkpoint: Checkpoint, group: dist.ProcessGroup) -> list[list[str]]:
    """Return the problems that each rank finds without hashing.

    Raises _FilesDifferError on all ranks if only some ranks find any.
    """
    by_rank = on_all_ranks(checkpoint.problems, group)
    if any(by_rank) and not all(by_rank):
        rank = next(rank for rank, problems in enumerate(by_rank) if problems)
        raise _FilesDifferError(
            f"the ranks do not see the same files in {checkpoint.path}; nothing was moved or "
            "deleted",
            found=f"rank {rank}: {by_rank[rank][0]}; rank {by_rank.index([])}: all files",
            hint=f"check the mount on the node of rank {rank}, then run the same command again",
        )
    return by_rank
