"""Items that compute in their own process: numbers of the GPU against float32 by plain means."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.place import Place

ROUNDED = 1e-2  # relative error that bf16 operands may cause; float32 stays far below it
EXACT = 1e-4


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to that of what is expected."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def loss_head(place: Place) -> None:
    """The output layer's own loss and gradients against those of float32 logits, tied and not."""
    for dtype, most in ((torch.bfloat16, ROUNDED), (torch.float32, EXACT)):
        for compiled in place.size((True, False), (False,)):
            found = _loss_head_alone(place, dtype, compiled)
            place.note(**{f"{dtype}, {'compiled' if compiled else 'eager'}": found})
            assert max(found.values()) < most, found
    for tied in (True, False):
        found = _loss_of_model(place, tied)
        place.note(**{f"model, {'tied' if tied else 'untied'}": found})
        assert found["loss"] < EXACT and max(found.values()) < 3 * ROUNDED, found


def _loss_head_alone(place: Place, dtype: torch.dtype, compiled: bool) -> dict[str, float]:
    from lib.parallel.loss import CHUNK_LOGITS, LossHead
    from lib.tokens.samples import IGNORED

    rows, width, vocabulary = place.size((4096, 2048, 128_256), (600, 64, 1000))
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=place.device, dtype=dtype)
    hidden = torch.randn(2, rows // 2, width, device=place.device, dtype=dtype)
    labels = torch.randint(0, vocabulary, (2, rows // 2), device=place.device)
    labels[:, ::7] = IGNORED
    plain = [hidden.float().requires_grad_(), head.weight.detach().float().requires_grad_()]
    logits = F.linear(*plain).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    wanted = torch.autograd.grad(expected * 0.5, plain)
    del logits
    hidden.requires_grad_()
    head.forward = LossHead(
        head,
        place.size(CHUNK_LOGITS["cuda"], rows * vocabulary // 3),
        strict_compiler() if compiled else None,
    )
    loss = head.forward.loss_sum(
        lambda states: SimpleNamespace(logits=head(states)), {"states": hidden}, labels, 0.5
    )
    loss.backward()
    return {
        "loss": abs(loss.item() / expected.item() - 1),
        "gradient of the hidden states": error(hidden.grad, wanted[0]),
        "gradient of the weight": error(head.weight.grad, wanted[1]),
    }


def strict_compiler() -> Any:
    """Return a compiler that no part of a step may do without: a failure is an error."""
    from lib.parallel.compiling import Compiler

    class Strict(Compiler):
        def for_part(self, part: str) -> Compiler:
            return self

    return Strict(required=True)


def _loss_of_model(place: Place, tied: bool) -> dict[str, float]:
    """Return how far the loss in the output layer is from that of the same model's logits."""
    from lib.parallel import loss

    found = {}
    with trained(place, "fp32", tie_word_embeddings=tied) as (model, _, layout):
        batch = tokens(place, 2, model)
        head = model.get_output_embeddings()
        plain, expected = _gradients(model, batch)
        assert "never exist" in loss.chunk_loss(model, layout), "the output layer makes no loss"
        chunked, gradients = _gradients(model, batch)
        assert isinstance(head.forward, loss.LossHead)
        found["loss"] = abs(chunked / plain - 1)
        found["gradients"] = max(error(gradients[name], expected[name]) for name in expected)
    return found


def _gradients(model: nn.Module, batch: Any) -> tuple[float, dict[str, Tensor]]:
    from lib.parallel import loss

    total = loss.token_loss_sum(model, batch)
    total.backward()
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return total.item(), gradients


def varlen(place: Place) -> None:
    """Attention over packed documents against float32 scores, by heads, sizes and windows."""
    from transformers import AttentionInterface

    from lib.parallel import attention  # noqa: F401 (it registers the name)

    attend = AttentionInterface()["varlen"]
    lengths = place.size((700, 1, 300, 23), (40, 1, 17, 6))
    ends = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    dtype = place.size(torch.bfloat16, torch.float32)
    for heads, shared, width in ((8, 8, 64), (8, 2, 128), (4, 1, 64), (4, 2, 100)):
        for window, longest in product((None, place.size(128, 9)), (None, max(lengths))):
            torch.manual_seed(0)
            parts = [
                torch.randn(
                    1, n, sum(lengths), width, device=place.device, dtype=dtype, requires_grad=True
                )
                for n in (heads, shared, shared)
            ]
            out, _ = attend(
                None,
                *parts,
                None,
                scaling=width**-0.5,
                sliding_window=window,
                cu_seq_lens_q=ends,
                **({"max_length_q": longest} if longest else {}),
            )
            plain = [part.detach().float().requires_grad_() for part in parts]
            expected = _attended(*plain, ends, window)
            weights = torch.randn_like(expected)
            wanted = torch.autograd.grad(expected, plain, weights)
            found = torch.autograd.grad(out, parts, weights.to(dtype))
            worst = max(map(error, (out, *found), (expected, *wanted)))
            place.note(
                **{
                    f"{heads} heads, {shared} of keys, {width} wide, window {window}, "
                    f"longest {longest or 'the row'}": worst
                }
            )
            assert worst < 2 * ROUNDED, f"relative error {worst}"


def _attended(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, window: int | None
) -> Tensor:
    """Attend with a mask of documents. query: [1, H, T, D]; returns [1, T, H, D]."""
    key, value = (
        part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value)
    )
    at = torch.arange(query.shape[2], device=query.device)
    of = torch.bucketize(at, ends[1:], right=True)
    seen = (of[:, None] == of) & (at[:, None] >= at)
    if window:
        seen &= at[:, None] - at < window
    scores = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(3) @ value).transpose(1, 2)


def bad_steps(place: Place) -> None:
    """A step whose gradient holds a NaN or an infinity changes no bit, with each optimizer."""
    from lib.checkpoints import contents
    from lib.optim import registry
    from lib.optim.guard import StepGuard

    for kind in ("adamw", "adamw8bit"):
        for precision in place.size(("bf16", "fp16"), ("fp32",)):
            with trained(place, precision, kind) as (model, optimizer, layout):
                guard = StepGuard(precision, 30.0, layout.device)
                for bad in (0.0, torch.nan, torch.inf, 0.0):
                    scaled = backward(model, tokens(place, 1, model), guard)
                    if bad:
                        next(model.parameters()).grad.to_local().view(-1)[3] = bad
                    tensors = contents.name_tensors(model, registry.named_states(model, optimizer))
                    before = {name: local(t).clone() for name, t in tensors.items()}
                    guard.clip(optimizer, 1.0, scaled)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    changed = [
                        name
                        for name, t in tensors.items()
                        if not torch.equal(local(t), before[name])
                    ]
                    assert bool(changed) == (bad == 0.0), (kind, precision, bad, changed[:3])
                assert guard.count_skipped()[0] == 2
    place.note(skipped="NaN and infinite gradients, adamw and adamw8bit")


def gradient_scale(place: Place) -> None:
    """The norm of the mean gradient does not depend on how many samples it is the mean of."""
    from lib.optim.guard import StepGuard

    norms: dict[str, list[float]] = {}
    for precision in place.size(("fp32", "bf16", "fp16"), ("fp32", "bf16")):
        with trained(place, precision) as (model, optimizer, layout):
            for samples in (1, 3, 5):
                guard = StepGuard(precision, 0.0, layout.device)
                scaled = backward(model, tokens(place, 1, model), guard, samples)
                norms.setdefault(precision, []).append(guard.clip(optimizer, 0.0, scaled).item())
                optimizer.zero_grad(set_to_none=True)
    place.note(**{f"norms in {precision}": found for precision, found in norms.items()})
    for precision, found in norms.items():
        assert max(found) / min(found) < 1.001, (precision, found)
        assert abs(found[0] / norms["fp32"][0] - 1) < 0.02, (precision, norms)


def staging(place: Place) -> None:
    """Copies in host memory are those of before the step that follows at once, and pinned."""
    from lib.checkpoints import contents
    from lib.checkpoints.host_copies import HostCopies
    from lib.checkpoints.snapshot import capture_snapshot
    from lib.optim import registry
    from lib.optim.guard import StepGuard

    changes = place.size({"hidden_size": 1024, "intermediate_size": 4096}, {})
    with trained(place, place.size("bf16", "fp32"), **changes) as (model, optimizer, layout):
        guard = StepGuard("fp32", 0.0, layout.device)
        copies = HostCopies(optimizer)
        seconds = []
        for number in range(4):
            if number:  # a capture after the first step: there are moments then
                began = time.monotonic()
                tensors = contents.name_tensors(model, registry.named_states(model, optimizer))
                snapshot = capture_snapshot(tensors, {"step": number}, {}, layout.device, copies)
                seconds.append(time.monotonic() - began)
                expected = {name: local(tensor).clone() for name, tensor in tensors.items()}
            scaled = backward(model, tokens(place, 1, model), guard)
            guard.clip(optimizer, 1.0, scaled)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number:
                snapshot.ready()
                other = [
                    name
                    for name, tensor in snapshot.tensors.items()
                    if not torch.equal(local(tensor), expected[name].cpu())
                ]
                assert not other, f"copied late: {other[:3]}"
        large = [local(tensor) for tensor in snapshot.tensors.values() if local(tensor).ndim > 1]
        assert not place.on_gpu or all(tensor.is_pinned() for tensor in large)
        place.note(tensors=len(expected), bytes=copies.bytes, seconds_of_captures=seconds)
        assert copies.bytes == sum(tensor.nbytes for tensor in expected.values())


def peaks(place: Place) -> None:
    """The listed peak of this GPU beside the products and copies that it does."""
    from lib.planning import flops

    listed, where = flops.device_peak(torch.device(place.device), place.size("bf16", "fp32"))
    size = place.size(8192, 512)
    count = place.size(1 << 30, 1 << 24)
    dtype = place.size(torch.bfloat16, torch.float32)
    a, b = (torch.randn(size, size, device=place.device, dtype=dtype) for _ in range(2))
    product = 2 * size**3 / median_s(place, lambda: a @ b)
    source = torch.randn(count, device=place.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_s(place, lambda: target.copy_(source))
    place.note(
        listed_tflops=listed / 1e12,
        where=where,
        product_tflops=product / 1e12,
        copy_tb_per_s=copied / 1e12,
    )
    assert not place.on_gpu or product < 1.02 * listed, "the peak for MFU is too low"


def median_s(place: Place, work: Any, times: int = 20) -> float:
    """Return the median of the seconds that some work takes on the device."""
    took = []
    for _ in range(times + 3):
        if place.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if place.on_gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return sorted(took[3:])[times // 2]


@contextmanager
def trained(
    place: Place, precision: str, kind: str = "adamw", **changes: Any
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Any]]:
    """Give the small model as stage 04 makes it on one rank, its optimizer, and the layout."""
    from lib.models import architecture
    from lib.models.weights import initialise
    from lib.optim import registry
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    model = architecture.build_on_meta(place.model("small", **changes), "sdpa")
    layout = ParallelLayout.start()
    try:
        parallelize.shard(model, layout.fsdp, precision)
        parallelize.materialise(model, layout.device, offload=False)
        initialise(model, 0)
        yield model, registry.build_optimizer(kind, model, 1e-3), layout
    finally:
        layout.stop()


def tokens(place: Place, rows: int, model: nn.Module) -> Any:
    """Return the same made-up batch each time."""
    from lib.parallel.trial import SingleDevice
    from lib.tokens.batches import MicroBatch

    ids = torch.randint(
        0,
        model.config.vocab_size,
        (rows, place.size(1025, 65)),
        generator=torch.Generator().manual_seed(0),
    )
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(
        SingleDevice(torch.device(place.device))
    )


def backward(model: nn.Module, batch: Any, guard: Any, samples: int = 1) -> Any:
    """Compute gradients of a mean over `samples` times a batch; return their LossScale."""
    from lib.parallel import loss

    scaled = guard.scale_for(samples * batch.labels.numel())
    for number in range(samples):
        model.set_requires_all_reduce(number == samples - 1)
        loss.token_loss_sum(model, batch, scaled.loss).backward()
    return scaled


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
