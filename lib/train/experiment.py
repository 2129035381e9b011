"""The directory of a run: held by one launch, moved aside, described, given its model's files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lib.checkpoints import commit
from lib.core import file_identity, hashing, launcher, log, manifest, records
from lib.core.artifacts import TOKENIZER_FILES
from lib.core.errors import EXIT_BUG, Preempted, UsageError
from lib.core.events import Event
from lib.core.lease import ExperimentHeld, Held, Lease
from lib.core.paths import Experiment
from lib.core.retry import poll
from lib.models import architecture, chat_files, dialects, remote_code
from lib.models.directory import CONFIG
from lib.parallel.layout import ParallelLayout, gather, on_rank_0
from lib.tokens.chat.counts import ChatFacts
from lib.train import chats
from lib.train.config import Config
from lib.train.inputs import Inputs
from lib.train.journal import Journal, read_config
from lib.train.launches import Launch
from lib.train.plan import Plan

_SHARED_WITHIN_S = 60.0
_MODEL_FILES = (CONFIG, "generation_config.json", *TOKENIZER_FILES)


@contextmanager
def claim(
    config: Config,
    experiment: Experiment,
    plan: Plan,
    inputs: Inputs,
    chat: ChatFacts | None,
    journal: Journal,
    launch: Launch,
    layout: ParallelLayout,
) -> Iterator[None]:
    """Hold the directory for the while, and see that every rank means the same one by it.

    chat: what the conversations were prepared with that the run learns from. All ranks must call
    this. Raises ExperimentHeld when another launch is at work there.
    """
    leases: list[Lease] = []

    def write() -> str:
        leases.append(_lease(experiment))
        if config.overwrite and not experiment.is_empty():
            leases.pop().release()
            _set_aside(experiment)
            leases.append(_lease(experiment))
        return _describe(config, experiment, plan, inputs, chat, journal, launch)

    start = on_rank_0(write, layout.control)
    _require_shared(experiment, start, layout)
    in_order = False  # whether all ranks come to the end
    try:
        yield
        in_order = True
    except Preempted:
        in_order = True
        raise
    finally:
        for lease in leases:
            if in_order:  # asked to end while it was ending: not a word for the next launch
                with suppress(OSError):
                    experiment.stop_file.unlink(missing_ok=True)
            with suppress(OSError):  # a record that stays is known to be of a process that is gone
                lease.release()


def _describe(
    config: Config,
    experiment: Experiment,
    plan: Plan,
    inputs: Inputs,
    chat: ChatFacts | None,
    journal: Journal,
    launch: Launch,
) -> str:
    """Write what stands in the directory from the start; return the mark of this start (rank 0)."""
    old = inputs.stop_request  # one that has come since is meant for this launch
    if not launch.has_begun and old and old == file_identity.read_identities(old):
        log.info(f"{experiment.stop_file} was meant for an earlier launch: it is deleted")
        experiment.stop_file.unlink(missing_ok=True)
    start = f"{time.time_ns():x}"
    settled = {name: getattr(config, name) for name in config.settled_by}
    journal.write_config(
        config.to_record(),
        settled,
        plan.identity(),
        inputs.model_dir,
        start,
        read_config(experiment).get("run", start),
        launch.marks,
    )
    manifest.remove_temporary(
        experiment.root,
        [path.name for path in (experiment.config, experiment.state, experiment.metrics)],
    )
    _copy_model_files(inputs.model_dir, experiment.model, config.trust_remote_code)
    if chat:
        chat_files.write(
            experiment.model,
            chats.template_to_keep(chat.template, inputs.model_dir),
            list(chat.stops),
        )
    inputs.require_unchanged()
    if left := commit.delete_leftovers(experiment.checkpoints):
        journal.add_event(Event.CLEAN, 0, paths=left)
    return start


def _require_shared(experiment: Experiment, start: str, layout: ParallelLayout) -> None:
    """Raise UsageError when a rank does not see the start that rank 0 has noted."""
    seen = poll(
        lambda: read_config(experiment).get("launch") == start,
        every=0.5,
        patience=_SHARED_WITHIN_S,  # network file systems may show it late
    )
    if not all(gather(seen, layout.control)):
        raise UsageError(
            f"{experiment.root} is not the same directory on all nodes",
            expected="--save-dir on a file system that all nodes share",
        )


def _lease(experiment: Experiment) -> Lease:
    """Hold the experiment's directory for as long as this process lives."""

    def lost(text: str) -> None:
        # At once: two launches must not write the same run.
        launcher.end_at_once(
            EXIT_BUG, lambda: os.write(2, f"error: {text}\n".encode()), lambda: log.error(text)
        )

    experiment.root.mkdir(parents=True, exist_ok=True)
    try:
        return Lease(experiment.lock, lost)
    except Held as error:
        raise ExperimentHeld(
            f"another launch is training {experiment.root} now",
            holder=error.holder,
            hint="wait for it, stop it, or use another --experiment-name",
        ) from None


def _set_aside(experiment: Experiment) -> None:
    """Move an experiment that --overwrite replaces out of the way; it is never deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = experiment.root.with_name(f"{experiment.root.name}.replaced-{stamp}")
    experiment.root.rename(aside)
    log.info(f"--overwrite: the earlier {experiment.root} is kept as {aside}")


def _copy_model_files(model_dir: Path, target: Path, with_code: bool) -> None:
    """Keep config and tokenizer of this model, and no others, with the run: it stands alone."""
    target.mkdir(exist_ok=True)
    manifest.remove_temporary(target, _MODEL_FILES)
    has_code = with_code and remote_code.is_needed(architecture.read_config_json(model_dir))
    for name in _MODEL_FILES:
        if not (model_dir / name).is_file():
            (target / name).unlink(missing_ok=True)
            continue
        if name == CONFIG and not has_code:  # code of its own reads the keys that it wrote
            _write_config(model_dir, target)
            continue
        temporary = target / f"{name}.tmp"
        shutil.copyfile(model_dir / name, temporary)
        temporary.replace(target / name)
    if with_code:
        remote_code.copy_code(model_dir, target)


def _write_config(model_dir: Path, target: Path) -> None:
    """Write config.json with the keys that other programs read beside those of transformers 5.

    If the file says the same already, it stays to the last byte: checkpoints hold its digest, and
    an earlier version of this code may have written it.
    """
    content = architecture.read_config_json(model_dir)
    is_silent = "tie_word_embeddings" not in content
    config = architecture.read_config(model_dir) if is_silent else None
    tied = getattr(config, "tie_word_embeddings", None)
    full = dialects.add_earlier_keys(content, tied)
    with suppress(OSError, ValueError):
        before = records.read_json(target / CONFIG)
        if isinstance(before, dict) and dialects.add_earlier_keys(before, tied) == full:
            return
    manifest.write_json(target / CONFIG, full)


def digests(directory: Path) -> dict[str, str]:
    """Return the digests of the files in a directory, by name."""
    return {
        path.name: hashing.file_digest(path, "sha256")
        for path in sorted(directory.iterdir())
        if path.is_file()
    }
