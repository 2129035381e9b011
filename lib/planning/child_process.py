"""Run a tracing function in a child process, for a limited time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar
from unittest import mock

import torch

from lib.core import log

Result = TypeVar("Result")
_REPORT_AFTER_S = 15.0


class NoAnswer(Exception):
    """The child process gave no result; the message says why."""


class TracingProcess(Generic[Result]):
    """A child process that calls a tracing function and returns its result.

    A trace runs as rank 0 of a fake process group. torch caches shards by mesh, and the meshes of
    all ranks compare equal. So in a training process, a trace would make the other ranks use rank
    0's shards instead of their own.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        patience_s: float,
        in_background: bool = False,
    ) -> None:
        """Start the process, which waits for `begin` before it calls the function.

        in_background: the process has a low priority and prints nothing, and `patience_s` limits
        its processor time. Otherwise the caller of `result` waits for at most `patience_s` seconds.
        """
        context = _choose_context()
        self._patience_s = patience_s
        self._failure = ""
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_answer_call,
            args=(self._pipe, theirs, patience_s, in_background, function, arguments),
            daemon=True,
        )
        try:
            _start_without_gpus(self._child)
        except OSError as error:  # no memory for another process, but there may be for a run
            self._failure = str(error)
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Return the ID of the process, None if it could not be started."""
        return self._child.pid

    def begin(self, *arguments: Any) -> None:
        """Let the process call the function.

        arguments: further arguments, after the ones given to the constructor.
        """
        if not self._failure:
            with suppress(OSError):  # the process has ended: `result` says why
                self._pipe.send(arguments)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        """Wait for at most `wait_s` seconds; return whether `result` would return at once."""
        return bool(self._failure) or self._pipe.poll(wait_s)

    def result(self) -> Result:
        """Wait for the function and return its result.

        Raises NoAnswer if the function fails, or if the system cannot start the process or kills
        it.
        """
        if self._failure:
            raise NoAnswer(self._failure)
        try:
            failure, result = self._pipe.recv()
        except EOFError:
            self._child.join()
            if self._child.exitcode == -signal.SIGPROF:
                raise NoAnswer(_describe_patience(self._patience_s)) from None
            raise NoAnswer("its process was killed") from None
        if failure:
            raise NoAnswer(failure)
        return result

    def close(self) -> None:
        """End the process, whether it has answered or not."""
        if self._child.pid is not None:
            self._child.kill()
            self._child.join()
        self._pipe.close()


def in_child_process(function: Callable[..., Result], *arguments: Any, patience_s: float) -> Result:
    """Run a tracing function in a child process and return its result.

    Raises NoAnswer as `TracingProcess.result` does, and after `patience_s` seconds: a family that
    computes a sample token by token, such as Mamba without its kernels, takes minutes.
    """
    process = TracingProcess(function, *arguments, patience_s=patience_s)
    try:
        process.begin()
        if not process.has_answer(min(_REPORT_AFTER_S, patience_s)) and log.rank() == 0:
            log.info(f"still estimating memory, for at most {patience_s:g} s")
        if not process.has_answer(max(0.0, patience_s - _REPORT_AFTER_S)):
            raise NoAnswer(_describe_patience(patience_s))
        return process.result()
    finally:
        process.close()


def _describe_patience(patience_s: float) -> str:
    return f"it takes longer than {patience_s:g} s"


def _choose_context() -> SpawnContext | ForkContext:
    """Return the way to start a child process that traces.

    A fork need not import everything again. A fork of a process that uses a GPU cannot compute
    (torch ends it in autograd), so that process starts a new interpreter.
    """
    if torch.cuda.is_initialized():
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork")


def _start_without_gpus(child: BaseProcess) -> None:
    """Start a child process that sees no GPU.

    If it saw one, it would take GPU memory for nothing, and could not start if the GPUs allow only
    a single process.
    """
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        warnings.catch_warnings(),
    ):
        # torch warns of threads at a fork; the child does not use them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()


def _answer_call(
    parent: Connection,
    pipe: Connection,
    patience_s: float,
    in_background: bool,
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
) -> None:
    """Call a function in the child process, and send its error or its result.

    parent: the end of the pipe that the parent process uses.
    """
    # The collector must not finalise objects of the parent process: a fork lacks the threads that
    # some of them need, which has crashed children in the middle of a trace.
    gc.freeze()
    parent.close()  # an open copy of it would hide the end of the parent process
    if in_background:
        _enter_background(patience_s)
    try:
        more_arguments = pipe.recv()
    except EOFError:  # the parent process has ended
        return
    if not in_background:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * patience_s)  # in case the parent process ends
    try:
        pipe.send(("", function(*arguments, *more_arguments)))
    except Exception as error:  # whatever it is, the run may continue
        first, *_ = str(error).splitlines() or [""]
        pipe.send((f"{type(error).__name__}: {first[:200]}".removesuffix(": "), None))


def _enter_background(patience_s: float) -> None:
    """Give way to the run, print nothing, and end after some seconds of processor time."""
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, patience_s)
    os.nice(19)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of the run's output must not wait for this process
        os.dup2(null, stream)
