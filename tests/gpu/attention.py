"""Items that time the kernels of attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.gpu.kernels import BF16_TOLERANCE, attend_with_mask, relative_error, time_median
from tests.gpu.place import Place

HEADS = 32
KEY_HEADS = 8  # as in Llama 3
_ROWS = 2
_LENGTH = 8192
_TRIAL_LENGTH = 1024  # tokens on which results are compared
_LEAK = "gradient of another document"
_WRONG = "its results are wrong"

# Attention over packed documents: it takes queries, keys and values [tokens, H, D], and returns the
# output [tokens, H, D].
PackedAttention = Callable[..., Any]


def attention(place: Place) -> None:
    """Time attention over packed documents and over whole rows, forward and backward.

    The shapes are those of 8B-wide, and of heads of 64. Speeds count the squares of the lengths of
    documents. Each kernel for packed documents is first compared with float32 scores, and must keep
    documents apart. The figures name the fastest.
    """
    import torch

    wrong = []
    lengths = make_lengths(place.size(_LENGTH, 64)) * _ROWS
    for width in place.size((128, 64), (16,)):
        parts = _make_parts(place, sum(lengths), width)
        ends = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
        flops = 3.5 * 2 * HEADS * width * sum(length**2 for length in lengths)
        speeds = {}
        for name, attend in _PACKED.items():
            label = f"{name} on documents, {width} wide"
            began = time.monotonic()
            problem = _activate(place, name, width) or _find_error(place, label, attend, width)
            place.note(**{f"{label}, compiled and compared, s": time.monotonic() - began})
            if problem:
                place.note(**{label: problem})
                wrong += [label] if problem == _WRONG and name in _USED else []
                continue
            work = partial(_run_both_ways, attend, parts, ends, max(lengths))
            speed = _note_speed(place, label, work, flops)
            speeds |= {name: speed} if speed else {}
        if speeds:
            place.note(**{f"fastest on documents, {width} wide": max(speeds, key=speeds.get)})
        if place.on_gpu:
            _time_whole_rows(place, width)
    assert not wrong, f"kernels that a run would use give wrong results: {', '.join(wrong)}"


def make_lengths(length: int) -> list[int]:
    """Return the lengths of documents that fill a row: a few long ones, and many short ones."""
    parts = [length // 2, length // 8, length // 8, *[length // 32] * 4, *[length // 128] * 12]
    return [*parts, length - sum(parts)]


def _make_parts(place: Place, tokens: int, width: int) -> list[Any]:
    """Return random queries, keys and values, [tokens, H, D]."""
    import torch

    return [
        torch.randn(
            tokens,
            heads,
            width,
            device=place.device,
            dtype=place.size(torch.bfloat16, torch.float32),
            requires_grad=True,
        )
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def _run_both_ways(attend: PackedAttention, parts: list[Any], ends: Any, longest: int) -> None:
    import torch

    out = attend(*parts, ends, longest)
    torch.autograd.grad(out, parts, out.detach())  # summing into .grad would take time too


def _note_speed(place: Place, name: str, work: Callable[[], None], flops: float) -> float | None:
    """Note and return the TFLOP/s of a kernel; None if it raises an error, which is noted."""
    try:
        speed = flops / time_median(place, work) / 1e12
    except Exception as error:  # a missing kernel is a result too
        place.note(**{f"{name}, TFLOP/s": _describe_error(error)})
        return None
    place.note(**{f"{name}, TFLOP/s": speed})
    return speed


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _activate(place: Place, name: str, width: int) -> str:
    """Let `varlen` use a version of FlashAttention; return why it cannot, or "".

    Other names leave it at version 2.
    """
    from lib.parallel import attention_kernel as kernels

    kernels.restore_flash_2()
    kernel = next((kernel for kernel in kernels.PACKED_KERNELS if kernel.name == name), None)
    if kernel is None:
        return ""
    if not place.on_gpu:
        return "a CPU has no such kernel"
    if kernel.find_version() is None:
        return f"{kernel.package} is not installed"
    parts = [part.detach().transpose(0, 1)[None] for part in _make_parts(place, 256, width)]
    return kernels.activate(kernel, "varlen", [part.requires_grad_() for part in parts], (0, 40))


def _find_error(place: Place, label: str, attend: PackedAttention, width: int) -> str:
    """Compare a kernel with float32 scores; return why it is of no use, or ""."""
    try:
        figures = compare_with_scores(place, attend, width)
    except Exception as error:  # a missing kernel is a result too
        return _describe_error(error)
    place.note(**{f"{label}, {name}": figure for name, figure in figures.items()})
    is_right = all(figure < 2 * BF16_TOLERANCE for figure in figures.values())
    return "" if is_right and not figures[_LEAK] else _WRONG


def compare_with_scores(place: Place, attend: PackedAttention, width: int) -> dict[str, float]:
    """Return the relative errors of the output and the gradients against float32 scores.

    Also return the largest gradient that the output of one document gives to the others.
    """
    import torch

    lengths = make_lengths(place.size(_TRIAL_LENGTH, 128))
    parts = _make_parts(place, sum(lengths), width)
    ends = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    plain_parts = [part.detach().float().transpose(0, 1)[None].requires_grad_() for part in parts]
    expected = attend_with_mask(*plain_parts, ends, None)[0]
    weights = torch.randn_like(expected)
    reference = torch.autograd.grad(expected, plain_parts, weights)
    out = attend(*parts, ends, max(lengths))
    gradients = torch.autograd.grad(out, parts, weights.to(out.dtype), retain_graph=True)
    inside = torch.zeros(len(out), 1, 1, dtype=torch.bool, device=out.device)
    inside[ends[2] : ends[3]] = True
    of_one = torch.autograd.grad(out, parts, (weights * inside).to(out.dtype))
    return {
        "error": relative_error(out, expected),
        **{
            f"error of {name}": relative_error(gradient, plain[0].transpose(0, 1))
            for name, gradient, plain in zip(
                ("queries", "keys", "values"), gradients, reference, strict=True
            )
        },
        _LEAK: max(part.masked_fill(inside, 0).abs().max().item() for part in of_one),
    }


def _attend_by_varlen(query: Any, key: Any, value: Any, ends: Any, longest: int) -> Any:
    """Compute attention as a run does, with the FlashAttention that is active."""
    from lib.parallel import varlen

    attend = varlen.attend_by_kernel if query.is_cuda else varlen.attend_by_document
    return attend(query, key, value, ends, ends, longest, None, 0)


def _attend_by_cudnn(query: Any, key: Any, value: Any, ends: Any, longest: int) -> Any:
    """Compute attention with cuDNN's kernel for sequences of different lengths.

    torch's varlen_attn contains a call of it, but never chooses it (2.11 to 2.13).
    """
    import torch

    return torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, ends, ends, longest, longest, True, 0.0, True
    )[0]


def _attend_by_cudnn_with_copies(query: Any, key: Any, value: Any, ends: Any, longest: int) -> Any:
    """Compute attention with cuDNN's kernel and as many heads of keys as of queries."""
    groups = query.shape[1] // key.shape[1]
    copies = (part.repeat_interleave(groups, 1) for part in (key, value))
    return _attend_by_cudnn(query, *copies, ends, longest)


def _attend_by_flex(query: Any, key: Any, value: Any, ends: Any, longest: int) -> Any:
    """Compute attention with compiled flex_attention and a mask of documents."""
    attend, mask = _prepare_flex(ends)
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    return attend(*parts, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


_FLEX: dict[str, Any] = {}  # the compiled function, and the mask of the last boundaries


def _prepare_flex(ends: Any) -> tuple[Any, Any]:
    """Return compiled flex_attention and the mask, which all layers of a step would share."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if "attend" not in _FLEX:
        _FLEX["attend"] = torch.compile(flex_attention) if ends.is_cuda else flex_attention
    if _FLEX.get("ends") is not ends:
        tokens = int(ends[-1])
        documents = torch.bucketize(torch.arange(tokens, device=ends.device), ends[1:], right=True)

        def sees(_: Any, __: Any, query: Any, key: Any) -> Any:
            return (documents[query] == documents[key]) & (query >= key)

        _FLEX["mask"] = create_block_mask(sees, None, None, tokens, tokens, device=ends.device)
        _FLEX["ends"] = ends
    return _FLEX["attend"], _FLEX["mask"]


_USED = ("FlashAttention 2", "FlashAttention 3", "FlashAttention 4")  # by runs
_PACKED: dict[str, PackedAttention] = {
    **dict.fromkeys(_USED, _attend_by_varlen),
    "cuDNN": _attend_by_cudnn,
    "cuDNN with repeated keys": _attend_by_cudnn_with_copies,
    "flex": _attend_by_flex,
}


def _time_whole_rows(place: Place, width: int) -> None:
    """Note the speeds of cuDNN and of FlashAttention on rows of one document each."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from lib.parallel import attention_kernel as kernels

    kernels.restore_flash_2()
    parts = [
        part.detach().unflatten(0, (_ROWS, _LENGTH)).transpose(1, 2).requires_grad_()
        for part in _make_parts(place, _ROWS * _LENGTH, width)
    ]
    flops = 3.5 * 2 * HEADS * width * _ROWS * _LENGTH**2  # causal half, forward and backward

    def attend(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, parts, out.detach())

    for name, backend in (
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("FlashAttention 2", SDPBackend.FLASH_ATTENTION),
    ):
        _note_speed(place, f"{name} on rows, {width} wide", partial(attend, backend), flops)
    _note_determinism(place, partial(attend, SDPBackend.FLASH_ATTENTION), width)


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


def boundaries(place: Place) -> None:
    """Time packed attention by the number of documents and by the `longest` given to the kernel.

    Some kernels start thread blocks for `longest` tokens in each document. If `longest` is the
    whole row, most of these blocks have nothing to do. Documents of length 0 stand for the padding
    that a list of boundaries contains.
    """
    from lib.parallel import attention_kernel as kernels

    place.need(place.on_gpu, "a CPU has none of these kernels")
    for width in (128, 64):
        parts = _make_parts(place, _LENGTH, width)
        heads = [part.detach()[:256].transpose(0, 1)[None].requires_grad_() for part in parts]
        for kernel in (None, *kernels.PACKED_KERNELS):
            kernels.restore_flash_2()
            name = kernel.name if kernel else "FlashAttention 2"
            if kernel and (
                reason := "not installed"
                if kernel.find_version() is None
                else kernels.activate(kernel, "varlen", heads)
            ):
                place.note(**{f"{name}, {width} wide": reason})
                continue
            for documents, empty_count in ((1, 0), (16, 0), (16, 112), (64, 0), (128, 0), (512, 0)):
                offsets = _make_offsets(documents, empty_count, _LENGTH)
                for longest in dict.fromkeys((_LENGTH, _LENGTH // documents)):
                    seconds = time_median(
                        place, partial(_run_both_ways, _attend_by_varlen, parts, offsets, longest)
                    )
                    place.note(
                        **{
                            f"{name}, {width} wide, {documents} documents and {empty_count} "
                            f"empty, longest {longest}, ms": 1000 * seconds
                        }
                    )
    kernels.restore_flash_2()


def _make_offsets(documents: int, empty_count: int, length: int) -> Any:
    """Return the int32 offsets of documents of equal length, followed by empty documents."""
    import torch

    offsets = torch.arange(0, length + 1, length // documents, dtype=torch.int32, device="cuda")
    return torch.cat([offsets, offsets[-1:].expand(empty_count)])
