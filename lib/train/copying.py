"""Copy the checkpoints of a run to the place of --ckpt-copy-to, and restore a lost run from it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints import commit, copies
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.copier import Copier
from lib.checkpoints.copies import CopyPlace
from lib.checkpoints.copy_lease import PlaceLease
from lib.core import commands, launcher, log, units
from lib.core.errors import EXIT_BUG, ArtifactError, Preempted, StageError, UsageError
from lib.core.identity import find_differences, list_differences
from lib.core.lease import DirectoryHeld, Lease
from lib.core.paths import Experiment
from lib.core.retry import poll
from lib.hub.folder import is_url
from lib.runs import state_file
from lib.runs.events import Event, EventFile
from lib.runs.journal import Journal
from lib.runs.run_records import read_config
from lib.train import checks, previous_run
from lib.train.config import Config
from lib.train.inputs import find_inputs
from lib.train.launches import is_restart
from lib.train.new_model import model_from_scratch
from lib.train.output.kinds import RunKind
from lib.train.plan import Plan
from lib.train.settle import settle_from_files
from lib.train.sources.table import choose_source

if TYPE_CHECKING:  # these import torch, which a run that is complete does not wait for
    from lib.checkpoints.checkpointer import Checkpointer
    from lib.checkpoints.place import Note, SavedRun
    from lib.parallel.stop_request import StopRequest
    from lib.train.output.meters import Meters
    from lib.train.state import TrainState

COPIES = "copies"  # the value of --resume that takes over a lost run
_ROOT = Path("/")
_WAIT_S = 1800.0  # for the last copy of a complete run
_WAIT_IF_STOPPED_S = 20.0  # for the last copy; a launcher kills the ranks after 30 s


def restore_lost_run(config: Config, experiment: Experiment) -> None:
    """Restore the newest copy of a run that has no complete checkpoint, if there is one.

    Without the run's config.yaml, only the run's name connects it with copies, and another run may
    have the same name; so a person must ask for them with --resume copies. Copies of a run with
    other settings are never restored.

    Call this before the run looks for its earlier launches, so that the run then resumes as usual.
    All ranks must call this; rank 0 restores while the others wait. Raises ArtifactError if no copy
    is intact, UsageError if nobody has asked for the copies, if they belong to another run, or if
    another launch writes them, and UsageError or StageError if the place cannot be read, since a
    run that may have copies must not start from the beginning.
    """
    if config.resume == COPIES and not config.ckpt_copy_to:
        raise UsageError("--resume copies needs --ckpt-copy-to, the place of the copies")
    if (
        not config.ckpt_copy_to
        or config.overwrite
        or config.resume not in ("auto", COPIES)
        or config.dry_run
        or config.prepare_only
        or commit.find_newest(experiment.checkpoints)
    ):
        return
    from lib.parallel.layout import meet_ranks  # imports torch

    if meeting := meet_ranks():
        meeting.run_on_rank_0(lambda: _restore_run(config, experiment))
    else:
        _restore_run(config, experiment)


def _require_consent(config: Config, experiment: Experiment, place: CopyPlace) -> None:
    """Raise UsageError if copies belong to a run of this name that nobody has asked for."""
    if config.resume == COPIES or read_config(experiment).get("run"):
        return
    raise UsageError(
        f"{place.where} contains copies of a run that is also named {experiment.root.name}, and "
        f"{experiment.root} has no such run",
        found=f"the newest copy is of step {place.list_steps()[0]:,}",
        hint="to continue that run from its copies, or to start another one under this name:",
        run=f"{commands.as_typed('--resume', COPIES)}\n{commands.as_typed('--resume', 'never')}",
    )


def _require_same_run(config: Config, experiment: Experiment, place: CopyPlace) -> None:
    """Raise UsageError if copies belong to a run with other settings; restores nothing.

    Reads only small files of the place: the newest COMMIT, config.yaml, and the files of the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied = Experiment(Path(folder), experiment.root.name)
        with _explain_unreadable(experiment):
            commits = place.read_commits()
            if not commits:  # all are damaged, which the restore reports
                return
            place.restore_run_files(copied, with_logs=False)
        facts = commits[max(commits)]
        record = read_config(copied) | {"identity": facts["identity"]}
        lost = Experiment(config.save_dir, config.experiment_name)
        lost.model = copied.model
        now = _identify_launch(config, lost, record, facts.get("samples_per_epoch"))
    changed = find_differences(facts["identity"], now)
    if refused := previous_run.list_refused(changed, config.resume_with_changes):
        raise UsageError(
            f"the copies in {place.where} belong to a run that was started with other settings",
            found=list_differences(refused),
            hint="nothing is restored. Use the settings of that run or another "
            "--experiment-name, or start another run under this name:",
            run=commands.as_typed("--resume", "never"),
        )


def _identify_launch(
    config: Config, lost: Experiment, record: dict[str, Any], samples: int | None
) -> dict[str, Any]:
    """Return the identity of this launch if it resumes a lost run.

    record: the content of the run's config.yaml. samples: number of samples in an epoch.
    """
    checks.require_consistent(config, has_begun=True)
    source = choose_source(config)
    with log.muted(), model_from_scratch(config, lost, RunKind, source, True) as new_model:
        inputs = find_inputs(config, lost, RunKind, source, new_model, record)
    settled = settle_from_files(config, inputs)
    return Plan.of(settled, inputs.fingerprints, samples).identity()


@contextmanager
def _explain_unreadable(experiment: Experiment) -> Iterator[None]:
    """Raise UsageError or StageError with a remedy if the place cannot be read."""
    try:
        yield
    except (StageError, OSError) as error:
        problem = error.problem if isinstance(error, StageError) else str(error)
        kind = UsageError if isinstance(error, (UsageError, OSError)) else StageError
        raise kind(
            f"{experiment.root} has no complete checkpoint, and the place of --ckpt-copy-to, which "
            "may contain copies, cannot be read",
            found=problem,
            hint="if this run has no copies, start it without looking for them:",
            run=commands.as_typed("--resume", "never"),
        ) from error


def _restore_run(config: Config, experiment: Experiment) -> None:
    assert config.ckpt_copy_to
    copies.require_mount(config.ckpt_copy_to)
    with _explain_unreadable(experiment):
        place = _find_copies(config.ckpt_copy_to, experiment)
        steps = place.list_steps() if place else []
    if place is None or not steps:
        return
    _require_consent(config, experiment, place)
    _require_same_run(config, experiment, place)
    place_lease = PlaceLease(place)
    try:
        _restore_with_leases(place, steps, experiment)
    finally:
        place_lease.release()


def _restore_with_leases(place: CopyPlace, steps: list[int], experiment: Experiment) -> None:
    """Restore a run, whose directory no other launch may use meanwhile. steps: newest first."""
    experiment.root.mkdir(parents=True, exist_ok=True)
    try:
        lease = Lease(experiment.lock, lambda text: launcher.end_at_once(EXIT_BUG))
    except DirectoryHeld:
        return  # another launch trains this run; `claim_experiment` refuses this one
    written: list[Path] = []
    try:
        # config.yaml comes first: if this launch is killed, the next one finds the run's ID in it.
        written += place.restore_run_files(experiment)
        commit.delete_leftovers(experiment.checkpoints)
        checkpoint = _restore_newest(place, steps, experiment)
    except BaseException:
        with suppress(OSError):
            _delete_restored(experiment, written)
        raise
    finally:
        lease.release()
    EventFile(experiment).add_event(Event.RESTORE, checkpoint.step, path=place.where)
    log.warn(
        f"{experiment.root} had no complete checkpoint; step {checkpoint.step:,} was restored from "
        f"its copy in {place.where}, and the run continues from there"
    )


def _delete_restored(experiment: Experiment, written: list[Path]) -> None:
    """Delete restored files, and the directories that are empty without them."""
    for path in written:
        path.unlink(missing_ok=True)
    folders = [path for path in experiment.root.rglob("*") if path.is_dir()]
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # not empty
            folder.rmdir()


def _find_copies(target: str, experiment: Experiment) -> CopyPlace | None:
    """Return the place with the copies of a run, or None if there is none.

    If the run's directory is lost too, return the copies of the last run with its name.
    """
    name = experiment.root.name
    run = read_config(experiment).get("run") or copies.find_last_run(target, name)
    place = CopyPlace(target, name, run) if run else None
    return place if place and place.is_ours() else None


def _restore_newest(place: CopyPlace, steps: list[int], experiment: Experiment) -> Checkpoint:
    """Restore the newest copy that is intact. steps: newest first."""
    problems = []
    for step in steps:
        log.info(f"restoring step {step:,} from {place.where}")
        try:
            return place.restore(step, experiment.checkpoints)
        except ArtifactError as error:
            problems.append(f"step {step:,}: {error.problem}")
            log.warn(f"the copy of step {step:,} in {place.where} is damaged: {error.problem}")
    raise ArtifactError(
        f"{experiment.root} has no complete checkpoint, and none of its copies in {place.where} is "
        "intact",
        found=units.join_lines(problems, 8),
        hint="to train from the beginning:",
        run=commands.as_typed("--resume", "never"),
    )


def make_copier(
    config: Config, experiment: Experiment, run: SavedRun, journal: Journal
) -> Copier | None:
    """Return the copier of a run's checkpoints on rank 0, and None elsewhere.

    All ranks must call this. Raises UsageError if the place of the copies cannot be used, unless a
    launcher has restarted the run: the copier then retries.
    """
    from lib.parallel.layout import on_rank_0

    copier = None
    if run.layout.rank == 0:
        copier = _make_copier(config, experiment, run.note, journal.update_copy_state)

    def open_copier() -> None:
        if copier and not journal.is_restart:
            copier.open()
            _warn_about_disk(config, experiment)

    on_rank_0(open_copier, run.layout.control)
    return copier


def begin_copying(
    stack: ExitStack,
    state: TrainState,
    checkpointer: Checkpointer,
    meters: Meters,
    stop_request: StopRequest,
) -> None:
    """Begin to copy, and wait for the copy of the last checkpoint when the stack is closed.

    After an error, ranks do not wait. All ranks must call this.
    """

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            checkpointer.stop(_WAIT_S, lambda: bool(stop_request.agree()), meters.show_end)
        elif issubclass(kind, Preempted):
            checkpointer.stop(_WAIT_IF_STOPPED_S, lambda: False, meters.show_end)

    checkpointer.start(state.step)
    stack.push(finish)


def copy_complete_run(config: Config, experiment: Experiment) -> None:
    """Copy the checkpoints of a complete run that have no copy yet; only rank 0 copies."""
    if not config.ckpt_copy_to or config.dry_run or log.rank() != 0:
        return
    newest = commit.find_newest(experiment.checkpoints)
    assert newest, "the run is complete"

    show = partial(state_file.change_state, experiment)
    copier = _make_copier(config, experiment, EventFile(experiment).add_event, show)
    try:
        lease = Lease(experiment.lock, lambda text: launcher.end_at_once(EXIT_BUG))
    except DirectoryHeld:
        return  # the launch that completed the run is still copying
    try:
        if not is_restart(experiment):
            copier.open()
        copier.start(newest.step, lambda step: None)
        copier.hurry(_WAIT_S)
        poll(lambda: copier.wait(1.0) or copier.has_given_up(), 0.0, _WAIT_S)
        copier.close()
    finally:
        lease.release()


def _make_copier(
    config: Config, experiment: Experiment, note: Note, show: Callable[..., None]
) -> Copier:
    assert config.ckpt_copy_to
    return Copier(
        config.ckpt_copy_to,
        experiment,
        read_config(experiment)["run"],
        note=note,
        show=show,
    )


def _warn_about_disk(config: Config, experiment: Experiment) -> None:
    """Warn if copies in a directory do not survive the loss of the run, or may be misplaced."""
    target = Path(config.ckpt_copy_to or "")
    if is_url(str(config.ckpt_copy_to)) or not target.is_dir():
        return
    device = target.stat().st_dev
    if device == experiment.root.stat().st_dev:
        log.warn(
            f"--ckpt-copy-to {target} is on the same file system as {experiment.root}: the copies "
            "do not survive its loss"
        )
    elif device == _ROOT.stat().st_dev:
        log.warn(
            f"--ckpt-copy-to {target} is on the file system of {_ROOT}. If another disk belongs "
            "there, it is not mounted, and the copies will fill this one"
        )
