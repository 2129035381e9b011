"""Find the checkpoint of a run that --step names, and check it before and during its export."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lib.checkpoints import best, commit
from lib.core import commands, log
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import Experiment
from lib.export import card

LATEST = "latest"
BEST = "best"


def find_checkpoint(
    experiment: Experiment, choice: str = LATEST, best_by: str | None = None
) -> commit.Checkpoint:
    """Return the checkpoint of a run that --step names.

    choice: a step, latest or best. best_by: the figure that decides which checkpoint is the best,
    None for the figure of the run. A damaged checkpoint is an error; no older one replaces it.
    Raises UsageError if `choice` is no step, and ArtifactError if the checkpoint is missing or
    damaged.
    """
    if not (experiment.model / "config.json").is_file():
        raise ArtifactError(
            f"no experiment {experiment.root}", found=list_experiments(experiment.root.parent)
        )
    if choice not in (LATEST, BEST) and not choice.isdecimal():
        raise UsageError(f"--step must be a number, latest or best, not {choice!r}")
    checkpoints = {c.step: c for c in commit.list_checkpoints(experiment.checkpoints)}
    if not checkpoints:
        raise ArtifactError(
            f"no checkpoint in {experiment.checkpoints}",
            run=commands.train("--config", experiment.config) if experiment.config.exists() else "",
        )
    steps = ", ".join(str(step) for step, c in checkpoints.items() if not c.problems())
    complete = f"steps {steps}" if steps else "no complete checkpoint"
    if choice == BEST:
        key = best_by or card.find_score_key(checkpoints.values())
        scores = card.read_scores(checkpoints.values(), experiment.metrics, key)
        best_step = best.choose_best(key, scores)
        if best_step is None:
            raise ArtifactError(
                f"no checkpoint was saved right after an evaluation of {key}",
                found=complete,
                run=commands.as_typed("--step", "latest"),
            )
        step = best_step
        log.info(f"best: step {step:,}, {key} {scores[step]:.4f}")
    else:
        step = max(checkpoints) if choice == LATEST else int(choice)
        if step not in checkpoints:
            raise ArtifactError(f"no checkpoint of step {step}", found=complete)
    require_undamaged(checkpoints[step], checkpoints[step].problems())
    return checkpoints[step]


def list_experiments(save_dir: Path) -> str:
    """Return a text that lists the experiments in a directory."""
    names = sorted(path.parent.parent.name for path in save_dir.glob("*/model/config.json"))
    return f"under {save_dir}: {', '.join(names) or 'none'}"


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
