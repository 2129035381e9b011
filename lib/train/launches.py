"""Find out whether this start belongs to a launch that has begun before.

A launch begins when a person starts a run, and it includes all restarts by a launcher. torchrun and
the launchers repeat the typed options. But two options must act only once per launch: after a
restart, --overwrite would discard the launch's own work, and --resume never would refuse it. So
config.yaml contains the marks of its launch (IDs that all processes of a launch share), and a
process with one of these marks knows that it is a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lib.core import launcher, log
from lib.core.paths import Experiment
from lib.runs import run_records

if TYPE_CHECKING:  # imports torch, which a run that is complete does not wait for
    from lib.parallel.layout import ParallelLayout
    from lib.train.config import Config


@dataclass(frozen=True)
class Launch:
    """Describes the launch of all ranks. marks: its IDs. has_begun: whether this is a restart."""

    marks: list[str]
    has_begun: bool


def join_launch(experiment: Experiment, layout: ParallelLayout) -> Launch:
    """Return the launch of all ranks. All ranks must call this.

    A rank on a replacement machine cannot know by itself that this start is a restart.
    """
    from lib.parallel.layout import gather

    marks_here = launcher.launch_marks() + launcher.job_marks()
    recorded = _read_marks(experiment)
    ranks = gather((_is_of_this_launch(recorded), marks_here, recorded), layout.control)
    has_begun = any(is_of_launch for is_of_launch, _, _ in ranks)
    marks = {
        mark
        for _, marks_there, recorded_there in ranks
        for mark in marks_there + (recorded_there if has_begun else [])
    }
    return Launch(sorted(marks), has_begun)


def is_restart(experiment: Experiment) -> bool:
    """Return whether an earlier process of this launch has started the run."""
    return _is_of_this_launch(_read_marks(experiment))


def drop_one_time_options(config: Config, has_begun: bool) -> Config:
    """Return the options of a restart without --overwrite and --resume never, and log that.

    has_begun: whether this start is a restart; if not, the options stay as they are.
    """
    typed = (["--overwrite"] if config.overwrite else []) + (
        ["--resume never"] if config.resume == "never" else []
    )
    if not has_begun or not typed:
        return config
    log.info(f"{' and '.join(typed)} acted when this launch began: it resumes now")
    return replace(
        config, overwrite=False, resume="auto" if config.resume == "never" else config.resume
    )


def _is_of_this_launch(marks: list[str]) -> bool:
    """Return whether one of these marks belongs to the launch of this process."""
    marks_here = launcher.launch_marks() + (launcher.job_marks() if launcher.is_requeued() else [])
    return not set(marks_here).isdisjoint(marks)


def _read_marks(experiment: Experiment) -> list[str]:
    """Return the marks of the launch that wrote config.yaml; [] without such a file."""
    return run_records.read_config(experiment).get("launched_by") or []
