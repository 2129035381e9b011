# covers: lib/models/dialects.py, lib/models/directory.py, lib/models/chat_files.py
# covers: lib/models/architecture.py
"""Configs contain the keys of older programs beside those of transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GptOssConfig, PretrainedConfig

from lib.core import manifest
from lib.models import chat_files, dialects, directory
from lib.models.architecture import read_config
from tests.models.families import FAMILIES, LLAMA3, LONGROPE

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _written(config: PretrainedConfig, place: Path) -> dict[str, Any]:
    config.save_pretrained(place)
    return json.loads((place / "config.json").read_text())


def _read_config(content: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the config as transformers 5 reads it."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(place)
    config.name_or_path = ""
    return config.to_dict()


def _base(value: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": value, **more}


@pytest.mark.parametrize(
    ("family", "rope", "expected"),
    [
        ("llama", _base(5e5), {"rope_theta": 5e5, "rope_scaling": None}),
        (
            "llama3",
            LLAMA3,
            {
                "rope_theta": 1e4,
                "rope_scaling": {name: LLAMA3[name] for name in LLAMA3 if name != "rope_theta"},
            },
        ),
        ("qwen2", {**_YARN, "rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": _YARN}),
        (
            "gpt_neox",
            _base(3e4, partial_rotary_factor=0.5),
            {"rotary_emb_base": 3e4, "rotary_pct": 0.5, "rope_scaling": None},
        ),
        (
            "phi",
            _base(3e4, partial_rotary_factor=0.75),
            {"rope_theta": 3e4, "partial_rotary_factor": 0.75, "rope_scaling": None},
        ),
        (
            "phi3",
            LONGROPE,
            {
                "rope_theta": 1e4,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": LONGROPE["short_factor"],
                    "long_factor": LONGROPE["long_factor"],
                },
            },
        ),
        (
            "gemma3",
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": _base(3e3),
            },
            {
                "rope_theta": 5e5,
                "rope_local_base_freq": 3e3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ("qwen3_moe", _base(1e6), {"num_experts": 3, "num_local_experts": 3, "rope_theta": 1e6}),
        ("mixtral", _base(1e6), {"num_local_experts": 3, "rope_theta": 1e6}),
    ],
)
def test_each_family_gets_its_earlier_keys(
    tmp_path: Path, family: str, rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = _written(FAMILIES[family](rope_parameters=rope, dtype="bfloat16"), tmp_path)
    after = dialects.add_earlier_keys(before, tied=False)
    all_expected = {**expected, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert {key: after.get(key, "absent") for key in all_expected} == all_expected
    assert "tie_word_embeddings" in after
    assert dialects.add_earlier_keys(after, tied=True) == after
    assert dialects.remove_keys(after, dialects.list_added_keys(before, after)) == before


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"phi3"}))
def test_transformers_5_reads_the_same_with_earlier_keys(tmp_path: Path, family: str) -> None:
    before = _written(FAMILIES[family](), tmp_path)
    after = dialects.add_earlier_keys(before)
    assert _read_config(after, tmp_path / "after") == _read_config(before, tmp_path / "before")


def test_phi3_accepts_the_names_of_its_earlier_fields(tmp_path: Path) -> None:
    before = _written(FAMILIES["phi3"](), tmp_path)
    read = _read_config(dialects.add_earlier_keys(before), tmp_path / "after")
    assert read.pop("partial_rotary_factor") == 1.0  # what stands in rope_parameters, too
    assert read["rope_parameters"].pop("type") == "longrope"
    assert read == _read_config(before, tmp_path / "before")


def test_the_text_part_of_a_model_gets_earlier_keys_too() -> None:
    before = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "rope_parameters": {"full_attention": _base(5e5), "sliding_attention": _base(3e3)},
        },
    }
    after = dialects.add_earlier_keys(before, tied=True)
    assert after["text_config"]["rope_local_base_freq"] == 3e3 and after["tie_word_embeddings"]
    added = dialects.list_added_keys(before, after)
    assert "text_config.rope_theta" in added
    assert dialects.remove_keys(after, added) == before


def test_existing_earlier_keys_are_not_contradicted() -> None:
    earlier = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _YARN}
    assert dialects.add_earlier_keys(earlier) == earlier
    stale = {"model_type": "llama", "rope_theta": 1e4, "rope_parameters": _base(5e5)}
    assert dialects.add_earlier_keys(stale)["rope_theta"] == 5e5  # what transformers 5 computes
    scaled = {**earlier, "rope_parameters": _base(1e4)}
    assert dialects.add_earlier_keys(scaled) == scaled  # transformers 5 reads rope_scaling first


def test_the_base_of_each_scaled_config_is_the_one_that_transformers_5_reads(
    tmp_path: Path,
) -> None:
    """transformers 5 replaces rope_parameters by rope_scaling, or extends those of some layers."""
    linear = {"rope_type": "linear", "factor": 8.0}
    by_layer = {"full_attention": _base(5e5), "sliding_attention": _base(3e3)}
    configs = {
        "stale": {"model_type": "gemma3_text", "rope_theta": 77.0, "rope_parameters": by_layer},
        "silent": {"model_type": "olmo3", "rope_parameters": by_layer},
        "inside": {"model_type": "llama"},
        "both": {"model_type": "llama", "rope_theta": 77.0, "rope_parameters": _base(3e3)},
    }
    for name, config in configs.items():
        scaling = linear | ({"rope_theta": 5e5} if config["model_type"] == "llama" else {})
        before = {**config, "rope_scaling": scaling}
        after = dialects.add_earlier_keys(before)
        assert after["rope_theta"] == 5e5 and after["rope_scaling"] == scaling, name
        assert dialects.add_earlier_keys(after) == after
        read = _read_config(before, tmp_path / f"{name} before")["rope_parameters"]
        assert read.get("full_attention", read)["rope_theta"] == 5e5
        assert _read_config(after, tmp_path / f"{name} after")["rope_parameters"] == read


def test_the_dtype_of_the_text_part_is_set_too() -> None:
    before = {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16"},
        "vision_config": {"dtype": "bfloat16"},
    }
    after = dialects.add_earlier_keys(dialects.set_dtype(before, "float32"))
    assert after["dtype"] == after["torch_dtype"] == "float32"
    assert after["text_config"] == {"torch_dtype": "float32", "dtype": "float32"}
    assert after["vision_config"] == before["vision_config"]  # not the part that we train
    silent = {"torch_dtype": "bfloat16", "text_config": {}}
    assert dialects.set_dtype(silent, "float16") == {
        "torch_dtype": "float16",
        "dtype": "float16",
        "text_config": {},
    }


def test_an_unscaled_model_of_a_family_that_scales_by_default_says_so(tmp_path: Path) -> None:
    config = GptOssConfig(rope_parameters=_base(5e5), num_hidden_layers=2)
    after = dialects.add_earlier_keys(_written(config, tmp_path))
    assert after["rope_scaling"] is None and after["rope_theta"] == 5e5


def test_earlier_keys_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    content = _written(FAMILIES["qwen3_moe"](), tmp_path)
    entry = {"kind": "model/1", "identity": {}, "options": {}}

    def publish(config: dict[str, Any], summary: dict[str, Any]) -> str:
        """Write config and manifest as a stage does, and return the fingerprint."""
        manifest.write_json(tmp_path / "config.json", config)
        files = [manifest.file_entry(tmp_path, tmp_path / "config.json", "sha256")]
        noted = {**entry, "files": files, "summary": summary}
        manifest.write_json(tmp_path / "manifest.json", noted)
        return directory.fingerprint_model(tmp_path)

    before = publish(content, {})
    after = dialects.add_earlier_keys(content, tied=False)
    added = dialects.list_added_keys(content, after)
    assert publish(after, {}) != before  # nobody says that keys were added
    assert publish(after, {"earlier_keys": added}) == before
    for edit in ({"rope_scaling": _YARN}, {"tie_word_embeddings": True}):
        manifest.write_json(tmp_path / "config.json", {**after, **edit})
        assert directory.fingerprint_model(tmp_path) != before  # transformers 5 reads both
    hidden = {"earlier_keys": [*added, "hidden_size", 5]}
    assert publish({**after, "hidden_size": 64}, hidden) != before  # nothing else can be left out
    assert read_config(tmp_path).hidden_size == 64


def test_a_tokenizer_config_of_transformers_5_works_with_version_4() -> None:
    saved = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "is_local": True,
        "local_files_only": True,
        "extra_special_tokens": ["<|im_end|>"],
    }
    assert dialects.translate_tokenizer(saved, "{{ messages }}") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "backend": "tokenizers",
        "additional_special_tokens": ["<|im_end|>"],
        "chat_template": "{{ messages }}",
    }
    saved = {"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]}
    read = dialects.translate_tokenizer(saved)
    assert read == {"additional_special_tokens": ["<a>"]}  # transformers 5 prefers the former
    assert dialects.translate_tokenizer({**read, "extra_special_tokens": []}) == read
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "extra_special_tokens": {"image": "<i>"},
        "chat_template": [{"name": "default", "template": "a"}],
    }
    assert dialects.translate_tokenizer(settings, "a") == settings


@pytest.mark.parametrize(
    ("stops", "expected"), [([7, 2], [7, 2]), (2, 2), (None, 2), (7, 2)], ids=repr
)
def test_a_list_of_stop_tokens_is_copied_to_the_config(
    tmp_path: Path, stops: object, expected: object
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "text_config": {"eos_token_id": 2}}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    chat_files.copy_stops(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == config["text_config"]["eos_token_id"] == expected
