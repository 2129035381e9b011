"""A launch: what a person started once, however often a launcher starts it again.

torchrun and the launchers repeat the words that were typed. Some must act once: --overwrite would
set aside what the launch itself has trained, --resume never would refuse it. So config.yaml keeps
the marks of the launch that wrote it, and a process that bears one of them knows that it is not the
first of its launch.
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
    """marks: of all ranks, and of those that were replaced. has_begun: this start is a repeat."""

    marks: list[str]
    has_begun: bool


def join(config: Config, experiment: Experiment, layout: ParallelLayout) -> tuple[Config, Launch]:
    """Agree with all ranks on the launch that they belong to, and on what its options still mean.

    All ranks must call this: one on a machine that was replaced cannot tell by itself.
    """
    from lib.parallel.layout import gather

    own = launcher.launch_marks() + launcher.job_marks()
    known = _known(experiment)
    found = gather((_is_of(known), own, known), layout.control)
    again = any(begun for begun, _, _ in found)
    if again:
        config = act_once(config)
    marks = {mark for _, own, known in found for mark in own + (known if again else [])}
    return config, Launch(sorted(marks), again)


def has_begun(experiment: Experiment) -> bool:
    """Tell whether an earlier process of this launch has begun the run in a directory."""
    return _is_of(_known(experiment))


def act_once(config: Config) -> Config:
    """Return the options without what a launch that has begun its run must not do again."""
    words = (["--overwrite"] if config.overwrite else []) + (
        ["--resume never"] if config.resume == "never" else []
    )
    if words:
        log.info(f"{' and '.join(words)} acted when this launch began: it goes on now")
    return replace(
        config, overwrite=False, resume="auto" if config.resume == "never" else config.resume
    )


def _is_of(known: list[str]) -> bool:
    """Tell whether these are the marks of the launch that this process belongs to."""
    own = launcher.launch_marks() + (launcher.job_marks() if launcher.is_requeued() else [])
    return not set(own).isdisjoint(known)


def _known(experiment: Experiment) -> list[str]:
    return journal.read_config(experiment).get("launched_by") or []
