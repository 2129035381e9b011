# covers: lib/core/records.py, lib/runs/run_records.py, lib/core/manifest.py
"""Records of others with values of any type cause an error message and never a traceback."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.checkpoints import contents
from lib.checkpoints.commit import Checkpoint
from lib.core import manifest, options
from lib.core.errors import StageError, escape_controls
from lib.core.paths import Experiment
from lib.corpus import inputs
from lib.models import architecture, directory
from lib.runs import run_records
from lib.tokens import store
from lib.tokens.dataset import open_dataset
from lib.train import previous_run
from tests.conftest import ROOT
from tests.training import prepared_once, project, save_model  # noqa: F401  (fixtures)

VALUES = [
    None,
    -1,
    10**30,
    "x",
    "../../x",
    [],
    {},
    True,
    1.5,
    ["a", 5],
    {"a": {"b": 1}},
    "\ud800\0",
    "\x1b[2J",
]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield where a value stands in a record, of lists the first two."""
    yield path
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value[:2])
    for key, child in children:
        yield from places(child, (*path, key))


def changed(content: Any, path: tuple, new: Any) -> Any:
    """Return a copy with another value at a place."""
    if not path:
        return new
    content = json.loads(json.dumps(content))
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return content


def attack_record(path: Path, read: Any, most: int = 150) -> None:
    """Read what lies at a path with some of its values replaced; StageError is the only error."""
    content = json.loads(path.read_text())
    cases = [(place, value) for place in places(content) for value in VALUES]
    for place, value in random.Random(path.name).sample(cases, min(most, len(cases))):
        path.write_text(json.dumps(changed(content, place, value)))
        try:
            read()
        except StageError as error:
            error.render().encode(
                errors="surrogateescape" if "\udc80" in error.problem else "backslashreplace"
            )
        except Exception as error:
            pytest.fail(f"{path.name} with {value!r} at {place}: {error!r}")
    path.write_text(json.dumps(content))


def test_records_of_data(project: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.chdir(project)
    stage_01 = runpy.run_path(str(ROOT / "01_organize_data.py"))
    attack_record(
        project / "splits/manifest.json", lambda: inputs.find_inputs(Path("splits"), False)
    )
    attack_record(
        project / "splits/manifest.json", lambda: stage_01["require_all_files"](Path("splits"))
    )
    dataset = project / "hf_datasets/corpus"
    attack_record(dataset / "manifest.json", lambda: open_dataset(dataset))
    (dataset / "manifest.json").unlink()
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        attack_record(dataset / name, lambda: open_dataset(dataset))


def test_records_of_a_model(project: Path):  # noqa: F811
    model = project / "model"
    attack_record(model / "config.json", lambda: architecture.build_on_meta(model), most=120)
    save_model(model)
    attack_record(model / "config.json", lambda: directory.fingerprint_model(model), most=60)


def test_records_of_tokens(tmp_path: Path):
    path = tmp_path / "tokens"
    path.mkdir()
    for name in ("train.tokens.bin", "train.ends.bin"):
        (path / name).write_bytes(bytes(16))
    manifest.write_manifest(
        path,
        kind=store.KIND,
        stage="04_train_fsdp.py",
        options={},
        identity={"options": {}, "inputs": {}},
        files=[manifest.file_entry(path, file) for file in sorted(path.iterdir())],
        summary={
            "dtype": "uint16",
            "vocab_size": 9,
            "bos": None,
            "eos": None,
            "splits": {"train": {"tokens": 8, "documents": 2}},
        },
    )
    attack_record(path / "manifest.json", lambda: store.open_store(path))


def test_records_of_a_run(tmp_path: Path):
    run = Experiment(tmp_path, "run")
    step = run.checkpoints / "step_00000001"
    step.mkdir(parents=True)
    record = {
        "step": 1,
        "tokens": 5,
        "seed": 0,
        "loss_scale": {"scale": 1.0, "good_steps": 0},
        "model_files": {"config.json": "sha256:0"},
        "cursors": [{"epoch": 0, "place": None}],
    }
    (step / "train_state.json").write_text(json.dumps(record))
    assert contents.read_record(step / "train_state.json") == record
    attack_record(step / "train_state.json", lambda: Checkpoint(step, 1).record())
    (step / "COMMIT.json").write_text(json.dumps({"step": 1, "manifest": "x", "digest": "y"}))
    attack_record(step / "COMMIT.json", lambda: Checkpoint(step, 1).problems())
    run.config.write_text(
        json.dumps(
            {
                "launch": "1f",
                "run": "1f",
                "options": {"lr": 1},
                "model_dir": "m",
                "versions": {},
                "identity": {"options": {"lr": 1}, "inputs": {"model": "x"}},
            }
        )
    )
    attack_record(
        run.config,
        lambda: previous_run.read_previous(run).get("identity", {}).get("options", {}).get("lr"),
    )
    run.config.write_text(json.dumps({"run": "../../x", "options": {}}))  # names a directory
    assert run_records.read_config(run) == {}
    run.config.write_text('{"lr": 0.1, "seed": 1, "src": "a"}')

    def parse() -> None:
        parser = options.Parser("x")
        parser.add_argument("--lr", type=options.positive)
        parser.add_argument("--seed", type=options.seed)
        parser.add_argument("--src", type=Path)
        options.add_config(parser, "plan")
        parser.parse(["--config", str(run.config)])

    attack_record(run.config, parse)


def test_what_a_terminal_obeys_is_spelled_out():
    assert escape_controls("a\x1b[2J\r\x07b\n\tc\x9b") == "a\\x1b[2J\\x0d\\x07b\n\tc\\x9b"
