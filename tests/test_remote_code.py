# covers: lib/models/remote_code.py
"""Code that comes with a model runs only where the command that was typed says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lib.core import manifest
from lib.core.errors import UsageError
from lib.models import remote_code
from lib.models.architecture import build_on_meta
from tests.conftest import ROOT, StageRunner, run_stage
from tests.training import VOCABULARY, project  # noqa: F401  (a fixture)

CODE = Path(__file__).parent / "models" / "novel"
TRAIN = ("04_train_fsdp.py", "-d", "corpus", "--max-steps", 1, "--seq-length", 32, "-b", 2)
TRUST = "--trust-remote-code"
WORKER = """
import functools, os, sys
sys.path.insert(0, sys.argv[1])
os.environ.pop("PYTHONSAFEPATH")
from lib.core.workers import Worker
worker = Worker("w", functools.partial, sorted)
worker.send([1])
print(worker.receive())
"""


@pytest.fixture
def evil(project: Path) -> Path:  # noqa: F811
    """Return a model directory as an attacker would hand it on, its record of trust included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = project / "evil"
    shutil.copytree(project / "model", model)
    (model / "model.safetensors").unlink()
    code = sorted(CODE.glob("*_novel.py"))
    for path in code:
        (model / path.name).write_text(
            f"import pathlib; pathlib.Path({str(project / 'ran')!r}).touch()\n" + path.read_text()
        )
    (model / "config.json").write_text(
        json.dumps(
            {
                "model_type": "novel",
                "vocab_size": VOCABULARY,
                "architectures": ["NovelForCausalLM"],
                "auto_map": {
                    "AutoConfig": "configuration_novel.NovelConfig",
                    "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM",
                },
            }
        )
    )
    remote_code.write_digests(model, [path.name for path in code])
    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    evil_model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    save_file(evil_model.state_dict(), model / "model.safetensors", {"format": "pt"})
    (project / "ran").unlink()
    return model


@pytest.mark.slow
def test_no_directory_makes_its_own_code_run(evil: Path, stage: StageRunner, tmp_path: Path):
    """Neither a model, nor a Hugging Face cache, a run, its config.yaml, nor an export."""
    ran = tmp_path / "ran"

    def refused(*command: object, **options: object) -> None:
        printed = stage(*command, expect=2, **options).stderr
        assert "of type 'novel'" in printed and f"only with {TRUST}" in printed
        assert not ran.exists() and "Traceback" not in printed

    commit = "0" * 40
    home = tmp_path / "hub/models--org--evil"
    shutil.copytree(evil, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(commit)
    refused(*TRAIN, "-e", "x", "-m", "evil", "--dry-run")
    refused(*TRAIN, "-e", "x", "-m", "org/evil", env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    (tmp_path / "run.yaml").write_text("trust_remote_code: true\n")
    printed = stage(*TRAIN, "-e", "x", "-m", "evil", "--config", "run.yaml", expect=2).stderr
    assert f"may set {TRUST}" in printed and not ran.exists()

    trusted = (*TRAIN, "-e", "exp", "-m", "evil", TRUST)
    assert f"-e exp {TRUST}" in stage(*trusted).stdout and ran.exists()
    assert "already done" in stage(*trusted).stdout  # as a restart types it
    ran.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outputs/exp").rename(tmp_path / "elsewhere/exp")
    run = tmp_path / "elsewhere/exp"
    refused(*TRAIN, "-e", "again", "--config", run / "config.yaml")
    refused("05_export_checkpoint.py", "-e", run, "--out", "out")
    stage("05_export_checkpoint.py", "-e", run, "--out", "out", TRUST)
    assert (tmp_path / "out/modeling_novel.py").is_file() and ran.exists()
    ran.unlink()
    refused(*TRAIN, "-e", "more", "-m", "out", "--dry-run")
    stage(*TRAIN, "-e", "more", "-m", "out", "--dry-run", TRUST)


def test_changed_code_is_not_run(evil: Path, tmp_path: Path):
    from lib.core.errors import ArtifactError

    with pytest.raises(UsageError, match="does not know"):
        build_on_meta(evil)
    for names in ({"../x.py": ""}, {str(tmp_path / "x.py"): ""}, ["a.py"], {"a.py": None}):
        (evil / "trusted_code.json").write_text(json.dumps(names))
        with pytest.raises(ArtifactError, match="has changed since"):
            build_on_meta(evil, trust_code=True)
    (evil / "trusted_code.json").unlink()
    with pytest.raises(UsageError, match="does not know"):
        build_on_meta(evil, trust_code=True)
    assert not (tmp_path / "ran").exists()


def test_no_command_that_runs_code_is_given_to_be_pasted():
    record = {"stage": "03_download_model.py", "options": {"model_name": "org/evil"}}
    assert manifest.make_remedy(record)["run"].endswith(
        "03_download_model.py --model-name org/evil"
    )
    remedy = manifest.make_remedy(
        {**record, "options": {**record["options"], "trust_remote_code": True}}
    )
    assert list(remedy) == ["hint"] and TRUST in remedy["hint"]
    for stage_name in ("/tmp/evil.py", "../03_evil.py", "", None, 5):
        assert list(manifest.make_remedy({**record, "stage": stage_name})) == ["hint"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks there first")
def test_no_code_of_the_working_directory_runs(tmp_path: Path):
    """Whoever works within a directory of data runs none of its files, under no name."""
    for name in ("lib/__init__.py", "xxhash.py", "socket.py", "multiprocessing/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"text": "x"}\n')
    run_stage("02_build_hf_dataset.py", "--data-folder", "raw", cwd=tmp_path, fresh=True)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(ROOT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[1]\n", done.stderr
    assert not (tmp_path / "ran").exists()
