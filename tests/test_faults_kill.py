"""kill -9 at random moments: at most the steps since the last save are done again, all alike."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import stage_command
from tests.faults import (
    Server,
    Undisturbed,
    begun_at,
    events,
    pinned,
    run_options,
    valid_steps,
)

LONG = 40  # steps


class Life:
    """A run that is killed over and over until it is complete.

    After each kill: every checkpoint is what it should be and the newest step never goes back;
    the next launch goes on from exactly that one.
    """

    def __init__(self, outputs: Path, options: tuple[object, ...], expected: Undisturbed) -> None:
        self.outputs, self.options, self.expected = outputs, options, expected
        self.newest = 0

    def launches(self) -> int:
        """Return how often the run has begun or gone on."""
        return len([e for e in events(self.outputs) if e["event"] in ("start", "resume")])

    def check(self, launches_before: int) -> None:
        """Check what a killed launch has left."""
        if self.launches() > launches_before:
            assert begun_at(self.outputs) == self.newest
        found = max(valid_steps(self.outputs), default=0)
        assert found >= self.newest
        self.newest = found
        self.expected.require_sound(self.outputs)


    def until_begun(self, launches_before: int, ended: Callable[[], bool]) -> None:
        """Wait until a launch has begun to train, or has ended."""
        while self.launches() == launches_before and not ended():
            time.sleep(0.002)


def lives(expected: Undisturbed, parent: Path, rng: random.Random, finish: Callable[[Life], None],
          ) -> Iterator[Life]:
    """Yield runs to kill a launch of: the same one until it is complete, then another.

    After the last kill, and wherever one is complete, it must have learned what it should.
    """
    for number in count():
        outputs = parent / f"life_{number}" / "outputs"
        life = Life(outputs, run_options(outputs, "--ckpt-freq", rng.choice([1, 2]),
                                         "--ckpt-async", rng.choice(["on", "off"]),
                                         "--ckpt-keep", 2, steps=LONG), expected)
        try:
            while life.newest < LONG:
                yield life
        finally:
            finish(life)
            expected.require_same(outputs)


def kill_often(server: Server, expected: Undisturbed, parent: Path, kills: int) -> None:
    """Kill launches at random moments, most of them after the start, until there were so many."""
    rng = random.Random(0)
    runs = lives(expected, parent, rng, lambda life: server.run(*life.options))
    while kills > 0:
        life = next(runs)
        before = life.launches()
        launch = server.start(*life.options)
        if rng.random() < 0.75:
            life.until_begun(before, launch.poll)
            time.sleep(rng.uniform(0, 0.25))
        else:
            time.sleep(rng.uniform(0, 0.6))
        launch.kill()
        [code] = launch.wait()
        assert code in (0, -signal.SIGKILL), launch.output[-3000:]
        kills -= bool(code)
        life.check(before)
    runs.close()


@pytest.mark.slow
def test_a_few_kills(server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path):
    kill_often(server, undisturbed(steps=LONG), tmp_path, kills=3)


@pytest.mark.slow
def test_many_kills(server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path):
    kill_often(server, undisturbed(steps=LONG), tmp_path, kills=188)


@pytest.mark.slow
def test_kills_of_the_command_itself(server: Server, undisturbed: Callable[..., Undisturbed],
                                     tmp_path: Path):
    """As the others, but each launch is a command of its own, as a person types it."""
    rng, kills = random.Random(0), 12
    runs = lives(undisturbed(steps=LONG), tmp_path, rng, lambda life: server.run(*life.options))
    while kills > 0:
        life = next(runs)
        before = life.launches()
        process = subprocess.Popen(
            stage_command("04_train_fsdp.py", *life.options), cwd=server.root, preexec_fn=pinned(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        life.until_begun(before, lambda: process.poll() is not None)  # noqa: B023
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        kills -= bool(process.returncode)
        life.check(before)
    runs.close()
