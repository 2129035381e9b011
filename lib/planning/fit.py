"""Whether a run fits in the memory that there is: asked before text is tokenised or memory taken.

What cannot fit is refused: its weights, gradients and optimizer states alone are too much, or the
traced step is, which leaves out what allocator and libraries take beside it. What comes close to
the limit is told and started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.models import training_memory
from lib.optim.registry import OPTIMIZERS
from lib.parallel import compiling
from lib.planning import capacity, memory
from lib.planning.memory import USABLE, Estimates, Turn
from lib.planning.trace import Case, StepMemory
from lib.planning.tracker import Bytes

_FLOAT32 = 4  # bytes
_DOUBT = 4  # times what the shape of a model says of its activations: a trace is worth its seconds


@dataclass
class Fit:
    """Compares what a rank needs and has. room: bytes on its device; host: of the host's memory.

    compiled: the trace is of code that is not, and says somewhat too much.
    """

    model: PreTrainedModel
    case: Case
    room: int
    host: int
    on_gpu: bool
    compiled: bool
    estimates: Estimates | None = None

    @classmethod
    def here(cls, model: PreTrainedModel, case: Case, compile_: bool | None) -> Fit:
        """Return what decides whether a run fits on this rank's device. compile_: --compile."""
        device = capacity.device()
        return cls(model, case, capacity.room(device), capacity.room(torch.device("cpu")),
                   device.type == "cuda", compiling.is_wanted(compile_, device))

    def excess(self) -> Bytes:
        """Return by kind what the run needs where that is more than there is; else nothing."""
        states = self._states(self.case)
        if sum(states.values()) > self._place(self.case):
            return states
        kept, gathered = training_memory.beside_states(
            self.model, self.case.batch * self.case.seq_length, self.case.precision)
        on_device = sum(states.values()) * (not self.case.offload)
        if on_device + gathered + _DOUBT * kept <= USABLE * self.room:
            return {}
        try:
            traced = memory.apart(_trace, self.model, self.case)
        except Exception as error:  # a family that cannot be traced may fit all the same
            log.info(f"memory could not be estimated: {type(error).__name__}")
            return {}
        if traced.total > self.room and not self.compiled:
            return {kind: size for kind, size in traced.peak.items() if size}
        if traced.total > USABLE * self.room and log.rank() == 0:
            log.warn(f"memory will be short: a rank needs about {units.memory(traced.total)} and "
                     f"can have {units.memory(self.room)}")
        return {}

    def refusal(self, needed: Bytes, whole: int, has_begun: bool) -> UsageError:
        """Return the error with the nearest settings that fit: on these ranks, and on more.

        whole: samples of a step, which stay as many. has_begun: see _turned.
        """
        near, wide = self._nearest(has_begun, False), self._nearest(has_begun, True)
        hints = []
        if wide:
            devices = "GPUs like this" if self.on_gpu else \
                "ranks, on machines with as much memory for each"
            with_options = f", with {' '.join(wide.words())}" if wide.options else ""
            hints.append(f"it fits on {wide.case.ranks} {devices}{with_options}")
        if not near:
            hints.append("no option makes it fit on these ranks; a smaller model may")
        place = self._place(self.case)
        where = "host memory" if place == self.host else "its GPU's memory"
        ranks, without = self.case.shard_size, ", without activations"
        parts = " + ".join(f"{units.memory(size)} {kind}" for kind, size in needed.items())
        return UsageError(
            f"this run does not fit: a rank needs {units.memory(sum(needed.values()))} and can "
            f"have {units.memory(place)} of {where}",
            found=f"{parts}, for {units.count(self.model.num_parameters())} parameters over "
                  f"{units.counted(ranks, 'rank')}{without * ('activations' not in needed)}",
            hint="\n".join(hints), run=self._command(near, whole) if near else "")

    def _nearest(self, has_begun: bool, more_ranks: bool) -> Turn | None:
        """Return the least costly setting that fits well, on the ranks there are or on more."""
        for turn in self._turned(has_begun, more_ranks):
            if sum(self._states(turn.case).values()) > USABLE * self._place(turn.case):
                continue  # no trace is needed to see that
            with suppress(Exception):  # some families cannot be checkpointed selectively
                if self._traced(turn.case).total <= USABLE * self.room:
                    return turn
        return None

    def _turned(self, has_begun: bool, more_ranks: bool) -> Iterator[Turn]:
        """Yield the other settings. has_begun: what a run keeps for good cannot be turned."""
        for turn in memory.turned(self.case, self.on_gpu):
            is_fixed = has_begun and not {"--optimizer", "-s"}.isdisjoint(turn.options)
            if turn.more_ranks == more_ranks and not is_fixed:
                yield turn

    def _command(self, near: Turn, whole: int) -> str:
        """Return the command that was typed with a setting that fits, and the same result."""
        if "-b" not in near.options or int(near.options["-b"]) == self.case.batch:
            return commands.as_typed(*near.words())
        return commands.as_typed(*near.words(), "--global-batch-size", whole,
                              drop=("--grad-accum-steps",))

    def _states(self, case: Case) -> Bytes:
        """Return the bytes of a rank's weights, gradients and optimizer states."""
        each = {"parameters": _FLOAT32, "gradients": _FLOAT32,
                "optimizer": OPTIMIZERS[case.optimizer].state_bytes}
        return {kind: round(size * self.model.num_parameters() / case.shard_size)
                for kind, size in each.items()}

    def _place(self, case: Case) -> int:
        """Return the bytes that there are for the states."""
        return self.host if case.offload or not self.on_gpu else self.room

    def _traced(self, case: Case) -> StepMemory:
        self.estimates = self.estimates or Estimates(self.model)
        return self.estimates.step(case)


def _trace(model: PreTrainedModel, case: Case) -> StepMemory:
    return Estimates(model).step(case)
