# covers: lib/export/companions.py, lib/models/dialects.py, lib/models/chat_files.py
"""What every export must have, for eight kinds of models, so that other programs read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GenerationConfig

from lib.core.artifacts import CHAT_TEMPLATE, OTHER_TOKENIZER_FILES, TOKENIZER_FILES
from lib.models import dialects
from tests.export import eight_models
from tests.export.eight_models import CONFIGS, HOME, QUESTION, TEXTS, export_model

pytestmark = pytest.mark.usefixtures("group")
_made: dict[str, Path] = {}


@pytest.fixture(params=CONFIGS)
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a model, made once."""
    name = request.param
    if name not in _made:
        _made[name] = export_model(tmp_path_factory.mktemp(name), name)
    return _made[name]


def name_of(out: Path) -> str:
    return next(name for name, path in _made.items() if path == out)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_files_are_complete_and_those_of_the_tokenizer_unchanged(out: Path) -> None:
    base = out.parent / "model"
    tokenizer_files = {
        name for name in (*TOKENIZER_FILES, *OTHER_TOKENIZER_FILES) if (base / name).exists()
    }
    names = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert {path.name for path in out.iterdir()} == names | tokenizer_files | {"manifest.json"}
    for name in tokenizer_files - {"tokenizer_config.json"}:
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    if name_of(out) == "scratch":  # nothing in it is misread, so it stays byte for byte
        name = "tokenizer_config.json"
        assert (out / name).read_bytes() == (base / name).read_bytes()
    # The manifest is ours, and repeats the command as it was typed.
    configs = set(out.glob("*.json")) - {out / "manifest.json"}
    texts = "".join(path.read_text() for path in configs)
    for trace in (HOME, str(out.parent), "is_local", "local_files_only", "_name_or_path"):
        assert trace not in texts, trace


def test_the_config_has_both_dialects_and_agrees_with_the_weights(out: Path) -> None:
    config = read_json(out / "config.json")
    generation = read_json(out / "generation_config.json")
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
        rows = file.get_slice("model.embed_tokens.weight").get_shape()[0]
    assert config["tie_word_embeddings"] is ("lm_head.weight" not in names)
    assert config["vocab_size"] == rows
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"][0].endswith("ForCausalLM") and "auto_map" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (config["rope_scaling"] is None) == (name_of(out) != "llama3")
    assert config["eos_token_id"] == generation["eos_token_id"]
    assert isinstance(config["eos_token_id"], list) == (name_of(out) in ("lora", "added"))
    GenerationConfig.from_pretrained(out).validate(strict=True)


def test_the_tokenizer_encodes_like_that_of_the_base(out: Path) -> None:
    base, exported = (AutoTokenizer.from_pretrained(place) for place in (out.parent / "model", out))
    assert len(exported) <= read_json(out / "config.json")["vocab_size"]
    assert read_json(out / "tokenizer_config.json")["tokenizer_class"] in (
        "PreTrainedTokenizerFast",
        "GemmaTokenizer",
    )
    for text in TEXTS:
        ids = exported(text)["input_ids"]
        assert ids == base(text)["input_ids"]
        assert exported.decode(ids) == base.decode(ids)
    if (out / CHAT_TEMPLATE).exists():
        assert (
            read_json(out / "tokenizer_config.json")["chat_template"]
            == (out / CHAT_TEMPLATE).read_text()
        )
        for prompt in (False, True):
            rendered = exported.apply_chat_template(
                QUESTION, tokenize=False, add_generation_prompt=prompt
            )
            assert rendered == base.apply_chat_template(
                QUESTION, tokenize=False, add_generation_prompt=prompt
            )
        stop = read_json(out / "generation_config.json")["eos_token_id"][0]
        assert exported.convert_ids_to_tokens(stop) == "<|im_end|>"
        assert "<|im_end|>" in exported.all_special_tokens


def test_transformers_computes_the_loss_of_the_run(out: Path) -> None:
    """The loss on 4,096 tokens is equal; without added keys, the logits are equal to the bit."""
    torch.set_num_threads(1)
    model = eight_models.load_export(out)
    with torch.no_grad():
        logits = model(eight_models.draw_tokens()).logits
    expected = eight_models.compute_run_loss(out.parent, name_of(out))
    assert abs(eight_models.compute_loss(logits) - expected) < 1e-4


def test_traces_of_a_machine_are_removed_and_names_of_the_hub_stay() -> None:
    settings = {"name_or_path": "org/name", "model_max_length": 8, "chat_template": "/a"}
    traces = {
        "is_local": True,
        "_name_or_path": "org/name",
        "tokenizer_file": "C:\\models\\tokenizer.json",
        "special_tokens_map_file": "~/.cache/special_tokens_map.json",
    }
    assert dialects.remove_traces(settings | traces) == settings
    nested = {"text_config": {"_name_or_path": "/x", "hidden_size": 8}}
    assert dialects.remove_traces(nested) == {"text_config": {"hidden_size": 8}}
