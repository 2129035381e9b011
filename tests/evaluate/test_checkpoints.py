# covers: lib/evaluate/open_model.py, lib/export/checkpoint_choice.py, lib/checkpoints/snapshot.py
"""`python -m lib.evaluate RUN` evaluates a checkpoint, as its export would be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.evaluate.open_model import find_evaluated_model
from tests.conftest import run_stage
from tests.evaluate.test_evaluate import read_values, run_evaluator
from tests.training import SMALL_RUN

RUN = (*SMALL_RUN, "--max-steps", 4, "--ckpt-freq", 2, "--eval-freq", 2)
EXPORT = ("05_export_checkpoint.py", "-e", "exp", "--dtype", "float32")
LORA = ("--lora-rank", 4, "--lr", 0.05)


def read_model(place: Path, name: str) -> dict[str, dict[str, float]]:
    """Return the figures in a file of results, after a check of their number."""
    values = read_values(place, name)
    assert len(values) == 6
    return values


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), LORA], ids=["full", "lora"])
def test_a_checkpoint_gives_the_figures_of_its_export(
    project: Path, options: tuple[object, ...]
) -> None:
    run_stage("04_train_fsdp.py", "-e", "exp", *RUN, *options, cwd=project, ranks=2)
    run_stage(*EXPORT, "--step", 2, "--out", "out", cwd=project)
    limit = ("--limit", 5)
    before = sorted(project.rglob("*"))
    done = run_evaluator(project, "outputs/exp", *limit, "--step", 2, "--json", "checkpoint.json")
    assert f"model: {Path('outputs/exp/checkpoints/step_00000002')}" in done.stdout
    assert set(project.rglob("*")) - set(before) == {project / "checkpoint.json"}, "no copies"
    run_evaluator(project, "out", *limit, "--json", "export.json")
    exported = read_model(project, "export.json")
    if options:  # the export adds the adapter to the weights, and rounds the sum
        for task, values in read_model(project, "checkpoint.json").items():
            assert values["bits_per_byte"] == pytest.approx(
                exported[task]["bits_per_byte"], rel=1e-5
            )
    else:
        assert read_model(project, "checkpoint.json") == exported
    # By its path, on several ranks; the newest one is another step.
    where = "outputs/exp/checkpoints/step_00000002"
    run_evaluator(project, where, *limit, "--json", "ranks.json", ranks=2)
    assert read_model(project, "ranks.json") == read_model(project, "checkpoint.json")
    done = run_evaluator(project, "exp", *limit, "--json", "newest.json")
    assert "step_00000004" in done.stdout
    assert read_model(project, "newest.json") != exported
    assert "best: step" in run_evaluator(project, "exp", *limit, "--step", "best").stdout


def test_what_cannot_be_evaluated_is_refused(project: Path) -> None:
    run_stage("04_train_fsdp.py", "-e", "lora", *RUN, *LORA, cwd=project)
    run = project / "outputs" / "lora"
    source = find_evaluated_model(str(run / "checkpoints"), project, None, str(project / "model"))
    assert source.checkpoint and source.checkpoint.step == 4
    with pytest.raises(ArtifactError, match="step 7"):
        find_evaluated_model(str(run), project, "7", None)
    with pytest.raises(UsageError, match="--step must be"):
        find_evaluated_model(str(run), project, "newest", None)
    with pytest.raises(UsageError, match="--step and --model-name"):
        find_evaluated_model(str(project / "model"), project, "2", "x")
    with pytest.raises(UsageError, match="not the base model"):
        find_evaluated_model(str(run), project, None, str(run / "model"))
    shutil.move(project / "model", project / "moved")
    with pytest.raises(ArtifactError, match=r"base model .* gone") as caught:
        find_evaluated_model(str(run), project, None, None)
    assert "-m NAME|DIR" in caught.value.hint
    assert find_evaluated_model(str(run), project, None, str(project / "moved")).base
    (run / "checkpoints" / "step_00000004" / "dcp" / ".metadata").unlink()
    with pytest.raises(ArtifactError, match="is damaged"):
        find_evaluated_model(str(run), project, None, str(project / "moved"))


@pytest.mark.slow
def test_a_damaged_checkpoint_and_another_model_are_refused(project: Path) -> None:
    run_stage("04_train_fsdp.py", "-e", "exp", *RUN, cwd=project)
    run = project / "outputs" / "exp"
    config = run / "model" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"intermediate_size": ', '"intermediate_size": 1'))
    done = run_evaluator(project, "outputs/exp", "--limit", 1, expect=3)
    assert "belongs to another model" in done.stderr and "Traceback" not in done.stderr
    config.write_text(text)
    (shard,) = (run / "checkpoints" / "step_00000004" / "dcp").glob("__0_0.distcp")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    done = run_evaluator(project, "outputs/exp", "--limit", 1, expect=3)
    assert "is damaged" in done.stderr and "--step 2" in done.stderr
