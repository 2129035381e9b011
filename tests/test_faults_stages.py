# covers: lib/core/publish.py, lib/core/partial_dirs.py
"""Test kills of stages 01, 02, 03 and 05 at their file operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_points import Fault
from tests.kills import Commands, Scene

STAGES = [1, 2, 3, 5]
# Operations of each command, counted from its end: during publishing and after it.
LAST = range(8)
FROM_END = [2, 5, 0, 3, 4]  # quick tests use one of them per command


@pytest.fixture(scope="module")
def commands(
    prepared_once: Path, model_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Commands]:
    """Return the commands to kill."""
    new_commands = Commands(prepared_once, model_files, tmp_path_factory.mktemp("commands"))
    yield new_commands
    new_commands.close()


def kill_at(scene: Scene, numbers: list[int], act: str = "kill") -> None:
    """Kill a command at each of some operations, and run it again each time."""
    for number in numbers:
        project = scene.copy()
        # With threads or worker processes, the number of operations varies.
        launch = scene.command.start(project, Fault(str(project), number, act))
        assert launch.wait() in ([-9], [0])
        scene.require_nothing_lost(project)
        scene.command.run(project)
        scene.require_done(project)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3, 5])
def test_a_kill_while_publishing_loses_nothing(commands: Commands, tmp_path: Path, stage: int):
    """The inputs and the old artifact remain; the result has the bytes of an undisturbed run."""
    for number, command in enumerate(commands.of_stage(stage)):
        scene = Scene(command, tmp_path / command.name)
        kill_at(scene, [scene.operations - FROM_END[number]])


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_kills_at_many_operations_lose_nothing(commands: Commands, tmp_path: Path, stage: int):
    for command in commands.of_stage(stage):
        scene = Scene(command, tmp_path / command.name)
        last = [scene.operations - number for number in LAST]
        others = random.Random(stage).sample(range(1, min(last)), 12)
        kill_at(scene, [*others, *last])
        kill_at(scene, others[:6], "torn")
