# covers: lib/models/weights.py, lib/models/architecture.py, lib/export/companions.py
"""Parts of a model that its class does not load are named, and the export describes only itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, prepare_project, read_log, train_model

RUN = (
    *("-d", "corpus", "-s", SEQ_LENGTH, "--packing", "concat", "--max-steps", 1, "--eval-freq", 0),
    *("--compile", "off", "--precision", "fp32", "--lr", 0, "--min-lr", 0, "--num-workers", 1),
)


def save_vision_model(directory: Path, vocabulary: int, tied: bool) -> None:
    """Save a tiny Qwen3.5; the key in its text_config says that its embeddings are not tied."""
    text = {
        **{"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
        **{"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(directory)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_vision_tower_is_named_and_the_export_is_the_text_model(
    tmp_path: Path, tied: bool
) -> None:
    root = prepare_project(tmp_path)
    shutil.move(root / "model", root / "plain")
    vocabulary = json.loads((root / "plain/config.json").read_text())["vocab_size"]
    save_vision_model(root / "model", vocabulary, tied)
    AutoTokenizer.from_pretrained(root / "plain").save_pretrained(root / "model")
    template = root / "model/additional_chat_templates/tool_use.jinja"
    template.parent.mkdir()
    template.write_bytes(b"{{ tools }}\r\n{{ messages }}")
    printed = train_model(root, "exp", *RUN, "-m", "model")
    assert "does not use" in printed and "model.visual" in printed
    assert ("embeddings are tied" in read_log(root, "exp")) == tied
    out = root / "out"
    words = ("-e", "exp", "--dtype", "fp32", "--out", out)
    result = run_stage("05_export_checkpoint.py", *words, cwd=root)
    assert "model.visual" in result.stdout + result.stderr
    copy = out / "additional_chat_templates/tool_use.jinja"
    assert copy.read_bytes() == template.read_bytes()
    assert str(copy.relative_to(out)) in (out / "manifest.json").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and "vision_config" not in config
    assert config["tie_word_embeddings"] == tied
    exported, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    original = Qwen3_5ForConditionalGeneration.from_pretrained(root / "model")
    tokens = torch.arange(20)[None] % vocabulary
    with torch.no_grad():
        assert torch.allclose(exported(tokens).logits, original(tokens).logits, atol=1e-5)
