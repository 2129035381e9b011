"""How the ranks of a launch find each other: all of one life, however long each has to prepare.

torchrun keeps one store for all lives of a launch (torch 2.13), in which what a killed life wrote
still stands: its process groups, meshes and addresses. So each life agrees on a part of its own,
named by rank 0. A rank knows the name for one of its own life's by the answer that rank 0 gives to
a word that this process alone can have sent; the names and words of earlier lives get none.

While a rank prepares (tokenising takes hours), a thread of it counts in the store, so that the
others can tell one that is at work from one that is gone.
"""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from lib.core import launcher, log, units
from lib.core.errors import StageError
from lib.core.liveness import SilenceClock
from lib.core.retry import poll

START_TIMEOUT = timedelta(minutes=30)  # until the processes of all ranks have started
SILENCE_S = 300.0  # without a sign of life before a rank counts as gone
BEAT_S = 10.0
_LOOK_EVERY_S = 0.1
_PER_RANK_S = 0.001  # many ranks ask seldom: one store answers them all
_TELL_AFTER_S = 20.0
_TELL_EVERY_S = 300.0


class Meeting:
    """Brings the ranks together, in the store that RANK, WORLD_SIZE and MASTER_ADDR lead to."""

    def __init__(self) -> None:
        """Tell the others that this process has started, and go on telling that it is alive."""
        launcher.parent_pid()  # notes which one it is
        shared, self.rank, self.size = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
        self._shared = dist.PrefixStore("meeting", shared)
        self._word = uuid.uuid4().hex
        self._clock = SilenceClock()
        self._look_every = max(_LOOK_EVERY_S, _PER_RANK_S * self.size)
        self._here = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="meeting", daemon=True)
        self._beats.start()

    def join(self) -> dist.Store:
        """Return the store of this life, once all ranks have called this.

        Raises StageError when one of them shows no sign of life, or the launcher has gone.
        """
        self._tell_at = time.monotonic() + _TELL_AFTER_S
        life = self._open() if self.rank == 0 else self._enter()
        self._here.set()
        self._beats.join()
        return dist.PrefixStore(life, self._shared)

    def _open(self) -> str:
        """Name a life, and welcome all ranks at once when the last of them has come (rank 0)."""
        life = self._word
        self._shared.set("life", life)
        words: dict[int, str] = {0: ""}

        def have_all_come() -> bool:
            for rank in range(self.size):
                if rank not in words and self._shared.check([f"{life}/{rank}"]):
                    words[rank] = self._shared.get(f"{life}/{rank}").decode()
            missing = [rank for rank in range(self.size) if rank not in words]
            self._require_alive(missing)
            return not missing

        poll(have_all_come, self._look_every)
        for word in words.values():
            self._shared.set(f"{life}/welcome/{word}", "")
        return life

    def _enter(self) -> str:
        """Come to the life that rank 0 names, until it is one in which this process is welcome."""
        life = ""

        def is_welcome() -> bool:
            nonlocal life
            if life and self._shared.check([f"{life}/welcome/{self._word}"]):
                return True
            if self._shared.check(["life"]):
                life = self._shared.get("life").decode()
                self._shared.set(f"{life}/{self.rank}", self._word)
            self._require_alive([0])
            return False

        poll(is_welcome, self._look_every)
        return life

    def _require_alive(self, missing: list[int]) -> None:
        """Raise StageError if a missing rank will not come, or the launcher is gone."""
        if not missing:
            return
        if launcher.is_gone():
            raise without_launcher()
        self._clock.look()
        for rank in missing:
            is_started = self._shared.check([f"alive/{rank}"])
            beat = self._shared.get(f"alive/{rank}") if is_started else None
            self._clock.note(rank, beat)
            silent = self._clock.silence(rank)
            if silent > (SILENCE_S if beat else START_TIMEOUT.total_seconds()):
                raise StageError(
                    f"rank {rank} has shown no sign of life for {units.duration(silent)}",
                    hint="look at its node; the same command goes on",
                )
        now = time.monotonic()
        if self.rank == 0 and now > self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            log.info(
                f"waiting for {units.counted(len(missing), 'rank')}, still preparing: "
                f"{units.first_of(missing)}"
            )

    def _beat(self) -> None:
        while True:
            try:
                self._shared.set(f"alive/{self.rank}", uuid.uuid4().hex)
            except dist.DistError:  # the store has ended, and with it the launch
                return
            if self._here.wait(BEAT_S):
                return


def without_launcher() -> StageError:
    """Return the error of a rank that nobody would ever end or start again."""
    return StageError(
        "the launcher that started this rank has gone", hint="the same command goes on"
    )
