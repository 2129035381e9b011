# covers: lib/train/previous_run.py, lib/checkpoints/search.py
"""What an earlier version made opens, and goes on, in this one."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_stage
from tests.earlier import ARCHIVE, DATA_STAGES, EXPORT_OPTIONS, RUNS
from tests.training import losses


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the project of the earlier version, in another place than it was made in."""
    root = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


def test_prepared_text_is_already_there(project: Path) -> None:
    for script, options in DATA_STAGES.items():
        assert "already done" in run_stage(script, *options, cwd=project).stdout


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on(project: Path, name: str) -> None:
    """From the checkpoint, with the tokens and packs that are there: the losses are the same."""
    ranks, options = RUNS[name]
    expected = {
        int(step): loss
        for step, loss in json.loads((project / "losses.json").read_text())[name].items()
    }
    done = run_stage("04_train_fsdp.py", *options, "--max-steps", 6, cwd=project, ranks=ranks)
    assert "tokenising" not in (project / f"outputs/{name}/logs/rank_00000.log").read_text()
    assert "resumed from" in done.stdout and "step_00000004" in done.stdout
    assert losses(project, name) == pytest.approx(expected, rel=1e-4)  # of another processor


def test_an_export_is_the_same(project: Path) -> None:
    run_stage("05_export_checkpoint.py", *EXPORT_OPTIONS, "--out", "again", cwd=project)
    for path in (project / "export").glob("*.safetensors"):
        assert path.read_bytes() == (project / "again" / path.name).read_bytes()


def test_it_is_small() -> None:
    assert ARCHIVE.stat().st_size < 400_000 and ARCHIVE.parent == ROOT / "tests"
