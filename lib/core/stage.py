"""How a stage script starts and ends: offline first, errors in words, exit codes."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from lib.core import log, offline
from lib.core.errors import EXIT_DONE, Preempted, StageError, UsageError, from_os_error

_AFTER_RANK_0_S = 2.0


def run(main: Callable[[list[str]], None], *, network: bool = False) -> NoReturn:
    """Run a stage's main with the command line and exit as errors.py says.

    network: True only for stage 03. A bug keeps its traceback (exit code 1).
    """
    if not network:
        offline.enable()
    faulthandler.enable()
    log.setup()
    try:
        main(sys.argv[1:])
        code = EXIT_DONE
    except StageError as error:
        code = _report(error)
    except OSError as error:
        known = from_os_error(error)
        if known is None:
            raise
        code = _report(known)
    except ModuleNotFoundError as error:
        if (error.name or "lib").partition(".")[0] == "lib":
            raise
        code = _report(UsageError(f"the package {error.name} is not installed",
                                  run="pip install -r requirements.txt"))
    except Exception:
        log.error(traceback.format_exc())  # to the rank's own file too; Python prints it here
        raise
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to go on", file=sys.stderr)
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.exit(code)


def _report(error: StageError) -> int:
    """Print an error once per launch and return its exit code."""
    if isinstance(error, Preempted):
        log.info(error.problem)
        return error.code
    log.error(error.render())
    if log.rank() > 0:
        # Ranks mostly fail on the same input. Let rank 0 speak first: torchrun then ends the
        # others before they repeat it. A failure of this rank alone is still printed.
        time.sleep(_AFTER_RANK_0_S)
        print(f"[rank={log.rank()}] {error.render()}", file=sys.stderr, flush=True)
    else:
        print(error.render(), file=sys.stderr, flush=True)
    return error.code


