"""Resume a run from its newest checkpoint or a named one, and roll it back after bad steps."""

from __future__ import annotations

import time
from dataclasses import replace

from lib.checkpoints import commit, search
from lib.checkpoints.checkpointer import Checkpointer
from lib.checkpoints.commit import Checkpoint
from lib.core import log, units
from lib.core.errors import ArtifactError
from lib.core.paths import Experiment
from lib.models import float8
from lib.models.sharded import is_frozen, restore_ties
from lib.models.weights import restore_buffers
from lib.parallel.layout import on_rank_0
from lib.runs.events import Event
from lib.runs.journal import Journal
from lib.tokens.batches import BEGINNING
from lib.train import previous_run
from lib.train.config import Config
from lib.train.inputs import Inputs
from lib.train.model_files import require_base_of_checkpoint
from lib.train.output import symptoms
from lib.train.output.report import Report
from lib.train.output.rows import Divergence
from lib.train.state import TrainState

_REPLACED = "--resume continues from another one"
_MOST_ROLLBACKS = 3  # of a run, over all its launches


def resume_run(
    state: TrainState,
    checkpointer: Checkpointer,
    experiment: Experiment,
    inputs: Inputs,
    journal: Journal,
) -> bool:
    """Load the checkpoint from which the run continues. Return False if there is none.

    This is the checkpoint that --resume names, unless the run has already resumed from it, and
    otherwise the newest one. All ranks must call this.
    """
    control = state.layout.control
    plan = state.plan
    is_named = False
    named = inputs.named_checkpoint
    if named is not None and not on_rank_0(
        lambda: previous_run.descends_from(commit.find_newest(experiment.checkpoints), named),
        control,
    ):
        search.verify_checkpoint(named, control)
        checkpoint = named
        is_named = True
        facts = {"resumed_from": named.commit()["manifest"], "resumed_path": str(named.path)}
    elif newest := _find_newest(checkpointer, plan.config):
        checkpoint = newest
        facts = newest.commit()
    else:
        return False
    changes = previous_run.require_same_run(
        *previous_run.add_sample_counts(checkpoint.commit(), plan.identity(), plan.samples),
        checkpoint.path,
        plan.config.resume_with_changes,
        plan.config,
    )
    if is_frozen(state.model) and not any(change.name == "model" for change in changes):
        on_rank_0(
            lambda: require_base_of_checkpoint(checkpoint.record(), inputs, checkpoint.path),
            control,
        )
    began = time.monotonic()
    if not is_frozen(state.model):  # otherwise the base model's files have filled it already
        restore_ties(state.model)
        restore_buffers(state.model)
    record = checkpointer.load(checkpoint, state)
    if not is_named:  # this run's evaluation was given up, or the run was killed during it
        state.figures = state.unevaluated = facts.get("unevaluated", {})
    state.resumed_from = facts.get("resumed_from")
    state.resumed_path = facts.get("resumed_path")
    if previous_run.changes_samples(changes):
        state.position = BEGINNING
    if is_named:
        is_own = checkpoint.path.parent == experiment.checkpoints.resolve()
        checkpointer.drop_newer(checkpoint.step if is_own else -1, _REPLACED, tier_step=-1)
    journal.add_event(
        Event.RESUME,
        state.step,
        path=str(checkpoint.path),
        ranks=state.layout.ranks,
        **({"changes": [*map(str, changes)]} if changes else {}),
    )
    log.info(
        f"resumed from {checkpoint.path} in {units.duration(time.monotonic() - began)}: step "
        f"{state.step:,} of {plan.total_steps:,}, {state.tokens:,} tokens seen"
    )
    for change in changes if log.rank() == 0 else ():
        log.warn(f"--resume-with-changes: {change}")
    if record["total_steps"] != plan.total_steps:
        before = replace(plan, total_steps=record["total_steps"]).schedule.lr(state.step - 1)
        log.info(
            f"the end moves from step {record['total_steps']:,} to {plan.total_steps:,}: "
            "the learning-rate schedule is stretched over the whole run; the next step has "
            f"{plan.schedule.lr(state.step):.3g}, after {before:.3g} in step {state.step:,}"
        )
    return True


def _find_newest(checkpointer: Checkpointer, config: Config) -> Checkpoint | None:
    """Return the newest valid checkpoint; if all are damaged, the error says how to go on."""
    try:
        return checkpointer.find_newest()
    except ArtifactError as error:
        # The damaged checkpoints are in quarantine now, so the next start restores a copy.
        if config.ckpt_copy_to:
            error.hint = (
                "run the same command again: it restores the newest copy from --ckpt-copy-to. "
                f"Or {error.hint}"
            )
        raise


def roll_back(
    state: TrainState,
    checkpointer: Checkpointer,
    experiment: Experiment,
    report: Report,
    divergence: Divergence,
) -> None:
    """Load the newest checkpoint before the last bad steps, and skip the data trained since.

    The run continues with the data after the divergence, even if one further step has already
    trained on some of it. All ranks must call this. Raises UsageError if there is no such
    checkpoint, or after three rollbacks.
    """
    diverged_at, position, bad_steps = divergence
    config = state.plan.config
    rollbacks = state.rollbacks + 1
    checkpointer.finish(wait=True)
    checkpoint = None
    if rollbacks <= _MOST_ROLLBACKS:
        try:
            checkpoint = checkpointer.find_newest(diverged_at - bad_steps)
        except ArtifactError as error:
            log.warn(error.render())
    if checkpoint is None:
        raise symptoms.make_divergence_error(
            diverged_at, bad_steps, state.rollbacks, config, experiment
        )
    checkpointer.load(checkpoint, state)
    float8.update_scales(state.model)
    # The weights go back, the position in the data does not.
    state.position = position
    state.rollbacks = rollbacks
    try:
        checkpointer.drop_newer(state.step, f"the steps up to {diverged_at} were rolled back")
    except ArtifactError as error:  # at worst a resume loads that step and is rolled back again
        log.warn(error.render().removeprefix("error: "))
    report.journal.add_event(
        Event.ROLLBACK, state.step, diverged_at=diverged_at, bad_steps=bad_steps
    )
    if log.rank() == 0:
        log.warn(
            f"{bad_steps} bad steps in a row: rolled back from step {diverged_at} to "
            f"{checkpoint.path}; the data of the steps between is skipped (rollback {rollbacks} of "
            f"at most {_MOST_ROLLBACKS})"
        )
    report.rewind()
