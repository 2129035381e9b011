"""Check that a run fits in memory, and choose the batch and recomputation that are left open.

The check runs before any text is tokenised and before any memory is taken. It refuses a run whose
weights, gradients and optimizer states alone are too large, or whose traced step is, although a
trace omits what the allocator and libraries add. It warns about a run that comes close to the
limit. Most runs of small models fit so clearly that no trace is needed.

The choice of batch and recomputation does not change what a model learns, as long as a step has
the same samples. Recomputation costs time (about 5 % if selective, 30 % if full). A pass with few
tokens costs time on a GPU too, which then waits for its memory. So the least recomputation wins
whose passes have enough tokens to keep the device busy; if none has, the largest batch wins. Memory
that is left reduces communication, which gains a few percent at most: from four nodes on, one
replica of the model per node; then weights that stay gathered throughout a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.models.sharded import describe_size
from lib.planning import capacity, sizes
from lib.planning.child_process import NoAnswer, Result, in_child_process
from lib.planning.knobs import BATCH_OPTION, RECOMPUTE_OPTION, Alternative, cheaper_settings
from lib.planning.memory import USABLE, Estimates
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import Bytes

FEW = {True: 1 << 13, False: 0}  # tokens in a pass, below which the device waits: a GPU, a CPU
ENOUGH = {True: 1 << 15, False: 1 << 11}  # tokens in a pass; more hardly help: a GPU, a CPU

_PER_MASKED = 8  # bytes for each pair of tokens in a sample, if attention takes a mask
# The share of memory that a traced step may take, and bytes to subtract from it. On a GPU the rest
# is for CUDA, NCCL and fragmentation. On a CPU it is for freed blocks that glibc keeps and for
# libraries that load later: 430 to 1,034 MiB were resident where 229 to 762 were traced.
_USABLE = {True: (USABLE, 0), False: (0.85, 200 << 20)}
# A trace is too high by this factor at most. For a GPU it is what tests/gpu allows; a CPU always
# takes more than is traced, as measured (benchmarks/results/train.md).
_ERROR = {True: 1.1, False: 1.0}
_PATIENCE_S = 180  # for all traces of a choice, of some seconds each
# The share of memory for weights that stay gathered. Not gathering them again saves a few percent
# of the time; the rest serves larger batches, and is a margin for what no estimate covers.
KEPT_SHARE = 0.15
_DOUBT = 4  # from this multiple of the estimated activations on, a trace is worth its seconds


@dataclass
class MemoryCheck:
    """Compares the memory that a rank needs with the memory that it has.

    room: bytes on its device. host: bytes of host memory. swap: bytes of the room on a disk, which
    a run may take but the choice of options does not count on. known: steps traced so far.
    estimates: used in a process that may trace, see `in_child`. unanswered: why no further step is
    traced.
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
    def here(cls, model: PreTrainedModel) -> MemoryCheck:
        """Return the check for this rank's device."""
        device = capacity.device()
        return cls(
            model,
            capacity.room(device),
            capacity.room(torch.device("cpu")),
            device.type == "cuda",
            swap=capacity.swap(device),
        )

    def in_child(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Run a method that traces in a child process and return its result.

        Raises NoAnswer if the child fails. After that each call raises it at once, since the first
        may have taken minutes.
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
        """Return whether a step clearly fits, from the shape of the model alone."""
        states = sum(self.states(case).values())
        kept, gathered = sizes.estimate_activations(self.model, case.tokens, case.precision)
        if case.keep_gathered:
            gathered += self.gathered(case)
        masks = _PER_MASKED * case.batch * case.seq_length**2 if case.masked else 0
        on_device = 0 if case.offload else states
        return (
            states <= USABLE * self.place(case)
            and self.model.config._attn_implementation != "eager"
            and on_device + gathered + _DOUBT * kept + masks <= self.usable
        )

    def fits(self, case: StepConfig) -> bool:
        """Return whether a step fits well. Traces it unless that is already clear.

        A step that cannot be traced does not fit: some families do not support selective
        activation checkpointing.
        """
        if self.is_easy(case):
            return True
        if sum(self.states(case).values()) > USABLE * self.place(case):
            return False
        try:
            return self.traced(case).total <= self.usable
        except Exception as error:
            log.info(
                f"the memory of --activation-checkpointing {case.recompute} could not be "
                f"estimated: {type(error).__name__}"
            )
            return False

    def excess(self, case: StepConfig) -> Bytes:
        """Return the bytes that a step needs, by kind, if they exceed the memory; else nothing."""
        states = self.states(case)
        if sum(states.values()) > self.place(case):
            return states
        if self.is_easy(case):
            return {}
        try:
            step = self.known.get(case) or self.in_child(MemoryCheck.traced, case)
        except NoAnswer as error:  # a family that cannot be traced may still fit
            if log.rank() == 0:
                log.warn(f"whether this run fits in memory could not be estimated: {error}")
            return {}
        # What compiled blocks keep is only an estimate, unless they keep nothing but their input.
        is_reliable = not case.compiled or case.recompute == "full"
        if is_reliable and step.total > _ERROR[self.on_gpu] * self.room:
            return {kind: size for kind, size in step.peak.items() if size}
        if step.total > self.usable and log.rank() == 0:
            log.warn(
                f"memory will be short: a rank needs about {units.memory(step.total)} and "
                f"can have {units.memory(self.room)}"
            )
        return {}

    @property
    def usable(self) -> float:
        """Return the bytes on the device that a traced step may take."""
        share, less = _USABLE[self.on_gpu]
        return share * (self.room - self.swap) - less

    def states(self, case: StepConfig) -> Bytes:
        """Return the bytes of a rank's weights, gradients and optimizer states."""
        return sizes.count_states(self.model, case.optimizer, case.shard_size)

    def gathered(self, case: StepConfig) -> int:
        """Return the bytes of all weights while they are gathered."""
        return sizes.count_gathered(self.model, case.shard_size, case.precision)

    def may_gather(self, case: StepConfig) -> bool:
        """Return whether all weights are small enough to stay gathered, if the step fits."""
        return not case.offload and self.gathered(case) <= KEPT_SHARE * (self.room - self.swap)

    def place(self, case: StepConfig) -> float:
        """Return the bytes of the memory in which the states lie."""
        return self.host if case.offload or not self.on_gpu else self.room

    def traced(self, case: StepConfig) -> StepMemory:
        """Return the memory of a step, traced in this process.

        With all blocks gathered it is an upper bound, which saves a second trace.
        """
        if case not in self.known and case.keep_gathered:
            plain = self.traced(replace(case, keep_gathered=False))
            self.known[case] = plain.gathered(self.gathered(case))
        elif case not in self.known:
            self.estimates = self.estimates or Estimates(self.model)
            self.known[case] = self.estimates.step(case)
        return self.known[case]

    def refusal(
        self, case: StepConfig, needed: Bytes, global_batch: int, has_begun: bool, auto: bool
    ) -> UsageError:
        """Return the error with the nearest settings that fit: on these ranks, and on more.

        global_batch: samples of a step, which does not change. has_begun: leave out settings that
        a run cannot change once it has begun. auto: recomputation is left open, so that no command
        needs to name it.
        """
        near = None
        wide = None
        hints = []
        try:
            near, wide = self.in_child(MemoryCheck.nearest, case, has_begun)
        except NoAnswer as error:
            hints.append(f"which setting would fit could not be estimated: {error}")
        omitted = RECOMPUTE_OPTION if auto else ""
        if wide:
            devices = (
                "GPUs like this"
                if self.on_gpu
                else "ranks, on machines with as much memory for each"
            )
            words = " ".join(wide.words(without=omitted))
            hints.append(f"it fits on {wide.case.ranks} {devices}{words and f', with {words}'}")
        place = self.place(case)
        if not near and not self.unanswered:
            per_state = USABLE * place / sum(self.states(case).values())
            largest = per_state * self.model.num_parameters()
            hints.append(
                "no option makes it fit on these ranks; a model of well below "
                f"{units.count(largest)} parameters may"
            )
        memory = "host memory" if place == self.host else "its GPU's memory"
        parts = " + ".join(f"{units.memory(size)} {kind}" for kind, size in needed.items())
        omission = "" if "activations" in needed else ", without activations"
        return UsageError(
            f"this run does not fit: a rank needs {units.memory(sum(needed.values()))} and can "
            f"have {units.memory(place)} of {memory}",
            found=f"{parts}, for {describe_size(self.model)}, over "
            f"{units.counted(case.shard_size, 'rank')}{omission}",
            hint="\n".join(hints),
            run=_command(near, case, global_batch, omitted) if near else "",
        )

    def nearest(
        self, case: StepConfig, has_begun: bool
    ) -> tuple[Alternative | None, Alternative | None]:
        """Return the least costly settings that fit well: on these ranks, and on more."""
        settings = list(cheaper_settings(case, has_begun))
        near, wide = (
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
        return near, wide


def choose_step(
    check: MemoryCheck,
    rows: Sequence[Sequence[StepConfig]],
    node: int = 0,
    gathers: bool = True,
) -> StepConfig:
    """Return the step to run, by the order that the module's docstring gives.

    rows: for each kind of recomputation, the least first, steps in order of their batch. If nothing
    fits, the result is the smallest batch with the most recomputation. node: GPUs of a node, which
    may share a replica; 0 if the shards are given. gathers: weights may stay gathered.
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
    """Return the step with the least recomputation whose passes keep the device busy, if any."""
    best: StepConfig | None = None
    for cases in rows:
        if best and (best.tokens >= FEW[check.on_gpu] or best.batch == cases[-1].batch):
            break
        largest = _largest_batch(check, cases)
        if largest and (best is None or largest.batch > best.batch):
            best = largest
    return best


def _largest_batch(check: MemoryCheck, cases: Sequence[StepConfig]) -> StepConfig | None:
    """Return the step with the largest batch that fits, with as few checks as possible, or None."""
    if check.fits(cases[-1]):
        return cases[-1]
    low = -1  # the last that fits
    high = len(cases) - 1  # the first that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if check.fits(cases[middle]) else (low, middle)
    return cases[low] if low >= 0 else None


def _command(near: Alternative, case: StepConfig, global_batch: int, omitted: str) -> str:
    """Return the command that was typed, with a setting that fits and gives the same result."""
    words = near.words(without=omitted)
    if int(near.options.get(BATCH_OPTION, case.batch)) == case.batch:
        return commands.as_typed(*words)
    return commands.as_typed(
        *words, "--global-batch-size", global_batch, drop=("--grad-accum-steps",)
    )


def _call_with_traces(
    check: MemoryCheck, method: Callable[..., Result], arguments: Sequence[Any]
) -> tuple[Result, dict[StepConfig, StepMemory]]:
    """Call a method in a child process, and return the traces that it made as well."""
    return method(check, *arguments), check.known
