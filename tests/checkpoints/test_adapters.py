"""Adapters leave a run merged or alone, and what is broken is not published."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lib.core import hashing
from lib.core.errors import ArtifactError, UsageError
from lib.models.lora import Lora
from tests.checkpoints.adapted_runs import adapted_model, save_adapted_run
from tests.checkpoints.exporting import run_stage_05
from tests.models.families import FAMILIES, make_checkpoint
from tests.models.two_ranks import TOKENS

pytestmark = pytest.mark.usefixtures("group")


def make_run(root: Path, family: str = "llama_tied", lora: Lora | None = None,
             **more: Any) -> Path:
    """Leave a run with adapters under a directory; return that."""
    make_checkpoint(root / "model", FAMILIES[family]())
    save_adapted_run(root, root / "model", lora or Lora(4, 8.0), **more)
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory with the experiment `exp` of a tiny Llama, whose adapters do much."""
    return make_run(tmp_path, strength=0.2)


def export(root: Path, *arguments: object) -> None:
    """Run stage 05 on it."""
    run_stage_05("-e", "exp", "--save-dir", root, "--out", root / "out", *arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_merged_computes_what_the_trainer_did(tmp_path: Path, family: str) -> None:
    lora = Lora(4, 8.0, targets="attention" if family == "mixtral" else "all-linear")
    make_run(tmp_path, family, lora)
    export(tmp_path, "--dtype", "fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    trained = adapted_model(tmp_path / "model", lora).eval()
    with torch.no_grad():
        expected, found = (model(input_ids=TOKENS).logits for model in (trained, merged))
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(TOKENS).logits
    assert (base - expected).std() > 0.005 * expected.std()
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_precision_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                precision: str, optimizer: str) -> None:
    make_run(tmp_path, "llama", Lora(4, 8.0, precision=precision, rslora=True),
             optimizer=optimizer)
    caplog.set_level(logging.INFO, "pipeline")
    for dtype in ("bf16", "fp16", "fp32"):
        caplog.clear()
        export(tmp_path, "--dtype", dtype, "--overwrite")
        said = caplog.text
        assert said.count("at most") == 3 and "of lora_B had a gradient, and none" in said


def broken_fold(change: Callable[[Tensor, Tensor, str], Tensor]) -> Callable[..., Tensor]:
    """Return a `Lora.fold` whose result is changed. change: (W, W + s B A, name) → a tensor."""
    fold = Lora.fold

    def broken(self: Lora, model: Any, name: str, tensor: Tensor, added: Any) -> Tensor:
        return change(tensor.float(), fold(self, model, name, tensor, added).float(), name)
    return broken


BROKEN = {
    "an adapter missing": lambda w, new, name: w if "1.mlp.down_proj" in name else new,
    "alpha forgotten": lambda w, new, _: w + (new - w) / 2,
    "the scale twice": lambda w, new, _: w + (new - w) * 2,
    "rows of B lost": lambda w, new, _: torch.cat([new[:len(w) // 8], w[len(w) // 8:]]),
    "A and B swapped": lambda w, new, _: w + (new - w).flatten().flip(0).view(w.shape),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_merged_wrongly_is_not_published(run: Path, monkeypatch: pytest.MonkeyPatch,
                                                 what: str, dtype: str) -> None:
    monkeypatch.setattr(Lora, "fold", broken_fold(BROKEN[what]))
    with pytest.raises(ArtifactError, match="does not compute what was trained") as caught:
        export(run, "--dtype", dtype)
    assert "the files − the trainer" in caught.value.found and not list(run.glob("out*"))


def test_the_base_is_found_verified_and_named(run: Path) -> None:
    content = bytearray((run / "model" / "model.safetensors").read_bytes())
    digest = hashing.bytes_digest(bytes(content))
    shutil.rmtree(run / "exp")
    save_adapted_run(run, run / "model", Lora(4, 8.0),
                     record={"base": {"model.safetensors": digest}})
    (run / "model").rename(run / "elsewhere")
    with pytest.raises(ArtifactError, match="is gone") as gone:
        export(run)
    assert "-m NAME|DIR" in gone.value.hint
    export(run, "-m", run / "elsewhere")
    shutil.rmtree(run / "out")
    content[-1] ^= 1
    (run / "elsewhere" / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        export(run, "-m", run / "elsewhere")
    make_checkpoint(run / "other", FAMILIES["llama"]())
    with pytest.raises(UsageError, match="not the model that the adapters"):
        export(run, "-m", run / "other")
    assert not list(run.glob("out*"))
