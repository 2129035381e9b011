# covers: lib/train/suite.py
"""The names of tasks, and which checkpoints can be the best, before anything is tokenised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lib.core.errors import UsageError
from lib.tokens.mixture import open_corpora
from lib.train import suite
from lib.train.config import DEFAULTS
from lib.train.sources.corpora import CorporaSource
from tests.conftest import StageRunner
from tests.training import SMALL_RUN


def save_dataset(path: Path, *sources: str) -> str:
    """Save a dataset whose validation split comes from these sources."""
    rows = {"text": ["text"] * len(sources), "source": list(sources)}
    split = Dataset.from_dict(rows)
    DatasetDict({"train": split, "validation": split}).save_to_disk(path)
    return str(path)


def save_task(directory: Path, name: str) -> str:
    """Write a suite with one task, and return its directory."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.jsonl").write_text('{"context": "a", "answer": "b"}\n')
    return str(directory)


def test_a_task_with_the_name_of_a_source_or_dataset_is_refused(tmp_path: Path) -> None:
    first = save_dataset(tmp_path / "first", "books/a.txt", "code/b.txt")
    second = save_dataset(tmp_path / "second", "wiki/a.txt", "code/b.txt")

    def read(task: str, *datasets: str) -> None:
        directory = save_task(tmp_path / f"suite of {task}", task)
        config = replace(DEFAULTS, eval_suite=directory)
        suite.read_tasks(config, CorporaSource(open_corpora(list(datasets))))

    read("copying", first)
    read("first", first)  # one dataset names no figure
    for name in ("books", "wiki", "second"):
        with pytest.raises(UsageError, match=f"^{name}: name"):
            read(name, first, second)


def test_a_shared_name_is_refused_before_anything_is_tokenised(
    project: Path, stage: StageRunner
) -> None:
    dataset = save_dataset(project / "sourced", "books/a.txt", "code/b.txt")
    tasks = save_task(project / "tasks", "code")
    run = ("04_train_fsdp.py", "-e", "exp", *SMALL_RUN, "-d", dataset, "--eval-suite", tasks)
    for more in ((), ("--dry-run",)):
        done = stage(*run, *more, cwd=project, expect=2)
        assert "code: name" in done.stderr
    assert not (project / ".cache" / "tokens").exists()


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (100, ""),
        (200, ""),
        (75, "every 300 steps"),
        (50, "every 100 steps"),
        (0, "only the checkpoint"),
    ],
)
def test_a_message_says_which_checkpoints_can_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, text: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(suite.log, "warn", lines.append)
    directory = save_task(tmp_path / "tasks", "copying")
    config = replace(DEFAULTS, eval_suite=directory, eval_freq=every, ckpt_freq=100)
    suite.read_tasks(config, CorporaSource([]))
    assert not lines, "--best-by eval/loss"
    for key in ("eval/copying/bits_per_byte", "eval/bits_per_byte"):
        suite.read_tasks(replace(config, best_by=key), CorporaSource([]))
        assert [text in line for line in lines] == ([True] if text else [])
        lines.clear()
