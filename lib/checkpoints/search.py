"""Find the newest complete checkpoint, verified before unpickling and agreed by all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lib.checkpoints import aside, commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands
from lib.core.errors import ArtifactError, StageError
from lib.parallel.layout import on_rank_0, together

_PAUSES_S = (1.0, 3.0)  # until all ranks see the same


def newest_valid(
    checkpoints: Path,
    group: dist.ProcessGroup,
    quarantined: Callable[[int, str], None],
    before: int | None = None,
) -> Checkpoint | None:
    """Return the newest checkpoint whose every byte is as written; all ranks must call this.

    before: only of this step or an earlier one. A damaged one is moved to quarantine (and
    `quarantined(step, why)` called on rank 0) and the next older is tried. None when there never
    was one. Raises ArtifactError when there are some, be it in quarantine, and none is valid:
    training does not silently start again. Raises StageError, and moves nothing, when a rank cannot
    read what is there.
    """
    candidates, set_aside = on_rank_0(
        lambda: (commit.scan(checkpoints), commit.quarantined(checkpoints)), group
    )
    refused = [f"{path.name}: in quarantine" for path in set_aside]
    for candidate in candidates:
        if before is not None and candidate.step > before:
            continue
        problems = _agreed_problems(candidate, group)
        if not problems:
            return candidate
        refused.append(f"{candidate.path.name}: {problems[0]}")
        if dist.get_rank(group) == 0:
            commit.quarantine(candidate, problems[0])
            quarantined(candidate.step, problems[0])
    if refused:
        raise ArtifactError(
            f"no valid checkpoint is left in {checkpoints}",
            found="\n".join(refused[-8:]),
            **_way_back(checkpoints, group),
        )
    return None


def _way_back(checkpoints: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """Return what to do when none is valid, as parts of an error; all ranks must call this."""
    for candidate in on_rank_0(lambda: aside.unread(checkpoints), group):
        if not _agreed_problems(candidate, group):
            return {
                "hint": f"step {candidate.step:,} is whole: it was set aside when a disk "
                "failed to read it; to go on from it:",
                "run": aside.brought_back(candidate) + "\n" + commands.as_typed(),
            }
    return {
        "expected": "look at checkpoints/quarantine/; to train from the start, use another "
        "experiment name or --overwrite"
    }


def require_intact(checkpoint: Checkpoint, group: dist.ProcessGroup) -> None:
    """Raise ArtifactError when any byte of a checkpoint has changed; all ranks must call this."""
    if problems := _agreed_problems(checkpoint, group):
        raise ArtifactError(f"checkpoint {checkpoint.path} is damaged", found="\n".join(problems))


def _agreed_problems(checkpoint: Checkpoint, group: dist.ProcessGroup) -> list[str]:
    """Return what any rank found wrong; the ranks share the hashing.

    Raises StageError on all when one cannot read its part, or sees other files than the others.
    """
    for pause in (*_PAUSES_S, None):
        seen = together(checkpoint.problems, group)
        if all(seen) or not any(seen):
            break
        if pause is None:
            rank = next(rank for rank, found in enumerate(seen) if found)
            raise StageError(
                f"the ranks do not see the same of {checkpoint.path}; nothing was moved or deleted",
                found=f"rank {rank}: {seen[rank][0]}; rank {seen.index([])}: all files",
                hint="see to the mount on the node of that rank; the same command then goes on",
            )
        time.sleep(pause)  # a network file system may show late what is there
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    found = seen if any(seen) else together(lambda: checkpoint.content_problems(rank, ranks), group)
    return list(dict.fromkeys(problem for part in found for problem in part))
