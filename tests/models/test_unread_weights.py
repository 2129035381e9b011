# covers: lib/models/unread_weights.py, lib/models/lookup.py, lib/models/pickles.py
"""For weights in other formats, the error contains commands that convert them."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lib.core.errors import StageError
from lib.models import lookup
from tests.conftest import ROOT, run_code
from tests.training import save_model, save_tokenizer, write_corpus


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "04_train_fsdp.py"), "-e", "x", "-m", "a model"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable])
    write_corpus(tmp_path / "corpus", 5)
    save_model(Path("a model"))
    save_tokenizer(Path("a model"), tmp_path / "corpus")
    return Path("a model")


def find_and_fail(path: Path) -> StageError:
    with pytest.raises(StageError) as caught:
        lookup.find_model(str(path), Path(".cache"))
    assert caught.value.code in (2, 3)
    return caught.value


@pytest.mark.slow
def test_the_printed_command_converts_pickled_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    convert, train = find_and_fail(model).run.splitlines()
    python, option, code, *words = shlex.split(convert)
    assert (python, option) == (sys.executable, "-c")
    run_code(code, *words, cwd=Path.cwd())
    directory = Path(shlex.split(train)[-1])
    assert lookup.find_model(str(directory), Path(".cache")) == directory
    converted = load_file(directory / "model.safetensors")
    assert all(torch.equal(converted[name], weights[name]) for name in converted)
    (model / "config.json").unlink()  # then only its author can say what it is
    assert "save_pretrained" in find_and_fail(model).hint


@pytest.mark.parametrize("inner", [".", "pytorch_model_fsdp_0", "a/b"])
@pytest.mark.parametrize("has_config", [True, False])
def test_the_error_for_shards_of_fsdp_names_the_command_that_exports_them(
    model: Path, inner: str, has_config: bool
) -> None:
    shards = model / inner
    shards.mkdir(parents=True, exist_ok=True)
    (shards / "__0_0.distcp").touch()
    (model / "optimizer_0").mkdir()
    (model / "optimizer_0" / "__0_0.distcp").touch()
    (model / "model.safetensors").unlink()
    if not has_config:
        (model / "config.json").unlink()
    export, train = find_and_fail(model).run.splitlines()
    words = ["--from-dcp", str(shards), "-m", "MODEL", "--dtype", "float32"]
    assert shlex.split(export)[-8:] == [*words, "--out", "a model-model"]
    assert shlex.split(train)[-1] == "a model-model"


@pytest.mark.parametrize(
    "part", ["", "checkpoints", "checkpoints/step_00000002", "checkpoints/step_00000002/dcp"]
)
def test_the_printed_command_exports_a_run(model: Path, part: str) -> None:
    step = model / "checkpoints/step_00000002"
    (step / "dcp").mkdir(parents=True)
    (step / "dcp/__0_0.distcp").touch()
    (step / "COMMIT.json").touch()
    for file in ("config.json", "model.safetensors"):
        (model / file).unlink()
    words = shlex.split(find_and_fail(model / part).run.splitlines()[0])[2:]
    expected = ["--step", "2"] if "step" in part else []
    assert words == ["-e", "a model", *expected, "--out", "a model/export/model"]


def test_a_complete_model_is_accepted_beside_other_formats(model: Path) -> None:
    (model / "pytorch_model.bin").touch()
    (model / "global_step5").mkdir()
    (model / "global_step5" / "__0_0.distcp").touch()
    assert lookup.find_model(str(model), Path(".cache")) == model
    shutil.rmtree(model)
    assert "no finished model" in find_and_fail(model).problem
