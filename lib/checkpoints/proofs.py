"""What an export of adapters is put to before it is published.

A broken one looks whole: sizes and digests are right where a rank's slice alone was saved, where
alpha was forgotten, or a layer left out. So three things are proved on the files themselves: all of
B that was trained is there, names and shapes are those that will be looked for (adapter_files,
export), and the files compute what the trainer did when it saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.checkpoints import adapter_files, commit, contents
from lib.checkpoints.adapted import AdaptedRun, beside
from lib.checkpoints.export import PieceReader
from lib.core import log, units
from lib.core.errors import ArtifactError
from lib.models import lora
from lib.models.architecture import decoder_layers
from lib.models.stored import StoredModel
from lib.models.streamed import streamed
from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import attention, probe

# Of each optimizer its second moments, by their name, as far as whether they are zero.
_SECOND_MOMENTS = ("exp_avg_sq", "exp_avg_root")
# So many neighbouring rows of B, and such a share of all, are not without gradients by chance.
_FEWEST_LOST = 8
_LOST_SHARE = 0.25
PASSES = 3  # over the tensors of a model, to compute what it computes
# Rounding in each block is independent of that in others, so it grows with the root of their
# number. Of eight families with 2 and 24 blocks it was at most 1.1 × eps × √blocks.
_LIMIT = 2.0
_SUMMED = 1e-5
_SHOWN = 8


def prove(
    adapted: AdaptedRun, out: Path, dtype: torch.dtype, advance: Callable[[int], None]
) -> Iterator[str]:
    """Yield what is proved of an export, in words; raise ArtifactError where something is not so.

    out: the files, of a merged model or an adapter, whose names and shapes have been verified.
    dtype: theirs. advance: called with the numbers of each tensor read, PASSES × those of a model
    in all.
    """
    yield require_trained(adapted)
    yield require_equal(adapted, out, dtype, advance)


def require_trained(adapted: AdaptedRun) -> str:
    """Return in words how much of B was trained; ArtifactError where some of that is lost.

    A row of B that had a gradient has a second moment, and cannot be zero: B is zero at first, and
    a step moves a number that has a gradient. Rows without one are few and scattered, if any; a
    long run of them is a slice that was not saved.
    """
    checkpoint = adapted.checkpoint
    steps = checkpoint.record().get("optimizer_steps", 0)
    wrong = []
    rows = 0
    moved = 0
    is_moved = adapted.options.get("lr") != 0
    with closing(PieceReader(checkpoint.path / commit.TENSORS, False)) as reader:
        for name, tensor in adapted.tensors.items():
            keys = [f"{contents.OPTIMIZER}{kind}.{name}" for kind in _SECOND_MOMENTS]
            key = next((key for key in keys if key in reader.described), None)
            if not name.endswith(f".{lora.B}.weight") or key is None:
                continue
            # Of the experts of a layer, B is [experts, out, rank].
            had_gradient = reader.read([key])[0].flatten(0, -2).ne(0).any(1)
            lost = had_gradient & tensor.flatten(0, -2).eq(0).all(1)
            rows = rows + len(lost)
            moved = moved + int(had_gradient.sum())
            gap = _longest_run(~had_gradient)
            if is_moved and lost.any():
                wrong.append(
                    f"{name}: {units.counted(int(lost.sum()), 'row')} of {len(lost)} "
                    "had a gradient, and all is zero there"
                )
            elif steps and not had_gradient.any():
                log.warn(f"{name} had no gradient in any step, and adds nothing")
            elif steps and gap >= (_suspicious(len(lost)) if tensor.ndim == 2 else len(lost)):
                wrong.append(
                    f"{name}: {gap} of {len(lost)} rows, one after the other, had no "
                    "gradient in any step"
                )
    if wrong:
        raise ArtifactError(
            f"checkpoint {checkpoint.path} lacks a part of its adapters",
            found=units.join_lines(wrong, _SHOWN),
            hint="another checkpoint may be whole: --step N",
        )
    return f"{moved:,} of {rows:,} rows of lora_B had a gradient, and none of these is zero"


def _suspicious(rows: int) -> int:
    """Return of how many neighbours it is not by chance that none had a gradient."""
    return min(rows, max(_FEWEST_LOST, int(rows * _LOST_SHARE)))


def _longest_run(marked: Tensor) -> int:
    """Return how many neighbours are marked at most. marked: bool [rows]."""
    longest = 0
    run = 0
    for mark in marked.tolist():
        run = run + 1 if mark else 0
        longest = max(longest, run)
    return longest


def compute(
    model: PreTrainedModel, read: Callable[[str], Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Return the logits of the probe in float32, one block of the model in memory at a time.

    model: on meta. read: its tensors by name. options: of the run, by which some kinds of RoPE
    choose their frequencies.
    """
    model = copy.deepcopy(model)
    with streamed(model, read):
        attention.settle_rope(model, options["packing"], options["seq_length"])
        return probe.compute(model, torch.device("cpu"))


def compute_files(
    adapted: AdaptedRun, base: Callable[[str], Tensor], out: Path, advance: Callable[[int], None]
) -> Tensor:
    """Return the logits of the probe by what was written: a merged model, or an adapter.

    base: the tensors of the frozen model by name.
    """
    if not (out / adapter_files.CONFIG).exists():
        with StoredModel(adapted.plain, out) as merged:
            return compute(adapted.plain, _counted(merged.read, advance), adapted.options)
    settings, tensors = adapter_files.read_back(adapted.plain, out)
    model = copy.deepcopy(adapted.plain)
    settings.attach(model)
    return compute(model, beside(tensors, base), adapted.options)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return how far logits are from others, as a share of the spread of these.

    found, expected: [positions, sampled]. The root mean square of each position, and the median of
    these: where rounding sends a token to another expert, a few positions are far off.
    """
    return float((found - expected).square().mean(1).sqrt().median() / expected.std())


def require_equal(
    adapted: AdaptedRun, out: Path, dtype: torch.dtype, advance: Callable[[int], None]
) -> str:
    """Return in words how far apart three ways to compute the probe are, and the limits.

    Those are the files in `out`, of a merged model or an adapter; the base with the adapters of the
    checkpoint; and the trainer when it saved, as it has recorded. dtype: of the files. advance:
    called with the parameters of each tensor read. Raises ArtifactError beyond a limit.
    """
    recorded = adapted.checkpoint.record().get("probe")
    with StoredModel(adapted.plain, adapted.base) as base:
        of_base = _counted(base.read, advance)
        expected = compute(adapted.model, beside(adapted.tensors, of_base), adapted.options)
        found = compute_files(adapted, of_base, out, advance)
        without = compute(adapted.plain, of_base, adapted.options)
    pairs = [("the files − base + adapters", found, expected, _rounding(dtype))]
    if recorded:
        trainer = torch.tensor(recorded["logits"])
        if trainer.shape != expected.shape:
            raise ArtifactError(
                f"checkpoint {adapted.checkpoint.path} is not one that stage 04 wrote",
                found=f"a probe of {list(trainer.shape)} logits",
                expected=str(list(expected.shape)),
            )
        own = _rounding(COMPUTE_DTYPES[adapted.options["precision"]])
        pairs += [
            ("base + adapters − the trainer", expected, trainer, own),
            ("the files − the trainer", found, trainer, max(own, _rounding(dtype))),
        ]
    growth = _LIMIT * math.sqrt(len(decoder_layers(adapted.plain)))
    return _compared(
        [(what, difference(one, other), growth * eps) for what, one, other, eps in pairs],
        difference(expected, without),
    )


def _counted(
    read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> Callable[[str], Tensor]:
    """Return what reads the same, and counts the numbers that it has read."""

    def counting(name: str) -> Tensor:
        tensor = read(name)
        advance(tensor.numel())
        return tensor

    return counting


def _compared(pairs: list[tuple[str, float, float]], effect: float) -> str:
    """Return differences and limits in words; ArtifactError when one is beyond its limit.

    effect: how far the adapters move the logits.
    """
    lines = ["differences of logits, as shares of their spread"]
    lines += [f"  {what:<30} {found:.2g}, at most {limit:.2g}" for what, found, limit in pairs]
    if len(pairs) == 1:
        lines.append("  the trainer                    not recorded in this checkpoint")
    is_small = effect < max(limit for *_, limit in pairs)
    lines.append(
        f"  {'base + adapters − base':<30} {effect:.2g}"
        + (", less than rounding may be: this tells little of the adapters" if is_small else "")
    )
    if any(not found <= limit for _, found, limit in pairs):
        raise ArtifactError(
            "what was exported does not compute what was trained",
            found="\n".join(lines),
            expected="no more than rounding may be",
        )
    return "\n".join(lines)


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative error of a number; in float32 that of a sum, in another order."""
    return max(torch.finfo(dtype).eps, _SUMMED)
