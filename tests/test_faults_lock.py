# covers: lib/core/lease.py, lib/train/experiment.py
"""Test several launches of one experiment, and the lock of a killed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault_points import Fault, read_operations
from tests.faults import STEPS, Server, Undisturbed, find_start_step, find_valid_steps, run_options


@pytest.mark.parametrize(
    "first",
    [pytest.param(True, marks=pytest.mark.slow, id="new"), pytest.param(False, id="going on")],
)
def test_of_four_launches_at_once_one_trains(
    server: Server, tmp_path: Path, first: bool, undisturbed: Callable[..., Undisturbed]
):
    """The others report the holder of the run, and change nothing."""
    outputs = tmp_path / "outputs"
    if not first:
        server.run(
            *run_options(outputs),
            expect=-9,
            faults={0: Fault(str(outputs), 1, kinds=("mkdir",), match="step_00000006")},
        )
    # Saves are slow, so that no launch is complete before the last has begun.
    launches = [
        server.start(
            *run_options(outputs, "--ckpt-async", "off"),
            faults={
                0: Fault(
                    str(outputs),
                    1,
                    "pause",
                    times=10**6,
                    seconds=0.3,
                    kinds=("mkdir",),
                    match="step_",
                )
            },
        )
        for _ in range(4)
    ]
    codes = [launch.wait()[0] for launch in launches]
    assert sorted(codes) == [0, 2, 2, 2]
    for launch, code in zip(launches, codes, strict=True):
        assert code == 0 or "another launch is training" in launch.output
    undisturbed().require_same(outputs)
    assert max(find_valid_steps(outputs)) == STEPS


def test_the_lock_of_a_dead_process_is_taken_over(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed]
):
    """Its process was killed and its number reused, so the lock is taken over at once."""
    outputs = tmp_path / "outputs"
    report = tmp_path / "report"
    launch = server.start(
        *run_options(outputs),
        faults={
            0: Fault(
                str(outputs), 1, "pause", seconds=60, match="step_00000006", report=str(report)
            )
        },
    )
    launch.until(lambda: bool(read_operations(report)))
    busy = server.run(*run_options(outputs), expect=2)
    assert "another launch is training" in busy.output
    launch.signal(signal.SIGKILL)
    assert launch.wait() == [-signal.SIGKILL]
    record = outputs / "run" / "lock.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"pid": os.getpid()}))
    server.run(*run_options(outputs))
    assert find_start_step(outputs) == 4 and not record.exists()
    undisturbed().require_same(outputs)


@pytest.mark.parametrize("content", [b'{"host": "a', b"\xff\xfe"])
def test_a_torn_lock_is_taken_over(server: Server, tmp_path: Path, content: bytes):
    outputs = tmp_path / "outputs"
    (outputs / "run").mkdir(parents=True)
    (outputs / "run" / "lock.json").write_bytes(content)
    (outputs / "run" / "config.yaml").write_text(
        "identity: {}"
    )  # a config.yaml makes it an experiment
    server.run(*run_options(outputs, steps=2))
    assert find_valid_steps(outputs) == [2]
