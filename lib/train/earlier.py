"""What an earlier launch of an experiment left, and whether this one may go on from it.

The checkpoints are the truth: each COMMIT.json holds the identity of its run. config.yaml says
the same for people, and state.json is a hint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands, declared, log, manifest, paths
from lib.core.errors import ArtifactError, UsageError
from lib.core.identity import Difference, differences, list_differences
from lib.core.paths import Experiment
from lib.models import lookup
from lib.train import chats, journal, lora_from
from lib.train.config import Config

TEMPLATE = "chat template"  # an input of runs on conversations
_SAMPLES = "samples in an epoch"
_ANOTHER_NAME = "another --experiment-name"
_ALL_THE_SAME = "--resume-with-changes to go on all the same"
# The options that name an input.
_NAMED_BY = {
    "model": "model_name",
    "tokenizer": "model_name",
    "dataset": "dataset_name",
    "commit": "dataset_name",
    "text field": "text_field",
    TEMPLATE: "chat_template",
    lora_from.INPUT: "lora_from",
}
# What decides which tensors there are in a checkpoint, and of which shape.
_OF_TENSORS = {
    "optimizer": "states of another optimizer",
    "lora_rank": "other trained parameters",
    "lora_targets": "other trained parameters",
}
# What decides which sample bears which number: inputs, and options that are declared so.
_OF_SAMPLES = {"dataset", "tokenizer", _SAMPLES} | {
    field.name for field in declared.list_fields(Config) if field.metadata["renumbers"]
}

# Fields of state.json that depend on its step.
_OF_A_STEP = {"epoch", "tokens", "sample_cursor"}


def has_begun(experiment: Experiment) -> bool:
    """Tell whether a directory holds training that could be lost: checkpoints, good or bad."""
    return bool(commit.list_checkpoints(experiment.checkpoints)) or bool(
        commit.list_quarantined(experiment.checkpoints)
    )


def read(experiment: Experiment) -> dict[str, Any]:
    """Return `identity` and `model_dir` of the training in a directory; empty when none has begun.

    Taken from config.yaml, or from the newest checkpoint when that is lost.
    """
    if not has_begun(experiment):
        return {}
    recorded = journal.read_config(experiment)
    if "identity" in recorded:
        return recorded
    checkpoint = commit.find_newest(experiment.checkpoints)
    return {"identity": checkpoint.commit()["identity"]} if checkpoint else {}


def model_of(
    experiment: Experiment, begun: dict[str, Any], named: Checkpoint | None, cache_dir: Path
) -> str | None:
    """Return the model that a run is of where no -m says so; None where nothing was begun.

    Also with --overwrite, and of a run that has saved nothing yet. It is where it was, or wherever
    a prepared model of the same content lies. begun: see `read`. named: the checkpoint of --resume.
    Raises ArtifactError when it is not there any more: another one is not taken in its place.
    """
    recorded = begun or journal.read_config(experiment) or (named.commit() if named else {})
    path = recorded.get("model_dir", "")
    fingerprint = recorded.get("identity", {}).get("inputs", {}).get("model")
    found = lookup.find_recorded_model(path, fingerprint, cache_dir)
    if found is None and path:
        raise ArtifactError(
            f"the model {path}, with which {experiment.root} was begun, is gone",
            hint="copy it there; -m NAME names it elsewhere, or another model",
        )
    return found


def require_same(
    earlier: dict[str, Any],
    now: dict[str, Any],
    where: Path,
    with_changes: bool = False,
    config: Config | None = None,
) -> list[Difference]:
    """Return every difference between a run and this one; UsageError if that forbids to resume.

    where: the directory of the run, or of a checkpoint. config: the options of this launch, for a
    command that works.
    """
    changed = differences(earlier, now)
    if with_changes and (other := [each for each in changed if each.name in _OF_TENSORS]):
        what = " and ".join(sorted({_OF_TENSORS[each.name] for each in other}))
        raise UsageError(
            f"{where} holds {what}, which this run cannot take over",
            found=list_differences(other),
            hint="keep these options, or begin another run from an export of this one",
        )
    if changed and not with_changes:
        if any(each.name == TEMPLATE for each in changed) and (
            kept := chats.kept_template([_run_of(where) / "model"], earlier["inputs"].get(TEMPLATE))
        ):
            raise _other_template(changed, kept.path, where)
        raise _other_settings(earlier, changed, where, config)
    return changed


def _run_of(where: Path) -> Path:
    """Return the directory of a run. where: this directory, or that of one of its checkpoints."""
    return where if paths.step_of(where.name) is None else where.parents[1]


def _other_settings(
    earlier: dict[str, Any], changed: list[Difference], where: Path, config: Config | None
) -> UsageError:
    """Return the error for a run that was begun with other settings, or a checkpoint of one."""
    ways = [_ANOTHER_NAME, "--overwrite to start this one anew (the old one is kept aside)"]
    of_tensors = any(each.name in _OF_TENSORS for each in changed)
    if not of_tensors:
        ways.append(_ALL_THE_SAME)
    last = ""
    run = ""
    if config and _is_of(_run_of(where), config):
        last, run = _go_on(earlier, changed, _run_of(where), config)
    elif config:  # another name would resume the same checkpoint
        ways = ["another checkpoint in --resume"]
        last, run = _go_on_from(earlier, changed, where, config)
    ways = [way for way in ways if way != last] + ([last] if last else [])
    listed = ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
    return UsageError(
        f"{where} was begun with other settings",
        found=list_differences(changed),
        hint=f"use {listed}{':' if run else ''}",
        run=run,
    )


def _is_of(root: Path, config: Config) -> bool:
    own = Experiment(config.save_dir, config.experiment_name).root
    return own.resolve() == root.resolve()


def _go_on_from(
    earlier: dict[str, Any], changed: list[Difference], checkpoint: Path, config: Config
) -> tuple[str, str]:
    """Return what lets this run go on from a checkpoint of another run, as `_go_on` does."""
    names = {each.name for each in changed}
    if not names & _OF_TENSORS.keys() and not (config.trains_lora and "model" in names):
        return _ALL_THE_SAME, commands.as_typed("--resume-with-changes")
    own = Experiment(config.save_dir, config.experiment_name)
    root = _run_of(checkpoint)
    if has_begun(own) or not _has_recorded(journal.read_config(_experiment(root)), earlier):
        return "", ""
    words = ("--config", root / "config.yaml", "-e", own.root, "--resume", checkpoint)
    return "the settings that it was saved with", commands.with_options(*words)


def _experiment(root: Path) -> Experiment:
    return Experiment(root.parent, root.name)


def _has_recorded(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Return whether a config.yaml is of a run or a checkpoint, whose identity is `earlier`."""
    known = record.get("identity", {}).keys() >= earlier.keys()
    return known and {each.name for each in differences(earlier, record["identity"])} <= {_SAMPLES}


def _go_on(
    earlier: dict[str, Any], changed: list[Difference], where: Path, config: Config
) -> tuple[str, str]:
    """Return what lets a run go on, in words, and the command: "" and "" if nothing is sure to.

    The options that the run has recorded help if they name what it was begun with. They do not if
    the same name leads to something else by now, nor if a launch since has recorded other options.
    """
    record = journal.read_config(_experiment(where))
    recorded = record.get("options")
    if not isinstance(recorded, dict):
        return "", ""
    options = config.to_record()
    replaced = {
        each.name
        for each in changed
        if each.kind == "input"
        and options.get(name := _NAMED_BY.get(each.name, "")) in (None, recorded.get(name))
    }
    as_recorded = commands.with_options("--config", where / "config.yaml")
    if not replaced and _has_recorded(record, earlier):
        return "the settings that it has", as_recorded
    if replaced == {lora_from.INPUT} and config.lora_from is not None:
        is_alone = len(changed) == 1
        return (
            "the adapter that its checkpoints hold, which needs no --lora-from",
            commands.move_away(config.lora_from, commands.as_typed() if is_alone else as_recorded),
        )
    if any(each.name in _OF_TENSORS for each in changed) or (
        config.trains_lora and "model" in replaced
    ):
        name = f"{where.name}-2"
        return _ANOTHER_NAME, commands.as_typed("--experiment-name", name, drop=["--resume"])
    return _ALL_THE_SAME, commands.as_typed("--resume-with-changes")


def _other_template(changed: list[Difference], kept: Path, where: Path) -> UsageError:
    """Return the error for a run on conversations that another template would render now.

    kept: the text of the run's own template.
    """
    ways = (
        "use another --experiment-name, --overwrite to start this one anew (the old one is "
        "kept aside), or --resume-with-changes to go on all the same"
    )
    own = ("--chat-template", kept)
    if any(each.name != TEMPLATE for each in changed):
        run = commands.with_options("--config", _run_of(where) / "config.yaml", *own)
        return UsageError(
            f"{where} was begun with other settings",
            found=list_differences(changed),
            hint=f"{ways}, or the settings that it has:",
            run=run,
        )
    return UsageError(
        f"{where} was begun with other settings",
        found=list_differences(changed),
        hint=f"{ways}, or the template that it has:",
        run=commands.as_typed(*own, drop=own[:1]),
    )


def with_samples(
    facts: dict[str, Any], now: dict[str, Any], samples: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the identities of a checkpoint and of now, with the samples of an epoch as an input.

    Packs that were made anew may be others than those that an earlier version made of the same
    documents, and there are more of them then. facts: of the checkpoint.
    """

    def among_inputs(identity: dict[str, Any], count: int | None) -> dict[str, Any]:
        return identity | {"inputs": identity["inputs"] | {_SAMPLES: count}}

    return (
        among_inputs(facts["identity"], facts.get("samples_per_epoch", samples)),
        among_inputs(now, samples),
    )


def is_other_data(changes: list[Difference]) -> bool:
    """Tell whether samples had other numbers before some changes, so that the cursor is void."""
    return any(change.name in _OF_SAMPLES for change in changes)


def require_free_name(
    config: Config, experiment: Experiment, earlier: dict[str, Any], identity: dict[str, Any]
) -> None:
    """Raise UsageError when a directory holds something that this run cannot go on from.

    One that is no experiment is neither written to nor moved aside, whatever was typed.
    """
    # In this order: another launch may be about to make it one.
    if (
        not experiment.is_empty()
        and not has_begun(experiment)
        and "identity" not in journal.read_config(experiment)
    ):
        raise UsageError(
            f"{experiment.root} exists and is not an experiment (no config.yaml of one)",
            hint="use another --experiment-name, or move it away",
        )
    if config.overwrite:
        return
    if earlier:
        require_same(
            earlier["identity"], identity, experiment.root, config.resume_with_changes, config
        )
        if config.resume == "never":
            raise UsageError(
                f"{experiment.root} has been trained already, and --resume is never",
                hint="use another --experiment-name, or --overwrite, or go on:",
                run=commands.as_typed(drop=["--resume"]),
            )
    elif has_begun(experiment):
        raise ArtifactError(
            f"{experiment.root} holds checkpoints, none of them whole, and no readable config.yaml",
            hint="use another --experiment-name, or --overwrite to move it aside",
        )


def named_checkpoint(config: Config, experiment: Experiment) -> Checkpoint | None:
    """Return the checkpoint that --resume names, None for auto and never.

    Raises ArtifactError when it is none or is damaged, as far as that shows without hashing.
    """
    if config.resume in ("auto", "never"):
        return None
    path = Path(config.resume)
    step = paths.step_of(path.resolve().name)
    if (
        not config.overwrite
        and _has_gone_on_from(experiment, path)
        and (step is None or Checkpoint(path.resolve(), step).problems())
    ):
        log.info(f"{path} is no longer there as it was; this run has gone on from it since")
        return None
    if step is None or not path.is_dir():
        raise ArtifactError(
            f"--resume: {path} is not a checkpoint",
            expected="auto, never, or a directory …/checkpoints/step_…",
        )
    if config.overwrite and path.resolve().is_relative_to(experiment.root.resolve()):
        raise UsageError(
            f"--overwrite would move away {path}, which --resume names",
            hint="train under another --experiment-name, or go on from it:",
            run=commands.as_typed(drop=["--overwrite"]),
        )
    checkpoint = Checkpoint(path.resolve(), step)
    if problems := checkpoint.problems():
        raise ArtifactError(f"--resume: {path} is damaged", found="\n".join(problems))
    return checkpoint


def _has_gone_on_from(experiment: Experiment, path: Path) -> bool:
    checkpoint = commit.find_newest(experiment.checkpoints)
    return checkpoint is not None and checkpoint.commit().get("resumed_path") == str(path.resolve())


def descends(checkpoint: Checkpoint | None, ancestor: Checkpoint) -> bool:
    """Tell whether a checkpoint comes from a run that was resumed from `ancestor` by name."""
    return (
        checkpoint is not None
        and checkpoint.commit().get("resumed_from") == ancestor.commit()["manifest"]
    )


def mark_complete(experiment: Experiment, step: int) -> None:
    """Correct a state.json that a crash after the last save left behind."""
    state = journal.read_state(experiment)
    if log.rank() > 0 or (state.get("status"), state.get("step")) == ("complete", step):
        return
    if state.get("step") != step:  # what it reports of another step is wrong by now
        state = {key: value for key, value in state.items() if key not in _OF_A_STEP}
    now = {"status": "complete", "step": step, "global_step": step}
    manifest.write_json(experiment.state, state | now)
