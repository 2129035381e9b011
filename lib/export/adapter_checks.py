"""Check an exported adapter before it is published.

A broken export can look intact. Sizes and digests are correct even if only one rank's slice was
saved, alpha was forgotten, or a layer is missing. So the files themselves are checked: all trained
rows of B are present, names and shapes are as loaders expect (adapter_files, formats), and the
values are those of the checkpoint's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from lib.checkpoints import commit, contents
from lib.core import log, units
from lib.core.errors import ArtifactError
from lib.export import adapter_files
from lib.export.lora_run import LoraRun
from lib.export.stored_model import StoredModel
from lib.export.tensor_reader import FullTensorReader
from lib.models import lora, lora_targets
from lib.models.architecture import decoder_layers

# Names of the second moments of each optimizer; only whether they are zero is used.
_SECOND_MOMENTS = ("exp_avg_sq", "exp_avg_root")
_MIN_GAP_ROWS = 8  # of B, without a gradient
_GAP_SHARE = 0.25
_SUM_ERROR = 1e-5  # of a float32 sum in another order
_TINY = 1e-6  # of values that nearly cancel
_SHOWN = 8


def check_adapter(lora_run: LoraRun, out: Path, dtype: torch.dtype) -> None:
    """Check an exported adapter, and log the results.

    out: directory of the adapter, whose names and shapes have been verified. dtype: dtype of the
    exported tensors. Raises ArtifactError if a check fails, and UsageError if the base model was
    replaced meanwhile.
    """
    compared = f"{units.counted(len(lora_run.tensors), 'tensor')} of the adapter"
    _check_export(lora_run, dtype, compared, _compare_adapter(lora_run, out, dtype))


def check_merged(lora_run: LoraRun, out: Path, dtype: torch.dtype) -> None:
    """Check a model with a merged adapter, as `check_adapter` does, in one block.

    In the last block with an adapter each weight must be W + s B A, computed here from the base
    model, up to the rounding of `dtype`.
    """
    names = _select_last_block(lora_run)
    compared = f"{units.counted(len(names), 'weight')} of the last block with an adapter"
    _check_export(lora_run, dtype, compared, _compare_merged(lora_run, names, out, dtype))


def _check_export(
    lora_run: LoraRun, dtype: torch.dtype, compared: str, differences: Iterator[str]
) -> None:
    """Check that an adapter is complete and its export equal. compared: the compared tensors."""
    log.info(f"checked: {_require_trained(lora_run)}")
    if wrong := list(differences):
        raise ArtifactError(
            "the exported files differ from the adapter of the checkpoint",
            found=units.join_lines(wrong, _SHOWN),
            expected=f"{compared}, equal up to the rounding of {str(dtype).partition('.')[2]}",
        )
    log.info(f"checked: {compared}: as in the checkpoint")
    lora_run.base.require_unchanged()


def _require_trained(lora_run: LoraRun) -> str:
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


def _compare_adapter(lora_run: LoraRun, out: Path, dtype: torch.dtype) -> Iterator[str]:
    """Yield a line for each difference between the files of an adapter and the checkpoint."""
    settings, tensors = adapter_files.read_back(lora_run.plain, out)
    if settings.scale != lora_run.lora.scale:
        yield f"the scale is {settings.scale:g} instead of {lora_run.lora.scale:g}"
    for name, tensor in lora_run.tensors.items():
        if not torch.equal(tensors[name], tensor.to(dtype)):
            yield f"{name} has other values"


def _select_last_block(lora_run: LoraRun) -> list[str]:
    """Return the names of A in the last decoder block that has an adapter."""
    suffix = f".{lora.A}.weight"
    factors = [name for name in lora_run.tensors if name.endswith(suffix)]
    blocks = [f"{block}." for block in decoder_layers(lora_run.plain)]
    last = [block for block in blocks if any(name.startswith(block) for name in factors)][-1]
    return [name for name in factors if name.startswith(last)]


def _compare_merged(
    lora_run: LoraRun, names: Sequence[str], out: Path, dtype: torch.dtype
) -> Iterator[str]:
    """Yield a line for each weight of a merged model that is not W + s B A. names: those of A."""
    eps = max(torch.finfo(dtype).eps, _SUM_ERROR)
    with (
        StoredModel(lora_run.plain, lora_run.base.directory) as base,
        StoredModel(lora_run.plain, out) as merged,
    ):
        for name in names:
            weight = lora.name_weight(name)
            b = lora_run.tensors[name.replace(f".{lora.A}.", f".{lora.B}.")]
            product = lora_run.lora.scale * (b @ lora_run.tensors[name])
            before = base.read(weight).float()
            module = lora_run.plain.get_submodule(weight.rpartition(".")[0])
            if lora_targets.is_transposed(module):
                product = product.t()
            expected = before + product
            difference = (merged.read(weight).float() - expected).abs()
            if bool((difference > eps * expected.abs() + _TINY).any()):
                yield f"{weight} differs by up to {float(difference.max()):.2g}"
