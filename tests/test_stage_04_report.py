# covers: lib/train/output/page_writer.py, lib/train/output/report.py, lib/report/__main__.py
"""Stage 04 writes report.html, and its runs are the same as without it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from lib.core.errors import EXIT_PREEMPTED
from lib.core.retry import poll
from tests.conftest import run_stage, stage_command
from tests.pages.test_svg import check_page
from tests.training import SMALL_RUN, losses

SCRIPT = "04_train_fsdp.py"
TRAIN = (*SMALL_RUN, "-b", 2, "--lr-scheduler", "constant", "--warmup-steps", 0, "--ckpt-freq", 4)


@pytest.mark.slow
def test_a_page_that_cannot_be_written_changes_nothing(project: Path) -> None:
    result = run_stage(
        SCRIPT, *TRAIN, "-e", "whole", "--max-steps", 12, cwd=project, ranks=2, pages=True
    )
    page = project / "outputs" / "whole" / "report.html"
    parsed = check_page(page.read_text())
    assert "whole is complete: step 12 of 12" in parsed.text
    assert result.stdout.count(f"files            {page.relative_to(project)}, ") == 1
    assert not list(page.parent.glob("*.tmp*"))

    run_stage(SCRIPT, *TRAIN, "-e", "parts", "--max-steps", 8, cwd=project, ranks=2)
    (project / "outputs" / "parts" / "report.html" / "in the way").mkdir(parents=True)
    parts = run_stage(
        SCRIPT, *TRAIN, "-e", "parts", "--max-steps", 12, cwd=project, ranks=2, pages=True
    )
    assert (parts.stdout + parts.stderr).count("report.html cannot be written") == 1
    assert losses(project, "parts") == losses(project, "whole")


@pytest.mark.slow
def test_the_page_follows_a_run_that_is_stopped(project: Path) -> None:
    command = stage_command(SCRIPT, *TRAIN, "-e", "run", "--max-steps", 100_000)
    run = subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL)
    page = project / "outputs" / "run" / "report.html"
    try:
        assert poll(page.exists, every=0.05, patience=120)
        assert "was running when" in check_page(page.read_text()).text
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == EXIT_PREEMPTED
    finally:
        run.kill()
    assert poll(lambda: "was stopped after saving" in page.read_text(), every=0.1, patience=60)
    check_page(page.read_text())
    assert page.stat().st_size < 2_000_000
