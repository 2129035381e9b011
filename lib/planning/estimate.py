"""The memory of a run, estimated while it starts and compared with what it took."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from unittest import mock

import torch
from transformers import PreTrainedModel

from lib.core import log, units
from lib.planning import memory
from lib.planning.trace import Case

_GIB = 1 << 30
_NAMED = 0.005  # the share of the whole from which on a kind of memory is named
_ESTIMATED_FROM = 20e6  # parameters
_PATIENCE_S = 30  # of processor time; a trace takes a few seconds of it


class MemoryEstimate:
    """Traces in a process of its own: nothing of it stays, and the run does not wait for it.

    Must be made before the process group and before the model is sharded: it forks, which spares
    importing everything again. A fork of a process that uses a GPU could not compute (torch ends it
    in autograd), so there it imports all, and sees no GPU. It waits until the ranks have agreed on
    what is to be traced (`begin`). On other ranks than 0, and for a model so small that libraries
    take more memory than it does, nothing is estimated.
    """

    def __init__(self, model: PreTrainedModel, precision: str) -> None:
        self.gib: float | None = None
        self._traced = "estimated as for bf16" if precision == "fp8" else "estimated"
        self._on_gpu = torch.cuda.is_available()
        context: SpawnContext | ForkContext = multiprocessing.get_context("spawn") \
            if torch.cuda.is_initialized() else multiprocessing.get_context("fork")
        self._answer, question = context.Pipe()
        self._is_wanted = log.rank() == 0 and \
            model.num_parameters() >= _ESTIMATED_FROM
        if not self._is_wanted:
            self._answer.close()
            question.close()
            return
        self._child = context.Process(target=_trace, daemon=True, args=(
            self._answer, question, model))
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), \
                warnings.catch_warnings():  # of threads, which the child does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._child.start()
            except OSError as error:  # no room for another process, but for a run there may be
                question.send(str(error))
        question.close()

    def __enter__(self) -> MemoryEstimate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, case: Case) -> None:
        """Start the trace of a run."""
        if self._is_wanted:
            with suppress(OSError):  # of a process that is not there: `tell` has its last word
                self._answer.send(case)

    def tell(self, wait_s: float = 0.0) -> None:
        """Print the estimate as soon as it is known, once. wait_s: for it, at most."""
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
        parts = " + ".join(f"{units.memory(size)} {kind}" for kind, size in answer.items()
                           if size >= _NAMED * self.gib * _GIB)
        log.info(f"memory: at most {units.memory(self.gib * _GIB)} per rank, {self._traced}: "
                 f"{parts}")

    def compared(self, peak: float, before: float) -> str:
        """Return the peak of the run, GiB, beside the estimate. before: in use without the model.

        A run may end before its estimate is there, which is waited for then.
        """
        self.tell(_PATIENCE_S)
        what = "the most that the allocator gave out" if self._on_gpu else "the most that was " \
            "resident"
        own = units.memory((peak - before) * _GIB)
        estimated = "" if not self._is_wanted else "; it was not estimated" if self.gib is None \
            else f"; {units.memory(self.gib * _GIB)} were estimated"
        return f"peak {units.memory(peak * _GIB)} ({what}); {own} without what was in use before " \
               f"the model{estimated}"

    def close(self) -> None:
        """Do not wait for the answer any longer."""
        if self._is_wanted and self._child.pid is not None:
            self._child.kill()


def _trace(others: Connection, question: Connection, model: PreTrainedModel) -> None:
    others.close()  # or this process would wait for itself when the run has ended
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE_S)
    os.nice(10)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whoever reads the run's output must not wait for this process
        os.dup2(nowhere, stream)
    try:
        question.send(memory.Estimates(model).step(question.recv()).peak)
    except Exception as error:  # whatever it is, the run goes on
        first, *_ = str(error).splitlines() or [""]
        question.send(f"{type(error).__name__}: {first[:200]}")
