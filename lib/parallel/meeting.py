"""Let the ranks of an attempt find each other, however long each takes to prepare.

A launch makes several attempts if it restarts its ranks. torchrun keeps one store for all of them
(torch 2.13). It still contains the process groups, meshes and addresses of a killed attempt. So
rank 0 names each attempt, and the name is the prefix of the attempt's keys in the store. A rank
accepts the name only after rank 0 has echoed a token that this process just sent, so keys left by
earlier attempts are ignored.

While a rank prepares (tokenising takes hours), one of its threads writes to the store, so that the
others can distinguish a rank that works from one that has died.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lib.core import launcher, log, units
from lib.core.errors import StageError, from_os_error
from lib.core.liveness import SilenceClock
from lib.core.retry import poll

START_TIMEOUT = timedelta(minutes=30)  # until the processes of all ranks have started
SILENCE_S = 300.0  # without a heartbeat before a rank counts as lost
BEAT_S = 10.0
_POLL_S = 0.1
_POLL_PER_RANK_S = 0.001  # one store answers all ranks, so many ranks poll less often
_REPORT_AFTER_S = 20.0
_REPORT_EVERY_S = 300.0


class Meeting:
    """Connects the ranks through the store at MASTER_ADDR and MASTER_PORT."""

    def __init__(self) -> None:
        """Start sending heartbeats to the store, in a thread."""
        launcher.parent_pid()  # records the parent process as it is now
        shared, self.rank, self.size = _find_store()
        self._shared = dist.PrefixStore("meeting", shared)
        self._token = uuid.uuid4().hex
        self._clock = SilenceClock()
        self._poll_s = max(_POLL_S, _POLL_PER_RANK_S * self.size)
        self._has_joined = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="meeting", daemon=True)
        self._beats.start()

    def join(self) -> dist.Store:
        """Return the store of this attempt, once all ranks have called this.

        Raises StageError if a rank sends no more heartbeats, or the launcher has ended.
        """
        self._report_at = time.monotonic() + _REPORT_AFTER_S
        attempt = self._open() if self.rank == 0 else self._enter()
        self._has_joined.set()
        self._beats.join()
        return dist.PrefixStore(attempt, self._shared)

    def run_on_rank_0(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 while the other ranks wait for its end, without a timeout.

        No process group is needed, and `join` is called; for a later `join`, make another Meeting.
        All ranks must call this, and raise the error of the action.
        """
        store = self.join()
        key = "action"
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                known = from_os_error(error) if isinstance(error, OSError) else error
                shared = known if isinstance(known, StageError) else StageError(str(error))
                store.set(key, pickle.dumps(shared))
                raise
            store.set(key, b"")
            return

        def is_over() -> bool:
            if launcher.is_gone():
                raise launcher_error()
            return store.check([key])

        poll(is_over, self._poll_s)
        if answer := store.get(key):
            raise pickle.loads(answer)

    def _open(self) -> str:
        """Name the attempt, and echo all tokens once every rank has sent one (rank 0 only)."""
        attempt = self._token
        self._shared.set("life", attempt)
        tokens: dict[int, str] = {0: ""}

        def is_complete() -> bool:
            for rank in range(self.size):
                if rank not in tokens and self._shared.check([f"{attempt}/{rank}"]):
                    tokens[rank] = self._shared.get(f"{attempt}/{rank}").decode()
            missing = [rank for rank in range(self.size) if rank not in tokens]
            self._require_alive(missing)
            return not missing

        poll(is_complete, self._poll_s)
        for token in tokens.values():
            self._shared.set(f"{attempt}/welcome/{token}", "")
        return attempt

    def _enter(self) -> str:
        """Return the attempt's name from rank 0, once rank 0 has echoed this rank's token."""
        attempt = ""

        def is_echoed() -> bool:
            nonlocal attempt
            if attempt and self._shared.check([f"{attempt}/welcome/{self._token}"]):
                return True
            if self._shared.check(["life"]):
                attempt = self._shared.get("life").decode()
                self._shared.set(f"{attempt}/{self.rank}", self._token)
            self._require_alive([0])
            return False

        poll(is_echoed, self._poll_s)
        return attempt

    def _require_alive(self, missing: list[int]) -> None:
        """Raise StageError if a missing rank sends no heartbeats, or the launcher has ended."""
        if not missing:
            return
        if launcher.is_gone():
            raise launcher_error()
        self._clock.look()
        for rank in missing:
            is_started = self._shared.check([f"alive/{rank}"])
            beat = self._shared.get(f"alive/{rank}") if is_started else None
            self._clock.note(rank, beat)
            silence_s = self._clock.silence(rank)
            if silence_s > (SILENCE_S if beat else START_TIMEOUT.total_seconds()):
                raise StageError(
                    f"rank {rank} has shown no sign of life for {units.duration(silence_s)}",
                    hint="check its node; the same command resumes the run",
                )
        now = time.monotonic()
        if self.rank == 0 and now > self._report_at:
            self._report_at = now + _REPORT_EVERY_S
            log.info(
                f"waiting for {units.counted(len(missing), 'rank')}, still preparing: "
                f"{units.first_of(missing)}"
            )

    def _beat(self) -> None:
        while True:
            try:
                self._shared.set(f"alive/{self.rank}", uuid.uuid4().hex)
            except dist.DistError:  # the store ended with the launch
                return
            if self._has_joined.wait(BEAT_S):
                return


@functools.cache
def _find_store() -> tuple[dist.Store, int, int]:
    """Return the store of the launch, the rank and the number of ranks.

    Without torchrun, the process of rank 0 serves the store, and must keep it for a later meeting.
    """
    return next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))


def launcher_error() -> StageError:
    """Return the error of a rank whose launcher has ended without stopping the rank."""
    return StageError(
        "the launcher that started this rank has gone", hint="the same command resumes the run"
    )
