"""Read options from YAML: `key: value` lines of a person, or options that a run recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from lib.core import log, records, unknown_options
from lib.core.commands import REDACTED, is_secret
from lib.core.errors import UsageError

# No file may decide whose code runs here: these options must be typed.
TYPED = {"trust_remote_code"}
# Options for a single launch, which the record of a run does not repeat.
_OF_ONE_LAUNCH = {"resume", "resume_with_changes", "prepare_only", "only_splits", "merge", "verify"}

# In stage 04 of earlier versions, options of a new model. Its directory is recorded too.
_OF_CONFIG_JSON = {"config_json", "vocab_size", "tokenizer"}


def read_yaml(path: Path, label: str = "", numbers_as_text: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    label: the beginning of an error message. numbers_as_text: return numbers and dates as they are
    written. Raises UsageError if the file is missing or contains no mapping.
    """
    try:
        content = records.read_yaml(path, numbers_as_text)
    except FileNotFoundError:
        raise UsageError(f"{label}no such file: {path}") from None
    except ValueError as error:
        raise UsageError(f"{label}{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{label}{path} must contain `key: value` lines")
    return content


def read_file_options(config: Path, leave_out: Set[str], ours: Set[str]) -> dict[str, Any]:
    """Return the options in a file: its keys, or the options that a run or a stage recorded in it.

    ours: the options of this script. A run's config.yaml and an artifact's manifest.json contain
    more than options. Of their options, these are ignored: secrets, `leave_out`, options for a
    single launch, and options that no longer exist unless the result needs them. Raises UsageError
    for the manifest of another stage.
    """
    # A value means what it would mean on the command line, where 010 is 10.
    content = read_yaml(config, "--config: ", numbers_as_text=True)
    recorded = content.get("options")
    if not isinstance(recorded, dict) or "versions" not in content:
        content = unknown_options.update_values(content, ours)
        unknown = [str(key) for key in content if key not in ours]
        gone = [key for key in unknown if unknown_options.find_gone(key) and not _is_needed(key)]
        _report_gone(f"--config: {config}", gone)
        return {key: value for key, value in content.items() if key not in gone}
    stage = content.get("stage")
    script = Path(sys.argv[0]).name
    if stage and script != stage and script[:1].isdigit():
        raise UsageError(f"--config: {config} contains options of {stage}, not of {script}")
    values = {
        key: value
        for key, value in unknown_options.update_values(recorded, ours).items()
        if value not in (None, [], REDACTED) and key not in leave_out | TYPED | _OF_ONE_LAUNCH
    }
    if content.get("model_dir") and "config_json" in values:
        values = {key: value for key, value in values.items() if key not in _OF_CONFIG_JSON}
    unknown = _list_unknown(values, ours)
    refused = list(filter(_is_needed, unknown))  # the parser names them in one error
    _report_gone(f"--config: {config}", [key for key in unknown if key not in refused])
    values = {key: value for key, value in values.items() if key in ours or key in refused}
    if content.get("model_dir") and not values.keys() & {"model_name", "model_size"}:
        values["model_name"] = content["model_dir"]
    log.info(
        f"--config: uses the {len(values)} options recorded in {config}; those on the "
        "command line win"
    )
    return values


def report_gone(config: Path, recorded: dict[str, Any], ours: Set[str]) -> None:
    """Warn about the options in a run's config.yaml that no longer exist, if somebody set them."""
    options = recorded.get("options")
    _report_gone(str(config), _list_unknown(options if isinstance(options, dict) else {}, ours))


def _list_unknown(recorded: Mapping[str, Any], ours: Set[str]) -> list[str]:
    """Return the recorded options that somebody set and this version does not know."""
    updated = unknown_options.update_values(recorded, ours)
    unknown = {key: value for key, value in updated.items() if key not in ours}
    return sorted(key for key, value in unknown.items() if not _was_default(key, value))


def _was_default(name: str, value: Any) -> bool:
    """Return whether nobody set an option that this version does not know."""
    gone = unknown_options.find_gone(name)
    return value is None or (gone is not None and str(value) == str(gone.default))


def _is_needed(name: str) -> bool:
    """Return whether the result would differ without an option that this version does not know."""
    gone = unknown_options.find_gone(name)
    return gone is not None and gone.is_needed


def _report_gone(where: str, names: Sequence[str]) -> None:
    for name in names:
        gone = unknown_options.find_gone(name)
        log.warn(
            f"{where} contains {name}, which this version does not know and ignores"
            + (f"; {gone.advice}" if gone else "")
        )


def as_arguments(
    action: argparse.Action, flag: str, value: Any, where: str, separator: str
) -> list[str]:
    """Return a value of a file as words of a command line.

    where: the file and key, for the UsageError about a wrong value. separator: for an option whose
    values are typed as one word.
    """
    shown = REDACTED if is_secret(action.dest) else repr(value)
    if flag == "--config" or isinstance(value, dict):
        raise UsageError(f"{where} takes a plain value, got {shown}")
    if value is None:
        return []
    if action.nargs == 0:  # a flag such as --dry-run
        if not isinstance(value, bool):
            raise UsageError(f"{where} takes true or false, got {shown}")
        return [flag] if value else []
    if isinstance(value, list) and separator:
        value = separator.join(map(str, value))
    if isinstance(value, list) and not isinstance(action.default, list):
        raise UsageError(f"{where} takes one value, got {shown}")
    values = value if isinstance(value, list) else [value]
    if not all(records.is_passable(str(v)) for v in values):
        raise UsageError(f"{where} contains characters that a command line cannot contain")
    return [f"{flag}={value_as_word(v)}" for v in values]


def value_as_word(value: Any) -> str:
    """Return the value of an option as a person types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def parse_values(action: argparse.Action, words: Sequence[str]) -> list[Any]:
    """Return the values of an option from words of a command line, parsed if possible."""
    texts = [word.partition("=")[2] for word in words]
    try:
        return [action.type(text) if callable(action.type) else text for text in texts]
    except (ValueError, argparse.ArgumentTypeError):
        return texts
