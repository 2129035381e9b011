"""Check an exported adapter numerically before it is published.

A broken export can look intact. Sizes and digests are correct even if only one rank's slice was
saved, alpha was forgotten, or a layer is missing. So the files themselves are checked: all trained
rows of B are present, names and shapes are as loaders expect (adapter_files, formats), and the
files compute the same logits as the trainer did when it saved.
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

from lib.checkpoints import commit, contents
from lib.core import log, units
from lib.core.errors import ArtifactError
from lib.export import adapter_files, probe
from lib.export.lora_run import LoraRun, overlay_adapter
from lib.export.stored_model import StoredModel, stream_parts
from lib.export.tensor_reader import FullTensorReader
from lib.models import lora
from lib.models.architecture import decoder_layers
from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import attention
from lib.parallel.trial import SingleDevice

# Names of the second moments of each optimizer; only whether they are zero is used.
_SECOND_MOMENTS = ("exp_avg_sq", "exp_avg_root")
_MIN_GAP_ROWS = 8  # of B, without a gradient
_GAP_SHARE = 0.25
PASSES = 3  # over the tensors of a model, to compute its logits three times
# Rounding errors of the blocks are independent, so their sum grows with the root of the number of
# blocks. In eight model families with 2 and 24 blocks it was at most 1.1 × eps × √blocks.
_LIMIT = 2.0
_SUM_ERROR = 1e-5  # of a float32 sum in another order
_SHOWN = 8


def check_adapter(
    lora_run: LoraRun, out: Path, dtype: torch.dtype, advance: Callable[[int], None]
) -> Iterator[str]:
    """Yield the result of each check as text; raise ArtifactError if a check fails.

    out: directory of a merged model or an adapter, whose names and shapes have been verified.
    dtype: dtype of the exported tensors. advance: called with the number of elements of each tensor
    read; they add up to PASSES times the number of parameters of the model.
    """
    yield require_trained(lora_run)
    yield require_equal_logits(lora_run, out, dtype, advance)


def require_trained(lora_run: LoraRun) -> str:
    """Return how many rows of B were trained, as text; raise ArtifactError if some are lost.

    B starts at zero, and an optimizer step changes every element that has a gradient. So a row of B
    is lost if it is zero but its second moment in the optimizer state is not. Rows that never
    had a gradient are few and scattered; a long run of them is a slice that was not saved.
    """
    checkpoint = lora_run.checkpoint
    steps = checkpoint.record().get("optimizer_steps", 0)
    problems = []
    rows = 0
    trained_rows = 0
    is_trained = lora_run.options.get("lr") != 0
    with closing(FullTensorReader(checkpoint.path / commit.TENSORS, False)) as reader:
        for name, tensor in lora_run.tensors.items():
            keys = [f"{contents.OPTIMIZER}{kind}.{name}" for kind in _SECOND_MOMENTS]
            key = next((key for key in keys if key in reader.described), None)
            if not name.endswith(f".{lora.B}.weight") or key is None:
                continue
            # For experts, B is [experts, out, rank].
            had_gradient = reader.read([key])[0].flatten(0, -2).ne(0).any(1)
            lost = had_gradient & tensor.flatten(0, -2).eq(0).all(1)
            rows += len(lost)
            trained_rows += int(had_gradient.sum())
            gap = _longest_run(~had_gradient)
            if is_trained and lost.any():
                problems.append(
                    f"{name}: {units.counted(int(lost.sum()), 'row')} of {len(lost)} "
                    "had a gradient but are zero"
                )
            elif steps and not had_gradient.any():
                log.warn(f"{name} had no gradient in any step, so it has no effect")
            elif steps and gap >= (_find_gap_limit(len(lost)) if tensor.ndim == 2 else len(lost)):
                problems.append(
                    f"{name}: {gap} of {len(lost)} rows, all adjacent, had no gradient in any step"
                )
    if problems:
        raise ArtifactError(
            f"checkpoint {checkpoint.path} lacks a part of its adapter",
            found=units.join_lines(problems, _SHOWN),
            hint="another checkpoint may be complete: --step N",
        )
    return f"{trained_rows:,} of {rows:,} rows of lora_B had a gradient, and none of them is zero"


def _find_gap_limit(rows: int) -> int:
    """Return the number of adjacent rows without a gradient that cannot be a coincidence."""
    return min(rows, max(_MIN_GAP_ROWS, int(rows * _GAP_SHARE)))


def _longest_run(marked: Tensor) -> int:
    """Return the length of the longest run of marked rows. marked: bool [rows]."""
    longest = 0
    run = 0
    for mark in marked.tolist():
        run = run + 1 if mark else 0
        longest = max(longest, run)
    return longest


def compute_logits(
    model: PreTrainedModel, read: Callable[[str], Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Return the logits of the probe in float32, with one block of the model in memory at a time.

    model: on the meta device. read: returns a tensor by name. options: the run's options. Their
    packing and sequence length determine the frequencies of some kinds of RoPE.
    """
    model = copy.deepcopy(model)
    with stream_parts(model, read):
        attention.fix_rope_frequencies(model, options["packing"], options["seq_length"])
        return probe.compute_logits(model, SingleDevice(torch.device("cpu")))


def compute_exported_logits(
    lora_run: LoraRun, base: Callable[[str], Tensor], out: Path, advance: Callable[[int], None]
) -> Tensor:
    """Return the logits of the probe from the files of an exported model or adapter.

    base: returns a tensor of the base model by name.
    """
    if not (out / adapter_files.CONFIG).exists():
        with StoredModel(lora_run.plain, out) as merged:
            return compute_logits(
                lora_run.plain, _count_reads(merged.read, advance), lora_run.options
            )
    settings, tensors = adapter_files.read_back(lora_run.plain, out)
    model = copy.deepcopy(lora_run.plain)
    settings.attach(model)
    return compute_logits(model, overlay_adapter(tensors, base), lora_run.options)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the difference between logits, relative to the standard deviation of the expected.

    actual, expected: [positions, sampled]. Takes the root mean square per position and the median
    over positions, because rounding can send a few tokens to another expert.
    """
    return float((actual - expected).square().mean(1).sqrt().median() / expected.std())


def require_equal_logits(
    lora_run: LoraRun, out: Path, dtype: torch.dtype, advance: Callable[[int], None]
) -> str:
    """Compare three computations of the probe's logits, and return differences and limits as text.

    The logits come from the exported files in `out`, from the base model with the adapter of the
    checkpoint, and from the trainer when it saved (recorded in the checkpoint). dtype, advance: see
    `check_adapter`. Raises ArtifactError if a limit is exceeded.
    """
    recorded = lora_run.checkpoint.record().get("probe")
    with StoredModel(lora_run.plain, lora_run.base) as base:
        read_base = _count_reads(base.read, advance)
        expected = compute_logits(
            lora_run.model, overlay_adapter(lora_run.tensors, read_base), lora_run.options
        )
        exported = compute_exported_logits(lora_run, read_base, out, advance)
        base_logits = compute_logits(lora_run.plain, read_base, lora_run.options)
    pairs = [("the files − base + adapters", exported, expected, _rounding(dtype))]
    if recorded:
        trainer = torch.tensor(recorded["logits"])
        if trainer.shape != expected.shape:
            raise ArtifactError(
                f"checkpoint {lora_run.checkpoint.path} was not written by stage 04",
                found=f"a probe of {list(trainer.shape)} logits",
                expected=str(list(expected.shape)),
            )
        eps = _rounding(COMPUTE_DTYPES[lora_run.options["precision"]])
        pairs += [
            ("base + adapters − the trainer", expected, trainer, eps),
            ("the files − the trainer", exported, trainer, max(eps, _rounding(dtype))),
        ]
    growth = _LIMIT * math.sqrt(len(decoder_layers(lora_run.plain)))
    return _report_differences(
        [
            (label, relative_difference(actual, reference), growth * eps)
            for label, actual, reference, eps in pairs
        ],
        relative_difference(expected, base_logits),
    )


def _count_reads(
    read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> Callable[[str], Tensor]:
    """Return a function that reads tensors and reports the size of each to `advance`."""

    def read_and_count(name: str) -> Tensor:
        tensor = read(name)
        advance(tensor.numel())
        return tensor

    return read_and_count


def _report_differences(pairs: list[tuple[str, float, float]], effect: float) -> str:
    """Return the differences and limits as text; raise ArtifactError if one exceeds its limit.

    effect: the difference that the adapter makes to the logits.
    """
    lines = ["differences of logits, relative to their standard deviation"]
    lines += [
        f"  {label:<30} {difference:.2g}, at most {limit:.2g}" for label, difference, limit in pairs
    ]
    if len(pairs) == 1:
        lines.append("  the trainer                    not recorded in this checkpoint")
    lines.append(f"  {'base + adapters − base':<30} {effect:.2g}")
    if effect < max(limit for *_, limit in pairs):
        lines[-1] += ", below the rounding limit: the check says little about the adapter"
    if any(not difference <= limit for _, difference, limit in pairs):
        raise ArtifactError(
            "the logits of the exported files differ from those of training",
            found="\n".join(lines),
            expected="differences below the rounding limits",
        )
    return "\n".join(lines)


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding error of a dtype, at least that of a reordered float32 sum."""
    return max(torch.finfo(dtype).eps, _SUM_ERROR)
