"""Keep every stage except 03 off the network.

Stage 04 with --online stays offline too: a child process goes online, and only fetches files
(lib/hub/dataset.py).
"""

from __future__ import annotations

import os
import re
import sys

from lib.core import launcher
from lib.core.commands import LAUNCHED_AS

OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
}
# Variables of this launch. A command of the user may itself start torchrun or another run.
_LAUNCH_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PET_.*|"
    rf"{launcher.MARK}|{LAUNCHED_AS}"
)


def enable_offline_mode() -> None:
    """Set the offline environment for this process and its child processes.

    Must run before any Hugging Face import: huggingface_hub reads HF_HUB_OFFLINE once, at import,
    and setting it later does nothing. Raises RuntimeError when it is too late.
    """
    too_late = {"huggingface_hub", "transformers", "datasets"} & sys.modules.keys()
    if too_late:
        raise RuntimeError(
            f"offline.enable_offline_mode() called after importing {', '.join(sorted(too_late))}"
        )
    os.environ.update(OFFLINE_ENVIRONMENT)


def build_user_environment() -> dict[str, str]:
    """Return the environment of this process without the changes of this project and of torchrun.

    So a command of the user may use the network, and does not count as a rank.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if OFFLINE_ENVIRONMENT.get(name) != value and not _LAUNCH_VARIABLES.fullmatch(name)
    }
