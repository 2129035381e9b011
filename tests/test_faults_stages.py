"""Stages 01, 02, 03 and 05 killed at their file operations, and run again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_points import Fault
from tests.kills import Commands, Scene

STAGES = [1, 2, 3, 5]
# Of each command also these, from the end: while it is published, and after that.
LAST = range(8)
FROM_END = [2, 5, 0, 3]  # one of them per command of a stage, in the quick tests


@pytest.fixture(scope="module")
def commands(
    prepared_once: Path, model_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Commands]:
    """Return what makes the commands."""
    made = Commands(prepared_once, model_files, tmp_path_factory.mktemp("commands"))
    yield made
    made.close()


def kill_at(scene: Scene, numbers: list[int], act: str = "kill") -> None:
    """Kill the command at each of these operations, and run it again each time."""
    for number in numbers:
        project = scene.copy()
        # With threads or other processes at work, not each time as many are done.
        launch = scene.command.start(project, Fault(str(project), number, act))
        assert launch.wait() in ([-9], [0])
        scene.require_nothing_lost(project)
        scene.command.run(project)
        scene.require_done(project)


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3, 5))]
)
def test_killed_while_it_is_published(commands: Commands, tmp_path: Path, stage: int):
    """The input and the artifact before stay, the bytes are those of an undisturbed run."""
    for number, command in enumerate(commands.of_stage(stage)):
        scene = Scene(command, tmp_path / command.name)
        kill_at(scene, [scene.operations - FROM_END[number]])


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_many_operations(commands: Commands, tmp_path: Path, stage: int):
    for command in commands.of_stage(stage):
        scene = Scene(command, tmp_path / command.name)
        last = [scene.operations - number for number in LAST]
        others = random.Random(stage).sample(range(1, min(last)), 12)
        kill_at(scene, [*others, *last])
        kill_at(scene, others[:6], "torn")
