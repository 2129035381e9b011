# covers: lib/train/inputs.py, lib/train/model_files.py, lib/train/model.py, lib/core/verified.py
# covers: lib/core/file_identity.py
"""The model of a run: damaged, replaced while it is read, or with digests in a cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lib.core import file_identity, manifest, verified
from lib.core.errors import ArtifactError, UsageError
from lib.models import directory
from lib.train import model, model_files
from lib.train.config import Config
from lib.train.inputs import Inputs
from lib.train.sources.corpora import CorporaSource
from tests.training import save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tiny model, as stage 03 would leave it."""
    path = tmp_path_factory.mktemp("m") / "models" / "org--name"
    save_model(path)
    manifest.write_manifest(
        path,
        kind="model/1",
        stage="03_download_model.py",
        identity={},
        options={"model_name": "org/name"},
        summary={},
        files=[manifest.file_entry(path, file, "sha256") for file in path.iterdir()],
    )
    return path


@pytest.fixture
def model_dir(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / ".cache/models/org--name"))


def identify_inputs(model_dir: Path, **more: object) -> Inputs:
    facts = {
        "earlier_run": {},
        "named_checkpoint": None,
        "scratch": False,
        "model_identities": file_identity.read_identities(directory.list_model_files(model_dir)),
    }
    return Inputs(model_dir, CorporaSource([]), {}, **facts | more)


def require_whole(model_dir: Path, tmp_path: Path, **more: object) -> None:
    opts = Config(cache_dir=tmp_path / ".cache", num_workers=2, no_progress=True)
    model_files.verify_model_files(opts, identify_inputs(model_dir, **more))


def flip_middle_bit(path: Path) -> None:
    """Change one bit in the middle, and restore the times of the file."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_damaged_weights_are_found_before_training(
    model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(verified, "_RACY_NS", -(10**18))
    require_whole(model_dir, tmp_path)
    flip_middle_bit(model_dir / "model.safetensors")
    for run in (
        {"scratch": True},
        {"earlier_run": {"identity": {}}},
        {"named_checkpoint": "step_00000002"},
    ):
        require_whole(model_dir, tmp_path, **run)  # which read other weights
    with pytest.raises(ArtifactError, match=r"the model .*damaged") as caught:
        require_whole(model_dir, tmp_path)
    assert "03_download_model.py --model-name org/name --cache-dir" in caught.value.run
    assert "--overwrite" in caught.value.run
    monkeypatch.setenv("LOCAL_RANK", "1")
    require_whole(model_dir, tmp_path)  # one rank of a machine does it for all


def test_the_names_of_blobs_in_a_cache_are_digests(saved: Path, tmp_path: Path) -> None:
    import hashlib

    snapshot = tmp_path / "snapshot"
    weights = (saved / "model.safetensors").read_bytes()
    snapshot.mkdir()
    blob = tmp_path / hashlib.sha256(weights).hexdigest()
    blob.write_bytes(weights)
    (snapshot / "model.safetensors").symlink_to(blob)
    shutil.copy(saved / "config.json", snapshot)
    require_whole(snapshot, tmp_path)
    flip_middle_bit(blob)
    with pytest.raises(ArtifactError, match="is damaged"):
        require_whole(snapshot, tmp_path)


@pytest.mark.parametrize("way", ["replaced", "written"])
def test_a_model_that_changes_while_it_is_read_is_not_trained(
    model_dir: Path, monkeypatch, way: str
) -> None:
    def disturbed(model: torch.nn.Module, directory: Path) -> None:
        if way == "replaced":  # as `03 --overwrite` does
            shutil.copytree(directory, directory.with_name("new"))
            directory.rename(directory.with_name("old"))
            directory.with_name("new").rename(directory)
        else:
            (directory / "model.safetensors").write_bytes(b"")

    read = identify_inputs(model_dir)
    monkeypatch.setattr(model, "load_pretrained", disturbed)
    with pytest.raises(UsageError, match="replaced or changed"):
        model.load_first_weights(Config(), read, torch.nn.Linear(1, 1), SimpleNamespace(rank=0))
