# covers: lib/train/disagreements.py, lib/tokens/framing.py, lib/export/companions.py
"""Files of a model that disagree are both named, and the export says what the training did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from lib.core import hashing, paths
from lib.tokens import store
from lib.tokens.encode import Encoder
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, assert_refused, train_model

RUN = (
    *("-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "--packing", "concat", "--max-steps", 1),
    *("--compile", "off", "--precision", "fp32", "--lr", 1e-9, "--num-workers", 1),
    *("--eval-freq", 0),
)


def change_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file, or create it."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


@pytest.mark.slow
def test_a_bos_that_only_the_settings_add_is_trained_and_exported(project: Path) -> None:
    model = project / "model"
    change_json(model / "tokenizer.json", post_processor=None)
    change_json(
        model / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizerFast",
        add_bos_token=True,
    )
    printed = train_model(project, "exp", *RUN)
    assert printed.count("add_bos_token") == 1 and "tokenizer_config.json" in printed
    (directory,) = (project / ".cache/tokens").iterdir()
    stored = store.open_store(directory)
    bos = AutoTokenizer.from_pretrained(model).bos_token_id
    assert int(stored.splits["train"].tokens[0]) == bos
    out = project / "out"
    run_stage("05_export_checkpoint.py", "-e", "exp", "--dtype", "fp32", "--out", out, cwd=project)
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"][0] == bos
    assert AutoTokenizer.from_pretrained(model)("a")["input_ids"][0] != bos


@pytest.mark.slow
def test_each_disagreement_is_a_line_and_a_large_tokenizer_is_refused(project: Path) -> None:
    model = project / "model"
    change_json(model / "config.json", eos_token_id=7, dtype="bfloat16")
    change_json(model / "generation_config.json", eos_token_id=[7])
    change_json(model / "tokenizer_config.json", model_max_length=8)
    (model / "model.safetensors.index.json").write_text("{}")
    printed = train_model(project, "exp", *RUN, "--dry-run")
    for words in ("eos_token_id is 7", "model_max_length: 8", "dtype: bfloat16", "both there"):
        assert printed.count(words) == 1, words
    (model / "model.safetensors.index.json").unlink()
    train_model(project, "exp", *RUN)
    run_stage("05_export_checkpoint.py", "-e", "exp", "--out", "out", cwd=project)
    eos = Encoder(model, 1).eos
    for name in ("config.json", "generation_config.json"):
        assert json.loads((project / "out" / name).read_text())["eos_token_id"] == [7, eos]
    shutil.rmtree(project / "outputs")
    change_json(model / "config.json", vocab_size=20)
    (model / "model.safetensors").unlink()
    assert_refused(
        project,
        *("-e", "exp", *RUN, "--from-scratch", "--dry-run"),
        code=2,
        says="vocabulary",
    )


@pytest.mark.slow
def test_a_run_with_an_option_that_is_gone_goes_on_and_lends_its_config(project: Path) -> None:
    train_model(project, "exp", *RUN)
    run = project / "outputs/exp"
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    recorded["options"] |= {"resume_from_foreign": "somewhere", "sample_freq": 500}
    recorded["identity"]["inputs"]["foreign weights"] = "digest"
    (run / "config.yaml").write_text(yaml.safe_dump(recorded))
    (path,) = run.glob(f"checkpoints/*/{paths.COMMIT}")
    content = json.loads(path.read_text())
    content["identity"]["inputs"]["foreign weights"] = "digest"
    del content["digest"]
    text = json.dumps(content, sort_keys=True)
    content["digest"] = hashing.bytes_digest(text.encode(), "sha256")
    path.write_text(json.dumps(content))
    printed = train_model(project, "other", "--config", run / "config.yaml")
    assert "resume_from_foreign, which this version" in printed
    assert "--from-dcp" in printed and "sample_freq" not in printed
    printed = train_model(project, "exp", *RUN, "--max-steps", 2)
    assert "resume_from_foreign, which this version" in printed
    assert "--resume-from-foreign" in printed and "resumed from" in printed
    assert "--from-dcp" in printed and "sample_freq" not in printed
    recipe = project / "recipe.yaml"
    recipe.write_text("suite_freq: 5\n")
    printed = train_model(project, "third", *RUN, "--config", recipe, "--dry-run")
    assert "suite_freq, which this version" in printed
    assert "--eval-freq N" in printed
