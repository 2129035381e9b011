"""Start and end a stage script: offline guard, error messages, exit codes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lib.core import commands, launcher, log, offline, streams
from lib.core.errors import EXIT_BUG, EXIT_DONE, Preempted, StageError, UsageError, from_os_error

_AFTER_RANK_0_S = 2.0
_at_end: list[Callable[[int, BaseException | None], object]] = []


def run_main(
    main: Callable[[list[str]], None], *, network: bool = False, only_shows: bool = False
) -> NoReturn:
    """Run a stage's main with the command line, and exit with a code of errors.py.

    network: True only for stage 03 and launchers of it. only_shows: True for a command that ends
    when nobody reads its output. A bug keeps its traceback (exit code 1).
    """
    streams.outlive_readers(only_shows)
    if not network:
        offline.enable_offline_mode()
    faulthandler.enable()
    log.setup()
    if sys.version_info >= (3, 14):
        _lock_bars_in_this_process()
    ended_by: BaseException | None = None
    try:
        main(sys.argv[1:])
        code = EXIT_DONE
    except SystemExit:  # --help
        raise
    except KeyboardInterrupt as error:
        ended_by = error
        if log.rank() == 0:  # all ranks receive Ctrl-C
            print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BaseException as error:  # DCP raises errors that are no Exception
        ended_by = error
        known = find_known_error(error)
        code = _report_error(known) if known else _report_bug(error)
    for function in _at_end:
        function(code, ended_by)
    _end_process(code)


def _lock_bars_in_this_process() -> None:
    """Give tqdm a lock of threads before a library shows a bar.

    Its own lock is shared with other processes. From Python 3.14 on that starts a process, which
    complains about the lock when a stage ends without Python's teardown.
    """
    with suppress(ImportError):  # a launcher runs where only Python is installed
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def call_at_end(function: Callable[[int, BaseException | None], object]) -> None:
    """Call a function with the exit code and the error (or None), after the error was printed.

    The function must raise nothing.
    """
    _at_end.append(function)


def find_known_error(error: BaseException) -> StageError | None:
    """Return the StageError for an error that a person can fix, None for a bug."""
    if isinstance(error, StageError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error) or _make_missing_error(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "lib").partition(".")[0] != "lib":
        return UsageError(
            f"the package {error.name} is not installed",
            run=commands.pip_install("-r", commands.path_of("requirements.txt")),
        )
    return None


def _make_missing_error(error: OSError) -> UsageError | None:
    """Return the error for a missing path of the command line; for other paths it is a bug."""
    values = [word.rpartition("=")[2] for word in sys.argv[1:]]
    path = str(error.filename or "")
    if isinstance(error, FileNotFoundError) and any(
        len(value) > 1 and path and (path.startswith(value) or value.startswith(path))
        for value in values
    ):
        return UsageError(f"there is no {path}", expected="a path whose directory exists")
    return None


def _report_bug(error: BaseException) -> int:
    text = traceback.format_exc()
    log.error(text)
    launcher.record_failure(type(error).__name__, EXIT_BUG, text)
    print(text, file=sys.stderr, flush=True)
    return EXIT_BUG


def _end_process(code: int) -> NoReturn:
    """End the process with the stage's exit code.

    Gloo's threads may abort the process during Python's teardown (torch up to 2.13), which would
    replace the code. So with torch.distributed loaded there is no teardown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch.distributed" in sys.modules:
        os._exit(code)
    sys.exit(code)


def _report_error(error: StageError) -> int:
    """Print an error once per launch and return its exit code."""
    is_stop = isinstance(error, Preempted)
    text = error.problem if is_stop else error.render()
    launcher.record_failure(type(error).__name__, error.code, text)
    if is_stop:
        log.info(text)
        return error.code
    log.error(text)
    if log.rank() > 0:
        # Ranks usually fail on the same input. Let rank 0 print first: torchrun then ends the
        # others before they repeat the error. A failure of this rank alone is still printed.
        time.sleep(_AFTER_RANK_0_S)
        print(f"[rank={log.rank()}] {text}", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
    return error.code
