"""Claim the directory of a run for one launch, and copy all files that the run needs into it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lib.checkpoints import commit
from lib.core import file_identity, hashing, launcher, log, manifest, records, units
from lib.core.artifacts import (
    NAMED_TEMPLATES,
    OTHER_TOKENIZER_FILES,
    TOKENIZER_FILES,
    list_named_templates,
)
from lib.core.errors import EXIT_BUG, ArtifactError, Preempted, UsageError, from_os_error
from lib.core.lease import DirectoryHeld, ExperimentHeld, Lease
from lib.core.paths import Experiment
from lib.core.retry import poll
from lib.models import architecture, chat_files, dialects, remote_code, rope
from lib.models.directory import CONFIG
from lib.models.rope import RopeSettings
from lib.parallel.layout import ParallelLayout, gather, on_rank_0
from lib.runs.events import Event
from lib.runs.journal import Journal
from lib.runs.run_records import read_config
from lib.tokens.chat.counts import ChatFacts
from lib.tokens.encode import Encoder
from lib.train.config import list_changed_defaults
from lib.train.inputs import Inputs
from lib.train.launches import Launch
from lib.train.plan import Plan
from lib.train.previous_run import BOS_PREFIX

_VISIBLE_WITHIN_S = 60.0  # network file systems may show a new file late
_MODEL_FILES = (CONFIG, "generation_config.json", *TOKENIZER_FILES, *OTHER_TOKENIZER_FILES)


@contextmanager
def claim_experiment(
    experiment: Experiment,
    plan: Plan,
    inputs: Inputs,
    chat: ChatFacts | None,
    journal: Journal,
    launch: Launch,
    layout: ParallelLayout,
) -> Iterator[None]:
    """Hold the lease of a run's directory, and record this launch in its config.yaml.

    With --overwrite, the earlier run is renamed first. A launch that is refused before it starts to
    train leaves an earlier config.yaml as it was. chat: facts about the chat datasets, None without
    any. All ranks must call this. Raises ExperimentHeld if another launch holds the lease, and
    UsageError if the ranks do not see the same directory.
    """
    leases: list[Lease] = []
    earlier_records: list[str] = []  # at most one: config.yaml as this launch found it

    def start_launch() -> str:
        leases.append(_take_lease(experiment))
        if plan.config.overwrite and not experiment.is_empty():
            leases.pop().release()
            _rename_replaced(experiment)
            leases.append(_take_lease(experiment))
        with suppress(OSError, ValueError):  # there is none, or it is not text
            earlier_records.append(experiment.config.read_bytes().decode("utf-8"))
        return _write_start(experiment, plan, inputs, chat, journal, launch)

    ended_together = False
    try:
        start = on_rank_0(start_launch, layout.control)
        _require_shared(experiment, start, layout)
        yield
        ended_together = True
    except Preempted:
        ended_together = True
        raise
    except Exception as error:
        if earlier_records and not journal.has_started and _is_refusal(error):
            with suppress(OSError):  # the error that refuses the launch matters more
                manifest.write_text(experiment.config, earlier_records[0])
        raise
    finally:
        for lease in leases:
            if ended_together:  # a stop request that came meanwhile is not for the next launch
                with suppress(OSError):
                    experiment.stop_file.unlink(missing_ok=True)
            with suppress(OSError):  # the next launch sees that the process of a lease has ended
                lease.release()


def _is_refusal(error: Exception) -> bool:
    """Return whether an error refuses the launch (exit code 2 or 3), so no launcher restarts it."""
    cause = from_os_error(error) if isinstance(error, OSError) else error
    return isinstance(cause, (UsageError, ArtifactError))


def _write_start(
    experiment: Experiment,
    plan: Plan,
    inputs: Inputs,
    chat: ChatFacts | None,
    journal: Journal,
    launch: Launch,
) -> str:
    """Write config.yaml and the files of the model; return the ID of this start. Rank 0 only."""
    config = plan.config
    stop_request = inputs.stop_request  # a newer one is for this launch
    is_old = stop_request and stop_request == file_identity.read_identities(stop_request)
    if is_old and not launch.has_begun:
        log.info(f"{experiment.stop_file} was for an earlier launch and is deleted")
        experiment.stop_file.unlink(missing_ok=True)
    start = f"{time.time_ns():x}"
    settled = {name: getattr(config, name) for name in config.settled_by}
    recorded = config.to_record()
    journal.write_config(
        recorded,
        settled,
        list_changed_defaults(recorded | settled),
        plan.identity(),
        inputs.model_dir,
        start,
        read_config(experiment).get("run", start),
        launch.marks,
    )
    manifest.remove_temporary(
        experiment.root,
        [
            path.name
            for path in (
                experiment.config,
                experiment.state,
                experiment.metrics,
                experiment.report,
            )
        ],
    )
    settings = RopeSettings.from_options(config, config.seq_length)
    _copy_model_files(inputs.model_dir, experiment.model, config.trust_remote_code, settings)
    if chat:
        chat_files.write_chat_files(
            experiment.model,
            add_bos_to_template(chat.template, inputs.model_dir),
            list(chat.stops),
        )
    inputs.require_unchanged()
    if deleted := commit.delete_leftovers(experiment.checkpoints):
        journal.add_event(Event.CLEAN, 0, paths=deleted)
        log.info(
            f"deleted what an interrupted save or deletion had left: {units.join_names(deleted, 3)}"
        )
    return start


def _require_shared(experiment: Experiment, start: str, layout: ParallelLayout) -> None:
    """Raise UsageError if a rank does not see the ID of the start that rank 0 has written."""
    is_visible = poll(
        lambda: read_config(experiment).get("launch") == start,
        every=0.5,
        patience=_VISIBLE_WITHIN_S,
    )
    if not all(gather(is_visible, layout.control)):
        raise UsageError(
            f"{experiment.root} is not the same directory on all nodes",
            expected="--save-dir on a file system that all nodes share",
        )


def _take_lease(experiment: Experiment) -> Lease:
    """Return the lease of a run's directory; the process ends if it loses the lease."""

    def end_process(text: str) -> None:
        # At once: two launches must not write the same run.
        launcher.end_at_once(
            EXIT_BUG, lambda: os.write(2, f"error: {text}\n".encode()), lambda: log.error(text)
        )

    experiment.root.mkdir(parents=True, exist_ok=True)
    try:
        return Lease(experiment.lock, end_process)
    except DirectoryHeld as error:
        raise ExperimentHeld(
            f"another launch is training {experiment.root} now",
            holder=error.holder,
            hint="wait for it, stop it, or use another --experiment-name",
        ) from None


def _rename_replaced(experiment: Experiment) -> None:
    """Rename the directory that --overwrite replaces; it is never deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    replaced = experiment.root.with_name(f"{experiment.root.name}.replaced-{stamp}")
    experiment.root.rename(replaced)
    log.info(f"--overwrite: the earlier {experiment.root} is kept as {replaced}")


def _copy_model_files(
    model_dir: Path, target: Path, with_code: bool, settings: RopeSettings
) -> None:
    """Copy config, tokenizer and code of the model to the run, and delete another model's files.

    settings: the RoPE settings of the run, which its config.json contains.
    """
    target.mkdir(exist_ok=True)
    manifest.remove_temporary(target, _MODEL_FILES)
    has_code = with_code and remote_code.is_needed(architecture.read_config_json(model_dir))
    templates = {*list_named_templates(model_dir), *list_named_templates(target)}
    if templates:
        (target / NAMED_TEMPLATES).mkdir(exist_ok=True)
    for name in (*_MODEL_FILES, *sorted(templates)):
        if not (model_dir / name).is_file():
            (target / name).unlink(missing_ok=True)
            continue
        if name == CONFIG and not has_code:  # the code of a model reads its own keys
            _write_config(model_dir, target, settings)
            continue
        temporary = target / f"{name}.tmp"
        shutil.copyfile(model_dir / name, temporary)
        temporary.replace(target / name)
    if with_code:
        remote_code.copy_code(model_dir, target)


def _write_config(model_dir: Path, target: Path, settings: RopeSettings) -> None:
    """Write config.json with the keys of transformers 5 and the keys that other programs read.

    An existing file with the same content stays as it is, byte for byte: checkpoints contain its
    digest, and an earlier version of this code may have written it.
    """
    content = rope.read_config_json(model_dir, settings)
    lacks_tying = "tie_word_embeddings" not in content
    config = architecture.read_config(model_dir) if lacks_tying else None
    tied = getattr(config, "tie_word_embeddings", None)
    full_content = dialects.add_earlier_keys(content, tied)
    with suppress(OSError, ValueError):
        existing = records.read_json(target / CONFIG)
        if isinstance(existing, dict) and dialects.add_earlier_keys(existing, tied) == full_content:
            return
    manifest.write_json(target / CONFIG, full_content)


def add_bos_to_template(source: str, model_dir: Path) -> str:
    """Return a template that writes BOS itself if samples got it from the tokenizer.

    At inference the tokenizer adds no BOS to a rendered chat, so the template must, or the text
    would not start as in training.
    """
    from lib.tokens.chat import render  # takes time to import

    encoder = Encoder(model_dir, 1)
    tokenizer = encoder.tokenizer
    if encoder.bos is None:
        return source
    template = render.Template(source, tokenizer.special_tokens_map)
    with suppress(render.TemplateError), render.limit_rendering() as restart:
        restart()
        # A template may refuse these messages.
        if template.render([{"role": "user", "content": "a"}]).text.startswith(tokenizer.bos_token):
            return source
        return BOS_PREFIX + source
    return source if "bos_token" in source else BOS_PREFIX + source


def compute_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 digests of the files in a directory, by name."""
    return {
        path.name: hashing.file_digest(path, "sha256")
        for path in sorted(directory.iterdir())
        if path.is_file()
    }
