"""Find initial weights that a run loads instead of the weights of its model.

Only the first launch loads them; later launches load the checkpoints of the run. The directory of
the weights may be deleted by then, so the identity of the run contains their fingerprint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.checkpoints import foreign_run
from lib.checkpoints.foreign_run import ForeignRun
from lib.models import peft_adapter
from lib.models.peft_adapter import PeftAdapter
from lib.train import previous_run
from lib.train.config import Config


def find_adapter(directory: Path | None, identity: dict[str, Any]) -> PeftAdapter | None:
    """Return the adapter of --lora-from, None without that option.

    It is also None if the directory is gone but the run's checkpoints contain the adapter.
    identity: see inputs.Inputs. Raises UsageError or ArtifactError as `peft_adapter.read_adapter`.
    """
    is_kept = previous_run.ADAPTER in identity.get("inputs", {})
    if directory is None or (is_kept and not directory.exists()):
        return None
    return peft_adapter.read_adapter(directory)


def identify_adapter(
    config: Config, adapter: PeftAdapter | None, identity: dict[str, Any]
) -> dict[str, str]:
    """Return the fingerprint of the --lora-from adapter as an identity's input, {} without one."""
    if config.lora_from is None:
        return {}
    name = previous_run.ADAPTER
    return {name: adapter.fingerprint if adapter else identity["inputs"][name]}


def find_foreign(directory: Path | None, identity: dict[str, Any]) -> ForeignRun | None:
    """Return the checkpoint of --resume-from-foreign, None without that option.

    It is also None if the directory is gone but the run's own checkpoints contain the weights.
    identity: see inputs.Inputs. Raises the errors of `foreign_run.find_foreign_run`.
    """
    is_kept = previous_run.FOREIGN in identity.get("inputs", {})
    if directory is None or (is_kept and not directory.exists()):
        return None
    return foreign_run.find_foreign_run(directory)


def identify_foreign(foreign: ForeignRun | None, identity: dict[str, Any]) -> dict[str, str]:
    """Return the fingerprint of another trainer's weights as an identity's input, {} without any.

    A resumed run does not need the option.
    """
    name = previous_run.FOREIGN
    recorded = identity.get("inputs", {}).get(name)
    fingerprint = foreign.fingerprint if foreign else recorded
    return {name: fingerprint} if fingerprint else {}
