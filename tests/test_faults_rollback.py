# covers: lib/checkpoints/search.py, lib/train/resume.py
"""Test kills while stage 04 rolls back past bad steps: the same command gives the same result."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_points import Fault, install_fault, read_operations
from tests.faults import Server, Undisturbed, find_valid_steps, read_events, run_undisturbed
from tests.test_stage_04_nan import (
    ROLLBACK,
    STEPS,
    list_step_tokens,
    poison_token,
    predict_rollbacks,
    read_windows,
)
from tests.training import roll_back_early

_EARLY = f"{__name__}:expect_rollback"


def expect_rollback(rank: int, faults: dict[str, dict[str, Any]], clock: int) -> None:
    """Let a run roll back after a few bad steps, without a fault."""
    roll_back_early(rank)
    install_fault(rank, {}, clock)


def disturb_rollback(rank: int, faults: dict[str, dict[str, Any]], clock: int) -> None:
    """Count operations only from the beginning of the first rollback."""
    from lib.train import resume

    roll_back = resume.roll_back

    def begin(*parts: Any) -> None:
        resume.roll_back = roll_back
        Fault(**faults[str(rank)]).install()
        roll_back(*parts)

    expect_rollback(rank, faults, clock)
    resume.roll_back = begin


class Rollback:
    """A run with one rollback that skips checkpoints of bad steps."""

    def __init__(self, project: Path) -> None:
        tokens_by_step = list_step_tokens(read_windows(project))
        token, (self.reported, _, _) = next(
            (t, rollbacks)
            for t in sorted(set.union(*tokens_by_step))
            if t not in tokens_by_step[0]
            and len(
                (
                    rollbacks := predict_rollbacks(
                        [t in tokens for tokens in tokens_by_step], freq=1
                    )
                )[0]
            )
            == 1
            and rollbacks[0][0]["step"] > 4
            and rollbacks[0][0]["diverged_at"] < STEPS - 4
        )
        poison_token(project, token)
        self.server = Server(project)
        self.expected = run_undisturbed(
            self.server,
            self._options(project / "outputs"),
            project / "outputs",
            STEPS,
            before=_EARLY,
        )
        assert self._rollbacks(project / "outputs") == self.reported

    def _options(self, outputs: Path) -> tuple[object, ...]:
        return (*ROLLBACK, "--ckpt-freq", 1, "--save-dir", outputs)

    def _rollbacks(self, outputs: Path) -> list[dict[str, int]]:
        return [
            {key: event[key] for key in self.reported[0]}
            for event in read_events(outputs)
            if event["event"] == "rollback"
        ]

    def operations(self, parent: Path) -> list[tuple[str, str]]:
        """Return the file operations of a rollback up to the first save after it."""
        report = parent / "operations.txt"
        self.server.run(
            *self._options(parent / "outputs"),
            before=f"{__name__}:disturb_rollback",
            faults={0: Fault(str(parent), report=str(report))},
        )
        operations = read_operations(report)
        saving = next(
            number
            for number, (kind, path) in enumerate(operations)
            if kind == "mkdir" and Path(path).name.startswith("step_")
        )
        assert {"rename", "mkdir", "write"} <= {kind for kind, _ in operations[:saving]}
        assert [
            Path(path).name
            for kind, path in operations[:saving]
            if kind == "rename" and "step_" in path
        ], "a checkpoint is quarantined"
        return operations[:saving]

    def kill_at(self, number: int, act: str, outputs: Path) -> None:
        """Kill the run at an operation of its rollback, and run it again."""
        options = self._options(outputs)
        self.server.run(
            *options,
            expect=-9,
            before=f"{__name__}:disturb_rollback",
            faults={0: Fault(str(outputs), number, act)},
        )
        assert (
            max(find_valid_steps(outputs)) >= self.reported[0]["step"]
        )  # the target of the rollback exists
        self.server.run(*options, before=_EARLY)
        Undisturbed.require_same(self.expected, outputs)
        assert find_valid_steps(outputs)[:3] == [STEPS, STEPS - 1, STEPS - 2]
        printed = self._rollbacks(outputs)
        assert printed and all(one == self.reported[0] for one in printed)
        shutil.rmtree(outputs)


@pytest.fixture(scope="module")
def rollback(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollback]:
    """Return a run with one rollback."""
    shutil.copytree(prepared_once, project := tmp_path_factory.mktemp("rollback") / "project")
    new_rollback = Rollback(project)
    yield new_rollback
    new_rollback.server.close()


@pytest.mark.slow
def test_kills_at_a_few_operations_of_a_rollback_lose_nothing(rollback: Rollback, tmp_path: Path):
    operations = rollback.operations(tmp_path)
    for number in random.Random(0).sample(range(1, len(operations) + 1), 2):
        rollback.kill_at(number, "kill", tmp_path / f"killed_{number}" / "outputs")


@pytest.mark.long
@pytest.mark.parametrize("act", ["kill", "torn"])
def test_kills_at_every_operation_of_a_rollback_lose_nothing(
    rollback: Rollback, tmp_path: Path, act: str
):
    """The many writes of tensors by the save at the same time are left out."""
    operations = rollback.operations(tmp_path)
    for number, (kind, path) in enumerate(operations, 1):
        if "/dcp/" not in path and (act == "kill" or kind == "write"):
            rollback.kill_at(number, act, tmp_path / f"killed_{number}" / "outputs")
