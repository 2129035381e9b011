# covers: 04_train_fsdp.py, lib/train/output/rows.py, lib/train/output/report.py
"""A row is written one step later, or at once before a save, a validation or a stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lib.runs.figures import METRICS, STATE, documented_name
from tests.train.test_no_waiting import WAITING
from tests.training import SEQ_LENGTH, list_saved_steps, metrics, train_model

STEPS = 7
SAMPLES = 6  # of a step
RUN = (
    "-d",
    "corpus",
    "-m",
    "model",
    "-s",
    SEQ_LENGTH,
    "--precision",
    "fp32",
    "--max-steps",
    STEPS,
    "--eval-batches",
    1,
)
STOPPED_AT = 4  # the step in which a signal comes
FAILS_AT = 4  # the step in which an error comes
NEVER = 1000
# Collectives of the trainer itself; FSDP uses others for the weights.
EXCHANGES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "barrier",
)


class Recorder(TorchDispatchMode):
    """Records each launched step, row that is read, wait for the device, and collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._path = Path(f"recorded_{rank}.jsonl").resolve()
        self._silent = False

    def note(self, kind: str, value: Any = None) -> None:
        """Append an entry, except within work that waits for the device anyway."""
        if not self._silent:
            with self._path.open("a") as file:
                file.write(json.dumps([kind, value]) + "\n")

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Record nothing in the block."""
        before = self._silent
        self._silent = True
        yield
        self._silent = before

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function._schema.name in WAITING:
            self.note("asked", function._schema.name)
        return function(*arguments, **(named or {}))


def record_loop(rank: int) -> None:
    """Record the training loop from its first step."""
    from lib.checkpoints.checkpointer import Checkpointer
    from lib.parallel.stop_request import StopRequest
    from lib.train.output import report
    from lib.train.output.rows import Evaluation
    from lib.train.state import TrainState

    recorder = Recorder(rank)

    def around(
        owner: Any, name: str, begins: str = "", ends: str = "", silent: bool = False
    ) -> None:
        """Record when a function begins and ends, with the step of its first argument, if any."""
        real = getattr(owner, name)

        def noted(*parts: Any, **named: Any) -> Any:
            if begins:
                recorder.note(begins, getattr(parts[0], "step", None) if parts else None)
            with recorder.silence() if silent else nullcontext():
                result = real(*parts, **named)
            if ends:
                recorder.note(ends, parts[0].step)
            return result

        setattr(owner, name, noted)

    ask = StopRequest.begin_agreement

    def begin(request: StopRequest) -> None:
        StopRequest.begin_agreement = ask  # the loop has begun
        recorder.__enter__()
        ask(request)
        around(StopRequest, "begin_agreement", silent=True)
        around(StopRequest, "agree_on_reason", silent=True)
        around(Evaluation, "measure", "evaluating", silent=True)
        around(Checkpointer, "save", "saving", silent=True)
        around(TrainState, "advance", ends="launched")
        around(report, "read_row", "reading", "read")
        for name in EXCHANGES:
            around(dist, name, name)
        around(torch.Tensor, "tolist", "asked")

    StopRequest.begin_agreement = begin


def recorded(project: Path, rank: int = 0) -> list[tuple[str, Any]]:
    lines = (project / f"recorded_{rank}.jsonl").read_text().splitlines()
    return [(kind, value) for kind, value in map(json.loads, lines)]


def train_rows(
    project: Path,
    *options: object,
    before: str = "",
    ranks: int = 1,
    expect: int = 0,
    name: str = "run",
) -> str:
    return train_model(
        project,
        name,
        *RUN,
        "-b",
        SAMPLES // ranks,
        *options,
        ranks=ranks if ranks > 1 else 0,
        expect=expect,
        before=before and f"{__name__}:{before}",
    )


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_row_is_read_once_the_next_step_has_been_launched(project: Path, ranks: int) -> None:
    train_rows(
        project,
        "--log-freq",
        2,
        "--ckpt-freq",
        NEVER,
        "--eval-freq",
        0,
        ranks=ranks,
        before="record_loop",
    )
    for rank in range(ranks):
        order = recorded(project, rank)
        assert [entry for entry in order if entry[0] in ("launched", "reading", "saving")] == [
            ("launched", 1),
            ("launched", 2),
            ("reading", 1),
            ("launched", 3),
            ("reading", 2),
            ("launched", 4),
            ("launched", 5),
            ("reading", 4),
            ("launched", 6),
            ("launched", 7),
            ("reading", 6),
            ("reading", 7),
            ("saving", None),
        ]
        # Only reading a row waits for the device, and it exchanges numbers in one collective.
        is_reading = False
        exchanged = 0
        for kind, _ in order[: order.index(("saving", None))]:
            if kind == "reading":
                is_reading = True
                exchanged = 0
            elif kind == "read":
                assert exchanged == 1
                is_reading = False
            elif kind not in ("launched", "evaluating"):
                assert is_reading and kind in ("asked", "all_gather"), kind
                exchanged += kind == "all_gather"
    assert [row["step"] for row in metrics(project, "run")] == [1, 2, 4, 6, 7]


def _training(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the row of each step without times and memory."""
    return {
        row["step"]: {
            key: value
            for key, value in row.items()
            if key.startswith(("step", "epoch", "train/", "eval/"))
        }
        for row in rows
    }


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_figures_do_not_depend_on_when_a_row_is_written(project: Path, ranks: int) -> None:
    """If every step is saved, every row is written at once."""
    rows = []
    for name, every in (("late", NEVER), ("at_once", 1)):
        train_rows(
            project, "--log-freq", 1, "--ckpt-freq", every, "--eval-freq", 3, ranks=ranks, name=name
        )
        rows.append(_training(metrics(project, name)))
    assert rows[0] == rows[1] and list(rows[0]) == [*range(1, STEPS + 1)]
    assert [step for step, row in rows[0].items() if "eval/loss" in row] == [3, 6, 7]


@pytest.mark.parametrize(
    ("log", "save", "evaluate"),
    [
        (1, 2, 3),
        pytest.param(2, 3, 2, marks=pytest.mark.slow),
        pytest.param(3, 2, 3, marks=pytest.mark.long),
        pytest.param(7, 7, 7, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_follows_the_row_of_its_step(
    project: Path, log: int, save: int, evaluate: int
) -> None:
    train_rows(
        project,
        "--log-freq",
        log,
        "--ckpt-freq",
        save,
        "--eval-freq",
        evaluate,
        "--ckpt-keep",
        9,
        before="record_loop",
    )
    steps = range(1, STEPS + 1)
    due = [step for step in steps if step in (1, STEPS) or not step % log or not step % evaluate]
    rows = metrics(project, "run")
    assert [row["step"] for row in rows] == due
    assert not {documented_name(key) for row in rows for key in row} - set(METRICS)
    of_copies = {"copied", "copy_error"}
    state = json.loads((project / "outputs/run/state.json").read_text())
    assert set(state) == set(STATE) - of_copies
    launched = 0
    expected = []
    events = []
    for kind, value in recorded(project):
        if kind == "launched":
            launched = value
        elif kind in ("reading", "saving"):
            events.append((kind, launched, value))
    late: list[int] = []
    for step in steps:
        expected += [("reading", step, row) for row in late]
        late = [step] if step in due else []
        if not step % save or not step % evaluate or step == STEPS:
            expected += [("reading", step, row) for row in late]
            late = []
        if not step % save or step == STEPS:
            expected.append(("saving", step, None))
    assert events == expected
    saved = [step for step in steps if not step % save or step == STEPS]
    assert list_saved_steps(project, "run") == saved
    rows = {row["step"]: row for row in metrics(project, "run")}
    for step in saved:
        state = json.loads(
            (project / f"outputs/run/checkpoints/step_{step:08d}/COMMIT.json").read_text()
        )
        assert state["loss"] == rows.get(step, {}).get("train/loss")
        assert state["eval_loss"] == rows.get(step, {}).get("eval/loss")


def stop_in_step(rank: int) -> None:
    """Send rank 0 a signal when a step begins."""
    from lib.parallel.stop_request import StopRequest

    ask = StopRequest.begin_agreement
    calls = [0]

    def ask_or_stop(request: StopRequest) -> None:
        calls[0] += 1
        if calls[0] == STOPPED_AT and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        ask(request)

    StopRequest.begin_agreement = ask_or_stop


@pytest.mark.parametrize(
    "options",
    [
        ("--log-freq", 1),
        pytest.param(
            ("--log-freq", 3, "--ckpt-freq", STOPPED_AT, "--eval-freq", STOPPED_AT),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stopped_run_has_all_its_rows(
    project: Path, ranks: int, options: tuple[object, ...]
) -> None:
    options = ("--ckpt-freq", NEVER, "--eval-freq", 0, *options)
    train_rows(project, *options, name="whole", ranks=ranks)
    train_rows(project, *options, before="stop_in_step", ranks=ranks, expect=1 if ranks > 1 else 75)
    due = [
        step
        for step in range(1, STOPPED_AT + 1)
        if step in (1, STOPPED_AT) or not step % options[options.index("--log-freq", 1) + 1]
    ]
    assert [row["step"] for row in metrics(project, "run")] == due
    assert json.loads((project / "outputs/run/state.json").read_text())["status"] == "preempted"
    train_rows(project, *options, ranks=ranks)
    expected = {
        step: row["train/loss"] for step, row in _training(metrics(project, "whole")).items()
    }
    again = {step: row["train/loss"] for step, row in _training(metrics(project, "run")).items()}
    assert expected == {step: loss for step, loss in again.items() if step in expected}


def fail_in_step(rank: int) -> None:
    """Let a step fail once it has been launched."""
    from lib.train.state import TrainState

    advance = TrainState.advance

    def advance_or_fail(state: TrainState, step: Any) -> None:
        advance(state, step)
        if state.step == FAILS_AT:
            raise RuntimeError("any error")

    TrainState.advance = advance_or_fail


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_leaves_the_previous_row_or_logs_that_it_is_missing(
    project: Path, ranks: int
) -> None:
    """A failing rank cannot ask the others for figures that were not exchanged."""
    printed = train_rows(
        project,
        "--log-freq",
        1,
        "--ckpt-freq",
        NEVER,
        "--eval-freq",
        0,
        before="fail_in_step",
        ranks=ranks,
        expect=1,
    )
    assert "any error" in printed
    rows = [row["step"] for row in metrics(project, "run")]
    assert rows == ([1, 2, 3] if ranks == 1 else [1, 2])
    if ranks > 1:
        log = (project / "outputs/run/logs/rank_00000.log").read_text()
        assert "step 3 has no row" in log
