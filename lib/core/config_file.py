"""YAML files: `key: value` lines that a person wrote, or the options that a run has recorded."""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from lib.core import log, records
from lib.core.commands import REDACTED
from lib.core.errors import UsageError

# A file, whoever wrote it, does not say whose code runs here: that has to be typed.
TYPED = {"trust_remote_code"}
# Options for one launch of a person, which a record of the run does not ask for again.
_OF_ONE_LAUNCH = {"resume", "resume_with_changes", "prepare_only", "only_splits", "merge", "verify"}


def read_yaml(path: Path, label: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file; UsageError, which begins with `label`, when there is none.
    """
    try:
        content = records.read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"{label}no such file: {path}") from None
    except ValueError as error:
        raise UsageError(f"{label}{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{label}{path} must hold `key: value` lines")
    return content


def options_in(config: Path, leave_out: Set[str], ours: Set[str]) -> dict[str, Any]:
    """Return the options in a file: its keys, or what a run or a stage has recorded as its options.

    ours: names of the options that there are. A run's config.yaml and an artifact's manifest.json
    hold more than options. Secrets, `leave_out`, what belongs to one launch, and options that are
    no more, are not taken. Raises UsageError for the manifest of another stage.
    """
    content = read_yaml(config, "--config: ")
    recorded = content.get("options")
    if not isinstance(recorded, dict) or "versions" not in content:
        return content
    stage, script = content.get("stage"), Path(sys.argv[0]).name
    if stage and script != stage and script[:1].isdigit():
        raise UsageError(f"--config: {config} holds options of {stage}, not of {script}")
    taken = {key: value for key, value in recorded.items() if value not in (None, [], REDACTED)
             and key not in leave_out | TYPED | _OF_ONE_LAUNCH}
    if gone := sorted(taken.keys() - ours):
        log.info(f"--config: {config} holds {', '.join(gone)}, which this version has no more and "
                 "leaves out")
        taken = {key: value for key, value in taken.items() if key in ours}
    if content.get("model_dir") and not taken.keys() & {"model_name", "model_size"}:
        taken["model_name"] = content["model_dir"]
    log.info(f"--config: the {len(taken)} options recorded in {config} are taken; those of the "
             "command line win")
    return taken
