"""Fill sharded models, and write logits, weights and the bytes that were read; torchrun runs this.

argv: a directory with one model directory per case, named `<case>` and listed in cases.json as
{case: {"placement": dimension to shard or null for FSDP's own, "mesh": shape}}.

"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.models import host_draws, keys, weights
from lib.models.architecture import build_on_meta, decoder_layers
from lib.models.sharded import local_slice, local_tensor

PIECE = 50  # elements that are drawn at once: so shards begin within pieces
TOKENS = torch.arange(24).reshape(2, 12) % 90 + 3


def shard_model(model: PreTrainedModel, placement: int | None, mesh_shape: list[int]) -> None:
    """Shard as the trainer does: blocks, then norm and head (or tied embedding), then the root."""
    names = ("replicate", "shard") if len(mesh_shape) == 2 else ("shard",)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)}
    for layer in decoder_layers(model).values():
        place = None if placement is None else lambda p: Shard(min(placement, p.ndim - 1))
        fully_shard(layer, **options, shard_placement_fn=place)
    norm = [m for m in model.base_model.children() if "Norm" in type(m).__name__]
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding.weight is head.weight:
        fully_shard([*norm, embedding, head], **options)
    else:
        fully_shard(embedding, **options)
        fully_shard([*norm, head], **options)
    fully_shard(model, **options)


def spoil_memory(model: nn.Module) -> None:
    """Fill all memory that `to_empty` may have left uninitialised with NaN or wrong numbers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        local_tensor(tensor).fill_(torch.nan if tensor.is_floating_point() else 7)


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, gathered. All ranks must call this."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in named
    }


def check_slices(model: nn.Module) -> None:
    """Assert that `local_slice` has the shape of every local part."""
    for name, parameter in model.named_parameters():
        sizes = [part.stop - part.start for part in local_slice(parameter)]
        assert sizes == list(local_tensor(parameter).shape), (name, sizes)


def exported(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the content of an export, and assert its names. All ranks must call this."""
    state = model.state_dict()
    tensors = {
        key: tensor.clone()
        for group in keys.group_for_export(model)
        for key, tensor in keys.convert_to_hub(
            model, {name: state[name].full_tensor() for name in group}
        )
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert keys.list_expected(model) == shapes
    return tensors


def case(directory: Path, placement: int | None, mesh: list[int]) -> dict[str, Any]:
    """Load and then initialise one sharded model; return what the test compares."""
    read: list[int] = []
    original = weights.HubTensors.read

    def counting(self: weights.HubTensors, *arguments: Any) -> torch.Tensor:
        tensor = original(self, *arguments)
        read.append(tensor.numel())  # several threads read
        return tensor

    weights.HubTensors.read = counting
    model = build_on_meta(directory)
    shard_model(model, placement, mesh)
    model.to_empty(device="cpu")
    spoil_memory(model)
    weights.load_pretrained(model, directory)
    weights.HubTensors.read = original
    check_slices(model)
    held = sum(local_tensor(p).numel() for p in model.parameters())
    loaded = full_weights(model)
    written = exported(model)
    logits = model.eval()(TOKENS, use_cache=False).logits.detach()
    spoil_memory(model)
    weights.initialise_model(model, seed=3)
    return {
        "logits": logits,
        "loaded": loaded,
        "drawn": full_weights(model),
        "exported": written,
        "read": sum(read),
        "held": held,
    }


def main() -> None:
    """Run all cases and save each rank's results as `<case>.rank<r>.pt`."""
    root = Path(sys.argv[1])
    host_draws.PIECE = PIECE
    dist.init_process_group("gloo")
    for name, options in json.loads((root / "cases.json").read_text()).items():
        result = case(root / name, options["placement"], options["mesh"])
        torch.save(result, root / f"{name}.rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts while it is taken down, after all is done (torch 2.13)


if __name__ == "__main__":
    main()
