"""Keep every stage except 03 off the network.

Stage 04 with --online stays offline too: a child process goes online, and only fetches files
(lib/hub/dataset.py).
"""

from __future__ import annotations

import os
import sys

OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
}


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
