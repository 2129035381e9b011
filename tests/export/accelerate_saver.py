"""Save an FSDP2 model by accelerate's own function; torchrun runs this on several ranks.

argv: a model directory, and the directory in which to write pytorch_model_fsdp_0/
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import save_fsdp_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def main() -> None:
    model_dir, target = sys.argv[1:]
    # accelerate itself shards only on accelerators; on a CPU, torch does.
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_fsdp_model(plugin, accelerator, model, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
