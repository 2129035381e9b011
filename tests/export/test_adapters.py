# covers: lib/export/adapter_files.py, lib/export/adapter_checks.py
"""LoRA runs are exported as a merged model or as an adapter, and no broken export is published."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lib.core import hashing, manifest
from lib.core.errors import ArtifactError, UsageError
from lib.export import adapter_files
from lib.models.lora import Lora
from lib.models.sharded import local_tensor
from tests.export.exports import EXPORTED, run_stage_05, save_run
from tests.export.lora_runs import build_lora_model, save_lora_run
from tests.models.families import FAMILIES, make_checkpoint
from tests.models.two_ranks import TOKENS

pytestmark = pytest.mark.usefixtures("group")


def make_run(root: Path, family: str = "llama_tied", lora: Lora | None = None, **more: Any) -> Path:
    """Write a LoRA run under a directory, and return the directory."""
    make_checkpoint(root / "model", FAMILIES[family]())
    save_lora_run(root, root / "model", lora or Lora(4, 8.0), **more)
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory with the experiment `exp`, whose adapter changes the logits much."""
    return make_run(tmp_path, strength=0.2)


def export_adapter(root: Path, *arguments: object) -> None:
    """Run stage 05 on the experiment of a directory."""
    run_stage_05("-e", "exp", "--save-dir", root, "--out", root / "out", *arguments)


@pytest.mark.parametrize(
    "precision",
    ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "fp32"))],
)
def test_every_precision_passes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    make_run(
        tmp_path,
        "llama",
        Lora(4, 8.0, precision=precision, rslora=True),
        optimizer="adamw8bit" if precision == "bf16" else "adamw",
    )
    caplog.set_level(logging.INFO, "pipeline")
    for dtype in ("bf16", "fp16", "fp32"):
        caplog.clear()
        export_adapter(tmp_path, "--dtype", dtype, "--overwrite")
        logged = caplog.text
        assert "of the last block" in logged
        assert "had a gradient" in logged


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
    "rows of B lost": lambda w, new, _: torch.cat([new[: len(w) // 8], w[len(w) // 8 :]]),
    "A and B swapped": lambda w, new, _: w + (new - w).flatten().flip(0).view(w.shape),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_wrong_merge_is_not_published(
    run: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(Lora, "fold", broken_fold(BROKEN[fault]))
    with pytest.raises(ArtifactError, match="differ from the adapter") as caught:
        export_adapter(run)
    assert "differs by up to" in caught.value.found and not list(run.glob("out*"))


def test_the_base_model_is_found_and_verified(run: Path) -> None:
    content = bytearray((run / "model" / "model.safetensors").read_bytes())
    digest = hashing.bytes_digest(bytes(content))
    shutil.rmtree(run / "exp")
    save_lora_run(run, run / "model", Lora(4, 8.0), record={"base": {"model.safetensors": digest}})
    (run / "model").rename(run / "elsewhere")
    with pytest.raises(ArtifactError, match="is gone") as gone:
        export_adapter(run)
    assert "-m NAME|DIR" in gone.value.hint
    export_adapter(run, "-m", run / "elsewhere")
    shutil.rmtree(run / "out")
    content[-1] ^= 1
    (run / "elsewhere" / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        export_adapter(run, "-m", run / "elsewhere")
    make_checkpoint(run / "other", FAMILIES["llama"]())
    with pytest.raises(UsageError, match="not the base model"):
        export_adapter(run, "-m", run / "other")
    assert not list(run.glob("out*"))


def test_an_exported_adapter_equals_the_files_of_peft(tmp_path: Path) -> None:
    """The files are float32, and contain neither config.json nor any path."""
    make_run(tmp_path, lora=Lora(4, 6.5, 0.1, "q_proj|v_proj", rslora=True))
    (tmp_path / "exp" / "model" / "tokenizer.json").write_text("{}")
    export_adapter(tmp_path, "--adapter")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "README.md",
        "manifest.json",
    }
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == {
        "alpha_pattern": {},
        "base_model_name_or_path": "model",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 6.5,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": True,
    }
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"].shape == (
        16,
        4,
    )
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    export_adapter(tmp_path, "--adapter")  # already done
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    with pytest.raises(UsageError, match="other inputs or options") as merged:
        export_adapter(tmp_path)
    assert "--adapter" in merged.value.found
    export_adapter(tmp_path, "--adapter", "--dtype", "bf16", "--overwrite")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_base_models_and_targets_are_named_so_that_peft_finds_them(tmp_path: Path) -> None:
    """The name is from stage 03's manifest, the layout of the Hub's cache, or the directory."""
    cached = tmp_path / "models--org--a--b" / "snapshots" / ("0" * 40)
    for path in (prepared := tmp_path / "org--a", cached, tmp_path / "scratch-tiny"):
        path.mkdir(parents=True)
    written = {"kind": "model/1", "stage": "", "identity": {}, "files": [], "summary": {}}
    for path, name in ((prepared, "org/a"), (tmp_path / "scratch-tiny", "scratch-tiny")):
        manifest.write_json(path / "manifest.json", written | {"options": {"model_name": name}})
    assert [
        adapter_files.name_base_model(path)
        for path in (prepared, cached, tmp_path / "scratch-tiny")
    ] == ["org/a", "org/a--b", "scratch-tiny"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["qwen2_moe"]())
    first = "model.layers.0.mlp.shared_expert.down_proj"
    second = first.replace(".0.", ".1.")
    assert adapter_files.name_targets(model, [second, first]) == ["down_proj"]
    assert adapter_files.name_targets(model, [first]) == [first]  # the other has that last part too


def without_rows(rows: slice, *kinds: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that sets all but some `rows` to zero, in tensors B of these kinds."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith(kinds) and name.endswith(".lora_B.weight"):
                local = local_tensor(tensor)
                held = local[rows].clone()
                local.zero_()
                local[rows] = held

    return change


LOST = {
    "the slice of rank 0 of 8": (slice(0, 4), ("model.",), "but are zero"),
    "that of another rank": (slice(8, 12), ("model.",), "but are zero"),
    "one row": (slice(1, None), ("model.",), "1 row of 32 had a gradient"),
    "with its moments": (slice(0, 4), ("model.", "optimizer."), "28 of 32 rows"),
}


@pytest.mark.parametrize("fault", LOST)
def test_an_adapter_that_lacks_rows_is_not_published(tmp_path: Path, fault: str) -> None:
    rows, kinds, says = LOST[fault]
    make_run(
        tmp_path,
        lora=Lora(4, 8.0, targets="down_proj"),
        change=without_rows(rows, *kinds),
        optimizer="adamw" if "slice" in fault else "adamw8bit",
    )
    for arguments in ((), ("--adapter",)):
        with pytest.raises(ArtifactError, match="part of its adapter") as caught:
            export_adapter(tmp_path, *arguments)
        assert says in caught.value.found and not list(tmp_path.glob("out*"))


def test_rows_that_were_never_trained_may_be_zero(tmp_path: Path) -> None:
    """B remains zero without a step, and at a learning rate of 0."""
    none = without_rows(slice(0, 0), "model.")
    make_run(tmp_path, strength=0.0, change=none, lr=0)
    export_adapter(tmp_path, "--adapter")
    shutil.rmtree(tmp_path / "exp")
    save_lora_run(
        tmp_path,
        tmp_path / "model",
        Lora(4, 8.0),
        strength=0.0,
        change=without_rows(slice(0, 0), "model.", "optimizer."),
        record={"optimizer_steps": 0},
    )
    export_adapter(tmp_path, "--adapter", "--overwrite")


def rewritten(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[..., Any]:
    """Return an `adapter_files.write_adapter` that changes the config or the tensors."""
    write = adapter_files.write_adapter

    def broken(lora_run: Any, planned: Any, out: Path, advance: Any) -> Any:
        entries = write(lora_run, planned, out, advance)
        if name.endswith(".json"):
            content = json.loads((out / name).read_text())
            change(content)
            (out / name).write_text(json.dumps(content))
        else:
            content = load_file(out / name)
            change(content)
            save_file(content, out / name)
        return entries

    return broken


LAYER = "base_model.model.model.layers.1.mlp.down_proj.lora_"
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
BROKEN_ADAPTERS = {
    "an adapter missing": (
        TENSORS,
        lambda t: [t.pop(f"{LAYER}{x}.weight") for x in "AB"],
        "other tensors than PEFT",
    ),
    "B transposed": (
        TENSORS,
        lambda t: t.update({f"{LAYER}B.weight": t[f"{LAYER}B.weight"].t().contiguous()}),
        "other tensors than PEFT",
    ),
    "other names": (
        TENSORS,
        lambda t: t.update({f"x.{LAYER}B.weight": t.pop(f"{LAYER}B.weight")}),
        "other tensors than PEFT",
    ),
    "B zero": (TENSORS, lambda t: t[f"{LAYER}B.weight"].zero_(), "differ from"),
    "half of B zero": (TENSORS, lambda t: t[f"{LAYER}B.weight"][16:].zero_(), "differ from"),
    "alpha": (CONFIG, lambda c: c.update(lora_alpha=c["r"]), "differ from"),
    "rsLoRA": (CONFIG, lambda c: c.update(use_rslora=True), "differ from"),
    "a target missing": (
        CONFIG,
        lambda c: c["target_modules"].remove("down_proj"),
        "other tensors than PEFT",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_ADAPTERS)
def test_a_wrong_adapter_file_is_not_published(
    run: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name, change, says = BROKEN_ADAPTERS[fault]
    monkeypatch.setattr(adapter_files, "write_adapter", rewritten(name, change))
    with pytest.raises(ArtifactError, match=says):
        export_adapter(run, "--adapter", *(["--dtype", "bf16"] if says == "differ from" else []))
    assert not list(run.glob("out*"))


def test_adapter_is_refused_for_a_run_of_the_full_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", FAMILIES["llama"]())
    save_run(tmp_path, tmp_path / "model")
    with pytest.raises(UsageError, match="--adapter requires"):
        export_adapter(tmp_path, "--adapter")


@pytest.mark.parametrize("family", EXPORTED)
def test_peft_and_the_merged_model_compute_what_the_trainer_did(
    tmp_path: Path, family: str
) -> None:
    lora = Lora(
        4,
        6.0,
        targets="attention" if family == "mixtral" else "all-linear",
        rslora=family in ("llama", "gpt2"),
    )
    make_run(tmp_path, family, lora)
    export_adapter(tmp_path, "--adapter")
    run_stage_05(
        "-e", "exp", "--save-dir", tmp_path, "--out", tmp_path / "merged", "--dtype", "fp32"
    )
    base, merged = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("model", "merged")
    )
    trained = build_lora_model(tmp_path / "model", lora).eval()
    with torch.no_grad():
        without, by_merged, expected = (
            model(input_ids=TOKENS).logits for model in (base, merged, trained)
        )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)  # missing keys are a warning to PEFT
        by_peft = PeftModel.from_pretrained(base, tmp_path / "out").eval()(input_ids=TOKENS).logits
    assert (without - expected).std() > 0.005 * expected.std()
    for logits in (by_peft, by_merged):
        assert (logits - expected).abs().max() < 2e-5 * expected.std()
