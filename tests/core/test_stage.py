# covers: lib/core/stage.py, lib/core/progress.py, lib/core/log.py, lib/core/streams.py
"""The start and end of a stage: offline guard, exit codes, log and progress lines."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lib.core import log, paths, progress
from lib.core.errors import EXIT_PREEMPTED

RAISE = """
import errno
from lib.core import errors, stage
def main(argv):
    raise {}
stage.run_main(main)
"""


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            "errors.UsageError('bad option', run='do this')",
            2,
            "error: bad option\n  run:      do this",
        ),
        ("errors.ArtifactError('missing')", 3, "error: missing"),
        ("errors.DiskFullError('full')", 4, "error: full"),
        (
            "OSError(errno.ENOSPC, 'No space left on device', '/x')",
            4,
            "error: no room to write: /x",
        ),
        (
            "PermissionError(errno.EACCES, 'Permission denied', '/x')",
            2,
            "error: Permission denied: /x",
        ),
        ("KeyboardInterrupt", 130, "interrupted; run the same command again"),
    ],
)
def test_errors_of_users_have_a_code_and_no_traceback(python, raised, code, message) -> None:
    done = python(RAISE.format(raised), expect=code)
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_only_rank_0_reports_an_interruption(python) -> None:
    assert python(RAISE.format("KeyboardInterrupt"), expect=130, env={"RANK": "1"}).stderr == ""


@pytest.mark.parametrize("raised", ["ValueError('bug')", "OSError(errno.EBADF, 'bug')"])
def test_a_bug_keeps_its_traceback(python, raised: str) -> None:
    done = python(RAISE.format(raised), expect=1)
    assert "Traceback" in done.stderr and "bug" in done.stderr


def test_a_preempted_run_reports_no_error(python) -> None:
    done = python(RAISE.format("errors.Preempted('stopped after step 3')"), expect=EXIT_PREEMPTED)
    assert done.stdout == "stopped after step 3\n" and done.stderr == ""


def test_other_ranks_print_later_and_with_their_number(python) -> None:
    began = time.monotonic()
    done = python(RAISE.format("errors.UsageError('bad')"), expect=2, env={"RANK": "3"})
    assert done.stderr == "[rank=3] error: bad\n"
    assert time.monotonic() - began > 1.5


def test_ctrl_c_ends_a_stage_without_a_traceback(environment, tmp_path: Path) -> None:
    code = (
        "import time\nfrom lib.core import stage\n"
        "def main(argv):\n print('working', flush=True)\n time.sleep(60)\nstage.run_main(main)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in message and "Traceback" not in message


def test_a_stage_is_offline_before_any_import(python) -> None:
    done = python(
        """
import os
from lib.core import stage
def main(argv):
    from huggingface_hub import constants
    print(constants.HF_HUB_OFFLINE, os.environ["HF_DATASETS_OFFLINE"],
          os.environ["TRANSFORMERS_OFFLINE"], os.environ["HF_HUB_DISABLE_TELEMETRY"],
          os.environ["WANDB_MODE"])
stage.run_main(main)
""",
        env={"HF_HUB_OFFLINE": "0"},
    )
    assert done.stdout == "True 1 1 1 offline\n"


def test_stage_03_may_stay_online(python) -> None:
    done = python(
        "import os\nfrom lib.core import stage\n"
        "stage.run_main(lambda argv: print(os.environ.get('HF_HUB_OFFLINE')), network=True)"
    )
    assert done.stdout == "None\n"


@pytest.mark.parametrize("module", ["huggingface_hub", "datasets", "transformers"])
def test_going_offline_after_an_import_is_a_bug(python, module: str) -> None:
    done = python(
        f"import sys, types\nsys.modules[{module!r}] = types.ModuleType({module!r})\n"
        "from lib.core import offline\noffline.enable_offline_mode()",
        expect=1,
    )
    assert f"called after importing {module}" in done.stderr


def test_going_offline_after_a_real_import_is_a_bug(python) -> None:
    done = python(
        "import huggingface_hub\nfrom lib.core import offline\noffline.enable_offline_mode()",
        expect=1,
    )
    assert "called after importing huggingface_hub" in done.stderr


def test_names_that_are_not_utf8_do_not_end_a_run(python) -> None:
    done = python(
        "from lib.core import log, streams\nstreams.outlive_readers()\nlog.setup()\n"
        "log.info('caf\\u00e9 \\udcff')",
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.stdout == "caf\\xe9 \\udcff\n"


def test_the_log_file_of_a_rank_contains_more_than_its_console(python, tmp_path: Path) -> None:
    done = python(
        "from pathlib import Path\nfrom lib.core import log\nlog.setup()\n"
        "log.add_file(Path('logs/r.log'))\nlog.info('quiet')\nlog.warn('loud')\n"
        "log.error('the end')",
        env={"RANK": "1"},
    )
    assert done.stdout == "[rank=1] warning: loud\n"
    lines = (tmp_path / "logs/r.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO quiet",
        "WARNING loud",
        "ERROR the end",
    ]


def test_details_are_kept_for_the_log_file_of_a_run(python, tmp_path: Path) -> None:
    done = python(
        "from pathlib import Path\nfrom lib.core import log\nlog.setup()\n"
        "log.detail('of a dry run')\nlog.keep_details(True)\n"
        "log.detail('early')\nlog.warn('loud')\nlog.table({'a': 1}, log.detail)\n"
        "log.add_file(Path('r.log'))\nlog.detail('late')\nlog.info('for all')"
    )
    assert done.stdout == "of a dry run\nwarning: loud\nfor all\n"
    lines = (tmp_path / "r.log").read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == [
        "early",
        "loud",
        "  a  1",
        "late",
        "for all",
    ]


PROGRESS = """
import sys
from lib.core import log, progress
log.setup()
progress._LINE_EVERY_S = 0.0
total = int(sys.argv[1]) or None
with progress.Progress("reading", total, sys.argv[2], enabled=sys.argv[3] == "on") as bar:
    for _ in range(3):
        bar.advance(500_000)
"""


def test_progress_prints_lines_without_a_terminal(python) -> None:
    done = python(PROGRESS, 2_000_000, "B", "on")
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and done.stderr == ""
    assert lines[1].startswith("reading: 1.0 MB of 2.0 MB (50 %), ") and lines[1].endswith(" left")
    assert python(PROGRESS, 0, "files", "on").stdout.startswith("reading: 500K files, ")


@pytest.mark.parametrize(("switch", "rank"), [("off", "0"), ("on", "1")])
def test_progress_can_be_disabled_and_only_rank_0_shows_it(python, switch: str, rank: str) -> None:
    assert python(PROGRESS, 10, "B", switch, env={"RANK": rank}).stdout == ""


def test_progress_is_a_bar_on_a_terminal(environment, tmp_path: Path) -> None:
    master, terminal = os.openpty()
    # A new terminal has 0 columns, no room for a bar.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", PROGRESS, "2000000", "B", "on"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.set_blocking(master, False)
    assert done.returncode == 0 and done.stdout == "" and b"reading" in os.read(master, 4096)
    os.close(terminal)
    os.close(master)


def test_earlier_work_does_not_count_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(progress.log, "info", lines.append)
    bar = progress.Progress("reading", 4_000_000, "B")
    bar._began -= 10
    bar.skip(2_000_000)
    bar.advance(1_000_000)
    assert re.fullmatch(
        r"reading: 3.0 MB of 4.0 MB \(75 %\), (99|100)\.\d kB/s, 10 s left", lines[0]
    )
    bar.advance(-1_500_000)  # counted out again, so nothing has come
    assert lines[1].endswith("of 4.0 MB (38 %), 0 B/s")


def test_a_slow_rate_keeps_its_decimals(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(progress.log, "info", lines.append)
    bar = progress.Progress("evaluating", 85, "batches")
    bar._began -= 20
    bar.advance(7)
    assert lines[0].startswith("evaluating: 7 of 85 batches (8 %), 0.35 batches/s, ")


def test_progress_lines_are_rare() -> None:
    assert progress._LINE_EVERY_S >= 10 and log.rank() == 0


def test_step_names_are_parsed_back() -> None:
    assert paths.step_name(1000) == "step_00001000"
    assert [
        paths.step_of(name) for name in ("step_00001000", "step_x", "step_1.tmp-3", "best")
    ] == [1000, None, None, None]
    assert paths.model_dir_name("mistralai/Mathstral-7B-v0.1") == "mistralai--Mathstral-7B-v0.1"
