# covers: lib/checkpoints/commit.py, lib/checkpoints/storage.py
"""Kill a process at each file operation of a save, and cut a machine's power there."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.fault_points import Fault, read_operations
from tests.faults import STEPS, Server, Undisturbed, find_start_step, find_valid_steps, run_options

SAVE = "tests.checkpoint_harness:save_steps"
LOAD = "tests.checkpoint_harness:load_each"


@pytest.fixture
def saved(server: Server, tmp_path: Path) -> Path:
    """Return a directory with the checkpoints of steps 2 and 3."""
    server.run(tmp_path / "saved", 1, 3, call=SAVE)
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "step_00000002",
        "step_00000003",
    ]
    return tmp_path / "saved"


def points(server: Server, saved: Path) -> list[tuple[str, str]]:
    """Return all operations of saving step 4, including the deletion of step 2."""
    report = saved.with_name("report.txt")
    copy = saved.with_name("counted")
    shutil.copytree(saved, copy)
    server.run(copy, 4, 4, call=SAVE, faults={0: Fault(str(copy), report=str(report))})
    operations = read_operations(report)
    assert {kind for kind, _ in operations} == {
        "create",
        "write",
        "fsync",
        "rename",
        "mkdir",
        "unlink",
        "rmdir",
    }
    return operations


def disturb_save(server: Server, saved: Path, act: str, numbers: Iterable[int]) -> dict[int, int]:
    """Return the step that is loaded after a fault, by the operation of the save."""
    scene = saved.with_name(act)
    for number in numbers:
        directory = scene / f"{number:05d}"
        shutil.copytree(saved, directory)
        launch = server.run(
            directory, 4, 4, call=SAVE, expect=None, faults={0: Fault(str(directory), number, act)}
        )
        assert launch.codes == [-9]
    loaded = server.run(scene, call=LOAD).output.splitlines()
    return {
        int(line.split()[1]): int(line.split()[2]) for line in loaded if line.startswith("loaded ")
    }


@pytest.mark.long
@pytest.mark.parametrize("act", ["kill", "torn", "power"])
def test_a_fault_at_any_operation_of_a_save_leaves_a_state(server: Server, saved: Path, act: str):
    """Until the rename the old state is loaded, then the new one (after a power cut: its fsync)."""
    operations = points(server, saved)
    kinds = [kind for kind, _ in operations]
    published = next(
        number
        for number, (kind, path) in enumerate(operations, 1)
        if kind == "rename" and Path(path).name.startswith("step_00000004.tmp-")
    )
    durable = kinds.index("fsync", published) + 1
    numbers = [number for number, kind in enumerate(kinds, 1) if act != "torn" or kind == "write"]
    assert len(numbers) > 50 and published < durable < len(operations)
    loaded = disturb_save(server, saved, act, numbers)
    committed = durable if act == "power" else published
    assert loaded == {number: 4 if number > committed else 3 for number in numbers}


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", ["on", "off"])
def test_a_run_killed_at_its_file_operations_continues(
    server: Server, undisturbed: Callable[..., Undisturbed], tmp_path: Path, asynchronous: str
):
    """Stage 04 resumes at step 4, and is killed when it renames, syncs or deletes files."""
    options = ("--ckpt-async", asynchronous, "--ckpt-keep", 2)
    kinds = ("fsync", "rename", "mkdir", "unlink", "rmdir")
    first = tmp_path / "first" / "outputs"
    report = tmp_path / "report"
    server.run(
        *run_options(first, *options),
        expect=-9,
        faults={0: Fault(str(first), 1, kinds=("mkdir",), match="step_00000006")},
    )
    assert find_valid_steps(first) == [4, 2]
    shutil.copytree(first, tmp_path / "counted" / "outputs")
    server.run(
        *run_options(tmp_path / "counted" / "outputs", *options),
        faults={0: Fault(str(tmp_path / "counted"), report=str(report), kinds=kinds)},
    )
    total = (
        len(read_operations(report)) * 9 // 10
    )  # with threads, the number and order of writes vary
    for number in random.Random(asynchronous).sample(range(1, total), 14):
        outputs = tmp_path / f"killed_{number:04d}" / "outputs"
        shutil.copytree(first, outputs)
        act = "power" if number % 2 else "kill"
        server.run(
            *run_options(outputs, *options),
            expect=-9,
            faults={0: Fault(str(outputs), number, act, kinds=kinds)},
        )
        newest = max(find_valid_steps(outputs))
        server.run(*run_options(outputs, *options))
        assert newest == STEPS or find_start_step(outputs) == newest
        undisturbed().require_same(outputs, since=newest if act == "power" else 0)
        names = {p.name for p in (outputs / "run" / "checkpoints").iterdir()}
        assert names == {"step_00000010", "step_00000012"} or newest == STEPS
