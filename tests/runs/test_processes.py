# covers: lib/runs/processes.py
"""The directory of a run is found from command lines as stage 04 itself finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.runs.processes import find_directory
from lib.train import command_line

RECIPE = "experiment_name: exp\nsave-dir: runs\ndataset_name: [a, b]\nlr: 1e-3\nbench: false\n"
RECORD = "versions: {}\noptions: {experiment_name: exp, save_dir: runs, lr: 0.1, seed: null}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["-e", "exp"],
        ["-d", "corpus", "--lr=1e-4", "-eexp", "--save_dir", "runs"],
        ["--experiment_name=exp", "--save-dir", "/runs"],
        ["-e", "sweep/exp", "--streaming"],
        ["-e", "exp", "--checkpoint-dir", "runs"],
        ["-e", "exp", "--output_dir=runs", "--from-scratch", "-m", "model"],
        ["--config", "recipe.yaml"],
        ["--config=recipe.yaml", "-e", "other", "--save-dir", "elsewhere"],
        ["--config=recipe.yaml", "-e", "sweep/other"],
        ["--config=record.yaml", "--lr", "0.2"],
    ],
)
def test_a_directory_is_found_as_stage_04_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "record.yaml").write_text(RECORD)
    found = find_directory(tmp_path, words)
    monkeypatch.chdir(tmp_path)
    config = command_line.parse_options(words)
    assert found == (tmp_path / config.save_dir / config.experiment_name).resolve()


def test_other_command_lines_name_no_run(tmp_path: Path) -> None:
    (tmp_path / "bench.yaml").write_text("bench: true\nexperiment_name: exp\n")
    assert find_directory(tmp_path, ["-d", "corpus"]) is None
    assert find_directory(tmp_path, ["--bench", "-e", "exp"]) is None
    assert find_directory(tmp_path, ["--config", "bench.yaml"]) is None
    with pytest.raises(OSError):
        find_directory(tmp_path, ["--config", "none.yaml"])
    with pytest.raises(UsageError):
        find_directory(tmp_path, ["-e"])
