# covers: lib/parallel/stop_request.py, lib/checkpoints/checkpointer.py
"""Test signals during a save, repeated signals, signals to torchrun, and very slow saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.conftest import ROOT, kill_all, stage_command
from tests.fault_points import Fault, read_operations
from tests.faults import (
    Server,
    Undisturbed,
    find_start_step,
    find_valid_steps,
    pin_to_core,
    run_options,
)

LONG = 40  # steps
ONE = (signal.SIGTERM,)
THREE = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def state(outputs: Path) -> dict:
    return json.loads((outputs / "run" / "state.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "asynchronous"),
    [
        (THREE, "on"),
        (ONE, "off"),
        pytest.param(ONE, "on", marks=pytest.mark.long),
        pytest.param(THREE, "off", marks=pytest.mark.long),
    ],
)
def test_a_signal_during_a_save_saves_the_current_step(
    server: Server,
    tmp_path: Path,
    asynchronous: str,
    signals: Iterable[int],
    undisturbed: Callable[..., Undisturbed],
):
    """The save continues, and the current step is finished and saved too."""
    outputs = tmp_path / "outputs"
    report = tmp_path / "report"
    options = run_options(outputs, "--ckpt-async", asynchronous)
    launch = server.start(
        *options,
        ranks=2,
        faults={
            0: Fault(
                str(outputs),
                1,
                "pause",
                seconds=1.0,
                kinds=("fsync",),
                match="step_00000004",
                report=str(report),
            )
        },
    )
    launch.until(lambda: bool(read_operations(report)))
    for number in signals:
        launch.signal(number)
        time.sleep(0.1)
    assert launch.wait() == [75, 75], launch.output
    assert state(outputs)["status"] == "preempted"
    stopped = max(find_valid_steps(outputs))
    assert state(outputs)["step"] == stopped and {2, 4, stopped} == set(find_valid_steps(outputs))
    server.run(*options, ranks=2)
    assert find_start_step(outputs) == stopped
    undisturbed(ranks=2).require_same(outputs)


def start_torchrun(
    server: Server, outputs: Path, *options: object, fault: Fault | None = None
) -> subprocess.Popen:
    """Start two ranks as the README says; each has the fault."""
    command = stage_command(
        "04_train_fsdp.py", *run_options(outputs, *options, steps=LONG), ranks=2
    )
    script = command.index(str(ROOT / "04_train_fsdp.py"))
    command[script:script] = [
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        "--shutdown-timeout",
        "120",
    ]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": str(ROOT / "tests" / "fault_site"),
    }
    if fault is not None:
        environment["FAULT"] = json.dumps(asdict(fault))
    return subprocess.Popen(
        command,
        cwd=server.root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        preexec_fn=pin_to_core(),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "pause_s"),
    [(signal.SIGTERM, 0.3), (signal.SIGUSR1, 35.0)],
    ids=["SIGTERM", "SIGUSR1 and a save of 35 s"],
)
def test_torchrun_passes_a_signal_on_and_waits(
    server: Server,
    tmp_path: Path,
    number: int,
    pause_s: float,
    undisturbed: Callable[..., Undisturbed],
):
    outputs = tmp_path / "outputs"
    report = tmp_path / "report"
    fault = Fault(
        str(outputs),
        1,
        "pause",
        seconds=pause_s,
        kinds=("fsync",),
        report=str(report),
        match="step_00000004.tmp-",
    )
    process = start_torchrun(server, outputs, fault=fault)
    try:
        deadline = time.monotonic() + 120
        while not read_operations(report):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        output = process.communicate(timeout=180)[0]
    finally:
        kill_all(process, server.root)
    assert process.returncode == 1  # torchrun returns 1 for any exit code but 0
    assert state(outputs)["status"] == "preempted", output
    stopped = max(find_valid_steps(outputs))
    assert state(outputs)["step"] == stopped < LONG
    server.run(*run_options(outputs, steps=LONG), ranks=2)
    assert find_start_step(outputs) == stopped
    undisturbed(ranks=2, steps=LONG).require_same(outputs)
