"""Small agreements between ranks about files, over a gloo group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lib.core.errors import StageError, from_os_error

Result = TypeVar("Result")


def on_rank_0(action: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Return on all ranks what rank 0's action returned, or raise on all what it raised.

    All ranks must call this.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [action(), None]
        except OSError as error:
            outcome = [None, from_os_error(error) or error]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value on every rank; all ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], Result], group: dist.ProcessGroup) -> list[Result]:
    """Return what the action returned on each rank, or raise on all what it raised on any."""
    try:
        mine: tuple[Any, Any] = (action(), None)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        known = from_os_error(error) if isinstance(error, OSError) else error
        mine = (None, known if isinstance(known, StageError) else
                StageError(f"{type(error).__name__}: {error}"))
    outcomes = gather(mine, group)
    if errors := [error for _, error in outcomes if error is not None]:
        raise errors[0]
    return [result for result, _ in outcomes]
