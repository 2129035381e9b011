"""Find what earlier launches of a run left, and decide whether this launch may resume from it.

The checkpoints are the source of truth: each COMMIT.json contains the identity of its run.
config.yaml repeats it for people, and state.json is only a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands, config_file, declared, hashing, log, paths
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import ArtifactError, UsageError
from lib.core.identity import Difference, find_differences, list_differences
from lib.core.paths import Experiment
from lib.models import lookup
from lib.runs import run_records
from lib.tokens.chat.policy import TEMPLATE_INPUT
from lib.train.config import Config
from lib.train.trained import ADAPTER, choose_trained

# Names of inputs in the identity of a run.
TEMPLATE = TEMPLATE_INPUT  # only with chat datasets
BOS_PREFIX = "{{- bos_token }}"  # what lib/train/experiment.py adds to a template

_SAMPLES = "samples in an epoch"
_OTHER_NAME = "another --experiment-name"
_RESUME_WITH_CHANGES = "--resume-with-changes to go on all the same"
# The options that name an input.
_OPTION_OF_INPUT = {
    "model": "model_name",
    "tokenizer": "model_name",
    "dataset": "dataset_name",
    "commit": "dataset_name",
    "text field": "streaming",
    TEMPLATE: "chat_template",
    ADAPTER: "lora_from",
}
# Options that decide what the tensors in a checkpoint are and mean, and what differs then.
_TENSOR_OPTIONS = {
    "optimizer": "states of another optimizer",
    "optimizer_states": "optimizer states of another precision",
    "lora_rank": "other trained parameters",
    "lora_targets": "other trained parameters",
    "rope_theta": "a model with other RoPE settings",
    "rope_scaling": "a model with other RoPE settings",
}
# Inputs and options that decide which sample has which number.
_SAMPLE_OPTIONS = {"dataset", "tokenizer", _SAMPLES} | {
    field.name for field in declared.list_fields(Config) if field.metadata["renumbers"]
}


class KeptTemplate(NamedTuple):
    """The chat template of a run.

    path: the file in the run's directory. text: its content. source: the template with which the
    run was started, which lacks a BOS that the run added.
    """

    path: Path
    text: str
    source: str


def has_checkpoints(experiment: Experiment) -> bool:
    """Return whether a run has checkpoints, valid, damaged or in quarantine."""
    return bool(commit.list_checkpoints(experiment.checkpoints)) or bool(
        commit.list_quarantined(experiment.checkpoints)
    )


def read_previous(experiment: Experiment) -> dict[str, Any]:
    """Return `identity` and `model_dir` of a run with checkpoints; {} if there are none.

    They come from config.yaml, or from the newest checkpoint if that file is lost.
    """
    if not has_checkpoints(experiment):
        return {}
    recorded = run_records.read_config(experiment)
    if "identity" in recorded:
        if log.rank() == 0:
            ours = {field.name for field in declared.list_fields(Config)}
            config_file.report_gone(experiment.config, recorded, ours)
        return recorded
    checkpoint = commit.find_newest(experiment.checkpoints)
    return {"identity": checkpoint.commit()["identity"]} if checkpoint else {}


def find_previous_model(
    experiment: Experiment, earlier_run: dict[str, Any], named: Checkpoint | None, cache_dir: Path
) -> str | None:
    """Return the directory of the model that a run was started with; None for a new run.

    Works also with --overwrite, and for a run that has saved nothing yet. If the directory is gone,
    returns a prepared model with the same content. earlier_run: see `read_previous`. named: the
    checkpoint that --resume names. Raises ArtifactError if there is no such model either.
    """
    recorded = (
        earlier_run or run_records.read_config(experiment) or (named.commit() if named else {})
    )
    path = recorded.get("model_dir", "")
    fingerprint = recorded.get("identity", {}).get("inputs", {}).get("model")
    model_dir = lookup.find_recorded_model(path, fingerprint, cache_dir)
    if model_dir is None and path:
        raise ArtifactError(
            f"the model {path}, with which {experiment.root} was started, is gone",
            hint="copy it there; -m NAME names it elsewhere, or another model",
        )
    return model_dir


def find_kept_template(directories: Sequence[Path], fingerprint: str | None) -> KeptTemplate | None:
    """Return the chat template that a run was started with, or None if no directory contains it.

    directories: where runs keep the files of their model. fingerprint: the fingerprint of its
    source, None for a run without chat datasets.
    """
    for directory in directories if fingerprint else ():
        path = directory / CHAT_TEMPLATE
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8")
            for source in (text, text.removeprefix(BOS_PREFIX)):
                if hashing.fingerprint(source) == fingerprint:
                    return KeptTemplate(path, text, source)
    return None


def require_same_run(
    earlier: dict[str, Any],
    now: dict[str, Any],
    where: Path,
    with_changes: bool = False,
    config: Config | None = None,
) -> list[Difference]:
    """Return the differences to an earlier run; UsageError if this one must not resume from it.

    earlier, now: their identities. where: the directory of the run, or of a checkpoint.
    with_changes: allow all differences except in options that change the tensors. config: the
    options of this launch, to suggest a command.
    """
    changed = find_differences(earlier, now)
    if with_changes and (other := list_refused(changed, with_changes)):
        contents = " and ".join(sorted({_TENSOR_OPTIONS[change.name] for change in other}))
        raise UsageError(
            f"{where} contains {contents}, which this run cannot load",
            found=list_differences(other),
            hint="keep these options, or start another run from an export of this one",
        )
    if changed and not with_changes:
        if any(change.name == TEMPLATE for change in changed) and (
            kept_template := find_kept_template(
                [_run_of(where) / "model"], earlier["inputs"].get(TEMPLATE)
            )
        ):
            raise _other_template(changed, kept_template.path, where)
        raise _other_settings(earlier, changed, where, config)
    return changed


def list_refused(changed: list[Difference], with_changes: bool) -> list[Difference]:
    """Return the differences with which a run must not resume. with_changes: as above."""
    return [change for change in changed if not with_changes or change.name in _TENSOR_OPTIONS]


def _run_of(where: Path) -> Path:
    """Return the directory of a run. where: that directory, or one of its checkpoints."""
    return where if paths.step_of(where.name) is None else where.parents[1]


def _other_settings(
    earlier: dict[str, Any], changed: list[Difference], where: Path, config: Config | None
) -> UsageError:
    """Return the error for a run or a checkpoint with other settings, with ways to continue."""
    ways = [_OTHER_NAME, "--overwrite to start this one anew (the old one is kept)"]
    if not any(change.name in _TENSOR_OPTIONS for change in changed):
        ways.append(_RESUME_WITH_CHANGES)
    last = ""
    run = ""
    if config and _is_own_run(_run_of(where), config):
        last, run = _continue_run(earlier, changed, _run_of(where), config)
    elif config:  # another name would resume the same checkpoint
        ways = ["another checkpoint in --resume"]
        last, run = _continue_from(earlier, changed, where, config)
    ways = [way for way in ways if way != last] + ([last] if last else [])
    listed = ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
    return UsageError(
        f"{where} was started with other settings",
        found=list_differences(changed),
        hint=f"use {listed}{':' if run else ''}",
        run=run,
    )


def _is_own_run(root: Path, config: Config) -> bool:
    own_root = Experiment(config.save_dir, config.experiment_name).root
    return own_root.resolve() == root.resolve()


def _continue_from(
    earlier: dict[str, Any], changed: list[Difference], checkpoint: Path, config: Config
) -> tuple[str, str]:
    """Return how to resume this run from another run's checkpoint, as `_continue_run` does."""
    names = {change.name for change in changed}
    changes_base = choose_trained(config).freezes_base and "model" in names
    if not names & _TENSOR_OPTIONS.keys() and not changes_base:
        return _RESUME_WITH_CHANGES, commands.as_typed("--resume-with-changes")
    own_run = Experiment(config.save_dir, config.experiment_name)
    root = _run_of(checkpoint)
    if has_checkpoints(own_run) or not _has_recorded(
        run_records.read_config(_open_experiment(root)), earlier
    ):
        return "", ""
    words = ("--config", root / "config.yaml", "-e", own_run.root, "--resume", checkpoint)
    return "the settings that it was saved with", commands.with_options(*words)


def _open_experiment(root: Path) -> Experiment:
    return Experiment(root.parent, root.name)


def _has_recorded(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Return whether a config.yaml records the identity `earlier` of a run or a checkpoint."""
    known = record.get("identity", {}).keys() >= earlier.keys()
    return known and {change.name for change in find_differences(earlier, record["identity"])} <= {
        _SAMPLES
    }


def _continue_run(
    earlier: dict[str, Any], changed: list[Difference], where: Path, config: Config
) -> tuple[str, str]:
    """Return a description and a command for resuming a run; both are "" if none surely works.

    The options in its config.yaml work if they still name the run's original inputs. They no
    longer work if an input was replaced under the same name, or if a later launch recorded others.
    """
    record = run_records.read_config(_open_experiment(where))
    recorded = record.get("options")
    if not isinstance(recorded, dict):
        return "", ""
    options = config.to_record()
    replaced = {
        change.name
        for change in changed
        if change.kind == "input"
        and options.get(name := _OPTION_OF_INPUT.get(change.name, "")) in (None, recorded.get(name))
    }
    as_recorded = commands.with_options("--config", where / "config.yaml")
    if not replaced and _has_recorded(record, earlier):
        return "the settings that it was started with", as_recorded
    if replaced == {ADAPTER} and config.lora_from is not None:
        is_alone = len(changed) == 1
        return (
            "the adapter in its checkpoints, which needs no --lora-from",
            commands.move_away(config.lora_from, commands.as_typed() if is_alone else as_recorded),
        )
    if any(change.name in _TENSOR_OPTIONS for change in changed) or (
        choose_trained(config).freezes_base and "model" in replaced
    ):
        name = f"{where.name}-2"
        return _OTHER_NAME, commands.as_typed("--experiment-name", name, drop=["--resume"])
    return _RESUME_WITH_CHANGES, commands.as_typed("--resume-with-changes")


def _other_template(changed: list[Difference], template_path: Path, where: Path) -> UsageError:
    """Return the error for a run whose chat template has changed.

    template_path: the file with the template of the run.
    """
    ways = (
        "use another --experiment-name, --overwrite to start this one anew (the old one is "
        "kept), or --resume-with-changes to go on all the same"
    )
    template_option = ("--chat-template", template_path)
    if any(change.name != TEMPLATE for change in changed):
        run = commands.with_options("--config", _run_of(where) / "config.yaml", *template_option)
        return UsageError(
            f"{where} was started with other settings",
            found=list_differences(changed),
            hint=f"{ways}, or the settings that it was started with:",
            run=run,
        )
    return UsageError(
        f"{where} was started with other settings",
        found=list_differences(changed),
        hint=f"{ways}, or the template that it was started with:",
        run=commands.as_typed(*template_option, drop=template_option[:1]),
    )


def add_sample_counts(
    facts: dict[str, Any], now: dict[str, Any], samples: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the number of samples as an input to the identities of a checkpoint and of this run.

    Another version of the packing may pack the same documents into another number of samples.
    facts: the checkpoint's COMMIT.json. samples: number in an epoch now, None if unknown.
    """

    def among_inputs(identity: dict[str, Any], count: int | None) -> dict[str, Any]:
        return identity | {"inputs": identity["inputs"] | {_SAMPLES: count}}

    return (
        among_inputs(facts["identity"], facts.get("samples_per_epoch", samples)),
        among_inputs(now, samples),
    )


def changes_samples(changes: list[Difference]) -> bool:
    """Return whether changes give samples other indices, so that a sample cursor is invalid."""
    return any(change.name in _SAMPLE_OPTIONS for change in changes)


def require_usable_directory(
    config: Config, experiment: Experiment, earlier: dict[str, Any], identity: dict[str, Any]
) -> None:
    """Raise UsageError if this run can neither start in its directory nor resume there.

    A directory that is not an experiment is never written to or moved, not even with --overwrite.
    Raises ArtifactError if all of its checkpoints are damaged. earlier: see `read_previous`.
    identity: the identity of this run.
    """
    # In this order, since another launch may be creating the experiment right now.
    if (
        not experiment.is_empty()
        and not has_checkpoints(experiment)
        and "identity" not in run_records.read_config(experiment)
    ):
        raise _make_stranger_error(experiment.root, config)
    if config.overwrite:
        return
    if earlier:
        require_same_run(
            earlier["identity"], identity, experiment.root, config.resume_with_changes, config
        )
        if config.resume == "never":
            raise UsageError(
                f"{experiment.root} has been trained already, and --resume is never",
                hint="use another --experiment-name, or --overwrite, or resume it:",
                run=commands.as_typed(drop=["--resume"]),
            )
    elif has_checkpoints(experiment):
        raise ArtifactError(
            f"{experiment.root} has no complete checkpoint and no readable config.yaml",
            hint="use another --experiment-name, or --overwrite, which keeps it under another name",
        )


def find_named_checkpoint(config: Config, experiment: Experiment) -> Checkpoint | None:
    """Return the checkpoint that --resume names; None for auto, never and copies.

    Also None if the checkpoint is gone or damaged, but the run has resumed from it before. Raises
    ArtifactError for a path that is not a checkpoint or whose file sizes are wrong, and UsageError
    if --overwrite would move it.
    """
    if config.resume in ("auto", "never", "copies"):
        return None
    path = Path(config.resume)
    step = paths.step_of(path.resolve().name)
    if (
        not config.overwrite
        and _has_resumed_from(experiment, path)
        and (step is None or Checkpoint(path.resolve(), step).problems())
    ):
        log.info(f"{path} is gone or damaged; this run has resumed from it before and continues")
        return None
    if step is None or not path.is_dir():
        raise ArtifactError(
            f"--resume: {path} is not a checkpoint",
            expected="auto, never, or a directory …/checkpoints/step_…",
        )
    if config.overwrite and path.resolve().is_relative_to(experiment.root.resolve()):
        raise UsageError(
            f"--overwrite would move away {path}, which --resume names",
            hint="train under another --experiment-name, or resume from it:",
            run=commands.as_typed(drop=["--overwrite"]),
        )
    checkpoint = Checkpoint(path.resolve(), step)
    if problems := checkpoint.problems():
        raise ArtifactError(f"--resume: {path} is damaged", found="\n".join(problems))
    return checkpoint


def _has_resumed_from(experiment: Experiment, path: Path) -> bool:
    checkpoint = commit.find_newest(experiment.checkpoints)
    return checkpoint is not None and checkpoint.commit().get("resumed_path") == str(path.resolve())


def descends_from(checkpoint: Checkpoint | None, ancestor: Checkpoint) -> bool:
    """Return whether a run resumed from the checkpoint `ancestor` before it saved `checkpoint`."""
    return (
        checkpoint is not None
        and checkpoint.commit().get("resumed_from") == ancestor.commit()["manifest"]
    )


def _make_stranger_error(root: Path, config: Config) -> UsageError:
    """Return the error for a directory that is not an experiment of this project."""
    checkpoints = [
        path.parent
        for pattern in ("", "*/", "*/*/")
        for path in root.glob(pattern + paths.DCP_METADATA)
    ]
    if not checkpoints:
        return UsageError(
            f"{root} exists and is not an experiment (no config.yaml of one)",
            hint="use another --experiment-name, or move it away",
        )
    newest = max(checkpoints, key=lambda path: (path / paths.DCP_METADATA).stat().st_mtime)
    model = root.with_name(f"{root.name}-model")
    return UsageError(
        f"{root} is a run of another trainer (it contains {newest.relative_to(root)}/, a "
        "checkpoint of torch.distributed.checkpoint)",
        hint="take over its weights under another --experiment-name; -m of the first command "
        "names the model that it was trained from:",
        run="\n".join(
            (
                commands.script(
                    "05_export_checkpoint.py",
                    *("--from-dcp", newest, "-m", config.model_name or "MODEL"),
                    *("--dtype", "float32", "--out", model),
                ),
                commands.as_typed(
                    *("-e", f"{root.name}-2", "-m", model),
                    drop=["-e", "--experiment-name", "-m", "--model-name"],
                ),
            )
        ),
    )
