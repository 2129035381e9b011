# covers: lib/parallel/one_rank.py, lib/parallel/fsdp_groups.py
"""One rank casts weights into place and reduces gradients without a copy.

tests/parallel/test_offload.py compares the losses with those of FSDP's own way, to the bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lib.models.sharded import local_tensor
from lib.parallel import one_rank, parallelize
from tests.parallel.test_offload import loss_of, shard_model, tokens

LARGE = 500  # elements; the norms are smaller, and activations are counted in both cases


class Copies(TorchDispatchMode):
    """Counts the bytes that copies and casts of large tensors write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(named or {}))
        name = function._overloadpacket._qualified_op_name
        is_same = name == "aten::copy_" and arguments[0] is arguments[1]
        if name in ("aten::copy_", "aten::_to_copy") and not is_same and result.numel() > LARGE:
            self.written += result.nbytes
        return result


def measure(model: nn.Module) -> int:
    """Return the bytes that copies write in a second pass and its backward."""
    loss_of(model, tokens(0)).backward()
    with Copies() as copies:
        loss_of(model, tokens(1)).backward()
    return copies.written


@pytest.mark.parametrize(("precision", "saved"), [("fp32", 4), ("bf16", 4 + 2 * 2)])
def test_copies_of_weights_and_gradients_are_left_out(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, precision: str, saved: int
) -> None:
    """For each weight: float32 of the gradient, and bf16 of the weight in forward and backward."""
    ours = shard_model(precision, offloaded=False)
    for name in ("cast_into_place", "share_buffers"):
        monkeypatch.setattr(parallelize, name, lambda model: None)
    plain = shard_model(precision, offloaded=False)
    difference = measure(plain) - measure(ours)
    elements = sum(p.numel() for p in map(local_tensor, plain.parameters()))
    assert difference > 0.7 * saved * elements, "of blocks that are gathered twice, and the rest"
    assert difference < 1.1 * saved * elements


def test_a_buffer_is_given_out_twice() -> None:
    buffers = one_rank._SharedBuffer()
    cpu = torch.device("cpu")
    allocated = [buffers.allocate((n,), dtype=torch.float32, device=cpu) for n in (3, 3, 3, 5, 5)]
    assert allocated[0] is allocated[1] and allocated[1] is not allocated[2]
    assert allocated[3].shape == (5,), "after an input whose output was not asked for"
    assert allocated[3] is allocated[4]


def test_the_allocator_waits_for_the_stream_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, stand-ins note which streams a buffer is used on."""
    streams: list[str] = []
    buffer = SimpleNamespace(
        numel=lambda: 3, dtype=torch.float32, is_cuda=True, record_stream=streams.append
    )
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: buffer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "reductions")
    buffers = one_rank._SharedBuffer()
    gpu = torch.device("cuda", 0)
    assert buffers.allocate((3,), dtype=torch.float32, device=gpu) is buffer and not streams
    assert buffers.allocate((3,), dtype=torch.float32, device=gpu) is buffer
    assert streams == ["reductions"]
