# covers: 04_train_fsdp.py, lib/checkpoints/checkpointer.py
"""Test kill -9 at random moments: at most the steps since the last save are repeated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import stage_command
from tests.faults import Server, Undisturbed, pin_to_core
from tests.random_kills import LONG_STEPS, STAGES, Killer, kill_often, make_lives


@pytest.mark.slow
def test_a_few_kills_lose_nothing(
    server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path
):
    kill_often(server, undisturbed(steps=LONG_STEPS), tmp_path, kills=30)


@pytest.mark.slow
def test_a_sample_of_make_test_faults(
    prepared_once: Path, model_files: dict[str, bytes], tmp_path: Path
):
    killer = Killer(prepared_once, model_files, tmp_path)
    try:
        assert sum(killer.kill(stage, kills=2, seed=0) for stage in STAGES) == 10
    finally:
        killer.close()


@pytest.mark.long
def test_many_kills_lose_nothing(
    server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path
):
    kill_often(server, undisturbed(steps=LONG_STEPS), tmp_path, kills=188)


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.long)]
)
def test_kills_of_new_commands_lose_nothing(
    server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path, kills: int
):
    """Like the other kills, but each launch is a new command, as a user types it."""
    rng = random.Random(0)
    runs = make_lives(
        undisturbed(steps=LONG_STEPS), tmp_path, rng, lambda life: server.run(*life.options)
    )
    while kills > 0:
        life = next(runs)
        before = life.launches()
        process = subprocess.Popen(
            stage_command("04_train_fsdp.py", *life.options),
            cwd=server.root,
            preexec_fn=pin_to_core(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )
        life.until_begun(before, lambda: process.poll() is not None)  # noqa: B023
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        kills -= bool(process.returncode)
        life.check(before)
    runs.close()
