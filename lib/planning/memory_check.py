"""Check that a run fits in memory, and choose the batch and recomputation that are left open.

The check runs before any text is tokenised and before any memory is taken. It refuses a run if
its weights, gradients and optimizer states alone are too large, or if a traced step is too large
even without the overhead of the allocator and of libraries. It warns about a run that comes close
to the limit. Most runs of small models fit so clearly that no trace is needed.

The size of the micro-batch and the recomputation do not change what a model learns, as long as a
step has the same samples. Recomputation costs time (about 5 % if selective, 30 % if full). So do
micro-batches with few tokens, since a GPU then waits for its memory. The check chooses the least
recomputation with which a micro-batch has enough tokens to keep the device busy, and otherwise the
largest micro-batch. Spare memory is used to communicate less, which gains a few percent at most.
First, from four nodes on, each node gets a replica of the model. Then weights stay gathered
throughout a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.models.sharded import describe_size
from lib.planning import capacity, sizes
from lib.planning.child_process import NoAnswer, Result, in_child_process
from lib.planning.knobs import RECOMPUTE_OPTION, Alternative, cheaper_settings
from lib.planning.memory import USABLE, Estimates
from lib.planning.trace import StepConfig, StepMemory, gathers_keys
from lib.planning.tracker import OFFLOADED, Bytes

# Tokens of a micro-batch, on a GPU (True) and on a CPU. With fewer than FEW the device waits for
# its memory; more than ENOUGH hardly help.
FEW = {True: 1 << 13, False: 0}
ENOUGH = {True: 1 << 15, False: 1 << 11}

_MASK_BYTES = 8  # for each pair of tokens in a sample, if attention takes a mask
# The share of memory that a traced step may take, and bytes to subtract from it, on a GPU (True)
# and on a CPU. On a GPU the rest is for CUDA, NCCL and fragmentation. On a CPU it is for freed
# blocks that glibc keeps and for libraries that load later: 430 to 1,034 MiB were resident where
# 229 to 762 were traced.
_USABLE = {True: (USABLE, 0), False: (0.85, 200 << 20)}
# A trace is too high by at most this factor. For a GPU, tests/gpu checks that; on a CPU a run
# always took more than the trace (benchmarks/results/train.md).
_MAX_EXCESS = {True: 1.1, False: 1.0}
_PATIENCE_S = 180  # for all traces of a choice, which take some seconds each
# The share of memory that gathered weights may take for a whole step. This saves a few percent of
# the time. The rest is for larger batches, and a margin for the errors of the estimate.
KEPT_SHARE = 0.15
_SAFETY = 4  # a step that fits with this multiple of the estimated activations is not traced


@dataclass
class MemoryCheck:
    """Compares the memory that a rank needs with the memory that it has.

    room: bytes on its device. host: bytes of host memory. swap: the part of `room` that is on a
    disk; a run may use it, but the choice of options does not count on it. known: steps traced so
    far. estimates: made in a child process, see `in_child`. unanswered: why no further step is
    traced, or "".
    """

    model: PreTrainedModel
    room: float
    host: float
    on_gpu: bool
    known: dict[StepConfig, StepMemory] = field(default_factory=dict)
    estimates: Estimates | None = None
    swap: float = 0.0
    unanswered: str = ""

    @classmethod
    def for_this_rank(cls, model: PreTrainedModel) -> MemoryCheck:
        """Return the check for this rank's device."""
        device = capacity.get_device()
        return cls(
            model,
            capacity.count_free(device),
            capacity.count_free(torch.device("cpu")),
            device.type == "cuda",
            swap=capacity.count_free_swap(device),
        )

    def in_child(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Run a tracing method of this class in a child process and return its result.

        Raises NoAnswer if the child process fails. Later calls raise it immediately, since the
        first attempt may have taken minutes.
        """
        if self.unanswered:
            raise NoAnswer(self.unanswered)
        try:
            result, known = in_child_process(
                _call_with_traces, self, method, arguments, patience_s=_PATIENCE_S
            )
        except NoAnswer as error:
            self.unanswered = str(error)
            raise
        self.known |= known
        return result

    def is_easy(self, case: StepConfig) -> bool:
        """Return whether a step clearly fits, judging by the shape of the model alone."""
        states = sum(self.count_states(case).values())
        activations, gathered = sizes.estimate_activations(self.model, case.tokens, case.precision)
        if case.keep_gathered:
            gathered += self.count_gathered(case)
        may_mask = case.masked or gathers_keys(self.model, case)
        masks = _MASK_BYTES * case.batch * case.seq_length**2 if may_mask else 0
        on_device = 0 if case.offload else states
        return (
            states <= USABLE * self.state_memory(case)
            and self._has_host_memory(case, USABLE)
            and self.model.config._attn_implementation != "eager"
            and on_device + gathered + _SAFETY * activations + masks <= self.usable
        )

    def fits(self, case: StepConfig) -> bool:
        """Return whether a step fits with a margin. Traces it unless that is already clear.

        A step that cannot be traced does not fit: some families do not support selective
        activation checkpointing, and ranks cannot share the attention heads of some models.
        """
        with suppress(UsageError):
            return self.is_easy(case) or self._fits_by_trace(case)
        return False

    def _fits_by_trace(self, case: StepConfig) -> bool:
        states = sum(self.count_states(case).values())
        if states > USABLE * self.state_memory(case) or self._is_hopeless(case):
            return False
        if not self._has_host_memory(case, USABLE):
            return False
        try:
            return self.trace(case).total <= self.usable
        except Exception as error:
            log.detail(
                f"the memory of --activation-checkpointing {case.recompute} could not be "
                f"estimated: {type(error).__name__}"
            )
            return False

    def excess(self, case: StepConfig) -> Bytes:
        """Return the bytes that a step needs, by kind, if they exceed the memory; else nothing."""
        states = self.count_states(case)
        if sum(states.values()) > self.state_memory(case):
            return states
        if not self._has_host_memory(case, 1.0):
            return {**(states if case.offload else {}), OFFLOADED: self.count_offloaded(case)}
        if self.is_easy(case):
            return {}
        if self._is_hopeless(case):
            return {"activations, at least": self._count_least(case)}
        try:
            step = self.known.get(case) or self.in_child(MemoryCheck.trace, case)
        except NoAnswer as error:  # a family that cannot be traced may still fit
            if log.rank() == 0:
                log.warn(f"whether this run fits in memory could not be estimated: {error}")
            return {}
        # The activations of compiled blocks are only estimated, unless they keep just their input.
        is_reliable = not case.compiled or case.recompute == "full"
        if is_reliable and step.total > _MAX_EXCESS[self.on_gpu] * self.room:
            return {kind: size for kind, size in step.peak.items() if size}
        if step.total > self.usable and log.rank() == 0:
            log.warn(
                f"memory will be short: a rank needs about {units.memory(step.total)} and "
                f"can have {units.memory(self.room)}"
            )
        return {}

    def _is_hopeless(self, case: StepConfig) -> bool:
        """Return whether the blocks' inputs alone exceed the memory; a trace would take minutes."""
        return self._count_least(case) > self.room

    def _count_least(self, case: StepConfig) -> int:
        return sizes.count_least_activations(self.model, case.tokens, case.activation_offload)

    def _has_host_memory(self, case: StepConfig, share: float) -> bool:
        """Return whether a share of host memory contains all that a step offloads."""
        states = sum(self.count_states(case).values()) if case.offload else 0
        return states + self.count_offloaded(case) <= share * self.host

    @property
    def usable(self) -> float:
        """Return the bytes on the device that a traced step may take."""
        share, less = _USABLE[self.on_gpu]
        return share * (self.room - self.swap) - less

    def count_states(self, case: StepConfig) -> Bytes:
        """Return the bytes of a rank's weights, gradients and optimizer states."""
        return sizes.count_states(self.model, case.optimizer, case.shard_size)

    def count_offloaded(self, case: StepConfig) -> int:
        """Return the bytes of activations that a step keeps in host memory."""
        if not case.activation_offload:
            return 0
        return sizes.count_offloaded(self.model, case.tokens, case.precision)

    def count_gathered(self, case: StepConfig) -> int:
        """Return the bytes of all weights while they are gathered."""
        return sizes.count_gathered(self.model, case.shard_size, case.precision)

    def may_gather(self, case: StepConfig) -> bool:
        """Return whether the weights are small enough to stay gathered, provided the step fits."""
        return not case.offload and self.count_gathered(case) <= KEPT_SHARE * (
            self.room - self.swap
        )

    def state_memory(self, case: StepConfig) -> float:
        """Return the size of the memory that contains the states: of the device or the host."""
        return self.host if case.offload or not self.on_gpu else self.room

    def trace(self, case: StepConfig) -> StepMemory:
        """Trace a step in this process and return its memory.

        If all weights stay gathered, the result is an upper bound, derived from the trace of the
        same step without that. So no second trace is needed.
        """
        if case not in self.known and case.keep_gathered:
            plain = self.trace(replace(case, keep_gathered=False))
            self.known[case] = plain.with_gathered_weights(self.count_gathered(case))
        elif case not in self.known:
            self.estimates = self.estimates or Estimates(self.model)
            self.known[case] = self.estimates.step(case)
        return self.known[case]

    def refusal(
        self, case: StepConfig, needed: Bytes, global_batch: int, has_begun: bool, auto: bool
    ) -> UsageError:
        """Return the error with the nearest settings that fit: on these ranks, and on more.

        global_batch: samples per step, which stay the same. has_begun: leave out settings that
        a run cannot change once it has begun. auto: recomputation is left open, so that no command
        needs to name it.
        """
        here = None
        wider = None
        hints = []
        try:
            here, wider = self.in_child(MemoryCheck.nearest, case, has_begun)
        except NoAnswer as error:
            hints.append(f"which setting would fit could not be estimated: {error}")
        omitted = RECOMPUTE_OPTION if auto else ""
        if wider:
            devices = (
                "GPUs like this"
                if self.on_gpu
                else "ranks, on machines with as much memory for each"
            )
            words = " ".join(wider.words(without=omitted))
            hints.append(f"it fits on {wider.case.ranks} {devices}{words and f', with {words}'}")
        memory = self.host if OFFLOADED in needed else self.state_memory(case)
        if not here and not self.unanswered:
            possible_share = USABLE * memory / sum(self.count_states(case).values())
            largest = possible_share * self.model.num_parameters()
            hints.append(
                "no option makes it fit on these ranks; a model of well below "
                f"{units.count(largest)} parameters may"
            )
        where = "host memory" if memory == self.host else "its GPU's memory"
        parts = " + ".join(f"{units.memory(size)} {kind}" for kind, size in needed.items())
        has_activations = any(kind.startswith("activations") for kind in needed)
        omission = "" if has_activations else ", without activations"
        return UsageError(
            f"this run does not fit: a rank needs {units.memory(sum(needed.values()))} and can "
            f"have {units.memory(memory)} of {where}",
            found=f"{parts}, for {describe_size(self.model)}, over "
            f"{units.counted(case.shard_size, 'rank')}{omission}",
            hint="\n".join(hints),
            run=_make_command(here, case, global_batch, omitted) if here else "",
        )

    def nearest(
        self, case: StepConfig, has_begun: bool
    ) -> tuple[Alternative | None, Alternative | None]:
        """Return the least costly settings that fit well: on these ranks, and on more."""
        settings = list(cheaper_settings(case, has_begun))
        here, wider = (
            next(
                (
                    setting
                    for setting in settings
                    if setting.more_ranks == more_ranks and self.fits(setting.case)
                ),
                None,
            )
            for more_ranks in (False, True)
        )
        return here, wider


def choose_step(
    check: MemoryCheck,
    rows: Sequence[Sequence[StepConfig]],
    node: int = 0,
    gathers: bool = True,
) -> StepConfig:
    """Return the step to run, chosen as the docstring of this module explains.

    rows: one row for each kind of recomputation, the least first; a row lists steps with larger and
    larger batches. If nothing fits, the result is the smallest batch with the most recomputation.
    node: the number of GPUs in a node if these may share a replica, else 0. gathers: whether
    weights may stay gathered.
    """
    best = _least_recomputed(check, rows)
    if best is None:
        return rows[-1][0]
    in_node = replace(best, shard_size=node or best.shard_size)
    if in_node != best and check.fits(in_node):
        best = in_node
    gathered = replace(best, keep_gathered=True)
    return gathered if gathers and check.fits(gathered) else best


def _least_recomputed(
    check: MemoryCheck, rows: Sequence[Sequence[StepConfig]]
) -> StepConfig | None:
    """Return the step with the least recomputation that keeps the device busy.

    If there is none, return the step with the largest batch, or None if no step fits.
    """
    best: StepConfig | None = None
    for cases in rows:
        if best and (best.tokens >= FEW[check.on_gpu] or best.batch == cases[-1].batch):
            break
        largest = _largest_batch(check, cases)
        if largest and (best is None or largest.batch > best.batch):
            best = largest
    return best


def _largest_batch(check: MemoryCheck, cases: Sequence[StepConfig]) -> StepConfig | None:
    """Return the step with the largest batch that fits, or None, by a binary search."""
    if check.fits(cases[-1]):
        return cases[-1]
    low = -1  # the last case known to fit
    high = len(cases) - 1  # the first case known not to fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if check.fits(cases[middle]) else (low, middle)
    return cases[low] if low >= 0 else None


def _make_command(
    alternative: Alternative, case: StepConfig, global_batch: int, omitted: str
) -> str:
    """Return the typed command with the options of an alternative, and the same global batch."""
    words = alternative.words(without=omitted)
    smaller = alternative.case
    if (smaller.batch, smaller.context) == (case.batch, case.context):
        return commands.as_typed(*words)
    return commands.as_typed(
        *words, "--global-batch-size", global_batch, drop=("--grad-accum-steps",)
    )


def _call_with_traces(
    check: MemoryCheck, method: Callable[..., Result], arguments: Sequence[Any]
) -> tuple[Result, dict[StepConfig, StepMemory]]:
    """Call a method in a child process, and return the traces that it made as well."""
    return method(check, *arguments), check.known
