"""Try the experts of a sharded model, with a function that fails on rank 1; each rank runs this.

argv: a file for the lines of all ranks.

"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.parallel import experts, experts_trial, parallelize
from lib.parallel.layout import ParallelLayout, gather


def fail_to_start(*_: object) -> torch.Tensor:
    """Fail like a kernel that this rank's GPU cannot start."""
    raise RuntimeError("no such kernel")


def main() -> None:
    """Shard a model, try its experts, and write the function that each rank uses."""
    layout = ParallelLayout.start()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            MixtralConfig(
                vocab_size=97,
                hidden_size=32,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_local_experts=4,
            )
        )
    experts.use_own_function(model)
    parallelize.parallelize(model, layout.fsdp, "fp32")
    parallelize.materialise_model(model, layout.device, offload=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.1)
    for module in model.modules():
        for buffer in module._buffers.values():
            if buffer is not None:
                buffer.fill_(0.5)
    if layout.rank == 1:
        experts.combine_rows = fail_to_start
    lines = gather(experts_trial.choose_experts_function(model, layout), layout.control)
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(lines))
    layout.stop()


if __name__ == "__main__":
    main()
