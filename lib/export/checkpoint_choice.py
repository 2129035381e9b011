"""Find the checkpoint of a run that --step names."""

from __future__ import annotations

from pathlib import Path

from lib.checkpoints import best, commit
from lib.core import commands, log
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import Experiment
from lib.export import card, checkpoint_checks

LATEST = "latest"
BEST = "best"


def find_checkpoint(
    experiment: Experiment, wanted: str = LATEST, best_by: str | None = None
) -> commit.Checkpoint:
    """Return the checkpoint of a run that --step names.

    wanted: a step, latest or best. best_by: the figure that decides which checkpoint is the best,
    None for the figure of the run. A damaged checkpoint is an error; no older one replaces it.
    Raises UsageError if `wanted` is no step, and ArtifactError if the checkpoint is missing or
    damaged.
    """
    if not (experiment.model / "config.json").is_file():
        raise ArtifactError(
            f"no experiment {experiment.root}", found=list_experiments(experiment.root.parent)
        )
    if wanted not in (LATEST, BEST) and not wanted.isdecimal():
        raise UsageError(f"--step must be a number, latest or best, not {wanted!r}")
    checkpoints = {c.step: c for c in commit.list_checkpoints(experiment.checkpoints)}
    if not checkpoints:
        raise ArtifactError(
            f"no checkpoint in {experiment.checkpoints}",
            run=commands.train("--config", experiment.config) if experiment.config.exists() else "",
        )
    complete = ", ".join(str(step) for step, c in checkpoints.items() if not c.problems())
    if wanted == BEST:
        key = best_by or card.find_score_key(checkpoints.values())
        scores = card.read_scores(checkpoints.values(), experiment.metrics, key)
        best_step = best.choose_best(key, scores)
        if best_step is None:
            raise ArtifactError(
                f"no checkpoint was saved right after an evaluation of {key}",
                found=f"steps {complete or 'none'}",
                run=commands.as_typed("--step", "latest"),
            )
        step = best_step
        log.info(f"best: step {step:,}, {key} {scores[step]:.4f}")
    else:
        step = max(checkpoints) if wanted == LATEST else int(wanted)
        if step not in checkpoints:
            raise ArtifactError(
                f"no checkpoint of step {step}", found=f"steps {complete or 'none'}"
            )
    checkpoint_checks.require_undamaged(checkpoints[step], checkpoints[step].problems())
    return checkpoints[step]


def list_experiments(save_dir: Path) -> str:
    """Return a text that lists the experiments in a directory."""
    names = sorted(path.parent.parent.name for path in save_dir.glob("*/model/config.json"))
    return f"under {save_dir}: {', '.join(names) or 'none'}"
