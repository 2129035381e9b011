# covers: 04_train_fsdp.py, lib/models/scratch.py
"""Train from scratch with `--model-size`, without stage 03: start, resume, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lib.core import log, manifest, options, paths
from lib.core.errors import ArtifactError, UsageError
from lib.train.command_line import add_options, read_options
from lib.train.inputs import find_inputs
from lib.train.output.kinds import RunKind
from lib.train.settle import settle_from_files
from lib.train.sources.table import choose_source
from tests.conftest import run_stage
from tests.training import losses, read_log

STAGE = "04_train_fsdp.py"
RUN = ("-e", "own", "-d", "corpus", "-s", 32, "--precision", "fp32", "--log-freq", 1)
TINY = ("--from-scratch", "--model-size", "tiny", "--tokenizer", "model", "--vocab-size", 500)


@pytest.mark.slow
def test_a_run_from_scratch_needs_no_stage_03(project: Path) -> None:
    (project / "model" / "model.safetensors").unlink()
    before = sorted(project.rglob("*"))
    plan = run_stage(STAGE, *RUN, *TINY, "--dry-run", cwd=project).stdout
    assert "tokenizer of model" in plan
    assert sorted(project.rglob("*")) == before

    run_stage(STAGE, *RUN, *TINY, "--max-steps", 2, "-b", 2, cwd=project, ranks=2)
    log = read_log(project, "own")
    assert "initialised from seed 0" in log and log.count("created from scratch") == 1
    run_stage("03_download_model.py", *TINY, cwd=project)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        from_stage_03 = project / ".cache" / "models" / "scratch-tiny" / name
        file = project / "outputs" / "own" / "model" / name
        assert file.read_bytes() == from_stage_03.read_bytes()
    config = json.loads(from_stage_03.with_name("config.json").read_text())
    assert config["vocab_size"] == 512
    shutil.rmtree(project / ".cache" / "models")

    done = run_stage(STAGE, *RUN, *TINY, "--max-steps", 2, "-b", 4, cwd=project).stdout
    assert "already done" in done
    again = run_stage(STAGE, *RUN, *TINY, "--max-steps", 3, "-b", 4, cwd=project).stdout
    assert "resumed from" in again and read_log(project, "own").count("created from scratch") == 1
    assert list(losses(project, "own")) == [1, 2, 3]
    other = run_stage(
        STAGE,
        *RUN,
        *TINY,
        "--model-size",
        "350M",
        "--max-steps",
        4,
        "-b",
        4,
        "--dry-run",
        cwd=project,
        expect=2,
    )
    assert "--model-size: tiny there, 350M now" in other.stderr

    shutil.rmtree(project / ".cache")
    shutil.rmtree(project / "model")  # the run stands alone
    run_stage("05_export_checkpoint.py", "-e", "own", "--out", "exported", cwd=project)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(project / "exported").config.vocab_size == 512
    assert len(AutoTokenizer.from_pretrained(project / "exported")) <= 500


@pytest.mark.parametrize(
    ("contradiction", "says"),
    [
        (
            ("-m", "model", "--model-size", "tiny", "--vocab-size", 9),
            (
                "2 problems",
                "not both",
                "--vocab-size 9 is too small for a tokenizer",
            ),
        ),
        (
            ("--from-scratch", "-m", "model", "--vocab-size", 9, "--tokenizer", "model"),
            ("2 problems", "--vocab-size belongs to --model-size", "--tokenizer belongs to"),
        ),
        ((*TINY, "--vocab-size", 100), ("smaller than the tokenizer",)),
        ((*TINY, "--tokenizer", "nowhere"), ("nowhere contains no tokenizer",)),
    ],
    ids=str,
)
def test_contradictory_options_of_a_run_from_scratch_are_refused(
    project: Path, contradiction: tuple, says: tuple[str, ...]
) -> None:
    done = run_stage(STAGE, *RUN, *contradiction, cwd=project, expect=2)
    assert not [text for text in says if text not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr and not (project / ".cache").exists()


def find_start(*words: object) -> tuple[float | None, bool]:
    """Return the learning rate of a launch, and whether it initialises its weights.

    None: the number of parameters will decide.
    """
    parser = options.Parser("")
    add_options(parser)
    config = read_options(parser, [*map(str, words)])
    experiment = paths.experiment(config.experiment_name)
    inputs = find_inputs(config, experiment, RunKind, choose_source(config), None, {})
    return settle_from_files(config, inputs).lr, inputs.scratch


def prepare_model(model: Path, target: Path) -> None:
    """Copy a model, with a manifest as stage 03 writes it."""
    shutil.copytree(model, target)
    files = [manifest.file_entry(target, path, "sha256") for path in sorted(target.iterdir())]
    manifest.write_manifest(
        target,
        kind="model/1",
        stage="03_download_model.py",
        files=files,
        options={"model_name": "org/own"},
        identity={},
        summary={},
    )


def test_missing_weights_are_not_initialised_unless_asked_for(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(project)
    run = (*RUN[:4], "-m", "model")
    model = project / "model"
    assert find_start(*run) == (3e-5, False)
    weights = model / "model.safetensors"
    weights.rename(model / "consolidated.safetensors")
    done = run_stage(STAGE, *run, cwd=project, expect=3)
    assert "model has no weights" in done.stderr
    assert "consolidated.safetensors cannot be used" in done.stderr
    assert "random weights" in done.stderr
    assert not (project / "outputs").exists() and not (project / ".cache").exists()
    (model / "consolidated.safetensors").unlink()
    with pytest.raises(ArtifactError, match="has no weights") as caught:
        find_start(*run)
    assert "without any .safetensors file" in caught.value.found
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ArtifactError, match="incomplete") as caught:
        find_start(*run)
    assert "model-1.safetensors is missing" in caught.value.found
    index.unlink()

    assert find_start(*run, "--from-scratch") == (None, True)
    with pytest.raises(ArtifactError, match="has no weights"):
        find_start(*run, "--dry-run")  # as the run itself
    log.setup()
    for plan in (("--dry-run", "--plan-gpus", 8), ("--prepare-only",)):
        assert find_start(*run, *plan) == (3e-5, False)
        assert "training would end here" in capsys.readouterr().out
    prepare_model(model, project / ".cache/models/org--own")
    with pytest.raises(UsageError, match="--from-scratch") as caught:
        find_start(*RUN[:4], "--from-scratch")
    assert "--model-size 1M|tiny|" in caught.value.expected
    assert "-m org--own" in caught.value.hint
    assert find_start(*RUN[:4], "--from-scratch", "-m", "org/own") == (None, True)
    shutil.rmtree(project / ".cache/models")
    run_stage("03_download_model.py", *TINY, cwd=project)
    assert find_start(*RUN[:4]) == (None, True)  # the only model, made from scratch
    assert find_start(*RUN[:4], "--from-scratch") == (None, True)
