"""Says at the start of a run which GPUs of this machine nothing will use, and what needs one."""

from __future__ import annotations

import os

import torch

from lib.core import commands, log, units


def note(device: str, cpu_offload: bool = False) -> None:
    """Log one line where there are more GPUs than ranks here, with the command that uses all.

    device: as --device says. GPUs that CUDA_VISIBLE_DEVICES hides are not counted. Warn about
    --cpu-offload where there is no GPU to take anything from.
    """
    if cpu_offload and (device == "cpu" or not torch.cuda.is_available()):
        log.warn("--cpu-offload changes nothing here: this run trains on the CPU")
    if device == "cpu":
        return
    gpus = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < ranks < gpus:
        command = commands.on_ranks(gpus)
        log.info(
            f"uses {ranks} of the {units.counted(gpus, 'GPU')} of this machine"
            + (
                f"; all of them: {command}"
                if command
                else f"; --nproc-per-node {gpus} uses all of them"
            )
        )
