"""Whether a run fits in the memory that there is: asked before text is tokenised or memory taken.

What cannot fit is refused: its weights, gradients and optimizer states alone are too much, or the
traced step is, which leaves out what allocator and libraries take beside it. What comes close to
the limit is told and started. Most runs of small models are seen to fit without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.models.sharded import size_of
from lib.optim.registry import OPTIMIZERS
from lib.parallel import parallelize
from lib.planning import bound, capacity, cheaper
from lib.planning.apart import NoAnswer, Result, apart
from lib.planning.cheaper import RECOMPUTE_OPTION, Turn
from lib.planning.memory import USABLE, Estimates
from lib.planning.trace import Case, StepMemory
from lib.planning.tracker import Bytes

_FLOAT32 = 4  # bytes
_PER_MASKED = 8  # bytes of each pair of tokens in a sample, where attention takes a mask
# Of the memory, this part less so many bytes is for what a trace counts. On a GPU the rest is for
# CUDA, NCCL and fragments; on a CPU for freed blocks that glibc keeps and for libraries that load
# later: 430 to 1,034 MiB were resident where 229 to 762 are traced.
_USABLE = {True: (USABLE, 0), False: (0.85, 200 << 20)}
# Of a trace, at most: on a GPU what tests/gpu allows; a CPU always takes more than is traced, as
# measured (benchmarks/results/train.md).
_ERROR = {True: 1.1, False: 1.0}
_PATIENCE_S = 180  # with all the traces of a choice, of some seconds each
# Of the memory, for weights that stay gathered. Not gathering them again saves a few percent of the
# time; what else there is serves larger batches, and is a margin for what no plan knows.
KEPT_SHARE = 0.15
_DOUBT = 4  # times what the shape of a model says of its activations: a trace is worth its seconds


@dataclass
class Fit:
    """Compares what a rank needs and has. room: bytes on its device; host: of the host's memory.

    swap: bytes of the room that a run may take but is not chosen for. known: what was traced
    already. estimates: those of a process that may trace, see `apart`. unanswered: why nothing more
    is traced.
    """

    model: PreTrainedModel
    room: float
    host: float
    on_gpu: bool
    known: dict[Case, StepMemory] = field(default_factory=dict)
    estimates: Estimates | None = None
    swap: float = 0.0
    unanswered: str = ""

    @classmethod
    def here(cls, model: PreTrainedModel) -> Fit:
        """Return what decides whether a run fits on this rank's device."""
        device = capacity.device()
        return cls(
            model,
            capacity.room(device),
            capacity.room(torch.device("cpu")),
            device.type == "cuda",
            swap=capacity.swap(device),
        )

    def apart(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Return what one of the methods returns that trace, from a process of its own.

        Raises NoAnswer where that fails, and from then on at once: it may have taken minutes.
        """
        if self.unanswered:
            raise NoAnswer(self.unanswered)
        try:
            result, known = apart(_worked_out, self, method, arguments, patience_s=_PATIENCE_S)
        except NoAnswer as error:
            self.unanswered = str(error)
            raise
        self.known |= known
        return result

    def is_easy(self, case: Case) -> bool:
        """Tell whether a case fits beyond doubt, by the shapes of the model alone."""
        states = sum(self.states(case).values())
        kept, gathered = bound.beside_states(
            self.model, case.batch * case.seq_length, case.precision
        )
        if case.keep_gathered:
            gathered += self.gathered(case)
        masks = _PER_MASKED * case.batch * case.seq_length**2 if case.masked else 0
        on_device = 0 if case.offload else states
        return (
            states <= USABLE * self.place(case)
            and self.model.config._attn_implementation != "eager"
            and on_device + gathered + _DOUBT * kept + masks <= self.usable
        )

    def fits(self, case: Case) -> bool:
        """Tell whether a case fits well; traces where that is not clear. Also not what cannot be
        traced: some families cannot be checkpointed selectively.
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

    def excess(self, case: Case) -> Bytes:
        """Return by kind what a run needs where that is more than there is; else nothing."""
        states = self.states(case)
        if sum(states.values()) > self.place(case):
            return states
        if self.is_easy(case):
            return {}
        try:
            step = self.known.get(case) or self.apart(Fit.traced, case)
        except NoAnswer as error:  # a family that cannot be traced may fit all the same
            if log.rank() == 0:
                log.warn(f"whether this run fits in memory could not be estimated: {error}")
            return {}
        # What compiled blocks keep is only estimated, unless they keep nothing but their input.
        is_like_it = not case.compiled or case.recompute == "full"
        if is_like_it and step.total > _ERROR[self.on_gpu] * self.room:
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

    def states(self, case: Case) -> Bytes:
        """Return the bytes of a rank's weights, gradients and optimizer states.

        What is frozen has neither gradients nor states.
        """
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        trained = self.model.num_parameters(only_trainable=True)
        whole = {
            "parameters": weights,
            "gradients": _FLOAT32 * trained,
            "optimizer": OPTIMIZERS[case.optimizer].state_bytes * trained,
        }
        return {kind: round(size / case.shard_size) for kind, size in whole.items()}

    def gathered(self, case: Case) -> int:
        """Return the bytes of all weights while they are gathered."""
        return parallelize.gathered_bytes(self.model, case.shard_size, case.precision)

    def may_gather(self, case: Case) -> bool:
        """Tell whether all weights are so small that they may stay gathered if the step fits."""
        return not case.offload and self.gathered(case) <= KEPT_SHARE * (self.room - self.swap)

    def place(self, case: Case) -> float:
        """Return the bytes that there are for the states."""
        return self.host if case.offload or not self.on_gpu else self.room

    def traced(self, case: Case) -> StepMemory:
        """Return the memory of a step, traced in this process.

        With all blocks gathered it is an upper bound, which spares a second trace.
        """
        if case not in self.known and case.keep_gathered:
            plain = self.traced(replace(case, keep_gathered=False))
            self.known[case] = plain.gathered(self.gathered(case))
        elif case not in self.known:
            self.estimates = self.estimates or Estimates(self.model)
            self.known[case] = self.estimates.step(case)
        return self.known[case]

    def refusal(self, case: Case, needed: Bytes, whole: int, begun: bool, auto: bool) -> UsageError:
        """Return the error with the nearest settings that fit: on these ranks, and on more.

        whole: samples of a step, which stay as many. begun: see _turned. auto: recomputation is
        open, so that no command needs to name it.
        """
        near = None
        wide = None
        hints = []
        try:
            near, wide = self.apart(Fit.nearest, case, begun)
        except NoAnswer as error:
            hints.append(f"which setting would fit could not be estimated: {error}")
        if wide:
            devices = (
                "GPUs like this"
                if self.on_gpu
                else "ranks, on machines with as much memory for each"
            )
            words = " ".join(wide.words(without=RECOMPUTE_OPTION * auto))
            hints.append(f"it fits on {wide.case.ranks} {devices}{words and f', with {words}'}")
        if not near and not self.unanswered:
            largest = (
                USABLE
                * self.place(case)
                / sum(self.states(case).values())
                * self.model.num_parameters()
            )
            hints.append(
                "no option makes it fit on these ranks; a model of well below "
                f"{units.count(largest)} parameters may"
            )
        place = self.place(case)
        without = ", without activations"
        where = "host memory" if place == self.host else "its GPU's memory"
        parts = " + ".join(f"{units.memory(size)} {kind}" for kind, size in needed.items())
        return UsageError(
            f"this run does not fit: a rank needs {units.memory(sum(needed.values()))} and can "
            f"have {units.memory(place)} of {where}",
            found=f"{parts}, for {size_of(self.model)}, over "
            f"{units.counted(case.shard_size, 'rank')}"
            f"{'' if 'activations' in needed else without}",
            hint="\n".join(hints),
            run=_command(near, case, whole, auto) if near else "",
        )

    def nearest(self, case: Case, begun: bool) -> tuple[Turn | None, Turn | None]:
        """Return the least costly settings that fit well, on the ranks there are and on more."""
        turns = list(_turned(case, self.on_gpu, begun))
        near, wide = (
            next(
                (turn for turn in turns if turn.more_ranks == more_ranks and self.fits(turn.case)),
                None,
            )
            for more_ranks in (False, True)
        )
        return near, wide


def _turned(case: Case, on_gpu: bool, begun: bool) -> Iterator[Turn]:
    """Yield the other settings. begun: what a run keeps for good cannot be turned."""
    for turn in cheaper.turned(case, on_gpu):
        if not (begun and not {"--optimizer", "-s"}.isdisjoint(turn.options)):
            yield turn


def _command(near: Turn, case: Case, whole: int, auto: bool) -> str:
    """Return the command that was typed with a setting that fits, and the same result."""
    words = near.words(without=RECOMPUTE_OPTION * auto)
    if "-b" not in near.options or int(near.options["-b"]) == case.batch:
        return commands.as_typed(*words)
    return commands.as_typed(*words, "--global-batch-size", whole, drop=("--grad-accum-steps",))


def _worked_out(
    fit: Fit, method: Callable[..., Result], arguments: Sequence[Any]
) -> tuple[Result, dict[Case, StepMemory]]:
    return method(fit, *arguments), fit.known
