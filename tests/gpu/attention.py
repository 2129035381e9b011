"""Items that time the kernels of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.gpu.kernels import time_median
from tests.gpu.place import Place


def attention(place: Place) -> None:
    """Time attention forward and backward with cuDNN, FlashAttention 2 and FlashAttention 3."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

    from lib.parallel.attention_kernel import activate_flash_3

    place.need(place.on_gpu, "a CPU has none of these kernels")
    from torch.nn.attention.varlen import varlen_attn

    heads = 32
    length = 8192
    for width in (128, 64):
        parts = [
            torch.randn(
                1, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in range(3)
        ]
        flops = 3.5 * 2 * heads * width * length**2  # causal half, forward and backward
        offsets = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        packed_parts = [
            part[0].transpose(0, 1).contiguous().detach().requires_grad_() for part in parts
        ]

        def sdpa(kernel: SDPBackend, parts: list = parts) -> None:
            with sdpa_kernel(kernel):
                F.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

        def varlen(
            packed_parts: list = packed_parts, offsets: Any = offsets, length: int = length
        ) -> None:
            varlen_attn(
                *packed_parts, offsets, offsets, length, length, window_size=(-1, 0)
            ).sum().backward()

        kernels = {
            "sdpa cudnn": lambda sdpa=sdpa: sdpa(SDPBackend.CUDNN_ATTENTION),
            "sdpa flash": lambda sdpa=sdpa: sdpa(SDPBackend.FLASH_ATTENTION),
            "varlen FA2": varlen,
        }
        _note_determinism(place, kernels["sdpa flash"], width)
        _note_speeds(place, kernels, flops, width)
        if reason := activate_flash_3("varlen", parts):
            place.note(**{f"FA3, {width} wide": reason})
            continue
        _note_speeds(place, {"sdpa FA3": kernels["sdpa flash"], "varlen FA3": varlen}, flops, width)
        restore_flash_attention_impl()


def _note_determinism(place: Place, work: Callable[[], None], width: int) -> None:
    """Note by which factor attention takes longer with --deterministic on."""
    import torch

    fast = time_median(place, work)
    torch.use_deterministic_algorithms(True)
    try:
        slow = time_median(place, work)
    finally:
        torch.use_deterministic_algorithms(False)
    place.note(**{f"sdpa flash, {width} wide, deterministic: times as long": slow / fast})


def _note_speeds(
    place: Place, kernels: dict[str, Callable[[], None]], flops: float, width: int
) -> None:
    """Note the TFLOP/s of each attention kernel for heads of one width."""
    for name, work in kernels.items():
        try:
            result = flops / time_median(place, work) / 1e12
        except Exception as error:  # a missing kernel is a result too
            result = str(error).splitlines()[0][:200]
        place.note(**{f"{name}, {width} wide, TFLOP/s": result})


def boundaries(place: Place) -> None:
    """Time packed attention by the number of documents and by the `longest` given to the kernel.

    The kernel starts thread blocks for `longest` tokens in each document. If `longest` is the whole
    row, most of these blocks have nothing to do. Documents of length 0 stand for the padding that a
    list of boundaries contains.
    """
    import torch
    from torch.nn.attention import restore_flash_attention_impl

    from lib.parallel.attention_kernel import activate_flash_3

    place.need(place.on_gpu, "a CPU has none of these kernels")
    from torch.nn.attention.varlen import varlen_attn

    heads = 32
    length = 8192
    for width in (128, 64):
        packed_parts = [
            torch.randn(
                length, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in range(3)
        ]

        def work(offsets: torch.Tensor, longest: int, packed_parts: list = packed_parts) -> None:
            varlen_attn(
                *packed_parts, offsets, offsets, longest, longest, window_size=(-1, 0)
            ).sum().backward()

        trial_parts = [
            part.detach()[None, :256].transpose(1, 2).contiguous().requires_grad_()
            for part in packed_parts
        ]
        for kernel in ("FA2", "FA3"):
            if kernel == "FA3" and (reason := activate_flash_3("varlen", trial_parts)):
                place.note(**{f"FA3, {width} wide": reason})
                continue
            for documents, empty_count in ((1, 0), (16, 0), (16, 112), (64, 0), (128, 0)):
                offsets = _make_offsets(documents, empty_count, length)
                for longest in dict.fromkeys((length, length // documents)):
                    seconds = time_median(place, partial(work, offsets, longest))
                    place.note(
                        **{
                            f"{kernel}, {width} wide, {documents} documents and {empty_count} "
                            f"empty, longest {longest}, ms": 1000 * seconds
                        }
                    )
            if kernel == "FA3":
                restore_flash_attention_impl()


def _make_offsets(documents: int, empty_count: int, length: int) -> Any:
    """Return the int32 offsets of documents of equal length, followed by empty documents."""
    import torch

    offsets = torch.arange(0, length + 1, length // documents, dtype=torch.int32, device="cuda")
    return torch.cat([offsets, offsets[-1:].expand(empty_count)])
