# covers: lib/export/full_model.py, lib/export/tensor_reader.py, lib/export/card.py
"""An exported model equals the files of `save_pretrained`, for every model family."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from lib.checkpoints import commit
from lib.core import manifest
from lib.core.errors import ArtifactError
from lib.export import card, checkpoint_choice, full_model
from lib.export.tensor_reader import FullTensorReader
from lib.models.architecture import build_on_meta
from lib.models.tensor_file import TensorFile
from tests.export.exports import EXPORTED, run_stage_05, save_run
from tests.models.families import FAMILIES, make_checkpoint

pytestmark = pytest.mark.usefixtures("group")
OWN = {"README.md", "manifest.json"}


def content(directory: Path) -> dict[str, tuple[str, dict[str, str], torch.Tensor]]:
    """Return file, metadata and tensor by name."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {
                key: (path.name, file.metadata(), file.get_tensor(key))
                for key in file.keys()  # noqa: SIM118 (no mapping)
            }
    return tensors


def settings(path: Path) -> dict[str, Any]:
    """Return a JSON file without the version that wrote it."""
    values = json.loads(path.read_text())
    values.pop("transformers_version", None)
    return values


def config_of(directory: Path) -> dict[str, Any]:
    """Return the config as transformers reads it, without second names for the same settings."""
    config = AutoConfig.from_pretrained(directory)
    config.name_or_path = ""
    values = config.to_dict()
    values.pop("partial_rotary_factor", None)
    (values.get("rope_parameters") or {}).pop("type", None)
    return values


def assert_same_model(out: Path, reference: Path, same_files: bool) -> None:
    """Compare files, names, dtypes, shapes, bits, index and configs."""
    assert {p.name for p in out.iterdir()} - OWN == {p.name for p in reference.iterdir()}
    ours = content(out)
    theirs = content(reference)
    assert ours.keys() == theirs.keys()
    for key, (file, metadata, tensor) in theirs.items():
        assert ours[key][1] == metadata and (ours[key][0] == file or not same_files), key
        assert ours[key][2].dtype == tensor.dtype and torch.equal(ours[key][2], tensor), key
    index = "model.safetensors.index.json"
    if (reference / index).exists():
        ours = settings(out / index)
        theirs = settings(reference / index)
        assert ours["metadata"] == theirs["metadata"]
        assert ours["weight_map"] == {key: file for key, (file, _, _) in content(out).items()}
    assert settings(out / "generation_config.json") == settings(
        reference / "generation_config.json"
    )
    assert config_of(out) == config_of(reference)


class Factors:
    """A model change that multiplies the outputs of linear layers by trained factors."""

    def owns(self, name: str) -> bool:
        return name.endswith(".factor")

    def fold(
        self, _: object, name: str, tensor: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        factor = added.get(name.replace(".weight", ".factor"))
        return tensor if factor is None else tensor * factor[:, None]


def test_tensors_that_a_model_change_added_are_merged(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", FAMILIES["llama"]())
    model = build_on_meta(tmp_path / "model")
    layer = "model.layers.1.mlp.down_proj"
    rows = model.get_submodule(layer).out_features
    checkpoint = save_run(
        tmp_path, tmp_path / "model", added={f"{layer}.factor": torch.arange(float(rows))}
    )
    planned = full_model.plan_export(model, torch.float32, 1 << 30)
    (out := tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match="does not have") as caught:
        full_model.write_model(model, checkpoint, planned, out, lambda _: None)
    assert f"{layer}.factor" in caught.value.found
    full_model.write_model(model, checkpoint, planned, out, lambda _: None, [Factors()])
    full_model.verify_model(model, out)
    for key, (_, _, tensor) in content(tmp_path / "model").items():
        expected = tensor.float()
        if key == f"{layer}.weight":
            expected = expected * torch.arange(float(rows))[:, None]
        assert torch.equal(content(out)[key][2], expected), key


@pytest.mark.parametrize("family", EXPORTED)
def test_an_export_equals_save_pretrained(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / "model", FAMILIES[family]())
    save_run(tmp_path, tmp_path / "model")
    for dtype, size in (("float32", 5 * 10**9), ("bfloat16", 40_000)):
        out = tmp_path / f"out_{dtype}"
        reference = tmp_path / f"reference_{dtype}"
        run_stage_05(
            *("-e", "exp", "--save-dir", tmp_path, "--out", out),
            *("--dtype", dtype, "--max-shard-size", size),
        )
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", dtype=getattr(torch, dtype)
        ).save_pretrained(reference, max_shard_size=size)
        # The experts of one module tensor count as one there, so that files grow beyond the limit.
        assert_same_model(out, reference, same_files=family != "mixtral")
        assert all(p.stat().st_size < size + 4096 for p in out.glob("*.safetensors"))
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == dtype
        record = manifest.read_manifest(out, "export/1", "the export")
        assert {entry["path"] for entry in record["files"]} | {"manifest.json"} == {
            path.name for path in out.iterdir()
        }
        assert manifest.find_damage(out, record, deep=True) == []
        assert all(entry["digest"].startswith("sha256:") for entry in record["files"])


def test_router_biases_remain_float32_under_any_name(tmp_path: Path) -> None:
    """On the Hub, the bias of DeepSeek-V4 is named `ffn.gate.bias`."""
    sizes = {
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16},
        **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8, "qk_rope_head_dim": 8},
        **{"mlp_layer_types": ["moe"], "layer_types": ["sliding_attention"], "hc_mult": 2},
    }
    config = {"model_type": "deepseek_v4", "vocab_size": 97, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = full_model.plan_export(build_on_meta(tmp_path), torch.bfloat16, 1 << 30)
    dtypes = {entry.key: entry.dtype for entry in planned.entries}
    assert dtypes["model.layers.0.ffn.gate.bias"] == torch.float32
    assert dtypes["model.layers.0.ffn.gate.weight"] == torch.bfloat16


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory with the experiment `exp` of a tiny Llama."""
    make_checkpoint(tmp_path / "model", FAMILIES["llama_tied"]())
    save_run(tmp_path, tmp_path / "model")
    return tmp_path


def test_the_card_describes_the_training(run: Path) -> None:
    (run / "exp" / "config.yaml").write_text(
        "options:\n  dataset_name: [/secret/place/corpus=0.7, other=0.3]\n"
    )
    (run / "exp" / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 9.0, "eval/loss": 1.25}\n{"step": 2, "eval/loss": 0.5}\n{"st'
    )
    run_stage_05("-e", "exp", "--save-dir", run)
    text = (run / "exp" / "export" / "step_00000001" / "README.md").read_text()
    for row in (
        "steps | 1",
        "tokens seen | 640",
        "final training loss | 1.5000",
        "data | corpus=0.7, other=0.3",
        "validation loss | 1.2500 (at step 1)",
        "digest of dataset | d1e5",
        "architecture | LlamaForCausalLM",
        "dtype | bfloat16",
        "seed | 7",
    ):
        assert f"| {row} |" in text
    assert text.startswith("---\nlibrary_name: transformers\n") and "secret" not in text


def test_best_is_the_step_with_the_lowest_recorded_loss(run: Path) -> None:
    for step, loss in ((2, 1.0), (3, float("nan")), (4, 2.0)):
        save_run(run, run / "model", step=step, facts={"eval_loss": loss})
    run_stage_05("-e", "exp", "--save-dir", run, "--step", "best")
    assert [p.name for p in (run / "exp" / "export").iterdir()] == ["step_00000002"]
    rows = [{"step": 1, "eval/loss": 0.5}, {"step": 9, "eval/loss": 0.1}]  # step 9 is not kept
    (run / "exp" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_stage_05("-e", "exp", "--save-dir", run, "--step", "best", "--out", run / "out")
    assert json.loads((run / "out" / "manifest.json").read_text())["summary"]["step"] == 1


def test_a_checkpoint_can_be_deleted_once_its_files_are_open(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, the export fails and leaves no files."""
    folder = run / "exp" / "checkpoints" / "step_00000001"
    original = FullTensorReader.read

    def prune_first(self: FullTensorReader, names: list[str]) -> list[torch.Tensor]:
        shutil.rmtree(folder, ignore_errors=True)
        return original(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(FullTensorReader, "read", prune_first)
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "out", "--dtype", "float32")
    assert content(run / "out").keys() == content(run / "model").keys()
    save_run(run, run / "model")
    start_hashing = checkpoint_choice.start_hashing

    def prune_after(checkpoint: commit.Checkpoint, for_export: bool) -> Future[list[str]]:
        problems = start_hashing(checkpoint, for_export)
        assert problems.result() == []
        shutil.rmtree(folder)
        return problems

    monkeypatch.setattr(checkpoint_choice, "start_hashing", prune_after)
    with pytest.raises(ArtifactError, match="was deleted"):
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "later")
    assert not list(run.glob("later*"))


def test_a_checkpoint_with_more_layers_than_the_model_is_refused(run: Path) -> None:
    path = run / "exp" / "model" / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="does not have") as caught:
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "out")
    assert f"model.model.layers.{config['num_hidden_layers']}." in caught.value.found
    assert not (run / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    shutil.copyfile(run / "model" / "config.json", run / "exp" / "model" / "config.json")
    path = run / "exp" / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 32}))
    with pytest.raises(ArtifactError, match="another model"):
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "out")
    assert not list(run.glob("out*"))


def test_an_export_that_does_not_read_back_is_not_published(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorFile, "reads_back", lambda self: False)
    with pytest.raises(ArtifactError, match="does not read back"):
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "out")
    assert not list(run.glob("out*"))


def test_a_full_disk_leaves_no_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lib.models.tensor_file.os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):  # exit code 4, as in all stages
        run_stage_05("-e", "exp", "--save-dir", run, "--out", run / "out")
    assert not list(run.glob("out*"))


@pytest.fixture
def writes(run: Path) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function that writes the export with a maximum file size."""

    def write(size: int) -> list[dict[str, Any]]:
        model = build_on_meta(run / "exp" / "model")
        planned = full_model.plan_export(model, torch.float32, size)
        checkpoint = commit.list_checkpoints(run / "exp" / "checkpoints")[0]
        (run / "files").mkdir()
        return full_model.write_model(model, checkpoint, planned, run / "files", lambda count: None)

    return write


def test_a_tensor_above_the_maximum_file_size_gets_its_own_file(
    run: Path, writes: Callable[..., Any]
) -> None:
    entries = writes(100)
    files = [entry for entry in entries if entry["path"].endswith(".safetensors")]
    assert len(files) == len(content(run / "files")) == len(content(run / "model"))


def test_metrics_that_are_not_finite_are_ignored(tmp_path: Path) -> None:
    """So are lines that a power cut has damaged."""
    (tmp_path / "m").write_bytes(
        b'{"step": 1, "x": NaN}\n{"step": 2, "x": 3}\n{"x": 1}\n[]\n\0\0\xff\xfe\n{"step": 3, "x"'
    )
    assert card.read_metric(tmp_path / "m", "x") == {2: 3.0}
    assert card.read_metric(tmp_path / "none", "x") == {}
