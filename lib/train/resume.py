"""Where a run goes on: from the newest checkpoint, a named one, or back before bad steps."""

from __future__ import annotations

import time
from typing import Any

from lib.checkpoints import commit, load
from lib.checkpoints.commit import Checkpoint
from lib.core import log, units
from lib.core.errors import ArtifactError
from lib.models import float8
from lib.models.sharded import tie_again
from lib.models.weights import restore_buffers
from lib.parallel.layout import on_rank_0
from lib.tokens.batches import BEGINNING, Cursor, Position
from lib.train import earlier, symptoms
from lib.train.run import Run

_NEWER = "--resume goes on from another one"
_NEEDED = {"tokens", "samples", "seed", "total_steps", "rollbacks", "loss_scale", "optimizer_steps"}
_MOST_ROLLBACKS = 3  # of a run, however often it is started again


def resume(run: Run, named: Checkpoint | None) -> bool:
    """Load the checkpoint to go on from; False when there is none. All ranks must call this.

    named: by --resume; it is taken unless the run has gone on from it before.
    """
    experiment, control = run.experiment, run.layout.control
    if named is not None and not on_rank_0(
            lambda: earlier.descends(earlier.newest(experiment), named), control):
        load.require_intact(named, control)
        checkpoint, facts = named, {"resumed_from": named.commit()["manifest"],
                                    "resumed_path": str(named.path)}
    else:
        checkpoint = _newest(run)
        if checkpoint is None:
            return False
        facts = checkpoint.commit()
    run.resumed_from, run.resumed_path = facts.get("resumed_from"), facts.get("resumed_path")
    changes = earlier.require_same(
        *earlier.with_samples(checkpoint.commit(), run.plan.identity(), run.plan.samples),
        checkpoint.path, run.config.resume_with_changes)
    began = time.monotonic()
    tie_again(run.model)
    restore_buffers(run.model)
    state = _load(run, checkpoint)
    run.position = BEGINNING if earlier.is_other_data(changes) else _position(run, state)
    run.rollbacks = state["rollbacks"]
    if checkpoint is named and run.layout.rank == 0:
        is_own = named.path.parent == experiment.checkpoints.resolve()
        commit.supersede(experiment.checkpoints, named.step if is_own else -1, _NEWER)
    if checkpoint is named and run.saves.tier:
        run.saves.tier.supersede(-1, _NEWER)
    run.journal.event("resume", run.step, path=str(checkpoint.path), ranks=run.layout.ranks,
                      **({"changes": [*map(str, changes)]} if changes else {}))
    log.info(f"resumed from {checkpoint.path} in {units.duration(time.monotonic() - began)}: step "
             f"{run.step:,} of {run.plan.total_steps:,}, {run.tokens:,} tokens seen")
    for change in changes:
        log.warn(f"--resume-with-changes: {change}")
    if run.profiler.has_passed(run.step) and run.layout.rank == 0:
        first, last = run.config.profile
        log.warn(f"--profile {first}:{last} records nothing: the run goes on after step "
                 f"{run.step:,}")
    if state["total_steps"] != run.plan.total_steps:
        log.info(f"the end moves from step {state['total_steps']:,} to {run.plan.total_steps:,}: "
                 "the learning-rate schedule is stretched over all of it")
    return True


def roll_back(run: Run) -> None:
    """Go back to the newest checkpoint before the last bad steps, and pass over the data since.

    All ranks must call this. Raises UsageError when there is no such checkpoint, or when that was
    done several times already.
    """
    bad = run.step_guard.in_a_row
    run.saves.finish(wait=True)
    checkpoint = None
    if run.rollbacks < _MOST_ROLLBACKS:
        try:
            checkpoint = _newest(run, run.step - bad)
        except ArtifactError as error:
            log.warn(error.render())
    if checkpoint is None:
        raise symptoms.diverged(run.step, bad, run.rollbacks, run.config, run.experiment)
    diverged_at = run.step
    _load(run, checkpoint)  # and keep the position
    float8.rescale(run.model)
    run.rollbacks += 1
    why = f"the steps up to {diverged_at} were rolled back"
    if run.layout.rank == 0:
        commit.supersede(run.experiment.checkpoints, run.step, why)
    if run.saves.tier:
        try:
            run.saves.tier.supersede(run.step, why)
        except ArtifactError as error:  # at worst a resume goes back to there, and then here again
            log.warn(error.render().removeprefix("error: "))
    run.report.rewind(run.step)
    run.journal.event("rollback", run.step, diverged_at=diverged_at, bad_steps=bad)
    log.warn(f"{bad} bad steps in a row: back from step {diverged_at} to {checkpoint.path}; the "
             f"data of the steps between is passed over (rollback {run.rollbacks} of at most "
             f"{_MOST_ROLLBACKS})")
    run.write_state("running")


def _newest(run: Run, before: int | None = None) -> Checkpoint | None:
    """Return the newest valid checkpoint of both tiers; see load.newest_valid."""
    checkpoints, tier, control = run.experiment.checkpoints, run.saves.tier, run.layout.control
    if tier is None:
        return load.newest_valid(checkpoints, control, run.note_quarantine, before)

    def newer_local(than: int) -> Checkpoint | None:
        return tier.newest_valid(run.plan.identity(), than, run.note_quarantine, before)

    # Not hashed yet: a shared file system need not be read when the nodes have something newer.
    likely = on_rank_0(lambda: next((c.step for c in commit.scan(checkpoints) if not c.problems()
                                     and (before is None or c.step <= before)), 0), control)
    if local := newer_local(likely):
        return local
    try:
        shared, error = load.newest_valid(checkpoints, control, run.note_quarantine, before), None
    except ArtifactError as damaged:
        shared, error = None, damaged
    step = shared.step if shared else 0
    if step < likely and (local := newer_local(step)):
        return local
    if error:
        raise error
    return shared


def _load(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fill model, optimizer and counters from a verified checkpoint; return its train state."""
    tier, device = run.saves.tier, run.layout.device
    there = checkpoint.train_state()
    if lacking := _NEEDED - there.keys() or \
            run.step_guard.state().keys() - there["loss_scale"].keys():
        raise ArtifactError(f"{checkpoint.path} lacks what a run goes on from",
                            found=f"no {', '.join(sorted(lacking))} in its train state")
    if tier and tier.holds(checkpoint):
        state = tier.load(checkpoint, run.model, run.optimizer, device)
    else:
        state = load.load(checkpoint, run.model, run.optimizer, device, run.layout.control)
    run.step_guard.restore(state["loss_scale"])
    run.step, run.tokens = checkpoint.step, state["tokens"]
    return state


def _position(run: Run, state: dict[str, Any]) -> Position:
    """Return where the data stood, for this rank."""
    cursors = state.get("cursors")
    return Position(state["samples"],
                    Cursor(**cursors[run.plan.division.dp_rank]) if cursors else None)
