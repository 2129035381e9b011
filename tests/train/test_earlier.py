# covers: lib/train/previous_run.py
"""Directories in which a run may start or resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.train import previous_run
from lib.train.config import Config


def test_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    """Another version of the packing may pack the same documents into other samples."""
    now = {"options": {"seed": 0}, "inputs": {"dataset": "d"}}
    for facts, changes in (
        ({"samples_per_epoch": 300}, []),
        ({}, []),
        ({"samples_per_epoch": 298}, ["samples in an epoch: 298 there, 300 now"]),
    ):
        identities = previous_run.add_sample_counts({"identity": now, **facts}, now, 300)
        differences = previous_run.require_same_run(*identities, tmp_path, with_changes=True)
        assert [*map(str, differences)] == changes and previous_run.changes_samples(
            differences
        ) == bool(changes)
    with pytest.raises(UsageError) as error:
        previous_run.require_same_run(*identities, tmp_path)
    assert "samples in an epoch: 298 there, 300 now" in error.value.render()
    assert now == {"options": {"seed": 0}, "inputs": {"dataset": "d"}}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "config.yaml", "config.yaml of another program"])
def test_a_directory_that_is_no_experiment_is_neither_used_nor_moved(
    tmp_path: Path, name: str, overwrite: bool
) -> None:
    opts = SimpleNamespace(overwrite=overwrite, resume="auto", resume_with_changes=False)
    (tmp_path / "exp").mkdir()
    previous_run.require_usable_directory(opts, Experiment(tmp_path, "exp"), {}, {})
    file = tmp_path / "exp" / name.partition(" ")[0]
    file.write_text("" if name == "config.yaml" else "model: resnet\n")
    with pytest.raises(UsageError, match="is not an experiment"):
        previous_run.require_usable_directory(opts, Experiment(tmp_path, "exp"), {}, {})
    file.unlink()
    (tmp_path / "exp/config.yaml").write_text("identity: {options: {}, inputs: {}}\n")
    previous_run.require_usable_directory(opts, Experiment(tmp_path, "exp"), {}, {})


@pytest.mark.parametrize(
    ("typed", "inputs", "options", "run"),
    [
        ({}, {}, {"seed": 1}, "--config"),
        ({"dataset_name": ["b"]}, {"dataset": 2}, {}, "--config"),
        ({"model_name": "n"}, {"model": 2, "tokenizer": 2}, {"seed": 1}, "--config"),
        ({}, {"dataset": 2}, {}, "--resume-with-changes"),
        ({}, {"ranks": 2}, {}, "--resume-with"),
        ({}, {"model": 2}, {"seed": 1}, "--resume-with-changes"),
        ({}, {"chat template": 2}, {}, "--resume-with-changes"),
        ({"chat_template": Path("t")}, {"chat template": 2}, {}, "--config"),
        ({}, {"dataset": 2}, {"optimizer": "x"}, "--experiment-name exp-2"),
        ({"lora_rank": 4}, {"model": 2}, {}, "--experiment-name exp-2"),
        ({"lora_from": Path("a")}, {"adapter": 2}, {}, "mv a a.aside\n"),
        ({"lora_from": Path("a")}, {"adapter": 2}, {"seed": 1}, "--config"),
    ],
    ids=str,
)
def test_the_suggested_command_resumes_a_run_with_other_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: dict,
    inputs: dict,
    options: dict,
    run: str,
) -> None:
    """Recorded options help, unless the same name leads to another input now."""
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "-e", "exp"])
    recorded = replace(
        Config(),
        experiment_name="exp",
        save_dir=tmp_path,
        dataset_name=["a"],
        model_name="m",
        **{key: value for key, value in typed.items() if key.startswith(("lora", "resume"))},
    )
    now = {"options": dict.fromkeys(options, 0), "inputs": dict.fromkeys(inputs, 1)}
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/config.yaml").write_text(
        yaml.safe_dump({"options": recorded.to_record(), "identity": now})
    )
    with pytest.raises(UsageError) as error:
        previous_run.require_same_run(
            now,
            {"options": options, "inputs": inputs},
            tmp_path / "exp",
            config=replace(recorded, **typed),
        )
    assert run in error.value.run and error.value.hint.endswith(":")
