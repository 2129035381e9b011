# covers: lib/core/reading.py, lib/checkpoints/commit.py, lib/checkpoints/search.py
# covers: lib/checkpoints/storage.py
"""Test that damaged, missing and malicious files are never loaded, and always reported."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.storage import HashingWriter
from lib.core import manifest
from tests.fault_points import Fault
from tests.faults import (
    Server,
    Undisturbed,
    find_start_step,
    find_valid_steps,
    flip_bit,
    read_events,
    run_options,
)

NEWEST = 10
BEFORE = 8
FILES = (
    "dcp/__0_0.distcp",
    "dcp/__0_optimizer_0.distcp",
    "dcp/.metadata",
    "train_state.json",
    "rng.safetensors",
    "manifest.json",
    "COMMIT.json",
)
PAGE = 4096


@pytest.fixture(scope="module")
def stopped(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return outputs/ of a run that was killed when it began to save its last step."""
    outputs = tmp_path_factory.mktemp("stopped") / "outputs"
    server.run(
        *run_options(outputs),
        expect=-9,
        faults={0: Fault(str(outputs), 1, kinds=("mkdir",), match="step_00000012")},
    )
    assert find_valid_steps(outputs) == [NEWEST, BEFORE, 6]
    names = {p.relative_to(step(outputs)).as_posix() for p in step(outputs).rglob("*")}
    assert names == {*FILES, "dcp"}
    return outputs


@pytest.fixture
def outputs(stopped: Path, tmp_path: Path) -> Path:
    """Return a copy of the outputs of the stopped run."""
    shutil.copytree(stopped, tmp_path / "outputs")
    return tmp_path / "outputs"


def step(outputs: Path, number: int = NEWEST) -> Path:
    return outputs / "run" / "checkpoints" / f"step_{number:08d}"


def damage_file(path: Path, way: str) -> None:
    size = path.stat().st_size
    if way == "flipped bit":
        flip_bit(path, 8 * (size // 2) + 3)
    elif way == "cut":
        os.truncate(path, size - 2)  # for JSON, cut more than the last line break
    elif way == "empty":
        os.truncate(path, 0)
    elif way == "zeroed page":
        with path.open("r+b") as file:
            file.seek(size // 2 // PAGE * PAGE)
            file.write(bytes(min(PAGE, size - file.tell())))
    else:
        path.unlink()


def seal_checkpoint(checkpoint: Path) -> None:
    """Make manifest and COMMIT match the files, as an attacker would."""
    content = json.loads((checkpoint / commit.COMMIT).read_text())
    files = [
        manifest.file_entry(checkpoint, path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in (commit.COMMIT, commit.MANIFEST)
    ]
    attempt = checkpoint.rename(checkpoint.with_name("attempt"))
    facts = {
        key: value
        for key, value in content.items()
        if key not in ("step", "manifest", "world_size", "identity", "digest")
    }
    commit.commit_attempt(attempt, content["step"], files, content["identity"], 1, facts)
    assert Checkpoint(checkpoint, content["step"]).problems() == []


HOWS = ("flipped bit", "cut", "empty", "zeroed page", "missing")
# Each file once, damaged in one of the ways: at most one file of each checkpoint.
PAIRS = list(
    zip(
        FILES,
        ("flipped bit", "zeroed page", "missing", "cut", "flipped bit", "empty", "missing"),
        strict=True,
    )
)


@pytest.mark.parametrize(
    "damages",
    [
        *(dict(zip((NEWEST, BEFORE), PAIRS[i : i + 2], strict=False)) for i in range(0, 7, 2)),
        *(
            pytest.param({NEWEST: (name, way)}, marks=pytest.mark.long)
            for name in FILES
            for way in HOWS
            if (name, way) not in PAIRS[::2]
        ),
    ],
    ids=lambda damages: ", ".join(f"{name}-{way}" for name, way in damages.values()),
)
def test_a_run_resumes_from_the_checkpoint_before_damaged_ones(
    server: Server,
    undisturbed: Callable[..., Undisturbed],
    outputs: Path,
    damages: dict[int, tuple[str, str]],
):
    for number, (name, way) in damages.items():
        damage_file(step(outputs, number) / name, way)
    result = server.run(*run_options(outputs))
    assert find_start_step(outputs) == NEWEST - 2 * len(damages)
    assert "moved to quarantine" in result.output
    printed = {e["step"]: e["reason"] for e in read_events(outputs) if e["event"] == "quarantine"}
    assert printed.keys() == damages.keys()
    assert all(Path(name).name in printed[number] for number, (name, _) in damages.items())
    assert len(commit.list_quarantined(outputs / "run" / "checkpoints")) == len(damages)
    undisturbed().require_same(outputs)


def test_any_flipped_bit_is_found(outputs: Path):
    """Except for bits of COMMIT.json that do not change its content."""
    rng = random.Random(0)
    checkpoint = Checkpoint(step(outputs), NEWEST)
    read = checkpoint.commit()
    for name in FILES:
        path = checkpoint.path / name
        bits = range(8 * path.stat().st_size)
        for bit in rng.sample(bits, 400 if name == commit.COMMIT else 40):
            flip_bit(path, bit)
            seen = checkpoint.problems() or checkpoint.content_problems(0, 1)
            assert seen or (name == commit.COMMIT and checkpoint.commit() == read), f"{name} {bit}"
            flip_bit(path, bit)
    assert not checkpoint.problems() + checkpoint.content_problems(0, 1)


def test_a_run_without_a_valid_checkpoint_does_not_train(server: Server, outputs: Path):
    for number in find_valid_steps(outputs):
        damage_file(step(outputs, number) / FILES[0], "flipped bit")
    before = (outputs / "run" / "metrics.jsonl").read_bytes()
    for _ in range(2):  # a retry by a launcher has the same result
        result = server.run(*run_options(outputs), expect=3)
        assert "no valid checkpoint in" in result.output and "Traceback" not in result.output
    assert (outputs / "run" / "metrics.jsonl").read_bytes() == before
    assert len(commit.list_quarantined(outputs / "run" / "checkpoints")) == 3


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["metadata", "bytes entry"])
@pytest.mark.parametrize(
    "sealed",
    [pytest.param(True, id="sealed"), pytest.param(False, id="as found", marks=pytest.mark.long)],
)
def test_a_malicious_pickle_runs_no_code(
    server: Server,
    outputs: Path,
    tmp_path: Path,
    where: str,
    sealed: bool,
    undisturbed: Callable[..., Undisturbed],
):
    """If it matches all digests, the run ends; otherwise the checkpoint is damaged."""
    harm = Malicious(f"touch {tmp_path / 'ran'}")
    tensors = step(outputs) / "dcp"
    if where == "metadata":
        (tensors / ".metadata").write_bytes(pickle.dumps(harm))
    else:
        shutil.rmtree(tensors)
        dcp.save(
            {"model.x": torch.zeros(1), "model.y": harm},
            no_dist=True,
            storage_writer=HashingWriter(tensors),
        )
        (tmp_path / "ran").unlink(missing_ok=True)  # saving may copy the object, which unpickles it
    if sealed:
        seal_checkpoint(step(outputs))
    result = server.run(*run_options(outputs), expect=3 if sealed else 0)
    assert not (tmp_path / "ran").exists()
    if sealed:
        assert "only descriptions of tensors" in result.output
        assert "Traceback" not in result.output and find_valid_steps(outputs)[0] == NEWEST
    else:
        undisturbed().require_same(outputs)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"status": "comp', id="torn"),
        pytest.param(b"", id="empty", marks=pytest.mark.long),
        pytest.param(bytes(PAGE), id="zeros", marks=pytest.mark.long),
        pytest.param(b"\xff\xfe[1]", id="no text", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", ["state.json", "config.yaml", "metrics.jsonl", "events.jsonl"])
def test_a_run_survives_torn_bookkeeping_files(
    server: Server,
    undisturbed: Callable[..., Undisturbed],
    outputs: Path,
    name: str,
    content: bytes,
):
    """The run continues from its checkpoints; only the content of the torn file is lost."""
    (outputs / "run" / name).write_bytes(content)
    server.run(*run_options(outputs))
    undisturbed().require_same(outputs, since=NEWEST)
    assert json.loads((outputs / "run" / "state.json").read_text())["status"] == "complete"
    printed = (outputs / "run" / "events.jsonl").read_text(errors="replace").splitlines()
    is_torn = name == "events.jsonl" and content
    rows = [json.loads(line) for line in (printed[1:] if is_torn else printed)]
    assert [row["event"] for row in rows[-2:]] == ["save", "complete"] or [
        row["event"] for row in rows[-3:]
    ] == ["save", "prune", "complete"]
    assert {"event": "resume", "step": NEWEST}.items() <= [
        row for row in rows if row["event"] == "resume"
    ][-1].items()


@pytest.mark.parametrize("days", [-1, 1])
def test_the_clock_and_file_times_do_not_matter(
    server: Server, outputs: Path, days: int, undisturbed: Callable[..., Undisturbed]
):
    rng = random.Random(days)
    for path in outputs.rglob("*"):
        moment = rng.uniform(0, 4e9)
        os.utime(path, (moment, moment))
    server.run(*run_options(outputs), clock=days * 86_400)
    assert find_start_step(outputs) == NEWEST
    undisturbed().require_same(outputs)
    assert find_valid_steps(outputs) == [12, 10, 8]


def test_other_directories_are_not_taken_for_checkpoints(
    server: Server, outputs: Path, undisturbed: Callable[..., Undisturbed]
):
    checkpoints = outputs / "run" / "checkpoints"
    shutil.copytree(step(outputs), checkpoints / "step_00000011.tmp-1")
    shutil.copytree(step(outputs, 6), checkpoints / ".trash-step_00000004-1")
    (checkpoints / ".trash-step_00000004-1" / commit.COMMIT).unlink()
    (checkpoints / "step_00000099").mkdir()
    shutil.copytree(step(outputs), checkpoints / "step_00000098")
    (checkpoints / "step_latest").mkdir()
    (checkpoints / "step_00000097").write_text("a file")
    server.run(*run_options(outputs))
    assert find_start_step(outputs) == NEWEST
    undisturbed().require_same(outputs)
    assert find_valid_steps(outputs) == [12, 10, 8]
    assert {p.name for p in checkpoints.iterdir()} == {
        "step_00000012",
        "step_00000010",
        "step_00000008",
        "step_latest",
        "step_00000097",
        "quarantine",
        "step_00000011.tmp-1",
        ".trash-step_00000004-1",
    }
    assert {p.name.partition("-")[0] for p in commit.list_quarantined(checkpoints)} == {
        "step_00000098",
        "step_00000099",
    }


@pytest.mark.slow
def test_a_failing_disk_quarantines_nothing(server: Server, outputs: Path):
    """If it keeps failing on one rank, all ranks stop; if it recovers, the read is retried."""
    names = sorted(p.name for p in step(outputs).parent.iterdir())
    fault = Fault(
        str(outputs), 1, "ESTALE", times=10**6, kinds=("read",), match="step_00000010/dcp"
    )
    result = server.run(*run_options(outputs), ranks=2, faults={1: fault}, expect=1)
    assert result.wait() == [1, 1] and "does not mean" in result.output
    assert "Traceback" not in result.output
    assert sorted(p.name for p in step(outputs).parent.iterdir()) == names
    fault.act = "EIO"
    fault.times = 2
    result = server.run(*run_options(outputs), ranks=2, faults={0: fault})
    assert find_start_step(outputs) == NEWEST and "moved to quarantine" not in result.output


def test_the_printed_command_restores_an_intact_checkpoint_from_quarantine(
    server: Server, outputs: Path, undisturbed: Callable[..., Undisturbed]
):
    """Older versions quarantined checkpoints after read errors; one of these is really damaged."""
    checkpoints = outputs / "run" / "checkpoints"
    with (outputs / "run" / "events.jsonl").open("a") as file:
        for checkpoint in commit.list_checkpoints(checkpoints):
            commit.quarantine(checkpoint, "")
            file.write(
                json.dumps(
                    {
                        "time": "",
                        "event": "quarantine",
                        "step": checkpoint.step,
                        "reason": "[Errno 116] Stale file handle: 'x'",
                    }
                )
                + "\n"
            )
    [newest] = (checkpoints / "quarantine").glob(f"step_{NEWEST:08d}-*")
    damage_file(newest / FILES[0], "flipped bit")
    result = server.run(*run_options(outputs), expect=3)
    assert f"step {BEFORE} in quarantine is intact" in result.output
    [move] = re.findall(r"^  run:(.*)$", result.output, re.M)
    subprocess.run(move, shell=True, check=True, cwd=server.root)
    server.run(*run_options(outputs))
    assert find_start_step(outputs) == BEFORE
    undisturbed().require_same(outputs)
