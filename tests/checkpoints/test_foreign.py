# covers: lib/checkpoints/foreign_weights.py, lib/export/foreign_source.py
"""Checkpoints of other trainers: weights are found by name, and everything else is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from lib.checkpoints import commit
from lib.checkpoints.foreign_weights import ForeignTensors, require_fits
from lib.core.errors import ArtifactError, UsageError
from lib.export.foreign_source import ForeignSource, find_foreign_checkpoint
from lib.models import keys
from lib.models.weights import load_stored
from tests.checkpoint_harness import commit_checkpoint

MODEL_DIR = Path("the model")


def build_model(tied: bool = False, **options: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | options, tie_word_embeddings=tied)).float()


def build_empty(tied: bool = False, **options: int) -> PreTrainedModel:
    """Return the same model without its weights."""
    model = build_model(tied, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def save_foreign_run(directory: Path, tensors: Mapping[str, object]) -> Path:
    dcp.save(dict(tensors), checkpoint_id=directory, no_dist=True)
    return find_foreign_checkpoint(directory)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_loaded(run: Path, expected: Mapping[str, Tensor], tied: bool = False) -> None:
    with torch.device("meta"):
        require_fits(build_model(tied), run, MODEL_DIR)
    model = build_empty(tied)
    load_foreign(model, run, MODEL_DIR)
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    "rename",
    [
        "model.{}",
        "{}",
        "app.model.{}",
        "state_dict.{}",
        "model._orig_mod.{}",
        "model.module.{}",
        "model._fsdp_wrapped_module._orig_mod.{}",
    ],
)
def test_weights_are_found_in_every_container(tmp_path: Path, rename: str) -> None:
    expected = weights(build_model())
    others = {
        "optimizer.state.model.norm.weight.exp_avg": torch.ones(16),
        "optimizer.param_groups.0.lr": 1e-3,
        "train_state": {"step": 7},
    }
    named = {rename.format(name): value for name, value in expected.items()}
    assert_loaded(save_foreign_run(tmp_path, named | others), expected)


def test_parts_of_names_that_wrappers_add_are_dropped(tmp_path: Path) -> None:
    expected = weights(build_model())

    def wrap(name: str) -> str:
        for block in ("layers.0", "layers.1"):
            name = name.replace(
                f"{block}.", f"{block}._fsdp_wrapped_module._checkpoint_wrapped_module."
            )
        return f"model.module.{name}"

    assert_loaded(
        save_foreign_run(tmp_path, {wrap(name): value for name, value in expected.items()}),
        expected,
    )


@pytest.mark.parametrize("names", ["one name", "both names"])
def test_tied_embeddings_need_one_name(tmp_path: Path, names: str) -> None:
    model = build_model(tied=True)
    expected = weights(model)
    tensors = {f"model.{name}": value for name, value in expected.items()}
    if names == "both names":
        tensors["model.lm_head.weight"] = expected["model.embed_tokens.weight"].clone()
    assert_loaded(save_foreign_run(tmp_path, tensors), expected, tied=True)
    tensors["model.lm_head.weight"] = torch.zeros(40, 16)
    run = save_foreign_run(tmp_path / "other", tensors)
    with pytest.raises(UsageError) as error:
        load_foreign(build_empty(tied=True), run, MODEL_DIR)
    assert "config.json ties them" in error.value.render()


@pytest.mark.parametrize("version", [4, 5])
def test_experts_are_found_under_the_names_of_both_transformers(
    tmp_path: Path, version: int
) -> None:
    """Version 4 has one parameter per expert, version 5 one for all experts of a layer."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    model = MixtralForCausalLM(config)
    expected = weights(model)
    tensors = dict(keys.convert_to_hub(model, expected)) if version == 4 else expected
    assert any("experts.1.w2" in name for name in tensors) == (version == 4)
    run = save_foreign_run(
        tmp_path, {f"model.{name}": value.clone() for name, value in tensors.items()}
    )
    torch.manual_seed(1)
    empty = MixtralForCausalLM(config)
    load_foreign(empty, run, MODEL_DIR)
    for name, value in empty.named_parameters():
        assert torch.equal(value, expected[name]), name


def test_bfloat16_becomes_float32_without_loss(tmp_path: Path) -> None:
    model = build_model().bfloat16()
    run = save_foreign_run(
        tmp_path, {f"model.{name}": value for name, value in weights(model).items()}
    )
    assert_loaded(run, weights(model.float()))


def test_all_weights_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    tensors = {f"model.{name}": value for name, value in weights(build_model()).items()}
    del tensors["model.model.norm.weight"]
    tensors["model.lm_head.weight"] = torch.zeros(41, 16)
    tensors["model.model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    tensors["model.model.embed_tokens.weight"] = torch.zeros(40, 16, dtype=torch.int64)
    run = save_foreign_run(tmp_path, tensors)
    with torch.device("meta"), pytest.raises(UsageError) as error:
        require_fits(build_model(), run, MODEL_DIR)
    text = error.value.render()
    assert "(4 differences)" in text
    for line in (
        "missing: model.norm.weight",
        "unexpected: model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight: expected shape (40, 16), found (41, 16)",
        "embed_tokens.weight: expected floating-point numbers, found I64",
        "-m names the model",
    ):
        assert line in text, text
    assert not commit.list_checkpoints(tmp_path)


def test_other_formats_are_named(tmp_path: Path) -> None:
    for number, (name, says) in enumerate(
        {
            "pytorch_model_fsdp.bin": "FULL_STATE_DICT",
            "zero_to_fp32.py": "DeepSpeed",
            "latest_checkpointed_iteration.txt": "Megatron-LM",
            "model-00001-of-00002.safetensors": "config.json and the tokenizer",
        }.items()
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).touch()
        with pytest.raises(ArtifactError, match=r"--from-dcp: .*not a checkpoint") as error:
            find_foreign_checkpoint(tmp_path / str(number))
        assert says in error.value.hint


def test_parameters_without_names_are_explained(tmp_path: Path) -> None:
    name = "model._fsdp_wrapped_module._flat_param"
    run = save_foreign_run(tmp_path, {name: torch.zeros(100)})
    with pytest.raises(UsageError, match="do not fit") as error:
        require_fits(build_model(), run, MODEL_DIR)
    assert "SHARDED_STATE_DICT" in error.value.hint


def test_one_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = {f"model.{name}": value for name, value in weights(build_model()).items()}
    tensors["model.module.model.norm.weight"] = torch.ones(16)
    with pytest.raises(UsageError, match="do not fit") as error:
        require_fits(build_model(), save_foreign_run(tmp_path, tensors), MODEL_DIR)
    assert "ambiguous: " in error.value.found


def load_foreign(model: PreTrainedModel, run: Path, model_dir: Path) -> None:
    """Load the weights of a checkpoint into a model."""

    def raise_if_any(problems: list[str]) -> None:
        if problems:
            raise UsageError("\n".join(problems))

    with ForeignTensors(run, model) as stored:
        load_stored(model, stored, raise_if_any)


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("place", ["the whole", "a part"])
def test_no_code_in_a_checkpoint_runs(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "saved"
    save_foreign_run(
        directory, {f"model.{name}": value for name, value in weights(build_model()).items()}
    )
    attack: object = Command(f"touch {tmp_path / 'ran'}")
    if place == "a part":
        metadata = dcp.FileSystemReader(directory).read_metadata()
        metadata.planner_data = attack
        attack = metadata
    (directory / ".metadata").write_bytes(pickle.dumps(attack))
    with pytest.raises(ArtifactError, match="would load posix"):
        require_fits(build_model(), find_foreign_checkpoint(directory), MODEL_DIR)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1, 2]), "cut"], ids=str)
def test_damaged_metadata_is_reported(tmp_path: Path, content: bytes | str) -> None:
    save_foreign_run(
        tmp_path, {f"model.{name}": value for name, value in weights(build_model()).items()}
    )
    path = tmp_path / ".metadata"
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-40])
    with pytest.raises(ArtifactError, match="metadata is damaged"):
        require_fits(build_model(), find_foreign_checkpoint(tmp_path), MODEL_DIR)


def test_files_outside_the_directory_are_not_read(tmp_path: Path) -> None:
    save_foreign_run(
        tmp_path / "saved",
        {f"model.{name}": value for name, value in weights(build_model()).items()},
    )
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (tmp_path / "saved/.metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "saved/__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    with pytest.raises(ArtifactError, match="is incomplete") as error:
        require_fits(build_model(), find_foreign_checkpoint(tmp_path / "saved"), MODEL_DIR)
    assert "outside this directory" in error.value.found


@pytest.mark.parametrize("damage", ["gone", "truncated", "overwritten"])
def test_damaged_files_are_reported(tmp_path: Path, damage: str) -> None:
    run = save_foreign_run(
        tmp_path, {f"model.{name}": value for name, value in weights(build_model()).items()}
    )
    file = next(tmp_path.glob("*.distcp"))
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.write_bytes(bytes(file.stat().st_size))
    if damage == "overwritten":
        require_fits(build_model(), run, MODEL_DIR)  # reads descriptions only
        with pytest.raises(ArtifactError, match="distcp is damaged"):
            load_foreign(build_empty(), run, MODEL_DIR)
        return
    with pytest.raises(ArtifactError, match="is incomplete") as error:
        require_fits(build_model(), run, MODEL_DIR)
    assert file.name in error.value.found


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([], "do not cover"),
        ([(0, 0, 20, 16)], "do not cover"),
        ([(0, 0, 20, 16), (0, 0, 20, 16)], "overlap"),
        ([(0, 0, 20, 16), (10, 0, 20, 16)], "overlap"),
        ([(0, 0, 40, 8), (0, 8, 20, 8), (10, 8, 20, 8)], "overlap"),
        ([(0, 0, 20, 16), (21, 0, 20, 16)], "beyond"),
        ([(0, 0, 40, 8), (20, 8, 20, 8), (0, 8, 20, 8)], ""),
    ],
)
def test_shards_must_cover_each_element_once(
    tmp_path: Path, cells: list[tuple[int, ...]], says: str
) -> None:
    """cells: the first row and column of each shard, and its numbers of rows and columns."""
    save_foreign_run(
        tmp_path, {f"model.{name}": value for name, value in weights(build_model()).items()}
    )
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    name = "model.lm_head.weight"
    entry = metadata.state_dict_metadata[name]
    assert isinstance(metadata, Metadata) and isinstance(entry, TensorStorageMetadata)
    place = metadata.storage_data[MetadataIndex(name, torch.Size((0, 0)))]
    entry.chunks[:] = [
        ChunkStorageMetadata(torch.Size(cell[:2]), torch.Size(cell[2:])) for cell in cells
    ]
    metadata.storage_data |= {MetadataIndex(name, chunk.offsets): place for chunk in entry.chunks}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if not says:
        require_fits(build_model(), tmp_path, MODEL_DIR)
        return
    with pytest.raises(UsageError) as error:
        require_fits(build_model(), tmp_path, MODEL_DIR)
    assert name in error.value.found and says in error.value.found


def test_a_file_newer_than_metadata_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = save_foreign_run(
        tmp_path, {f"model.{name}": value for name, value in weights(build_model()).items()}
    )
    require_fits(build_model(), run, MODEL_DIR)
    assert not caplog.text
    file = next(tmp_path.glob("*.distcp"))
    later = (tmp_path / ".metadata").stat().st_mtime + 300
    os.utime(file, (later, later))
    require_fits(build_model(), run, MODEL_DIR)
    assert f"{file} is newer than .metadata" in caplog.text


def test_the_layouts_of_trainers_are_found(tmp_path: Path) -> None:
    tensors = {f"model.{name}": value for name, value in weights(build_model()).items()}
    offline = tmp_path / "offline"
    save_foreign_run(offline / "checkpoint", tensors)
    (offline / "state.json").write_text(
        json.dumps({"epoch": 2, "global_step": 1500, "epoch_step": 9, "running_loss": 1.5})
    )
    LlamaConfig().save_pretrained(tmp_path / "model")

    def find(root: Path) -> ForeignSource:
        return ForeignSource.find(root, str(tmp_path / "model"), tmp_path)

    assert find(offline).checkpoint == offline / "checkpoint"
    assert find(offline).describe_progress() == "step 1,500 of epoch 2"
    trainer = tmp_path / "checkpoint-70"
    save_foreign_run(trainer / "pytorch_model_fsdp_0", tensors)
    (trainer / "trainer_state.json").write_text(json.dumps({"epoch": 0.5, "global_step": 70}))
    assert find(trainer).describe_progress() == "step 70 of epoch 0.5"
    for content in ("[]", '{"epoch": NaN, "global_step": -5}', '{"epoch": "1"}'):
        (trainer / "trainer_state.json").write_text(content)
        assert find(trainer).describe_progress() == ""


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    tensors = {"model.a": torch.zeros(2)}
    for name in ("step-10", "step-20"):
        save_foreign_run(tmp_path / "checkpoints" / name, tensors)
    with pytest.raises(ArtifactError, match="is not a checkpoint") as error:
        find_foreign_checkpoint(tmp_path)
    assert str(tmp_path / "checkpoints/step-20") in error.value.found
    (tmp_path / "checkpoints/step-20/.metadata").unlink()
    with pytest.raises(ArtifactError, match="the save was interrupted"):
        find_foreign_checkpoint(tmp_path / "checkpoints/step-20")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError) as error:
        find_foreign_checkpoint(tmp_path / "empty")
    assert "use -m" in error.value.hint
    (tmp_path / "file").touch()
    for name in ("nothing", "file"):
        with pytest.raises(ArtifactError, match=f"there is no directory {tmp_path / name}"):
            find_foreign_checkpoint(tmp_path / name)
    (tmp_path / "own/dcp").mkdir(parents=True)
    (tmp_path / "own" / commit.COMMIT).touch()
    for path in (tmp_path / "own", tmp_path / "own/dcp"):
        with pytest.raises(UsageError, match="checkpoint of this project"):
            find_foreign_checkpoint(path)
    for step in (1, 2):
        commit_checkpoint(tmp_path / "run/checkpoints", step)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints"):
        with pytest.raises(UsageError, match="step_00000002 is a checkpoint"):
            find_foreign_checkpoint(path)


def test_descriptions_of_torch_2_2_are_read(tmp_path: Path) -> None:
    """It took the class that describes a tensor from another module."""
    tensors = {f"model.{name}": value for name, value in weights(build_model()).items()}
    save_foreign_run(tmp_path, tensors)
    old = "torch.distributed._shard.sharded_tensor.metadata"

    class Pickler(pickle._Pickler):
        def save_global(self, obj: object, name: str | None = None) -> None:
            module = getattr(obj, "__module__", "")
            kind = getattr(obj, "__name__", "")
            if module.endswith("checkpoint.metadata") and kind in (
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            ):
                self.write(b"c" + f"{old}\n{kind.lstrip('_')}\n".encode())
                self.memoize(obj)
                return
            super().save_global(obj, name)

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(dcp.FileSystemReader(tmp_path).read_metadata())
    (tmp_path / ".metadata").write_bytes(stream.getvalue())
    assert old.encode() in stream.getvalue()
    assert_loaded(find_foreign_checkpoint(tmp_path), weights(build_model()))
