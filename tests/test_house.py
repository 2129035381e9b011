# covers: tests/house.py, tests/form.py
"""The figures that tests/house.py prints, of a tree that can be counted by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import house

FIRST = '''"""A module."""

a, b = 1, 2  # one comment


def documented(x):
    """Do it."""
    return 1 if x else 2 if b else 3


def bare(x):
    return x + \\
        1


def _private(): return 1


class Thing:
    def method(self):
        def inner(): return 1
        return inner
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "README.md": "# Title\n\nText\n",
        "04_train_fsdp.py": "c = d = 0\n",
        "lib/__init__.py": '"""Rooms."""\n',
        "lib/core/first.py": FIRST,
        "lib/core/second.py": "x = 1\n" * 451,
        "lib/train/third.py": "y = 1\n",
        "lib/train/fourth.py": "y = 1\n",
        "tests/test_all.py": "# covers: lib/core/f*.py\n# covers: lib/train/third.py, README.md\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_figures_of_a_tree(tree: Path) -> None:
    rows = house.describe_tree(tree, tree / "lib")
    lines = len(FIRST.splitlines())
    assert rows["modules"] == "4" and rows["… in lib/train"] == "2"
    assert rows["lines"] == str(lines + 451 + 2)
    assert rows["modules under 60, over 450 lines"] == "3, 1"
    assert rows["functions over 60, over 75 lines"] == "0, 0"
    assert rows["public functions with a docstring"] == "33%"
    not_blank = sum(bool(line) for line in FIRST.splitlines()) + 451 + 2
    assert rows["comments per 100 lines"] == f"{100 / not_blank:.1f}"
    assert rows["assignments of unrelated values"] == "2"  # that of the stage, too
    assert rows["nested conditional expressions"] == "1" and rows["backslashes"] == "1"
    assert rows["modules that no test covers"] == "3"
    assert rows["lines of README.md"] == "3"


def test_lines_behind_the_fence_and_reached_modules_are_counted(tree: Path) -> None:
    (tree / "launch/cloud").mkdir(parents=True)
    (tree / "launch/monitor.py").write_text("from lib.train import third\n")
    (tree / "launch/cloud/pod.py").write_text("import launch.monitor\n\n")
    (tree / "lib/train/third.py").write_text("def f():\n    import lib.core.second\n")
    rows = house.describe_tree(tree, tree / "lib")
    outside = len(FIRST.splitlines()) + 451 + 2 + 1 + 1 + 1
    assert rows[house._LINES] == f"{outside} / 2 / 2"
    assert rows[house._REACHED] == "0 / 2 / 0 / 0"


def test_lines_at_the_head_of_a_test_file_name_what_it_covers(tree: Path) -> None:
    assert house.find_untested(tree) == [
        Path("04_train_fsdp.py"),
        Path("lib/core/second.py"),
        Path("lib/train/fourth.py"),
    ]
    for path in ("lib/core/first.py", "lib/train/third.py", "README.md"):
        assert house.find_tests(tree, Path(path)) == [Path("tests/test_all.py")]
    assert house.find_tests(tree, Path("lib/core/second.py")) == []


def test_every_module_is_covered_by_a_test() -> None:
    assert not house.find_untested(house.ROOT)
    for path in sorted((house.ROOT / "tests").rglob("test_*.py")):
        names = house.list_covered(path)
        assert names, f"{path} begins with no `# covers:` line"
        assert not [name for name in names if not any(house.ROOT.glob(name))], path


def test_every_short_module_has_a_reason() -> None:
    design = (house.ROOT / "docs/explanation/design.md").read_text()
    listed = set(re.findall(r"`((?:lib|launch)/[\w/]+\.py)`", design.split("## Short modules")[1]))
    short = [
        path.relative_to(house.ROOT).as_posix()
        for room in ("lib", "launch")
        for path in sorted((house.ROOT / room).rglob("*.py"))
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < 60
    ]
    assert not [name for name in short if name not in listed]


def test_the_table_has_a_column_per_tree(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer has no stages, so what only this project has is left empty."""
    monkeypatch.setattr(house, "ROOT", tree)
    peer = tree / "peers/trainer"
    peer.mkdir(parents=True)
    (peer / "model.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", ["house", "--at", str(tree), "--package", str(peer)])
    house.main()
    table = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in table[0]] == ["", tree.name, "here", "trainer"]
    assert {len(row) for row in table} == {4}
    assert [cell.strip() for cell in table[2]] == ["modules", "4", "4", "1"]
    assert [cell.strip() for cell in table[3]] == ["… in lib/train", "2", "2", ""]


@pytest.mark.parametrize("option", ["--at", "--package"])
def test_a_directory_that_does_not_exist_is_refused(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit instead of its checkout would be counted as an empty tree."""
    monkeypatch.setattr(sys, "argv", ["house", option, "d5479de"])
    with pytest.raises(SystemExit):
        house.main()
    assert "d5479de" in capsys.readouterr().err


def test_only_the_owners_of_a_mode_ask_for_it() -> None:
    assert not house.find_mode_questions(house.ROOT)
