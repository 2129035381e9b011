# covers: lib/parallel/meeting.py
"""Ranks join late, ranks are lost, and keys of an earlier attempt are ignored."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lib.parallel import meeting
from tests import forks
from tests.conftest import free_port

SILENCE_S = 2.0


def take_part(prepares_s: str) -> None:
    """Prepare for some seconds, meet the other ranks, and write a file in place of training."""
    meeting.SILENCE_S = SILENCE_S
    meeting.BEAT_S = 0.1
    me = meeting.Meeting()
    while not me._shared.check([f"alive/{me.rank}"]):  # `wait` would keep the store to itself
        time.sleep(0.01)
    print("begun", flush=True)
    time.sleep(float(prepares_s))
    store = me.join()
    key = f"address/{me.rank}"
    print("met", me.rank, "another life's" if store.check([key]) else "nobody's", flush=True)
    store.set(key, str(os.getpid()))
    others = [int(store.get(f"address/{rank}")) for rank in range(me.size)]
    print("alive", all(Path(f"/proc/{pid}").exists() for pid in others), flush=True)
    store.set(f"seen/{me.rank}", "")
    store.wait([f"seen/{rank}" for rank in range(me.size)])
    time.sleep(60 if prepares_s == "0" else 0)  # until it is killed


@pytest.fixture
def launch(tmp_path: Path):
    """Return a function that starts the ranks of an attempt, with a store that outlives them."""
    port = free_port()
    launches = []
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    environment = {**os.environ, **forks.CPU_VARIABLES}
    ranks = [
        variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for variables in forks.rank_variables(2, port)
    ]

    def start(*seconds: float) -> list[tuple[forks.Launch, Path]]:
        life = []
        for rank, prepares_s in enumerate(seconds):
            log = tmp_path / f"log_{len(launches)}"
            with log.open("ab") as file:
                one = forks.Launch(
                    forks.get_server("stages").start(
                        "",
                        [prepares_s],
                        tmp_path,
                        environment,
                        file.fileno(),
                        file.fileno(),
                        [ranks[rank]],
                        call="tests.parallel.test_meeting:take_part",
                    )
                )
            launches.append(one)
            life.append((one, log))
        return life

    yield start
    for one in launches:
        one.kill()
    del store


def wait_for(word: str, *logs: Path) -> None:
    deadline = time.monotonic() + 60
    while any(word not in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.02)


@pytest.mark.slow
def test_an_attempt_joins_in_a_store_that_an_earlier_one_used(launch):
    for _ in range(3):
        life = launch(0, 0)
        wait_for("alive", *(log for _, log in life))
        for one, log in life:
            assert "nobody's" in log.read_text() and "alive True" in log.read_text()
            one.kill()


@pytest.mark.slow
def test_a_rank_may_prepare_longer_than_the_heartbeat_timeout(launch):
    life = launch(0.1, 2 * SILENCE_S)
    assert [one.wait() for one, _ in life] == [[0], [0]]


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_lost_while_preparing_is_named(launch, lost: int):
    life = launch(*(30 if rank == lost else 0.1 for rank in range(2)))
    wait_for("begun", life[lost][1])
    life[lost][0].signal(signal.SIGSTOP)
    other, log = life[1 - lost]
    assert other.wait()[0] > 0
    assert f"rank {lost} has shown no" in log.read_text()
