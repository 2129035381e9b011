"""Items that compare single computations on the GPU with plain float32 ones, in this process."""

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

BF16_TOLERANCE = (
    1e-2  # relative error that bf16 operands may cause; errors of float32 are far smaller
)
FP32_TOLERANCE = 1e-4


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `expected`."""
    difference = (result.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def loss_head(place: Place) -> None:
    """The chunked loss and its gradients are those of float32 logits, tied or not."""
    for dtype, tolerance in ((torch.bfloat16, BF16_TOLERANCE), (torch.float32, FP32_TOLERANCE)):
        for compiled in place.size((True, False), (False,)):
            errors = _compare_loss_head(place, dtype, compiled)
            place.note(**{f"{dtype}, {'compiled' if compiled else 'eager'}": errors})
            assert max(errors.values()) < tolerance, errors
    for tied in (True, False):
        errors = _compare_model_loss(place, tied)
        place.note(**{f"model, {'tied' if tied else 'untied'}": errors})
        assert errors["loss"] < FP32_TOLERANCE and max(errors.values()) < 3 * BF16_TOLERANCE, errors


def _compare_loss_head(place: Place, dtype: torch.dtype, compiled: bool) -> dict[str, float]:
    from lib.parallel.loss import CHUNK_LOGITS, LossHead
    from lib.tokens.samples import IGNORED

    rows, width, vocabulary = place.size((4096, 2048, 128_256), (600, 64, 1000))
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=place.device, dtype=dtype)
    hidden = torch.randn(2, rows // 2, width, device=place.device, dtype=dtype)
    labels = torch.randint(0, vocabulary, (2, rows // 2), device=place.device)
    labels[:, ::7] = IGNORED
    float32_parts = [hidden.float().requires_grad_(), head.weight.detach().float().requires_grad_()]
    logits = F.linear(*float32_parts).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    reference = torch.autograd.grad(expected * 0.5, float32_parts)
    del logits
    hidden.requires_grad_()
    head.forward = LossHead(
        head,
        place.size(CHUNK_LOGITS["cuda"], rows * vocabulary // 3),
        make_strict_compiler() if compiled else None,
    )
    loss = head.forward.chunked_loss_sum(
        lambda states: SimpleNamespace(logits=head(states)), {"states": hidden}, labels, 0.5
    )
    loss.backward()
    return {
        "loss": abs(loss.item() / expected.item() - 1),
        "gradient of the hidden states": relative_error(hidden.grad, reference[0]),
        "gradient of the weight": relative_error(head.weight.grad, reference[1]),
    }


def make_strict_compiler() -> Any:
    """Return a compiler that every part of a step must use: failing to compile is an error."""
    from lib.parallel.compiling import Compiler

    class Strict(Compiler):
        def for_part(self, part: str) -> Compiler:
            return self

    return Strict(required=True)


def _compare_model_loss(place: Place, tied: bool) -> dict[str, float]:
    """Return relative errors of the chunked loss and its gradients against the model's logits."""
    from lib.parallel import loss

    errors = {}
    with small_model(place, "fp32", tie_word_embeddings=tied) as (model, _, layout):
        batch = make_batch(place, 2, model)
        head = model.get_output_embeddings()
        plain_loss, plain_gradients = _take_gradients(model, batch)
        assert "logits are computed in chunks" in loss.chunk_loss(model, layout), (
            "the output layer makes no loss"
        )
        chunked_loss, gradients = _take_gradients(model, batch)
        assert isinstance(head.forward, loss.LossHead)
        errors["loss"] = abs(chunked_loss / plain_loss - 1)
        errors["gradients"] = max(
            relative_error(gradients[name], plain_gradients[name]) for name in plain_gradients
        )
    return errors


def _take_gradients(model: nn.Module, batch: Any) -> tuple[float, dict[str, Tensor]]:
    from lib.parallel import loss

    total = loss.token_loss_sum(model, batch)
    total.backward()
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return total.item(), gradients


def varlen(place: Place) -> None:
    """Attention over packed documents is that of float32 scores, for several shapes and windows."""
    from transformers import AttentionInterface

    from lib.parallel import attention  # noqa: F401 (it registers the name)

    attend = AttentionInterface()["varlen"]
    lengths = place.size((700, 1, 300, 23), (40, 1, 17, 6))
    offsets = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    dtype = place.size(torch.bfloat16, torch.float32)
    for heads, key_heads, width in ((8, 8, 64), (8, 2, 128), (4, 1, 64), (4, 2, 100)):
        for window, longest in product((None, place.size(128, 9)), (None, max(lengths))):
            torch.manual_seed(0)
            parts = [
                torch.randn(
                    1,
                    head_count,
                    sum(lengths),
                    width,
                    device=place.device,
                    dtype=dtype,
                    requires_grad=True,
                )
                for head_count in (heads, key_heads, key_heads)
            ]
            output, _ = attend(
                None,
                *parts,
                None,
                scaling=width**-0.5,
                sliding_window=window,
                cu_seq_lens_q=offsets,
                **({"max_length_q": longest} if longest else {}),
            )
            float32_parts = [part.detach().float().requires_grad_() for part in parts]
            expected = attend_with_mask(*float32_parts, offsets, window)
            weights = torch.randn_like(expected)
            reference = torch.autograd.grad(expected, float32_parts, weights)
            gradients = torch.autograd.grad(output, parts, weights.to(dtype))
            worst = max(map(relative_error, (output, *gradients), (expected, *reference)))
            place.note(
                **{
                    f"{heads} heads, {key_heads} of keys, {width} wide, window {window}, "
                    f"longest {longest or 'the row'}": worst
                }
            )
            assert worst < 2 * BF16_TOLERANCE, f"relative error {worst}"


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None
) -> Tensor:
    """Return attention with a mask of documents, [1, T, H, D]. query, key, value: [1, H, T, D]."""
    key, value = (
        part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value)
    )
    positions = torch.arange(query.shape[2], device=query.device)
    documents = torch.bucketize(positions, offsets[1:], right=True)
    visible = (documents[:, None] == documents) & (positions[:, None] >= positions)
    if window:
        visible &= positions[:, None] - positions < window
    scores = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(
        ~visible, -torch.inf
    )
    return (scores.softmax(3) @ value).transpose(1, 2)


def bad_steps(place: Place) -> None:
    """A step with NaN or infinity in a gradient leaves weights and state as they are to the bit."""
    from lib.checkpoints import contents
    from lib.optim import registry
    from lib.optim.guard import StepGuard

    for kind in ("adamw", "adamw8bit"):
        for precision in place.size(("bf16", "fp16"), ("fp32",)):
            with small_model(place, precision, kind) as (model, optimizer, layout):
                guard = StepGuard(precision, 30.0, layout.device)
                for bad_value in (0.0, torch.nan, torch.inf, 0.0):
                    loss_scale = compute_gradients(model, make_batch(place, 1, model), guard)
                    if bad_value:
                        next(model.parameters()).grad.to_local().view(-1)[3] = bad_value
                    tensors = contents.name_tensors(model, registry.named_states(model, optimizer))
                    before = {name: local_part(tensor).clone() for name, tensor in tensors.items()}
                    guard.clip(optimizer, 1.0, loss_scale)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    changed = [
                        name
                        for name, tensor in tensors.items()
                        if not torch.equal(local_part(tensor), before[name])
                    ]
                    assert bool(changed) == (bad_value == 0.0), (
                        kind,
                        precision,
                        bad_value,
                        changed[:3],
                    )
                assert guard.count_skipped()[0] == 2
    place.note(skipped="NaN and infinite gradients, adamw and adamw8bit")


def gradient_scale(place: Place) -> None:
    """The norm of the mean gradient does not depend on the number of samples."""
    from lib.optim.guard import StepGuard

    norms: dict[str, list[float]] = {}
    for precision in place.size(("fp32", "bf16", "fp16"), ("fp32", "bf16")):
        with small_model(place, precision) as (model, optimizer, layout):
            for samples in (1, 3, 5):
                guard = StepGuard(precision, 0.0, layout.device)
                loss_scale = compute_gradients(model, make_batch(place, 1, model), guard, samples)
                norms.setdefault(precision, []).append(
                    guard.clip(optimizer, 0.0, loss_scale).item()
                )
                optimizer.zero_grad(set_to_none=True)
    place.note(**{f"norms in {precision}": values for precision, values in norms.items()})
    for precision, values in norms.items():
        assert max(values) / min(values) < 1.001, (precision, values)
        assert abs(values[0] / norms["fp32"][0] - 1) < 0.02, (precision, norms)


def staging(place: Place) -> None:
    """Host copies are pinned, and a step right after the capture does not change them."""
    from lib.checkpoints import contents
    from lib.checkpoints.host_copies import HostCopies
    from lib.checkpoints.snapshot import capture_snapshot
    from lib.optim import registry
    from lib.optim.guard import StepGuard

    changes = place.size({"hidden_size": 1024, "intermediate_size": 4096}, {})
    with small_model(place, place.size("bf16", "fp32"), **changes) as (model, optimizer, layout):
        guard = StepGuard("fp32", 0.0, layout.device)
        copies = HostCopies(optimizer)
        seconds = []
        for number in range(4):
            if number:  # only after the first step, when the optimizer has moments
                began = time.monotonic()
                tensors = contents.name_tensors(model, registry.named_states(model, optimizer))
                snapshot = capture_snapshot(tensors, {"step": number}, {}, layout.device, copies)
                seconds.append(time.monotonic() - began)
                expected = {name: local_part(tensor).clone() for name, tensor in tensors.items()}
            loss_scale = compute_gradients(model, make_batch(place, 1, model), guard)
            guard.clip(optimizer, 1.0, loss_scale)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number:
                snapshot.ready()
                changed = [
                    name
                    for name, tensor in snapshot.tensors.items()
                    if not torch.equal(local_part(tensor), expected[name].cpu())
                ]
                assert not changed, f"copied late: {changed[:3]}"
        large = [
            local_part(tensor)
            for tensor in snapshot.tensors.values()
            if local_part(tensor).ndim > 1
        ]
        assert not place.on_gpu or all(tensor.is_pinned() for tensor in large)
        place.note(tensors=len(expected), bytes=copies.bytes, seconds_of_captures=seconds)
        assert copies.bytes == sum(tensor.nbytes for tensor in expected.values())


def peaks(place: Place) -> None:
    """The listed peak of this GPU is at least what matrix products reach; notes its copy rate."""
    from lib.planning import flops

    peak, source_of_peak = flops.find_peak("bf16") if place.on_gpu else (float("nan"), "")
    size = place.size(8192, 512)
    count = place.size(1 << 30, 1 << 24)
    dtype = place.size(torch.bfloat16, torch.float32)
    left, right = (torch.randn(size, size, device=place.device, dtype=dtype) for _ in range(2))
    product_rate = 2 * size**3 / time_median(place, lambda: left @ right)
    source = torch.randn(count, device=place.device)
    target = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / time_median(place, lambda: target.copy_(source))
    place.note(
        listed_tflops=peak / 1e12,
        where=source_of_peak,
        product_tflops=product_rate / 1e12,
        copy_tb_per_s=copy_rate / 1e12,
    )
    assert not place.on_gpu or product_rate < 1.02 * peak, "the peak for MFU is too low"


def time_median(place: Place, action: Any, repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median of the seconds that an action takes on the device."""
    seconds = []
    for _ in range(repeats + warm_up):
        if place.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if place.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[warm_up:])[repeats // 2]


@contextmanager
def small_model(
    place: Place, precision: str, kind: str = "adamw", **changes: Any
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Any]]:
    """Yield the small model as stage 04 builds it on one rank, its optimizer, and the layout."""
    from lib.models import architecture
    from lib.models.weights import initialise_model
    from lib.optim import registry
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    model = architecture.build_on_meta(place.model("small", **changes), "sdpa")
    layout = ParallelLayout.start()
    try:
        parallelize.shard(model, layout.fsdp, precision)
        parallelize.materialise_model(model, layout.device, offload=False)
        initialise_model(model, 0)
        yield model, registry.build_optimizer(kind, model, 1e-3), layout
    finally:
        layout.stop()


def make_batch(place: Place, rows: int, model: nn.Module) -> Any:
    """Return a MicroBatch of random tokens; each call returns the same ones."""
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


def compute_gradients(model: nn.Module, batch: Any, guard: Any, samples: int = 1) -> Any:
    """Compute gradients of the mean over `samples` copies of a batch; return their LossScale."""
    from lib.parallel import loss

    loss_scale = guard.scale_for(samples * batch.labels.numel())
    for index in range(samples):
        model.set_requires_all_reduce(index == samples - 1)
        loss.token_loss_sum(model, batch, loss_scale.loss).backward()
    return loss_scale


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; a tensor without shards as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
