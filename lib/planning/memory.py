"""Estimate the memory that a run needs on each GPU, and compare it with what the run took."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lib.core import log, units
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.models.architecture import decoder_layers
from lib.models.options import FLOAT8_RECIPES
from lib.optim.optimizers import Choice
from lib.parallel import placement
from lib.parallel.degrees import RECOMPUTATIONS
from lib.parallel.placement import ParameterPlacement
from lib.planning import sizes, trace
from lib.planning.child_process import NoAnswer, TracingProcess
from lib.planning.knobs import cheaper_settings
from lib.planning.longest import describe_longest
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import SHARDED, Bytes
from lib.planning.update import add_update, trace_update

_BATCH_FACTORS = (1, 2, 4)  # of --batch-size, in the rows of the table
USABLE = 0.9  # share of memory; the rest: CUDA context, NCCL buffers, fragments
_SHORT = 3  # number of blocks to trace if the model has more
_NAMED = 0.005  # the log leaves out kinds of memory below this share of the total
ESTIMATED_FROM = 20e6  # parameters; libraries need more memory than a smaller model
_PATIENCE_S = 30  # of processor time; a trace takes a few seconds
_GIB = 1 << 30


class Estimates:
    """Estimates the memory of a model's steps from traces, which it caches.

    model: on the meta device, not sharded. If all blocks are alike, only a few of them are traced.
    progress: shows the traces, which take a second or more each.
    """

    def __init__(self, model: PreTrainedModel, progress: Progress | None = None) -> None:
        self._layers = len(decoder_layers(model))
        short_models = [trace.shorten_model(model, _SHORT + more) for more in (0, 1)]
        self._models = [copy.deepcopy(model)] if None in short_models else short_models
        self._is_chunked = trace.returns_head_result(self._models[0])
        self._parameters = [
            (name, p.shape, p.element_size(), p.requires_grad)
            for name, p in model.named_parameters()
        ]
        self._traced: dict[StepConfig, StepMemory] = {}
        self._model = model
        self._updates: dict[tuple[object, ...], Bytes] = {}
        self._shares: dict[StepConfig, float] = {}
        self._progress = progress

    def step(self, case: StepConfig) -> StepMemory:
        """Return the memory of a step on rank 0, which has the largest shards."""
        step = self._eager_step(replace(case, compiled=False))
        if case.optimizer.spec.is_joint:
            step = add_update(step, self._update(case))
        return (
            step.with_compiled_blocks(self.estimate_kept_share(case), self._layers)
            if case.compiled and case.recompute == "none"
            else step
        )

    def estimate_kept_share(self, case: StepConfig) -> float:
        """Estimate the share of their activations that compiled blocks keep; 1.0 if unknown."""
        key = replace(  # without the settings that do not change the share
            case,
            seq_length=case.size.length_per_device,
            context=1,
            ranks=1,
            shard_size=1,
            batch=1,
            keep_gathered=False,
            offload=False,
            activation_offload=False,
            accumulates=False,
            optimizer=Choice(),
            recompute="none",
            documents=0,
        )
        if key not in self._shares:
            self._shares[key] = trace.estimate_kept_share(self._models[0], key)
        return self._shares[key]

    def _eager_step(self, case: StepConfig) -> StepMemory:
        """Return the memory of a step whose blocks are not compiled.

        The number of ranks changes neither the gathered weights nor the activations. So the memory
        for another number of ranks follows from an earlier trace and the sizes of the shards.
        """
        is_replicated = case.ranks > case.shard_size
        for traced, step in self._traced.items():
            if (
                (traced.ranks > traced.shard_size) == is_replicated
                and traced.shard_size > 1
                and case.shard_size > 1
                and self._dims(traced) == self._dims(case)
                and replace(traced, ranks=case.ranks, shard_size=case.shard_size) == case
            ):
                sizes_now = self._shard_sizes(case)
                sizes_traced = self._shard_sizes(traced)
                return step.with_shards(
                    {kind: sizes_now[kind] / sizes_traced[kind] for kind in SHARDED}
                )
        self._traced[case] = self._trace(case)
        return self._traced[case]

    def _trace(self, case: StepConfig) -> StepMemory:
        case = replace(case, chunked=self._is_chunked)
        if self._progress is not None:
            self._progress.show(f"batch {case.batch}, {case.recompute}")
        with log.muted(), trace.fake_mesh(case.ranks, case.shard_size) as mesh:
            first, *longer = [trace.trace_step(model, case, mesh) for model in self._models]
        if self._progress is not None:
            self._progress.advance()
        return first.with_more_blocks(longer[0], self._layers - _SHORT) if longer else first

    def _update(self, case: StepConfig) -> Bytes:
        """Return the memory of an update of all blocks."""
        key = (case.ranks, case.shard_size, case.precision, case.offload, case.optimizer)
        if key not in self._updates:
            with log.muted(), trace.fake_mesh(case.ranks, case.shard_size) as mesh:
                self._updates[key] = trace_update(self._model, case, mesh)
        return self._updates[key]

    def _place(self, case: StepConfig) -> list[ParameterPlacement]:
        """Return how ranks share each parameter."""
        ranks = placement.shard_sizes(case.shard_size)
        return [
            placement.place_parameter(name, shape, ranks) for name, shape, *_ in self._parameters
        ]

    def _dims(self, case: StepConfig) -> list[int]:
        """Return for each parameter the dimension along which it is sharded."""
        return [placed.dim for placed in self._place(case)]

    def _shard_sizes(self, case: StepConfig) -> dict[str, float]:
        """Return the size of the first rank's shards, which are the largest, by kind.

        Sizes are in bytes for weights, and in elements for gradients and optimizer states, which
        only trained weights have.
        """
        weights = 0.0
        trained = 0.0
        for (_, shape, size, is_trained), placed in zip(
            self._parameters, self._place(case), strict=True
        ):
            elements = math.prod(shape) / placed.ranks * placed.largest
            weights += elements * size
            trained += elements if is_trained else 0.0
        return {kind: weights if kind == "parameters" else trained for kind in SHARDED}


def print_memory_table(
    model: PreTrainedModel, cases: Sequence[StepConfig], gpu_gib: float, shown: bool
) -> None:
    """Print the memory that each case needs on a GPU, and the nearest setting that fits.

    gpu_gib: memory of one GPU in GiB. shown: show the progress of the traces.
    """
    usable_gib = gpu_gib * USABLE
    first = cases[0]
    traced_as = ", traced as bf16" if first.precision in FLOAT8_RECIPES else ""
    log.info(
        f"memory per GPU, traced row by row: {first.seq_length:,} tokens per sample, "
        f"{first.precision}{traced_as}; tensors may "
        f"take {usable_gib:.4g} of {gpu_gib:g} GiB. The rest is for CUDA, NCCL and fragmentation"
    )
    log.info("  columns: the maximum of each kind; peak: the maximum of their sum")
    # In a log file the rows themselves show the progress.
    with Progress("tracing steps", None, " traces", shown and sys.stderr.isatty()) as progress:
        estimates = Estimates(model, progress)
        if first.compiled and (share := estimates.estimate_kept_share(first)) < 1:
            log.info(
                f"  compiled: without checkpointing, blocks keep {100 * share:.0f} % of their "
                "activations, by torch's partitioner; --compile off estimates uncompiled blocks"
            )
        elif first.compiled:
            log.info("  estimated as if not compiled, which needs slightly more memory")
        for case in cases:
            plain = replace(case, keep_gathered=False)
            _print_table(plain, estimates, usable_gib, model.config)
            if case.keep_gathered:
                gathered = sizes.count_gathered(model, case.shard_size, case.precision)
                log.info(
                    "    → all blocks stay gathered, since memory allows it: at most "
                    + units.memory(estimates.step(plain).with_gathered_weights(gathered).total)
                )


def _print_table(
    chosen_step: StepConfig, estimates: Estimates, usable_gib: float, config: PretrainedConfig
) -> None:
    """Print the memory for one number of GPUs, by batch size and activation checkpointing."""
    step = estimates.step(chosen_step)
    ranks = chosen_step.ranks
    largest = step.largest
    name, unit = ("GiB", _GIB) if step.total >= _GIB / 10 else ("MiB", _GIB >> 10)
    replicas = (
        f" in {ranks // chosen_step.shard_size} replicas" if ranks > chosen_step.shard_size else ""
    )
    states = ", ".join(
        f"{units.memory(largest[kind])} {words}"
        for kind, words in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer", "optimizer states"),
        )
    )
    if chosen_step.context > 1:
        replicas += f", {chosen_step.context} for each sample"
    log.info(
        f"  {units.counted(ranks, 'GPU')}{replicas}: {states}"
        f"{', in host memory' if chosen_step.offload else ''}; in {name}:"
    )
    log.info("     batch  checkpointing  activations    loss  gathered    peak")
    for factor, kind in product(_BATCH_FACTORS, RECOMPUTATIONS):
        case = replace(
            chosen_step,
            batch=chosen_step.batch * factor,
            recompute=kind,
            activation_offload=chosen_step.activation_offload and kind == "full",
        )
        _print_row(case, estimates, usable_gib, unit, is_asked=case == chosen_step)
    if _peak_gib(step) > usable_gib:
        log.info("    → searching for the nearest setting that fits")
        log.info(f"    → {_describe_nearest(estimates, chosen_step, usable_gib)}")
    if longest := describe_longest(estimates.step, chosen_step, usable_gib * _GIB, config):
        log.info(f"    → {longest}")


def _print_row(
    case: StepConfig, estimates: Estimates, usable_gib: float, unit: int, is_asked: bool
) -> None:
    """Print the memory of a case. unit: bytes of the unit that the table uses."""
    begin = f"  {'→' if is_asked else ' '} {case.batch:>6}  {case.recompute:<13}"
    try:
        step = estimates.step(case)
    except RuntimeError as error:  # as in `_describe_nearest`
        log.info(f"{begin}  cannot be traced: {str(error).strip().splitlines()[0]}")
        return
    largest = {kind: size / unit for kind, size in step.largest.items()}
    log.info(
        f"{begin}  {largest['activations']:11.2f}  {largest['loss']:6.2f}  "
        f"{largest['gathered']:8.2f}  {step.total / unit:6.2f}  "
        f"{'fits' if _peak_gib(step) <= usable_gib else 'too much'}"
    )


def _describe_nearest(estimates: Estimates, chosen_step: StepConfig, usable_gib: float) -> str:
    """Return a text with the least costly setting that fits."""
    for setting in cheaper_settings(chosen_step):
        # Some families cannot be checkpointed selectively, or their samples not divided so.
        with suppress(RuntimeError, UsageError):
            if (peak := _peak_gib(estimates.step(setting.case))) <= usable_gib:
                gpus = f" on {setting.case.ranks} GPUs" if setting.more_ranks else ""
                return f"fits with {' '.join(setting.words())}{gpus}: {peak:.3g} GiB"
    return "no option makes it fit: use a smaller model or larger GPUs"


def _peak_gib(step: StepMemory) -> float:
    return step.total / _GIB


class MemoryEstimate:
    """Traces a run's step in a child process, for which the run does not wait.

    Create it before the process group and before the model is sharded, since it may fork. The child
    process waits until the ranks have agreed on the step to trace (`begin`). Only rank 0 makes an
    estimate, and only for a model that takes more memory than the libraries.
    """

    def __init__(self, model: PreTrainedModel, precision: str) -> None:
        """Start the child process if an estimate is to be made.

        precision: a value of --precision. fp8 is estimated as bf16, and reported as such.
        """
        self.gib: float | None = None
        self._verb = "estimated as for bf16" if precision in FLOAT8_RECIPES else "estimated"
        self._on_gpu = torch.cuda.is_available()
        self._process: TracingProcess[Bytes] | None = None
        self._is_awaited = log.rank() == 0 and model.num_parameters() >= ESTIMATED_FROM
        if self._is_awaited:
            self._process = TracingProcess(
                _trace_peak, model, patience_s=_PATIENCE_S, in_background=True
            )

    def __enter__(self) -> MemoryEstimate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, case: StepConfig) -> None:
        """Start the trace of a step."""
        if self._process is not None:
            self._process.begin(case)

    def report(self, wait_s: float = 0.0) -> None:
        """Log the estimate once it is known. wait_s: seconds to wait for it at most."""
        if self._process is None or not self._is_awaited or not self._process.has_answer(wait_s):
            return
        self._is_awaited = False
        try:
            peak = self._process.result()
        except NoAnswer as error:
            log.detail(f"memory could not be estimated: {error}")
            return
        total = sum(peak.values())
        self.gib = total / _GIB
        parts = " + ".join(
            f"{units.memory(size)} {kind}" for kind, size in peak.items() if size >= _NAMED * total
        )
        log.detail(f"memory: at most {units.memory(total)} per rank, {self._verb}: {parts}")

    def describe_peak(self, peak: float, before: float) -> str:
        """Return a sentence that compares the peak of the run with the estimate.

        peak: GiB in use at the peak of the run. before: GiB in use before the model was loaded. If
        the run ends before the estimate is known, wait for it.
        """
        self.report(_PATIENCE_S)
        source = "allocated by torch" if self._on_gpu else "resident"
        estimate = ""
        if self.gib is not None:
            estimate = f"; {units.memory(self.gib * _GIB)} were estimated"
        elif self._process is not None:
            estimate = "; it was not estimated"
        return (
            f"peak {units.memory(peak * _GIB)} ({source}); {units.memory((peak - before) * _GIB)} "
            f"without what was in use before the model{estimate}"
        )

    def close(self) -> None:
        """Stop waiting for the estimate, and end the child process."""
        self._is_awaited = False
        if self._process is not None:
            self._process.close()


def _trace_peak(model: PreTrainedModel, case: StepConfig) -> Bytes:
    return Estimates(model).step(case).peak
