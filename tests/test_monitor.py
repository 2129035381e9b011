# covers: launch/monitor.py, launch/runs/*.py, lib/runs/growing_files.py, lib/runs/collectives.py
"""Test that launch/monitor.py shows runs that train, end, hang, die, or have torn files."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import monitor, stop
from launch.runs import curves, page
from lib.core import liveness
from lib.core.lease import Lease
from lib.runs.growing_files import GrowingFile, JsonLines
from lib.runs.run_files import RunFiles
from tests.conftest import ROOT, run_stage, start_stage
from tests.training import SEQ_LENGTH, wait_for_save

MONITOR = [sys.executable, str(ROOT / "launch" / "monitor.py")]


def run_once(root: Path | str, expect: int = 0, cwd: Path | None = None, **environment: str) -> str:
    """Return the output of `--once`."""
    result = run_stage(
        "launch/monitor.py", root, "--once", cwd=cwd or Path.cwd(), expect=expect, env=environment
    )
    assert "Traceback" not in result.stderr
    return result.stdout if expect == 0 else result.stderr


def show(run: RunFiles, width: int = 100) -> str:
    """Return the page about a run as it is printed."""
    return monitor.format_text(monitor.make_console(width), page.render_page(run, width))


def make_row(step: int, **more: object) -> str:
    """Return a line of metrics.jsonl."""
    figures = {
        "step": step,
        "epoch": 0.1,
        "train/loss": 8.0 - step / 100,
        "train/grad_norm": 1.0,
        "train/learning_rate": 1e-3,
        "train/tokens_seen": step * 1000,
        "train/loss_mean": 8.05 - step / 100,
        "perf/run_tokens_per_sec": 4321.0,
        "perf/eta_sec": 4000.0 - 10 * step,
        "perf/tokens_per_sec": 5000.0,
        "perf/samples_per_sec": 2.4414,
        "perf/tokens_per_sec_per_device": 2500.0,
        "perf/tflops": 100.0,
        "perf/mfu": 0.31,
        "time/data": 1.0,
        "time/forward": 30.0,
        "time/backward": 60.0,
        "time/update": 9.0,
        "time/total": 100.0,
        "perf/slowest_rank": 3,
        "perf/slowest_ratio": 1.0,
        "memory/peak_gib": 58.0,
        "memory/max_peak_gib": 60.0,
        "memory/max_peak_rank": 3,
        "memory/total_gib": 80.0,
    }
    return json.dumps({**figures, **more}) + "\n"


@contextmanager
def hold_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run, as its rank 0 does."""
    lease = Lease(run / "lock.json", lambda text: None)
    try:
        yield
    finally:
        lease.release()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the files of a run that has done 100 of 400 steps."""
    root = tmp_path / "outputs" / "exp"
    (root / "logs").mkdir(parents=True)
    (root / "config.yaml").touch()
    (root / "metrics.jsonl").write_text("".join(make_row(step) for step in range(10, 101, 10)))
    (root / "events.jsonl").write_text(
        '{"time": "2026-01-01T00:00:00Z", "event": "start", "step": 0, "ranks": 16}\n'
    )
    (root / "state.json").write_text('{"status": "running", "step": 50, "total_steps": 400}')
    for step in (50, 100):
        place = root / "checkpoints" / f"step_{step:08d}"
        place.mkdir(parents=True)
        (place / "COMMIT.json").touch()
    (root / "checkpoints" / "step_00000150.tmp-1").mkdir()
    return root


def test_the_page_shows_the_figures_of_the_last_row(run: Path):
    with hold_run(run):
        text = run_once("exp", cwd=run.parents[1])  # a name means a run in outputs/
    assert re.search(r"exp +running, 16 ranks\n", text)
    assert "25.0 %, step 100 of 400, 50 min 00 s left" in text
    assert "7.0500 on average since step 90, 7.0000 in step 100;" in text
    assert re.search(r"speed +5,000 tok/s since step 90, MFU 31.0 %\n", text)
    assert "peak of this launch 60.0 GiB of 80.0 GiB (75 %), on rank 3" in text
    assert "100 ms on average since step 90: data 1, forward 30, backward 60, update 9" in text
    assert re.search(r"checkpoint +step 100, (under )?\S+ s ago; 2 kept", text)
    assert "slowest" not in text and "warnings" not in text
    picture = [line for line in text.splitlines() if set(line) & set("▁▂▃▄▅▆▇█")]
    assert len(picture) == 8 and "7.9500" in picture[0] and "7.0500" in picture[-1]
    assert picture[0].count("█") == 1 and len(picture[-1].split()[-1]) == 10  # the curve falls


def test_a_terminal_without_unicode_gets_ascii_only(run: Path):
    with hold_run(run):
        text = run_once(run, PYTHONIOENCODING="ascii")
    assert text.isascii() and "\\u" not in text and "-----" in text and "@" in text


def test_the_page_shows_the_gpus_of_this_machine(run: Path, monkeypatch: pytest.MonkeyPatch):
    tool = run.parent / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    files = RunFiles(run)
    files.update()
    shown = {}
    for name, cells in (
        ("two", "0, 97, 61234, 81559, 641.35, 700.00, 61\\n1, 0, 4, 81559, 70.1, [N/A], 31"),
        ("silent", "0" + ", [N/A]" * 6),
        ("some", "0, [N/A], [N/A], 81559, [N/A], 700.00, 45"),
        ("broken", "Failed to initialize NVML: Driver/library version mismatch"),
    ):
        tool.write_text(f"#!/bin/sh\necho '{cells}'\n".replace("\\n", "\n"))
        with hold_run(run):
            shown[name] = show(files)
    assert re.search(
        r"GPUs +on \S+, now\nGPU 0 +busy 97 %, 59.8 GiB of 79.6 GiB, 641 of 700 W, "
        r"61 °C\nGPU 1 +busy 0 %, 4.\S* MiB of 79.6 GiB, 70 W, 31 °C",
        shown["two"],
    )
    assert re.search("GPU 0 +no data", shown["silent"])
    assert re.search("GPU 0 +45 °C$", shown["some"], re.MULTILINE)
    tool.write_text("#!/bin/sh\necho 0, 9, 1, 2, 3, 4, 61\n")
    with hold_run(run):
        plain = run_once(run, PYTHONIOENCODING="ascii")
    assert "4 W, 61 C" in plain and plain.isascii() and "\\" not in plain
    assert "GPU" not in shown["broken"] + show(files)  # no process holds the run
    tool.unlink()
    with hold_run(run):
        assert "GPU" not in show(files)


def test_the_page_names_a_straggler(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(110, 400, 10):
            file.write(make_row(step, **{"perf/slowest_ratio": 1.62 if step % 20 else 1.3}))
    assert re.search(
        r"slowest rank +3, in 20 of the last 20, up to 1.62 × the median", run_once(run)
    )


@pytest.mark.parametrize(
    "partial",
    [{"perf/slowest_rank": None}, {"perf/slowest_rank": "3"}, {"perf/slowest_ratio": None}],
)
def test_rows_without_the_slowest_rank_or_its_ratio_are_ignored(
    run: Path, partial: dict[str, object]
):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    slow = {**json.loads(lines[-1]), "perf/slowest_ratio": 1.5}
    files = RunFiles(run)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(110, 210, 10):
            file.write(json.dumps({**slow, "step": step, **partial}) + "\n")
    files.update()
    assert "slowest" not in show(files)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(210, 320, 10):
            file.write(json.dumps({**slow, "step": step}) + "\n")
    files.update()
    assert "3, in 11 of the last 20, up to 1.50 ×" in show(files)


def test_the_page_tolerates_torn_and_missing_files(run: Path):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00 no json\n[1]\n{"step": "x"}\n')
        file.write(make_row(110, **{"train/loss": None}).encode())
        file.write(make_row(120, **{"eval/loss": 6.5}).encode())
        file.write(make_row(130).encode()[:40])
    (run / "state.json").write_text('{"status": "runn')
    (run / "events.jsonl").write_text('{"event": "sta')
    text = run_once(run)
    assert "step 120" in text and "6.5000 at step 120" in text
    for name in ("state.json", "events.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        assert run_once(run)
    assert "before its first step" in run_once(run)
    (run / "config.yaml").unlink()
    assert "not begun" in run_once(run)
    assert "there is no run" in run_once(run.parent / "other", expect=2)
    assert "exp" in run_once(run.parent / "other", expect=2)


def test_only_new_lines_are_read_unless_the_file_was_replaced(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.update() == []
    path.write_text(make_row(1) + make_row(2)[:30])
    assert [r["step"] for r in lines.update()] == [1]
    with path.open("a") as file:
        file.write(make_row(2)[30:])
    assert [r["step"] for r in lines.update()] == [1, 2]
    other = tmp_path / "new"
    other.write_text(make_row(1) + make_row(5) + make_row(6))
    other.replace(path)
    assert [r["step"] for r in lines.update()] == [1, 5, 6]
    path.write_text(make_row(7))
    assert [r["step"] for r in lines.update()] == [7]


def test_reading_continues_after_a_failed_read(tmp_path: Path):
    path = tmp_path / "rank_00000.log"
    away = tmp_path / "away"
    path.write_text("one\n")
    log = GrowingFile(path)
    assert log.read_new() == ([b"one"], True)
    path.rename(away)
    path.mkdir()  # a directory cannot be read as a file
    assert log.read_new() == ([], False)
    path.rmdir()
    away.write_text("one\ntwo\n")
    away.rename(path)
    assert log.read_new() == ([b"two"], False)


def test_the_page_shows_the_warnings_of_every_rank(run: Path):
    (run / "logs" / "rank_00000.log").write_text(
        "2026-01-01 10:00:00,123 INFO all is well\n2026-01-01 10:00:01,000 WARNING no room\n"
    )
    (run / "logs" / "rank_00012.log").write_text(
        "2026-01-01 10:00:02,000 ERROR Traceback (most recent call last):\n"
        '  File "x.py", line 1\nRuntimeError: out of luck\n'
    )
    (run / "logs" / "rank_00012.stacks.txt").touch()
    with (run / "events.jsonl").open("a") as file:
        file.write(
            '{"time": "2026-01-01T09:00:00Z", "event": "quarantine", "step": 50, '
            '"reason": "a bit"}\n'
        )
    text = run_once(run)
    shown = text[text.index("warnings") :].splitlines()[1:]
    assert [line.strip() for line in shown] == [
        f"stacks of a rank that hung: {run}/logs/rank_00012.stacks.txt",
        "2026-01-01 09:00:00  quarantine at step 50: reason a bit",
        "2026-01-01 10:00:01  rank 0: no room",
        "2026-01-01 10:00:02  rank 12: RuntimeError: out of luck",
    ]


def write_dump(rank: int, *entries: tuple[str, int, bool], members: int = 4, **more: object) -> str:
    """Write the dump of a rank that the watchdog ended. entries: group, number, pending."""
    rows = [
        {
            "profiling_name": "nccl:all_gather",
            "process_group": [group, f"mesh_{group}"],
            "collective_seq_id": number,
            "time_created_ns": place,
            "pending": pending,
        }
        for place, (group, number, pending) in enumerate(entries)
    ]
    neighbours = [2 * (rank // 2), 2 * (rank // 2) + 1]
    return json.dumps(
        {
            "rank": rank,
            "time": time.time(),
            "entries": rows,
            "groups": {"0": list(range(members)), "1": neighbours},
        }
        | more
    )


@pytest.mark.parametrize(
    ("dumps", "expected"),
    [
        # Rank 2 is behind. Rank 3 left no dump, and its neighbour waits for it in another group.
        (
            [
                write_dump(0, ("0", 7, False), ("0", 8, True), ("1", 3, True)),
                write_dump(1, ("0", 8, True)),
                write_dump(2, ("0", 7, False), ("1", 4, True)),
            ],
            "ranks 0, 1 hung in nccl:all_gather, number 8 of group mesh_0, "
            "and waited for ranks 2, 3",
        ),
        (
            [write_dump(rank, ("0", 8, True)) for rank in range(4)],
            "ranks 0, 1, 2, 3 hung in nccl:all_gather, number 8 of group mesh_0, "
            "which all ranks have reached: check the network",
        ),
        (
            [write_dump(0, ("0", 8, True), members=2), write_dump(1, ("0", 9, False), time=1.0)],
            "rank 0 hung in nccl:all_gather, number 8 of group mesh_0, and waited for rank 1",
        ),
        ([write_dump(0, ("0", 8, False))], ""),
        (
            [
                "{",
                "[]",
                '{"rank": []}',
                write_dump(0, time="now"),
                write_dump(0, entries=[{}]),
                write_dump(0, groups=[1]),
            ],
            "",
        ),
    ],
    ids=["late", "network", "an older hang", "nothing pending", "damaged"],
)
def test_a_hang_names_the_waiting_and_the_late_ranks(run: Path, dumps: list[str], expected: str):
    for number, text in enumerate(dumps):
        (run / "logs" / f"rank_{number:05d}.collectives.json").write_text(text)
    shown = [line.strip() for line in run_once(run).splitlines() if "hung in" in line]
    assert shown == ([expected] if expected else [])
    later = time.time() + 5
    os.utime(run / "config.yaml", (later, later))  # a new launch has begun
    assert "hung in" not in run_once(run)


def test_a_silent_run_and_a_dead_run_are_told_apart(run: Path):
    def age(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds, time.time() - seconds))

    assert "process is gone" in run_once(run)
    with hold_run(run):
        for path in run.iterdir():
            age(path, 1000)
        assert "silent for 17 min" in run_once(run)
    elsewhere = run / "lock.json"
    elsewhere.write_text(json.dumps({"host": "n7", "pid": 1, "born": "1", "machine": "m"}))
    assert "silent" in run_once(run) and "process 1 on n7" in run_once(run)
    age(elsewhere, 100)
    assert "process 1 on n7" in run_once(run)
    (run / "state.json").write_text('{"status": "preempted", "total_steps": 400}')
    text = run_once(run)
    assert "preempted" in text and "left" not in text


def test_the_curve_of_a_long_run_fits_a_narrow_terminal(run: Path, monkeypatch: pytest.MonkeyPatch):
    (run / "metrics.jsonl").write_text("".join(make_row(step) for step in range(1, 5001)))
    files = RunFiles(run)
    files.update()
    monkeypatch.setattr(curves, "supports_unicode", lambda: True)
    picture = curves.render_curve([r["train/loss"] for r in files.rows], 60, (1, 5000))
    assert all(len(line) <= 60 for _, line in picture)
    assert (
        curves.render_curve([], 60, (0, 0))
        == []
        == curves.render_curve([float("nan")] * 5, 60, (1, 5))
    )


def test_a_real_run_is_shown_while_it_trains_and_after_it_was_killed(project: Path):
    """It is shown live in a terminal, and with --once."""
    training = start_stage(
        "04_train_fsdp.py",
        "-e",
        "exp",
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        SEQ_LENGTH,
        "--max-steps",
        10**6,
        "--log-freq",
        1,
        "--ckpt-freq",
        20,
        cwd=project,
    )
    root = project / "outputs" / "exp"
    try:
        wait_for_save(training, project, "exp")
        text = run_once(root)
        assert re.search(r"exp +running, 1 rank\n", text) and " left" in text
        assert "tok/s" in text and "MFU" not in text and "step 20" in text
        shown = watch_live(root)
        assert shown.startswith("\x1b[?1049h") and "running" in shown
        assert "\x1b[?25h\x1b[?1049l" in shown
    finally:
        training.kill()
    assert "died" in run_once(root)


def watch_live(root: Path, **environment: str) -> str:
    """Return the output of the live page in a terminal until it has been drawn twice or ends."""
    ours, theirs = pty.openpty()
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")  # rich reads them
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(
        [*MONITOR, str(root), "--every", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**variables, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    shown = ""
    is_ended = False
    while True:
        try:
            part = os.read(ours, 65536).decode("utf-8", "replace")
        except OSError:  # the other side has closed the terminal
            break
        shown += part
        if shown.count("\x1b[H") >= 3 and not is_ended:
            process.send_signal(signal.SIGINT)
            is_ended = True
    assert process.wait(60) == 0
    os.close(ours)
    return shown


def test_the_live_page_fits_its_terminal(run: Path):
    (run / "logs" / "rank_00000.log").write_text(
        f"2026-01-01 10:00:00,123 ERROR {'no room ' * 30}\n"
    )
    shown = watch_live(run, COLUMNS="60", LINES="30", PYTHONIOENCODING="utf-8")
    assert "\x1b[33m" in shown and "\x1b[1m" in shown
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.split("\x1b[H")[2])
    assert "process is gone" in drawn and "learning rate" in drawn
    assert any(block in drawn for block in "▁▂▃▄▅▆▇█")
    lines = drawn.rstrip("\r\n").splitlines()
    assert len(lines) == 30 and {len(line) for line in lines} == {60}
    assert "\x1b[33m" not in watch_live(run, NO_COLOR="1")


def test_a_dumb_terminal_gets_the_page_once(run: Path):
    shown = watch_live(run, TERM="dumb")
    assert "process is gone" in shown and "\x1b" not in shown


def test_nothing_in_a_text_is_markup(tmp_path: Path):
    name = "[red]a[b] :smile: [link=x]"
    root = tmp_path / "outputs" / name
    (root / "logs").mkdir(parents=True)
    (root / "config.yaml").write_text(json.dumps({"options": {"lr": "[b]1[/b]"}}))
    (root / "state.json").write_text(json.dumps({"status": "[blue]x", "copy_error": "[/nonsense]"}))
    (root / "logs" / "rank_00000.log").write_text("2026-01-01 00:00:00,1 ERROR [/] :warning: [x]\n")
    text = run_once(root)
    assert f"{name} [blue]x" in text and "failed: [/nonsense]" in text
    assert "rank 0: [/] :warning: [x]" in text
    assert f"{name}  [blue]x" in run_stage("launch/monitor.py", cwd=tmp_path).stdout


def test_a_pipe_gets_whole_lines(run: Path):
    (run / "state.json").write_text(json.dumps({"status": "running", "copy_error": "x " * 400}))
    text = run_once(run, COLUMNS="60", FORCE_COLOR="1")
    assert "x " * 399 + "x\n" in text and " \n" not in text


HOSTILE = (
    "x\x1b[2Jy",
    "a\nb\r\x07\x9b",
    "\u202egnp.exe",
    [1],
    {"a": "\x1b[0m"},
    {},
    True,
    None,
    -1,
    1e308,
    -1e308,
    10**400,
    float("inf"),
    float("nan"),
    0,
    "12",
    2**63,
    1.5,
)


def print_run(root: Path) -> str:
    """Return all output of the monitor and the stop command about a run."""
    run = RunFiles(root)
    run.update()
    text = show(run)
    return text + run.status().text + stop._describe_step(run) + str(run.checkpoints())


def require_harmless(text: str) -> None:
    characters = [
        char
        for char in text
        if char != "\n" and (unicodedata.category(char) == "Cc" or char in "\u202e\u2028")
    ]
    assert not characters, text


def make_hostile_records(record: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield a record with each of its values and names replaced by unexpected ones."""
    for key in record:
        yield {name: value for name, value in record.items() if name != key}
        for value in HOSTILE:
            yield {**record, key: value}
    yield {**record, "\x1b[2J": "\x1b[2J"}


def test_no_file_of_a_run_can_break_or_control_the_terminal(tmp_path: Path) -> None:
    root = tmp_path / "outputs" / "run"
    (root / "logs").mkdir(parents=True)
    state = {"status": "running", "step": 20, "total_steps": 100, "tokens": 5}
    lock = {"host": "h", "pid": os.getpid(), "born": "1", "machine": "m", "id": "x"}
    lock["machine"] = liveness.machine_identity()
    event = {
        "event": "skip_step",
        "step": 3,
        "time": "2026-01-01T00:00:00Z",
        "reason": "nan",
        "ranks": 2,
    }
    base = {
        "state.json": json.dumps(state),
        "lock.json": json.dumps(lock),
        "metrics.jsonl": make_row(10) + make_row(20, **{"eval/loss": 3.0}),
        "events.jsonl": json.dumps(event) + "\n",
    }
    changed = {
        "state.json": map(json.dumps, make_hostile_records(state)),
        "lock.json": map(json.dumps, make_hostile_records(lock)),
        "events.jsonl": (json.dumps(one) + "\n" for one in make_hostile_records(event)),
        "metrics.jsonl": (
            make_row(10) + json.dumps(one) + "\n"
            for one in make_hostile_records(json.loads(make_row(20, **{"eval/loss": 3.0})))
        ),
    }
    for name, contents in changed.items():
        for file, text in base.items():
            (root / file).write_text(text)
        for content in contents:
            (root / name).write_text(content)
            require_harmless(print_run(root))
    (root / "logs/rank_00000.log").write_text("2026-01-01 00:00:00,1 WARNING \x1b[2Ja\x9bb\n")
    require_harmless(print_run(root))
    assert "\\x1b[2Ja\\x9bb" in print_run(root)
    for line in (b"\xff\n", b"[1]\n", b"{\n", b'{"step": 1e999}\n'):
        for name in base:
            (root / name).write_bytes(line)
            require_harmless(print_run(root))


def test_output_of_once_log_and_stop_is_harmless(tmp_path: Path) -> None:
    root = tmp_path / "outputs" / "run"
    (root / "logs").mkdir(parents=True)
    (root / "metrics.jsonl").write_text(make_row(10) + make_row(20, **{"perf/eta_sec": None}))
    (root / "state.json").write_text(json.dumps({"status": "a\x1b[2J\n", "step": "x"}))
    assert "a\\x1b[2J\\n" in run_once(root)
    (root / "state.json").write_text('{"status": "complete", "step": 20}')
    lines = [f"2026-01-01 00:00:00 INFO line {number} \x1b[2J" for number in range(100)]
    (root / "logs/rank_00000.log").write_text("\n".join(lines) + "\n")
    result = run_stage("launch/monitor.py", root, "--log", cwd=tmp_path)
    require_harmless(result.stdout)
    assert "line 60 \\x1b[2J" in result.stdout and "line 59" not in result.stdout
    assert "line 99" in result.stdout
    assert run_stage("launch/monitor.py", root / "no", "--log", cwd=tmp_path, expect=2)
    result = run_stage("launch/stop.py", root, cwd=tmp_path)
    require_harmless(result.stdout)


def test_the_log_is_followed_until_the_run_is_complete(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "logs").mkdir(parents=True)
    process = subprocess.Popen(
        [*MONITOR, root, "--log", "--every", "0.2"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert "no log in" in process.stdout.readline()
    log = root / "logs/rank_00000.log"
    log.write_text("first\n")
    assert process.stdout.readline() == "first\n"
    with log.open("a") as file:
        file.write("second\nto")
    assert process.stdout.readline() == "second\n"
    with log.open("a") as file:
        file.write("rn\n")
    assert process.stdout.readline() == "torn\n"
    (root / "state.json").write_text('{"status": "complete"}')
    assert process.wait(30) == 0


def test_the_log_includes_the_summary_after_the_last_step(tmp_path: Path) -> None:
    log = tmp_path / "logs/rank_00000.log"
    log.parent.mkdir()
    log.write_text("last step\n")
    (tmp_path / "state.json").write_text('{"status": "complete"}')
    process = subprocess.Popen(
        [*MONITOR, tmp_path, "--log", "--every", "2"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout.readline() == "last step\n"
    with log.open("a") as file:
        file.write("summary\n")
    assert process.wait(30) == 0 and process.stdout.read() == "summary\n"
