# covers: launch/supervision/end_command.py, launch/supervise.py, lib/core/unknown_options.py
"""--on-end of a launcher runs exactly once when a launch ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, kill_all, run_stage
from tests.trainer_stand_in import COMPLETE, KILLED, run_launcher, start_launcher
from tests.training import SMALL_RUN

SCRIPT = "04_train_fsdp.py"
TRAIN = (*SMALL_RUN, "-e", "run", "--eval-freq", 0, "-b", 2)
ENDLESS = (*TRAIN, "--max-steps", 50_000, "--ckpt-freq", 50_000)
# `sleep` shows a command that another one overtakes.
NOTE = 'echo "$EXP $STATUS $STEP ${LOSS:-none} $EXIT_CODE $REASON" >> ends; sleep 0.3'
ON_END = ("--on-end", NOTE)


def read_ends(project: Path) -> list[list[str]]:
    """Return the words of each call: EXP, STATUS, STEP, LOSS, EXIT_CODE and REASON."""
    path = project / "ends"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split(" ", 5) for line in lines]


def find_ranks(project: Path) -> dict[int, int]:
    """Return the process of each rank of a launch."""
    ranks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if (entry / "cwd").readlink() != project or b"-c" in command:
                continue
            rank = next(v for v in variables if v.startswith(b"RANK=")).removeprefix(b"RANK=")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if not any(name.endswith(b"04_train_fsdp.py") for name in command):
                continue
            siblings = Path(f"/proc/{parent}/environ").read_bytes()
            if b"\0RANK=" not in b"\0" + siblings:  # not a worker of a rank
                ranks[int(rank)] = int(entry.name)
        except (OSError, StopIteration):
            continue
    return ranks


def start_command(project: Path, command: list, **more: object) -> subprocess.Popen:
    """Start a command in a project, and wait for the third row of its run."""
    with (project / "printed").open("ab") as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=project, stdout=output, stderr=subprocess.STDOUT, **more
        )
    wait_for_rows(project, process)
    return process


def wait_for_rows(project: Path, process: subprocess.Popen, after: int = 0) -> None:
    path = project / "outputs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not path.exists() or len(path.read_text().splitlines()) < after + 3:
        assert process.poll() is None, (project / "printed").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_batch_job_does_not_print_the_command(tmp_path: Path) -> None:
    script = ROOT / "launch" / "slurm.sbatch"
    for words in (["--on-end", "curl https://a.b/s3cret"], ["--on_end=curl https://a.b/s3cret"]):
        job = ["bash", script, "--dry-run", *words, "--", "-e", "exp", "-d", "corpus"]
        printed = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "[redacted]" in printed.stdout and "s3cret" not in printed.stdout


def test_stage_04_refuses_it_and_ignores_it_in_files(project: Path) -> None:
    done = run_stage(SCRIPT, *TRAIN, *ON_END, cwd=project, expect=2)
    assert "unknown option --on-end" in done.stderr and "launch/single_node.sh" in done.stderr
    file = project / "recipe.yaml"
    recorded = "options: {on_end: touch pwned, on_end_seconds: 9}\nversions: {}\n"
    for text in ("on_end: touch pwned\n", recorded):
        file.write_text(text)
        done = run_stage(SCRIPT, *TRAIN, "--dry-run", "--config", file, cwd=project)
        assert "on_end" in done.stdout + done.stderr and "ignores" in done.stdout + done.stderr
    assert not (project / "pwned").exists() and not read_ends(project)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ((KILLED, KILLED, COMPLETE), ["run", "complete", "9", "none", "0", ""]),
        (("state('preempted', 5); sys.exit(1)",), ["run", "preempted", "5", "none", "75"]),
        (("state('disk_full', 5); sys.exit(1)",), ["run", "disk_full", "5", "none", "4"]),
        ((KILLED,), ["run", "failed", "0", "none", "1"]),
        (("fail('UsageError', 2, 'error: bad')",), ["run", "failed", "0", "none", "2"]),
        (("fail('ExperimentHeld', 2, 'error: held')",), None),
        (("",), None),
    ],
)
def test_the_launcher_calls_once_after_its_restarts(
    tmp_path: Path, plan: tuple, expected: list[str] | None
) -> None:
    code, output, attempts = run_launcher(tmp_path, *plan, options=("--max-restarts", 2, *ON_END))
    ends = read_ends(tmp_path)
    assert [end[: len(expected or [])] for end in ends] == ([expected] if expected else []), output
    assert ("--on-end succeeded" in output) == bool(expected)
    assert len(attempts) == (3 if KILLED in plan else 1)
    if expected:
        assert str(code) == ends[0][4]


def test_a_launcher_is_not_delayed_beyond_the_limit(tmp_path: Path) -> None:
    code, output, _ = run_launcher(
        tmp_path, COMPLETE, options=("--on-end", "sleep 500", "--on-end-seconds", "0.5")
    )
    assert code == 0 and "0.5 s and was killed" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(NOTE, marks=pytest.mark.long), f"{NOTE}; touch called; sleep 500"]
)
def test_only_the_launcher_of_node_0_calls_and_all_leave_after_it(
    tmp_path: Path, command: str
) -> None:
    options = ("--nnodes", 2, "--head", "127.0.0.1", "--interface", "lo")
    options = (*options, "--on-end", command, "--on-end-seconds", "4")
    launchers = [
        start_launcher(
            tmp_path,
            COMPLETE,
            node=node,
            options=(*options, "--node-rank", node),
        )
        for node in (0, 1)
    ]
    if command != NOTE:
        while not (tmp_path / "called").exists():
            time.sleep(0.05)
        assert launchers[1].poll() is None  # Slurm would end the job 60 s after this one's end
    outputs = [launcher.communicate(timeout=90)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert [end[1] for end in read_ends(tmp_path)] == ["complete"]


@pytest.mark.slow
def test_a_real_launch_calls_once_after_a_kill(project: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "BACKOFF_SECONDS": "0.1"}
    launch = ["bash", ROOT / "launch" / "single_node.sh", "--nproc-per-node", 2, *ON_END, "--"]
    command = [*launch, *TRAIN, "--max-steps", 160, "--ckpt-freq", 40]
    process = start_command(project, command, env=environment)
    os.kill(find_ranks(project)[0], signal.SIGKILL)
    process.wait(timeout=240)
    [end] = read_ends(project)
    printed = (project / "printed").read_text()
    assert end[1] == "complete" and "rank 0 on node 0: rank 0 (process" in printed, printed
    assert NOTE not in (project / "outputs/run/config.yaml").read_text()
    kill_all(process, project)
