"""Run a tracing function in a child process, for a limited time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar
from unittest import mock

import torch

from lib.core import log

Result = TypeVar("Result")
_REPORT_AFTER_S = 15.0


class NoAnswer(Exception):
    """The child process gave no result; the message says why."""


def in_child_process(function: Callable[..., Result], *arguments: Any, patience_s: float) -> Result:
    """Run a tracing function in a child process and return its result.

    A trace plays rank 0 of a fake process group, and torch caches shards by mesh, which compares
    equal on every rank: in a process that trains, other ranks would take rank 0's shards for
    theirs. Raises NoAnswer if the function fails, if the system cannot start the child or kills it,
    and after `patience_s` seconds: a family that computes a sample token by token, such as Mamba
    without its kernels, takes minutes.
    """
    context = child_context()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_work, args=(theirs, patience_s, function, arguments), daemon=True
    )
    try:
        start_without_gpus(child)
    except OSError as error:  # no memory for another process, but there may be for a run
        ours.close()
        raise NoAnswer(str(error)) from error
    finally:
        theirs.close()
    try:
        if not ours.poll(min(_REPORT_AFTER_S, patience_s)) and log.rank() == 0:
            log.info(f"still estimating memory, for at most {patience_s:g} s")
        if not ours.poll(max(0.0, patience_s - _REPORT_AFTER_S)):
            raise NoAnswer(f"it takes longer than {patience_s:g} s")
        failure, result = ours.recv()
    except EOFError:
        raise NoAnswer("its process was killed") from None
    finally:
        child.kill()
        child.join()
        ours.close()
    if failure:
        raise NoAnswer(failure)
    return result


def child_context() -> SpawnContext | ForkContext:
    """Return the way to start a child process that traces.

    A fork need not import everything again. A fork of a process that uses a GPU cannot compute
    (torch ends it in autograd), so that process starts a new interpreter.
    """
    if torch.cuda.is_initialized():
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork")


def start_without_gpus(child: BaseProcess) -> None:
    """Start a child process that sees no GPU.

    With one it would take GPU memory for nothing, and could not start if the GPUs allow a single
    process.
    """
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        warnings.catch_warnings(),
    ):
        # torch warns of threads at a fork; the child does not use them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()


def _work(
    answer: Connection,
    patience_s: float,
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * patience_s)  # in case the parent process is gone
    try:
        answer.send(("", function(*arguments)))
    except Exception as error:  # whatever it is, the run may continue
        first, *_ = str(error).splitlines() or [""]
        answer.send((f"{type(error).__name__}: {first[:200]}".removesuffix(": "), None))
