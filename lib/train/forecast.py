"""The memory of a run foretold while it starts, and compared with what it took."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedModel

from lib.core import log
from lib.core.options import Options
from lib.train import plan

_GIB = 1 << 30
_PATIENCE_S = 30  # a trace takes a second or two, at low priority somewhat longer


class Forecast:
    """A trace in a process of its own: nothing of it stays, and the run does not wait for it.

    Must be made before the process group, before the model is sharded and before this process uses
    a GPU: it forks, which spares importing everything again.
    """

    def __init__(self, opts: Options, model: PreTrainedModel, seq_length: int, precision: str,
                 ) -> None:
        self.gib: float | None = None
        self._on_gpu = torch.cuda.is_available()
        context = multiprocessing.get_context("fork")
        self._answer, question = context.Pipe(duplex=False)
        child = context.Process(target=_trace, daemon=True, args=(
            question, opts, model, seq_length, precision, self._on_gpu))
        with warnings.catch_warnings():  # of threads, which the child does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        question.close()

    def tell(self) -> None:
        """Say what is foretold as soon as it is known, once."""
        if self._answer.closed or not self._answer.poll():
            return
        try:
            answer = self._answer.recv()
        except EOFError:
            answer = "it took too long"
        self._answer.close()
        if isinstance(answer, str):
            log.info(f"memory is not foretold: {answer}")
            return
        self.gib = sum(answer.values()) / _GIB
        parts = " + ".join(f"{size / _GIB:.3g} {kind}" for kind, size in answer.items() if size)
        log.info(f"memory foretold: {self.gib:.3g} GiB per rank at its peak = {parts}")

    def compared(self, measured: float) -> str:
        """Return what was measured, GiB, beside what was foretold."""
        self.tell()
        how = "most that the allocator gave out" if self._on_gpu else \
            "most resident memory, less what there was before the model"
        foretold = "not foretold" if self.gib is None else f"foretold {self.gib:.3g} GiB"
        return f"peak {measured:.3g} GiB ({how}), {foretold}"


def _trace(question: Connection, opts: Options, model: PreTrainedModel, seq_length: int,
           precision: str, on_gpu: bool) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_PATIENCE_S)
    os.nice(10)
    try:
        from lib.train import memory_plan

        case = memory_plan.case_of(opts, seq_length, precision, plan.launched_size(), on_gpu)
        question.send(memory_plan.Estimates(model).step(case).peak)
    except Exception as error:  # whatever it is, the run goes on
        first, *_ = str(error).splitlines() or [""]
        question.send(f"{type(error).__name__}: {first[:200]}")
