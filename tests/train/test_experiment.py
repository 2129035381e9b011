# covers: lib/train/experiment.py, lib/train/new_model.py
"""The files of its model that a run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.core import artifacts, manifest
from lib.core.paths import Experiment
from lib.models import dialects, directory
from lib.models.rope import RopeSettings
from lib.train import experiment, new_model
from lib.train.config import Config
from lib.train.output.kinds import RunKind
from lib.train.sources.table import choose_source
from tests.models.families import FAMILIES

ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a config as transformers 5 writes it."""
    FAMILIES["llama"](rope_parameters=ROPE).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _keep_lock(model: Path, root: Path) -> tuple[dict[str, Any], bytes]:
    """Keep the model's files as a launch does; the name is private since only a launch needs it."""
    place = Experiment(root, "exp").model
    place.parent.mkdir(parents=True, exist_ok=True)
    experiment._copy_model_files(model, place, False, RopeSettings(None, "", 0))
    written = (place / "config.json").read_bytes()
    return json.loads(written), written


def test_a_run_keeps_a_config_that_other_programs_read(model: Path, tmp_path: Path) -> None:
    content, written = _keep_lock(model, tmp_path)
    assert content["rope_theta"] == 5e5 and content["rope_parameters"] == ROPE
    assert content["rope_scaling"] is None and content["tie_word_embeddings"] is False
    assert _keep_lock(model, tmp_path)[1] == written  # the next launch writes the same


def test_a_run_of_an_earlier_version_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    """Its checkpoints contain their digest, which stage 05 checks."""
    place = Experiment(tmp_path, "exp").model
    place.mkdir(parents=True)
    earlier = (model / "config.json").read_bytes()
    (place / "config.json").write_bytes(earlier)
    assert _keep_lock(model, tmp_path)[1] == earlier
    made_anew = dialects.add_earlier_keys(json.loads(earlier))
    (model / "config.json").write_text(json.dumps(made_anew))  # the model from scratch, say
    assert _keep_lock(model, tmp_path)[1] == earlier
    (model / "config.json").write_text(json.dumps({**made_anew, "rope_theta": 1e4}))
    assert _keep_lock(model, tmp_path)[1] == earlier  # transformers 5 reads rope_parameters first
    other = {**json.loads(earlier), "rope_parameters": {**ROPE, "rope_theta": 1e4}}
    (model / "config.json").write_text(json.dumps(other))
    assert _keep_lock(model, tmp_path)[0]["rope_theta"] == 1e4


def test_a_model_created_again_from_scratch_is_the_same(tmp_path: Path) -> None:
    """The cache may have been deleted, and an earlier version wrote fewer keys."""
    config = Config(
        experiment_name="exp",
        dataset_name=(),
        from_scratch=True,
        model_size="1M",
        streaming="text",
        cache_dir=tmp_path,
        no_progress=True,
    )
    exp = Experiment(tmp_path, "exp")
    source = choose_source(config)
    with new_model.model_from_scratch(config, exp, RunKind, source, False) as model_dir:
        now = directory.fingerprint_model(model_dir)
        content = manifest.read_if_any(model_dir)
        full = json.loads((model_dir / "config.json").read_text())
        assert full["rope_theta"] == 1e4 and full["pad_token_id"] == 2
        keys = content["summary"].pop("earlier_keys")
        assert {"rope_theta", "rope_scaling", "torch_dtype"} <= set(keys)
        manifest.write_json(model_dir / "manifest.json", content)
        manifest.write_json(model_dir / "config.json", dialects.remove_keys(full, keys))
        assert directory.fingerprint_model(model_dir) == now


def test_a_run_keeps_every_file_of_its_tokenizer(model: Path, tmp_path: Path) -> None:
    """Stage 05 exports the copies, so a template that is not copied would be lost."""
    for name in artifacts.TOKENIZER_FILES:
        (model / name).write_text("{}")
    _keep_lock(model, tmp_path)
    names = {path.name for path in Experiment(tmp_path, "exp").model.iterdir()}
    assert names >= {*artifacts.TOKENIZER_FILES}
