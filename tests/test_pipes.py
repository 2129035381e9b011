# covers: lib/core/streams.py
"""Commands whose reader leaves: no line about broken pipes, and work that matters goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_stage, stage_command, start_stage
from tests.training import SMALL_RUN, metrics

SCRIPTS = [
    *sorted(ROOT.glob("0[1-5]_*.py")),
    *sorted((ROOT / "launch").glob("*.py")),
    *(ROOT / "launch/cloud" / name for name in ("pod.py", "prepare.py")),
]
TRAIN = (*SMALL_RUN, "-e", "run", "--max-steps", 2)


@contextmanager
def no_reader() -> Iterator[int]:
    """Yield the end of a pipe that nobody reads, as `| head` leaves it behind."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_unread(command: list[str], cwd: Path, both: bool = False) -> tuple[int, str]:
    """Return exit code and standard error of a command whose output is not read (both: neither)."""
    with no_reader() as nowhere:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdout=nowhere,
            text=True,
            timeout=300,
            stderr=nowhere if both else subprocess.PIPE,
        )
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    "script", [p for p in SCRIPTS if p.name != "__init__.py"], ids=lambda path: path.name
)
def test_head_on_any_help(script: Path, tmp_path: Path) -> None:
    code, printed = run_unread([sys.executable, str(script), "--help"], tmp_path)
    assert "Pipe" not in printed and "Traceback" not in printed and code in (0, 141)


def test_an_error_keeps_its_code(tmp_path: Path) -> None:
    command = stage_command("05_export_checkpoint.py", "-e", "none")
    assert run_unread(command, tmp_path, both=True) == (3, "")


def test_a_run_goes_on_and_what_shows_it_ends(prepared_once: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared_once, tmp_path, dirs_exist_ok=True)
    with no_reader() as nowhere:
        launch = start_stage("04_train_fsdp.py", *TRAIN, cwd=tmp_path, output=nowhere)
        assert launch.wait() == [0]
    assert [row["step"] for row in metrics(tmp_path, "run")] == [1, 2]
    assert "step" in (tmp_path / "outputs/run/logs/rank_00000.log").read_text()
    listing = [sys.executable, "-m", "lib.checkpoints", "list", str(tmp_path / "outputs/run")]
    assert run_unread(listing, ROOT) == (141, "")
    follow = stage_command("launch/monitor.py", "outputs/run")
    assert run_unread(follow, tmp_path) == (141, "")


def test_paths_of_the_command_line_are_told_in_words(tmp_path: Path) -> None:
    render = (
        "launch/kubernetes.py",
        "render",
        "--job-name",
        "x",
        "--image",
        "y",
        "--instance-type",
        "g5.48xlarge",
        "--out",
    )
    for out in ("/proc/none/job.yaml", "/dev/null/job.yaml"):
        done = run_stage(*render, out, "--", "-e", "x", "-d", "c", cwd=tmp_path, expect=2)
        assert "Traceback" not in done.stderr and f"{Path(out).parent}" in done.stderr
    run_stage(*render, "not/there/job.yaml", "--", "-e", "x", "-d", "c", cwd=tmp_path)
    assert (tmp_path / "not/there/job.yaml").exists()
