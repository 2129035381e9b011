"""Traces in a process of their own, which may take so long and no longer."""

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
_TELL_AFTER_S = 15.0


class NoAnswer(Exception):
    """Says why there is no estimate."""


def apart(function: Callable[..., Result], *arguments: Any, patience_s: float) -> Result:
    """Return what a function returns that traces, worked out by a process of its own.

    A trace is of rank 0 of a group that is none, and torch remembers shards by meshes, which are
    equal whichever rank asks: in a process that trains, others would take rank 0's for theirs.
    Raises NoAnswer when that fails, when the system has no room for the process or ends it, and
    when it takes too long: a family that goes through a sample token by token, as Mamba without its
    kernels, takes minutes.
    """
    context = child_context()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_work, args=(theirs, patience_s, function, arguments), daemon=True
    )
    try:
        start_without_gpus(child)
    except OSError as error:  # no room for another process, but for a run there may be
        ours.close()
        raise NoAnswer(str(error)) from error
    finally:
        theirs.close()
    try:
        if not ours.poll(min(_TELL_AFTER_S, patience_s)) and log.rank() == 0:
            log.info(f"estimating memory still goes on, for at most {patience_s:g} s")
        if not ours.poll(max(0.0, patience_s - _TELL_AFTER_S)):
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
    """Return how to start a process that traces.

    A fork spares importing everything again. But one of a process that uses a GPU could not
    compute (torch ends it in autograd), so there the child is a new interpreter.
    """
    if torch.cuda.is_initialized():
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork")


def start_without_gpus(child: BaseProcess) -> None:
    """Start a process that sees no GPU.

    It would take memory of one for nothing, and could not start where GPUs allow one process only.
    """
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        warnings.catch_warnings(),
    ):  # of threads, which the child does not use
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()


def _work(
    answer: Connection,
    patience_s: float,
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * patience_s)  # when nobody is left to end it
    try:
        answer.send(("", function(*arguments)))
    except Exception as error:  # whatever it is, a run may go on
        first, *_ = str(error).splitlines() or [""]
        answer.send((f"{type(error).__name__}: {first[:200]}".removesuffix(": "), None))
