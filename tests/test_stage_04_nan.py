# covers: 04_train_fsdp.py, lib/optim/guard.py
"""Steps with a NaN or infinite gradient: skipped, counted, rolled back, or the end of the run."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lib.tokens import order, store
from lib.tokens.samples import Windows
from tests.conftest import run_stage
from tests.models.families import make_tiny_llama
from tests.training import SEQ_LENGTH, SMALL_RUN, VOCABULARY, metrics, read_events, save_model

STEPS = 30
BATCH = 2
AFTER = 3  # bad steps, as roll_back_early says
FREQ = 5
COMMON = (
    *SMALL_RUN,
    "-e",
    "run",
    "-b",
    BATCH,
    "--max-steps",
    STEPS,
    "--ckpt-freq",
    10,
    "--eval-freq",
    0,
    "--lr",
    "1e-2",
)
ROLLBACK = (*COMMON, "--ckpt-freq", FREQ)


def train_with_rollbacks(
    project: Path, *options: object, **more: Any
) -> subprocess.CompletedProcess:
    """Run stage 04, which rolls back after AFTER bad steps. more: as for `run_stage`."""
    return run_stage(
        "04_train_fsdp.py",
        *ROLLBACK,
        *options,
        cwd=project,
        before="tests.training:roll_back_early",
        **more,
    )


def read_windows(project: Path) -> Windows:
    run_stage("04_train_fsdp.py", *COMMON, "--prepare-only", cwd=project)
    directory = next((project / ".cache" / "tokens").iterdir())
    return Windows(store.open_store(directory).splits["train"].tokens, SEQ_LENGTH)


def read_inputs(samples: Windows, step: int) -> np.ndarray:
    return samples.read_samples(
        order.sample_numbers(step * BATCH, BATCH, len(samples), seed=0)
    ).inputs


def list_step_tokens(samples: Windows) -> list[set[int]]:
    """Return the set of input tokens of each step, for four times the steps of a run."""
    return [set(read_inputs(samples, step).ravel().tolist()) for step in range(4 * STEPS)]


def predict_rollbacks(
    is_bad: list[bool], freq: int = FREQ
) -> tuple[list[dict[str, int]], set[int], int]:
    """Return the expected rollbacks, the bad steps that remain, and the number of skipped steps.

    is_bad: for each step of data. freq: steps between checkpoints.
    """
    step = 0
    offset = 0
    in_a_row = 0
    rollbacks = []
    saved: dict[int, int] = {}
    bad: set[int] = set()
    while step < STEPS and len(rollbacks) < 4:
        here = step + offset
        step = step + 1
        in_a_row = in_a_row + 1 if is_bad[here] else 0
        bad = bad | {step} if is_bad[here] else bad - {step}
        if in_a_row >= AFTER:
            target = max((s for s in saved if s <= step - in_a_row), default=None)
            if target is None:
                return [], set(), 0
            rollbacks.append({"step": target, "diverged_at": step, "bad_steps": in_a_row})
            offset = here + 1 - target
            step = target
            in_a_row = saved[target]
            saved = {s: n for s, n in saved.items() if s <= target}
            bad = {s for s in bad if s <= target}
        elif step % freq == 0:
            saved[step] = in_a_row
    return rollbacks, bad, offset


def poison_token(project: Path, token: int) -> None:
    """Make the embedding of one token NaN, and so the loss of each batch with that token."""
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    save_model(
        project / "model",
        make_tiny_llama(vocab_size=VOCABULARY),
    )
    path = project / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, path, {"format": "pt"})


def test_steps_with_nan_gradients_change_nothing(project: Path) -> None:
    samples = read_windows(project)
    tokens_by_step = list_step_tokens(samples)[:STEPS]
    token = next(
        t
        for t in sorted(set.union(*tokens_by_step))
        if t not in tokens_by_step[0] | tokens_by_step[1]
        and 3 <= sum(t in tokens for tokens in tokens_by_step) <= 12
    )
    bad = {step + 1 for step, tokens in enumerate(tokens_by_step) if token in tokens}
    poison_token(project, token)
    done = run_stage("04_train_fsdp.py", *COMMON, cwd=project)
    assert "left the weights unchanged" in done.stdout
    assert {event["step"] for event in read_events(project, "skip_step")} == bad
    losses = {row["step"]: row["train/loss"] for row in metrics(project, "run")}
    assert {step for step, loss in losses.items() if loss is None} == bad
    assert losses[max(set(losses) - bad)] < losses[1]
    moments = json.loads(
        (project / "outputs/run/checkpoints/step_00000030/train_state.json").read_text()
    )["optimizer_steps"]
    assert moments == STEPS - len(bad)


def test_nan_in_the_first_step_is_explained(project: Path) -> None:
    token = int(read_inputs(read_windows(project), 0)[0, 0])
    poison_token(project, token)
    done = run_stage("04_train_fsdp.py", *COMMON, cwd=project, expect=2)
    assert "first step is nan" in done.stderr and "intact weights" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param((), 0, id="whole"),
        pytest.param(("--lora-rank", 4), 0, id="adapters", marks=pytest.mark.long),
        pytest.param(("-b", 1), 2, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_many_bad_steps_in_a_row_are_rolled_back_and_their_data_skipped(
    project: Path, options: tuple[object, ...], ranks: int
) -> None:
    tokens_by_step = list_step_tokens(read_windows(project))
    token, (rollbacks, bad, offset) = next(
        (t, rollback_list)
        for t in sorted(set.union(*tokens_by_step))
        if t not in tokens_by_step[0]
        and len((rollback_list := predict_rollbacks([t in tokens for tokens in tokens_by_step]))[0])
        == 1
        and rollback_list[0][0]["diverged_at"] < STEPS - FREQ
    )
    poison_token(project, token)
    done = train_with_rollbacks(project, *options, ranks=ranks)
    assert "(rollback 1 of" in done.stdout
    recorded = [{key: e[key] for key in rollbacks[0]} for e in read_events(project, "rollback")]
    assert recorded == rollbacks
    rows = {row["step"]: row["train/loss"] for row in metrics(project, "run")}
    assert list(rows) == list(range(1, STEPS + 1)), "each step once, in order"
    assert {step for step, loss in rows.items() if loss is None} == bad
    state = json.loads((project / "outputs/run/state.json").read_text())
    assert state["sample_cursor"] == (STEPS + offset) * BATCH

    last = project / f"outputs/run/checkpoints/step_{STEPS:08d}"
    shutil.rmtree(last)  # as if the run had been killed before it was written
    train_with_rollbacks(project, *options, ranks=ranks)
    again = {row["step"]: row["train/loss"] for row in metrics(project, "run")}
    assert again == rows, "the jump in the data survives a resume"


def test_the_number_of_rollbacks_is_limited(project: Path) -> None:
    tokens_by_step = list_step_tokens(read_windows(project))
    token = next(
        t
        for t in sorted(set.union(*tokens_by_step))
        if t not in tokens_by_step[0]
        and len(predict_rollbacks([t in tokens for tokens in tokens_by_step], freq=1)[0]) == 4
    )
    poison_token(project, token)
    done = train_with_rollbacks(project, "--ckpt-freq", 1, expect=2)
    assert f"{AFTER} bad steps in a row" in done.stderr and "after 3 rollbacks" in done.stderr
    assert "Traceback" not in done.stderr and len(read_events(project, "rollback")) == 3


def test_a_diverged_run_without_an_earlier_checkpoint_ends(project: Path) -> None:
    tokens_by_step = list_step_tokens(read_windows(project))
    token = next(
        t
        for t in sorted(set.union(*tokens_by_step))
        if t not in tokens_by_step[0]
        and all(t in tokens for tokens in tokens_by_step[1 : 1 + AFTER])
    )
    poison_token(project, token)
    done = train_with_rollbacks(project, expect=2)
    problem, *parts = done.stderr.strip().splitlines()
    assert f"diverged: {AFTER} bad steps" in problem and "no checkpoint" in problem
    assert [part.split()[0] for part in parts] == ["found:", "hint:", "run:"]
    assert "-e run-lower-lr --lr 0.001 --min-lr 0.0001" in parts[-1]
    state = json.loads((project / "outputs/run/state.json").read_text())
    assert state["status"] == "failed"


def test_a_spike_changes_nothing(project: Path) -> None:
    factor = 1.02
    run_stage("04_train_fsdp.py", *COMMON, "--max-steps", 40, "--spike-factor", factor, cwd=project)
    usual = 0.0
    sound = 0
    spikes = []
    for row in metrics(project, "run"):
        norm = row["train/grad_norm"]
        if sound >= 20 and norm > factor * usual:
            spikes.append(row["step"])
            continue
        sound += 1
        usual += (norm - usual) / min(sound, 100)
    assert [event["step"] for event in read_events(project, "skip_step")] == spikes and spikes
    state = json.loads(
        (project / "outputs/run/checkpoints/step_00000040/train_state.json").read_text()
    )
    assert state["optimizer_steps"] == sound
