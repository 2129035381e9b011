# covers: lib/export/full_model.py, lib/export/companions.py
"""Exports are read by programs that do not know the keys of transformers 5."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    GptOssConfig,
    Olmo2Config,
    PretrainedConfig,
    StableLmConfig,
)

from lib.models import scratch, tokenizer
from lib.models.rope import RopeSettings
from lib.tokens.encode import Encoder
from lib.train import experiment
from tests.export import earlier_reader, eight_models
from tests.export.environments import clean_environment, make_environment
from tests.export.exports import run_stage_05, save_run
from tests.models.families import FAMILIES, LLAMA3, LONGROPE, SIZES, make_checkpoint
from tests.tokens.conftest import save_tokenizer

pytestmark = pytest.mark.long
# The last of the versions that read `rope_theta`; torch is the one that runs the tests.
PINS = ("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 3e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _base(value: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": value, **more}


def _own(kind: type[PretrainedConfig], **fields: Any) -> Callable[[], PretrainedConfig]:
    return lambda: kind(**{**SIZES, "vocab_size": 97, **fields})


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama, base": FAMILIES["codellama"],
    "llama, llama3": lambda: FAMILIES["llama3_tied"](rope_parameters={**LLAMA3, "rope_theta": 5e5}),
    "llama, dynamic": lambda: FAMILIES["llama"](
        rope_parameters={"rope_type": "dynamic", "rope_theta": 3e4, "factor": 2.0}
    ),
    "llama, longrope": lambda: FAMILIES["llama"](
        rope_parameters={**LONGROPE, "original_max_position_embeddings": 32}
    ),
    "mistral": lambda: FAMILIES["mistral"](rope_parameters=_base(1e6)),
    "mixtral": lambda: FAMILIES["mixtral"](rope_parameters=_base(3e4)),
    "qwen2, yarn": lambda: FAMILIES["qwen2"](rope_parameters=_YARN),
    "qwen2_moe": lambda: FAMILIES["qwen2_moe"](rope_parameters=_base(1e6)),
    "qwen3": lambda: FAMILIES["qwen3"](rope_parameters=_base(1e6)),
    "qwen3_moe": lambda: FAMILIES["qwen3_moe"](rope_parameters=_base(1e6)),
    "gpt_neox": lambda: FAMILIES["gpt_neox"](rope_parameters=_base(3e4, partial_rotary_factor=0.5)),
    "phi": lambda: FAMILIES["phi"](rope_parameters=_base(3e4, partial_rotary_factor=0.75)),
    "phi3": lambda: FAMILIES["phi3"](original_max_position_embeddings=32),
    "falcon": lambda: FAMILIES["falcon_7b"](rope_parameters=_base(3e4)),
    "gemma": lambda: FAMILIES["gemma"](rope_parameters=_base(3e4)),
    "gemma2": _own(
        Gemma2Config,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        rope_parameters=_base(3e4),
    ),
    "gemma3": lambda: FAMILIES["gemma3"](
        num_hidden_layers=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
            "sliding_attention": _base(3e3),
        },
    ),
    "gpt_oss": _own(
        GptOssConfig,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "olmo2": _own(
        Olmo2Config, rope_parameters={"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0}
    ),
    "stablelm": _own(
        StableLmConfig,
        num_key_value_heads=4,
        rope_parameters=_base(3e4, partial_rotary_factor=0.5),
    ),
}


# Models whose RoPE settings a run changes, with fields that let the settings matter.
EXTENDED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "phi": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
}
# transformers 5 loads the tokenizer of a Qwen2 by a class of its own, which adds its EOS.
_DIFFERING = {"qwen2": {"length", "special"}}
# Families whose two implementations round in another order, in float32: logits differ by 3e-7.
_ROUNDED = {"qwen2_moe": 1e-6, "stablelm": 1e-6}


@pytest.fixture(scope="module")
def earlier_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with transformers 4 and our other packages."""
    return make_environment(tmp_path_factory.mktemp("transformers-4"), *PINS)


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, earlier_python: Path, group: None
) -> dict[str, Path]:
    """Return an export of each model, which transformers 4 has read."""
    root = tmp_path_factory.mktemp("exports")
    directories = {
        name: _export_model(root / name.replace(", ", "-"), make) for name, make in MODELS.items()
    }
    reader = Path(earlier_reader.__file__)
    subprocess.run(
        [earlier_python, reader, *directories.values()], check=True, env=clean_environment()
    )
    return directories


def _export_model(root: Path, make: Callable[[], PretrainedConfig]) -> Path:
    root.mkdir()
    make_checkpoint(root / "model", make())
    save_run(root, root / "model")
    out = root / "out"
    run_stage_05("-e", "exp", "--save-dir", root, "--out", out, "--dtype", "float32")
    ids = torch.randint(0, 97, (2, 96), generator=torch.Generator().manual_seed(1))
    for directory in (root / "model", out):
        torch.save(ids, directory / "ids.pt")
    return out


@pytest.mark.parametrize("name", MODELS)
def test_transformers_4_and_5_compute_the_same_logits(exports: dict[str, Path], name: str) -> None:
    torch.set_num_threads(1)
    out = exports[name]
    before = earlier_reader.read_model(out.parent / "model")["logits"]
    now = earlier_reader.read_model(out)
    earlier = torch.load(out / "read.pt")
    assert "error" not in earlier, earlier["error"]
    assert earlier["version"] == "4.57.6" and earlier["dtype"] == now["dtype"] == "torch.float32"
    assert torch.equal(now["logits"], before)  # the earlier keys change nothing for transformers 5
    difference = (now["logits"] - earlier["logits"]).abs().max()
    assert difference <= _ROUNDED.get(name, 0.0)


@pytest.mark.parametrize("scaling", ["yarn:4:64", "llama3:8:32", "linear:4", ""])
def test_transformers_4_reads_the_rope_settings_of_a_run(
    scaling: str, earlier_python: Path, tmp_path: Path
) -> None:
    """A run keeps them for its exports, in the config of a model that did not have them."""
    torch.set_num_threads(1)
    settings = RopeSettings(None if scaling else 5e5, scaling, 256)
    directories = []
    for name, fields in EXTENDED.items():
        base = tmp_path / name
        out = tmp_path / f"{name}-extended"
        make_checkpoint(base, FAMILIES[name](max_position_embeddings=64, **fields))
        shutil.copytree(base, out)
        experiment._copy_model_files(base, out, False, settings)
        ids = torch.randint(0, 97, (1, 200), generator=torch.Generator().manual_seed(1))
        torch.save(ids, out / "ids.pt")
        directories.append(out)
    reader = Path(earlier_reader.__file__)
    subprocess.run([earlier_python, reader, *directories], check=True, env=clean_environment())
    for out in directories:
        earlier = torch.load(out / "read.pt")
        assert "error" not in earlier, earlier["error"]
        now = earlier_reader.read_model(out)
        assert (now["logits"] - earlier["logits"]).abs().max() == 0, out.name


@pytest.fixture(scope="module")
def eight(
    tmp_path_factory: pytest.TempPathFactory, earlier_python: Path, group: None
) -> dict[str, Path]:
    """Return the exports of `eight_models`, which transformers 4 has read."""
    directories = {}
    for name in eight_models.CONFIGS:
        directories[name] = eight_models.export_model(tmp_path_factory.mktemp(name), name)
        torch.save(eight_models.draw_tokens(), directories[name] / "ids.pt")
    reader = Path(earlier_reader.__file__)
    subprocess.run(
        [earlier_python, reader, *directories.values()], check=True, env=clean_environment()
    )
    return directories


@pytest.mark.parametrize("name", eight_models.CONFIGS)
def test_eight_kinds_of_models_are_the_same_to_transformers_4(
    eight: dict[str, Path], name: str
) -> None:
    """Also IDs, templates, special tokens, and the loss of 4,096 tokens that the run computes."""
    torch.set_num_threads(1)
    out = eight[name]
    earlier = torch.load(out / "read.pt")
    assert "error" not in earlier, earlier["error"]
    now = earlier_reader.read_model(out)
    assert earlier["version"] == "4.57.6"
    assert torch.equal(now.pop("logits"), earlier["logits"])
    expected = eight_models.compute_run_loss(out.parent, name)
    assert abs(eight_models.compute_loss(earlier["logits"]) - expected) < 1e-4
    differing = {part for part in now.keys() - {"version"} if earlier[part] != now[part]}
    assert differing == _DIFFERING.get(name, set())


def test_models_that_transformers_4_saved_are_the_same_in_all_stages(
    tmp_path: Path, earlier_python: Path, group: None
) -> None:
    """Stage 03 copies their config and tokenizer, 04 reads their weights, 05 exports them."""
    reader = Path(earlier_reader.__file__)
    command = [earlier_python, reader, "--write", tmp_path]
    subprocess.run(command, check=True, env=clean_environment())
    for name in earlier_reader.WRITTEN:
        saved = tmp_path / name
        config = json.loads((saved / "config.json").read_text())
        assert config["transformers_version"] == "4.57.6" and "rope_parameters" not in config
        logits = torch.load(saved / "logits.pt")
        save_run(saved, saved)
        out = saved / "out"
        run_stage_05("-e", "exp", "--save-dir", saved, "--out", out, "--dtype", "float32")
        torch.save(torch.load(saved / "ids.pt"), out / "ids.pt")
        assert torch.equal(earlier_reader.read_model(out)["logits"], logits), name
        design = scratch.Design(None, saved / "config.json", None, (), saved)
        (saved / "new").mkdir()
        design.write_tokenizer(saved / "new", 1, False)
        design.write_configs(saved / "new", design.vocabulary())
        new = json.loads((saved / "new" / "config.json").read_text())
        assert new["rope_theta"] == new["rope_parameters"]["rope_theta"] == config["rope_theta"]


def test_transformers_4_reads_a_tokenizer_that_transformers_5_saved(
    tmp_path: Path, earlier_python: Path, group: None
) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, FAMILIES["llama"](300))
    save_run(tmp_path, model)
    tokenizer.train_tokenizer([], 300, 128, model, workers=1, show_progress=False)
    saved = tokenizer.load_tokenizer(model)
    saved.add_special_tokens({"extra_special_tokens": ["<|unused_270|>"]})
    saved.chat_template = "{{ bos_token }}{{ messages[0].content }}<|unused_270|>"
    saved.save_pretrained(tmp_path / "exp" / "model")
    settings = json.loads((tmp_path / "exp/model/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend" and "chat_template" not in settings
    out = tmp_path / "out"
    run_stage_05("-e", "exp", "--save-dir", tmp_path, "--out", out, "--dtype", "float32")
    torch.save(torch.arange(4)[None], out / "ids.pt")
    reader = Path(earlier_reader.__file__)
    subprocess.run([earlier_python, reader, out], check=True, env=clean_environment())
    earlier = torch.load(out / "read.pt")
    assert "error" not in earlier, earlier["error"]
    now = earlier_reader.read_model(out)
    for part in ("text", "special", "batch", "chat"):
        assert earlier[part] == now[part], part
    assert now["chat"] == f"{tokenizer.BOS}Hi<|unused_270|>"
    assert "<|unused_270|>" in now["special"] and now["batch"][1][-1] == 0


def test_transformers_4_and_5_add_bos_to_the_same_exports(
    tmp_path: Path, earlier_python: Path, group: None
) -> None:
    exports = {}
    for bos, add in itertools.product((True, False), (True, False, None)):
        root = tmp_path / f"{bos}-{add}"
        make_checkpoint(root / "model", FAMILIES["llama"](300))
        save_run(root, root / "model")
        directory = save_tokenizer(root / "tokenizer", bos=bos)
        path = directory / "tokenizer_config.json"
        settings = {"tokenizer_class": "LlamaTokenizerFast", "pad_token": "</s>"}
        settings |= {} if add is None else {"add_bos_token": add}
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        shutil.copytree(directory, root / "exp/model", dirs_exist_ok=True)
        out = root / "out"
        run_stage_05("-e", "exp", "--save-dir", root, "--out", out, "--dtype", "float32")
        torch.save(torch.arange(4)[None], out / "ids.pt")
        exports[out] = (Encoder(directory, 1).tokenizer, add is not False)
    reader = Path(earlier_reader.__file__)
    subprocess.run([earlier_python, reader, *exports], check=True, env=clean_environment())
    for out, (trained, has_bos) in exports.items():
        earlier = torch.load(out / "read.pt")
        assert "error" not in earlier, earlier["error"]
        now = earlier_reader.read_model(out)
        expected = [trained(text)["input_ids"] for text in earlier_reader.TEXTS]
        assert earlier["texts"] == now["texts"] == expected
        assert (now["text"][0] == 0) == has_bos
