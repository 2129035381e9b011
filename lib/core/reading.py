"""Reading what a disk or a network may fail to give for a moment, which is no damage."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import TypeVar

from lib.core.errors import StageError, UsageError, from_os_error, is_missing

Result = TypeVar("Result")

_PAUSES_S = (0.5, 1.0, 2.5)  # between the attempts; a mount that was lost is mostly back by then


def patiently(read: Callable[[], Result]) -> Result:
    """Return what `read` returns, tried again for some seconds while a disk fails to read.

    Raises the OSError of a file that is not there, UsageError when it may not be read, and
    StageError when it cannot be read to the end: what it holds is not known then.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return read()
        except OSError as error:
            if is_missing(error):
                raise
            known = from_os_error(error)
            if isinstance(known, UsageError):
                raise known from error
            if pause is None:
                raise _unreadable(error) from error
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _unreadable(error: OSError) -> StageError:
    what = f"{error.filename} " if error.filename else "a file "
    return StageError(f"{what}cannot be read ({error.strerror or error}); that does not mean that "
                      "it is damaged, and nothing was moved or deleted",
                      found=f"on {platform.node()}, several times in some seconds",
                      hint="see to the disk or the mount there (`dmesg` tells more); the same "
                           "command then goes on")
