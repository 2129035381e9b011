# covers: lib/train/suite.py, lib/train/output/rows.py, lib/train/checks.py, 05_export_checkpoint.py
"""Stage 04 evaluates on tasks while it trains, without changing what it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import StageRunner, run_stage
from tests.training import SMALL_RUN, list_saved_steps, losses, metrics, read_log

SUITE = ("--eval-suite", "small:4")
RUN = (*SMALL_RUN, "--max-steps", 6, "--ckpt-freq", 2, "--eval-freq", 2)


@pytest.mark.slow
def test_evaluation_on_tasks_changes_no_loss_and_keeps_the_best_checkpoint(project: Path) -> None:
    key = "eval/copying/accuracy"
    run_stage("04_train_fsdp.py", "-e", "plain", *RUN, cwd=project, ranks=2)
    done = run_stage(
        "04_train_fsdp.py", "-e", "suite", *RUN, *SUITE, "--best-by", key, cwd=project, ranks=2
    )
    assert losses(project, "plain") == losses(project, "suite")
    assert "forward passes of each" in read_log(project, "suite")
    assert "  task       items  metric " in done.stdout
    rows = {row["step"]: row for row in metrics(project, "suite")}
    assert [step for step, row in rows.items() if key in row] == [2, 4, 6]
    assert [step for step, row in rows.items() if "eval/loss" in row] == [2, 4, 6]
    plain = {row["step"]: row for row in metrics(project, "plain")}
    assert plain[6]["eval/loss"] == rows[6]["eval/loss"]
    measured = {step: rows[step][key] for step in (2, 4, 6)}
    for step in list_saved_steps(project, "suite"):
        directory = project / "outputs/suite/checkpoints" / f"step_{step:08d}"
        score = json.loads((directory / "COMMIT.json").read_text())["score"]
        assert score == {"key": key, "value": measured[step]}
    export = ("05_export_checkpoint.py", "-e", "suite", "--dtype", "float32")
    best = max(measured, key=lambda step: (measured[step], step))
    done = run_stage(*export, "--step", "best", "--dry-run", cwd=project)
    assert f"best: step {best}, {key} {measured[best]:.4f}" in done.stdout
    run_stage(*export, "--step", "best", "--best-by", "eval/loss", "--out", "out", cwd=project)

    # The exported model gives the same figures without the trainer.
    command = ("lib/evaluate/__main__.py", "out", "--json", "results.json")
    run_stage(*command, "--limit", 4, "--max-length", 32, "--no-progress", cwd=project)
    for task, result in json.loads((project / "results.json").read_text())["tasks"].items():
        for metric, value in result["values"].items():
            exact = metric.startswith("accuracy")
            same = pytest.approx(value, rel=0 if exact else 1e-6)
            assert rows[6][f"eval/{task}/{metric}"] == same, (task, metric)


@pytest.mark.slow
def test_evaluation_on_tasks_compiles_nothing(project: Path) -> None:
    options = (*RUN, "--compile", "on", "--packing", "documents")
    graphs = []
    for name, more in (("plain", ()), ("suite", SUITE)):
        command = ("04_train_fsdp.py", "-e", name, *options, *more)
        run_stage(*command, cwd=project, before="tests.training:note_graphs")
        file = project / "graphs.txt"
        graphs.append(file.read_text())
        file.unlink()
    assert graphs[0] and graphs[0] == graphs[1]
    assert losses(project, "plain") == losses(project, "suite")


def test_bad_options_and_suites_are_reported_before_the_run(
    project: Path, stage: StageRunner
) -> None:
    def fail(*options: object) -> str:
        done = stage("04_train_fsdp.py", "-e", "exp", *RUN, *options, cwd=project, expect=2)
        assert "Traceback" not in done.stderr and not (project / "outputs").exists()
        return done.stderr

    assert "no figure" in fail("--best-by", "train/loss")
    assert "no suite other" in fail("--eval-suite", "other")
    wrong_key = ("--eval-suite", "small", "--best-by", "eval/copying/perplexity")
    assert "is no figure of" in fail(*wrong_key)
    (project / "mine").mkdir()
    (project / "mine" / "bad.jsonl").write_text('{"context": 1}\n\n{"answer": "a"}\n')
    message = fail("--eval-suite", "mine", "--dry-run")
    assert "line 1" in message and "line 3: 'context'" in message
