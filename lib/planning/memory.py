"""Estimate the memory that a run needs on each GPU, and compare it with what the run took."""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.progress import Progress
from lib.models.architecture import decoder_layers
from lib.parallel import placement
from lib.parallel.degrees import RECOMPUTATIONS
from lib.parallel.placement import ParameterPlacement
from lib.planning import sizes, trace
from lib.planning.child_process import child_context, start_without_gpus
from lib.planning.knobs import cheaper_settings
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import SHARDED

_BATCHES = (1, 2, 4)  # times --batch-size
USABLE = 0.9  # share of memory; the rest: CUDA context, NCCL buffers, fragments
_SHORT = 4  # blocks, traced in place of any number of them
_NAMED = 0.005  # the log leaves out kinds of memory below this share of the total
ESTIMATED_FROM = 20e6  # parameters; libraries take more memory than a smaller model
_PATIENCE_S = 30  # of processor time; a trace takes a few seconds
_GIB = 1 << 30


class Estimates:
    """Estimates the memory of a model's steps, by traces that it caches.

    model: on the meta device, not sharded. If all blocks are alike, a trace covers a few of them.
    progress: counts the traces, which take a second or more each.
    """

    def __init__(self, model: PreTrainedModel, progress: Progress | None = None) -> None:
        self._layers = len(decoder_layers(model))
        short = [trace.shortened(model, _SHORT + more) for more in (0, 1)]
        self._models = [copy.deepcopy(model)] if None in short else short
        self._chunked = trace.makes_loss(self._models[0])
        self._parameters = [
            (name, p.shape, p.element_size(), p.requires_grad)
            for name, p in model.named_parameters()
        ]
        self._traced: dict[StepConfig, StepMemory] = {}
        self._shares: dict[StepConfig, float] = {}
        self._progress = progress

    def step(self, case: StepConfig) -> StepMemory:
        """Return the memory of a step on rank 0, which has the largest shards.

        Compiled blocks without recomputation keep fewer activations: torch's partitioner says
        which.
        """
        step = self._eager_step(replace(case, compiled=False))
        return (
            step.compiled(self.kept_share(case), self._layers)
            if case.compiled and case.recompute == "none"
            else step
        )

    def kept_share(self, case: StepConfig) -> float:
        """Return the share of their activations that compiled blocks keep; 1.0 if unknown."""
        alike = replace(
            case,
            ranks=1,
            shard_size=1,
            batch=1,
            keep_gathered=False,
            offload=False,
            accumulates=False,
            optimizer="",
            recompute="none",
            documents=0,
        )
        if alike not in self._shares:
            self._shares[alike] = trace.kept_when_compiled(self._models[0], alike)
        return self._shares[alike]

    def _eager_step(self, case: StepConfig) -> StepMemory:
        """Return the memory of a step whose blocks are not compiled.

        The number of ranks changes neither the gathered weights nor the activations. For another
        number than that of an earlier trace only the shards differ, which is arithmetic.
        """
        replicated = case.ranks > case.shard_size
        for known, step in self._traced.items():
            if (
                (known.ranks > known.shard_size) == replicated
                and known.shard_size > 1
                and case.shard_size > 1
                and self._dims(known) == self._dims(case)
                and replace(known, ranks=case.ranks, shard_size=case.shard_size) == case
            ):
                now = self._shards(case)
                before = self._shards(known)
                return step.resharded({kind: now[kind] / before[kind] for kind in SHARDED})
        self._traced[case] = self._trace(case)
        return self._traced[case]

    def _trace(self, case: StepConfig) -> StepMemory:
        case = replace(case, chunked=self._chunked)
        if self._progress is not None:
            self._progress.show(f"batch {case.batch}, {case.recompute}")
        with trace.fake_mesh(case.ranks, case.shard_size) as mesh:
            first, *longer = [trace.trace(model, case, mesh) for model in self._models]
        if self._progress is not None:
            self._progress.advance()
        return first.extended(longer[0], self._layers - _SHORT) if longer else first

    def _place(self, case: StepConfig) -> list[ParameterPlacement]:
        """Return how ranks share each parameter."""
        ranks = placement.shard_sizes(case.shard_size)
        return [placement.place(name, shape, ranks) for name, shape, *_ in self._parameters]

    def _dims(self, case: StepConfig) -> list[int]:
        """Return for each parameter the dimension along which it is sharded."""
        return [placed.dim for placed in self._place(case)]

    def _shards(self, case: StepConfig) -> dict[str, float]:
        """Return the size of the first rank's shards, which are the largest, by kind.

        Sizes are bytes for weights, and numbers of elements for gradients and optimizer states,
        which only trained weights have.
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

    gpu_gib: memory of one GPU. shown: show progress while tracing.
    """
    usable = gpu_gib * USABLE
    first = cases[0]
    traced_as = ", traced as bf16" if first.precision == "fp8" else ""
    log.info(
        f"memory per GPU, traced row by row: {first.seq_length:,} tokens per sample, "
        f"{first.precision}{traced_as}; usable are "
        f"{usable:.4g} of {gpu_gib:g} GiB, the rest is for CUDA, NCCL, fragments"
    )
    log.info("  columns: the most of each kind; peak: the most of all kinds together")
    # In a log file the rows themselves show the progress.
    with Progress("tracing steps", None, " traces", shown and sys.stderr.isatty()) as progress:
        estimates = Estimates(model, progress)
        if first.compiled and (share := estimates.kept_share(first)) < 1:
            log.info(
                f"  compiled: without checkpointing, blocks keep {100 * share:.0f} % of what "
                "they keep uncompiled, by torch's partitioner; --compile off estimates without it"
            )
        elif first.compiled:
            log.info("  traced as if not compiled, which needs slightly more")
        for case in cases:
            plain = replace(case, keep_gathered=False)
            _table(plain, estimates, usable)
            if case.keep_gathered:
                whole = sizes.count_gathered(model, case.shard_size, case.precision)
                log.info(
                    "    → all blocks stay gathered, since memory allows it: at most "
                    + units.memory(estimates.step(plain).gathered(whole).total)
                )


def _table(asked: StepConfig, estimates: Estimates, usable: float) -> None:
    """Print the memory for one number of GPUs, by batch and kind of checkpointing."""
    step = estimates.step(asked)
    ranks = asked.ranks
    held = step.largest
    name, unit = ("GiB", _GIB) if step.total >= _GIB / 10 else ("MiB", _GIB >> 10)
    replicas = f" in {ranks // asked.shard_size} replicas" if ranks > asked.shard_size else ""
    states = ", ".join(
        f"{units.memory(held[kind])} {words}"
        for kind, words in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer", "optimizer states"),
        )
    )
    log.info(
        f"  {units.counted(ranks, 'GPU')}{replicas}: {states}"
        f"{', in host memory' if asked.offload else ''}; in {name}:"
    )
    log.info("     batch  checkpointing  activations    loss  gathered    peak")
    for times, kind in product(_BATCHES, RECOMPUTATIONS):
        case = replace(asked, batch=asked.batch * times, recompute=kind)
        _row(case, estimates, usable, unit, case == asked)
    if _peak(step) > usable:
        log.info("    → searching for the nearest setting that fits")
        log.info(f"    → {_nearest(estimates, asked, usable)}")


def _row(case: StepConfig, estimates: Estimates, usable: float, unit: int, asked: bool) -> None:
    """Print the memory of a case. unit: bytes of the unit that the table uses."""
    begins = f"  {'→' if asked else ' '} {case.batch:>6}  {case.recompute:<13}"
    try:
        step = estimates.step(case)
    except RuntimeError as error:  # some families cannot be checkpointed selectively
        log.info(f"{begins}  cannot be traced: {str(error).strip().splitlines()[0]}")
        return
    held = {kind: size / unit for kind, size in step.largest.items()}
    log.info(
        f"{begins}  {held['activations']:11.2f}  {held['loss']:6.2f}  "
        f"{held['gathered']:8.2f}  {step.total / unit:6.2f}  "
        f"{'fits' if _peak(step) <= usable else 'too much'}"
    )


def _nearest(estimates: Estimates, asked: StepConfig, usable: float) -> str:
    """Return the first option, or combination of options, with which the step fits."""
    for setting in cheaper_settings(asked):
        with suppress(RuntimeError):  # as in a row
            if (peak := _peak(estimates.step(setting.case))) <= usable:
                gpus = f" on {setting.case.ranks} GPUs" if setting.more_ranks else ""
                return f"fits with {' '.join(setting.words())}{gpus}: {peak:.3g} GiB"
    return "no option makes it fit: use a smaller model or larger GPUs"


def _peak(step: StepMemory) -> float:
    return step.total / _GIB


class MemoryEstimate:
    """Traces a run's step in a child process, for which the run does not wait.

    Create it before the process group and before the model is sharded, since it may fork. The child
    waits until the ranks have agreed on the step to trace (`begin`). Only rank 0 makes an estimate,
    and none for a model so small that libraries take more memory.
    """

    def __init__(self, model: PreTrainedModel, precision: str) -> None:
        self.gib: float | None = None
        self._traced = "estimated as for bf16" if precision == "fp8" else "estimated"
        self._on_gpu = torch.cuda.is_available()
        context = child_context()
        self._answer, question = context.Pipe()
        self._is_wanted = log.rank() == 0 and model.num_parameters() >= ESTIMATED_FROM
        if not self._is_wanted:
            self._answer.close()
            question.close()
            return
        self._child = context.Process(
            target=_trace, daemon=True, args=(self._answer, question, model)
        )
        try:
            start_without_gpus(self._child)
        except OSError as error:  # no memory for another process, but there may be for a run
            question.send(str(error))
        question.close()

    def __enter__(self) -> MemoryEstimate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, case: StepConfig) -> None:
        """Start the trace of a run."""
        if self._is_wanted:
            with suppress(OSError):  # the child is gone: `report` has its last message
                self._answer.send(case)

    def report(self, wait_s: float = 0.0) -> None:
        """Log the estimate once it is known. wait_s: seconds to wait for it at most."""
        if self._answer.closed or not self._answer.poll(wait_s):
            return
        try:
            answer = self._answer.recv()
        except EOFError:
            answer = "it took too long"
        self._answer.close()
        if isinstance(answer, str):
            log.info(f"memory could not be estimated: {answer}")
            return
        self.gib = sum(answer.values()) / _GIB
        parts = " + ".join(
            f"{units.memory(size)} {kind}"
            for kind, size in answer.items()
            if size >= _NAMED * self.gib * _GIB
        )
        log.info(
            f"memory: at most {units.memory(self.gib * _GIB)} per rank, {self._traced}: {parts}"
        )

    def compared(self, peak: float, before: float) -> str:
        """Return a sentence that compares the peak of the run with the estimate.

        peak, before: GiB; `before` was in use without the model. A run may end before its estimate
        is known; then this waits for it.
        """
        self.report(_PATIENCE_S)
        source = "allocated by torch" if self._on_gpu else "resident"
        own = units.memory((peak - before) * _GIB)
        estimated = ""
        if self._is_wanted and self.gib is None:
            estimated = "; it was not estimated"
        elif self.gib is not None:
            estimated = f"; {units.memory(self.gib * _GIB)} were estimated"
        return (
            f"peak {units.memory(peak * _GIB)} ({source}); {own} without what was in use before "
            f"the model{estimated}"
        )

    def close(self) -> None:
        """Stop waiting for the answer."""
        if self._is_wanted and self._child.pid is not None:
            self._child.kill()


def _trace(others: Connection, question: Connection, model: PreTrainedModel) -> None:
    others.close()  # otherwise this process keeps its own pipe open
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE_S)
    os.nice(10)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of the run's output must not wait for this process
        os.dup2(nowhere, stream)
    try:
        question.send(Estimates(model).step(question.recv()).peak)
    except Exception as error:  # whatever it is, the run continues
        first, *_ = str(error).splitlines() or [""]
        question.send(f"{type(error).__name__}: {first[:200]}")
