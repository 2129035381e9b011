"""Recognise the launch that a process belongs to, and repeat no option that acts only once.

A launch is what a person started once, however often a launcher restarts it. torchrun and the
launchers repeat the words that were typed. Two options must act only once per launch: after a
restart, --overwrite would discard the launch's own work, and --resume never would refuse it. So
config.yaml contains the marks of the launch that wrote it, and a process with one of these marks
knows that it is a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lib.core import launcher, log
from lib.core.paths import Experiment
from lib.train import journal
from lib.train.config import Config

if TYPE_CHECKING:  # imports torch, which a run that is complete does not wait for
    from lib.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Launch:
    """The launch of all ranks. marks: of its processes. has_begun: this start is a restart."""

    marks: list[str]
    has_begun: bool


def join_launch(experiment: Experiment, layout: ParallelLayout) -> Launch:
    """Return the launch of all ranks. All ranks must call this.

    A rank on a machine that was replaced cannot know by itself that it is a restart.
    """
    from lib.parallel.layout import gather

    own = launcher.launch_marks() + launcher.job_marks()
    recorded = _recorded_marks(experiment)
    ranks = gather((_is_of(recorded), own, recorded), layout.control)
    has_begun = any(is_restart for is_restart, _, _ in ranks)
    marks = {mark for _, own, known in ranks for mark in own + (known if has_begun else [])}
    return Launch(sorted(marks), has_begun)


def is_restart(experiment: Experiment) -> bool:
    """Return whether an earlier process of this launch has started the run in a directory."""
    return _is_of(_recorded_marks(experiment))


def act_once(config: Config, is_restart: bool) -> Config:
    """Return the options of a restart without --overwrite and --resume never, and log that.

    is_restart: False returns the options unchanged.
    """
    typed = (["--overwrite"] if config.overwrite else []) + (
        ["--resume never"] if config.resume == "never" else []
    )
    if not is_restart or not typed:
        return config
    log.info(f"{' and '.join(typed)} acted when this launch began: it resumes now")
    return replace(
        config, overwrite=False, resume="auto" if config.resume == "never" else config.resume
    )


def _is_of(marks: list[str]) -> bool:
    """Return whether these are the marks of the launch that this process belongs to."""
    own = launcher.launch_marks() + (launcher.job_marks() if launcher.is_requeued() else [])
    return not set(own).isdisjoint(marks)


def _recorded_marks(experiment: Experiment) -> list[str]:
    return journal.read_config(experiment).get("launched_by") or []
