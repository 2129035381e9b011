"""Items that time the kernels of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.gpu.kernels import median_s
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
        ends = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        flat = [part[0].transpose(0, 1).contiguous().detach().requires_grad_() for part in parts]

        def sdpa(kernel: SDPBackend, parts: list = parts) -> None:
            with sdpa_kernel(kernel):
                F.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

        def varlen(flat: list = flat, ends: Any = ends, length: int = length) -> None:
            varlen_attn(*flat, ends, ends, length, length, window_size=(-1, 0)).sum().backward()

        works = {
            "sdpa cudnn": lambda sdpa=sdpa: sdpa(SDPBackend.CUDNN_ATTENTION),
            "sdpa flash": lambda sdpa=sdpa: sdpa(SDPBackend.FLASH_ATTENTION),
            "varlen FA2": varlen,
        }
        _note_determinism(place, works["sdpa flash"], width)
        _note_speeds(place, works, flops, width)
        if left_out := activate_flash_3("varlen", parts):
            place.note(**{f"FA3, {width} wide": left_out})
            continue
        _note_speeds(place, {"sdpa FA3": works["sdpa flash"], "varlen FA3": varlen}, flops, width)
        restore_flash_attention_impl()


def _note_determinism(place: Place, work: Callable[[], None], width: int) -> None:
    """Note how many times longer attention takes with --deterministic on."""
    import torch

    fast = median_s(place, work)
    torch.use_deterministic_algorithms(True)
    try:
        slow = median_s(place, work)
    finally:
        torch.use_deterministic_algorithms(False)
    place.note(**{f"sdpa flash, {width} wide, deterministic: times as long": slow / fast})


def _note_speeds(
    place: Place, works: dict[str, Callable[[], None]], flops: float, width: int
) -> None:
    """Note the TFLOP/s of each attention kernel for heads of one width."""
    for name, work in works.items():
        try:
            reached = flops / median_s(place, work) / 1e12
        except Exception as error:  # a missing kernel is a result too
            reached = str(error).splitlines()[0][:200]
        place.note(**{f"{name}, {width} wide, TFLOP/s": reached})


def boundaries(place: Place) -> None:
    """Time packed attention by the number of documents and the `longest` given to the kernel.

    The kernel starts thread blocks for `longest` tokens in each document; most of them are empty
    if that is the whole row. Empty documents stand for padding in the list of boundaries.
    """
    import torch
    from torch.nn.attention import restore_flash_attention_impl

    from lib.parallel.attention_kernel import activate_flash_3

    place.need(place.on_gpu, "a CPU has none of these kernels")
    from torch.nn.attention.varlen import varlen_attn

    heads = 32
    length = 8192
    for width in (128, 64):
        flat = [
            torch.randn(
                length, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in range(3)
        ]

        def work(ends: torch.Tensor, longest: int, flat: list = flat) -> None:
            varlen_attn(*flat, ends, ends, longest, longest, window_size=(-1, 0)).sum().backward()

        tried = [
            part.detach()[None, :256].transpose(1, 2).contiguous().requires_grad_() for part in flat
        ]
        for kernel in ("FA2", "FA3"):
            if kernel == "FA3" and (left_out := activate_flash_3("varlen", tried)):
                place.note(**{f"FA3, {width} wide": left_out})
                continue
            for documents, empty in ((1, 0), (16, 0), (16, 112), (64, 0), (128, 0)):
                ends = _ends(documents, empty, length)
                for longest in dict.fromkeys((length, length // documents)):
                    took = median_s(place, partial(work, ends, longest))
                    place.note(
                        **{
                            f"{kernel}, {width} wide, {documents} documents and {empty} "
                            f"empty, longest {longest}, ms": 1000 * took
                        }
                    )
            if kernel == "FA3":
                restore_flash_attention_impl()


def _ends(documents: int, empty: int, length: int) -> Any:
    """Return where equally long documents begin and end, with empty ones behind them."""
    import torch

    ends = torch.arange(0, length + 1, length // documents, dtype=torch.int32, device="cuda")
    return torch.cat([ends, ends[-1:].expand(empty)])
