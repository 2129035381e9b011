"""Approve what the code says to people: one file of tests/approved/ for each room.

python -m tests.wording            print which files are out of date, and exit with 1 if any is
python -m tests.wording --write    write them, after a change of wording; then read the difference

A file contains the texts of four words or more: messages, hints, lines of logs and reports. Texts
of options are in docs/reference/options.md. So no other test needs to repeat a sentence: it asserts
the class of an error, the exit code and one keyword.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APPROVED = ROOT / "tests" / "approved"
_LEAST_WORDS = 4
_DECLARING = {"option", "add_argument", "ArgumentParser"}  # calls whose texts --help shows


def list_rooms() -> dict[str, list[Path]]:
    """Return the modules of each room; the stages are a room as well."""
    rooms = {"stages": sorted(ROOT.glob("0[1-5]_*.py"))}
    for path in sorted([*(ROOT / "lib").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]):
        parts = path.relative_to(ROOT).parts
        rooms.setdefault("-".join(parts[:2]) if parts[0] == "launch" else parts[1], []).append(path)
    # Scripts of launch/ together, not each as a room.
    scripts = [name for name in rooms if name.endswith(".py")]
    rooms["launch"] = [path for name in scripts for path in rooms.pop(name)]
    return rooms


def _list_texts_of(paths: list[Path]) -> list[str]:
    """Return the texts of modules, each after a line with the path of its module."""
    lines: list[str] = []
    for path in paths:
        texts = sorted({*find_texts(ast.parse(path.read_text(encoding="utf-8")))})
        if texts:
            lines += [path.relative_to(ROOT).as_posix(), *(f"  {text}" for text in texts)]
    return lines


def find_texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a syntax tree; `{…}` stands for a value in an f-string."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in _DECLARING:
            return
    if isinstance(node, ast.JoinedStr):
        yield from _keep_if_prose("".join(map(_write_part, node.values)))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _keep_if_prose(node.value)
    children = node.values if isinstance(node, ast.JoinedStr) else [*ast.iter_child_nodes(node)]
    for child in children:
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        is_part = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
        if not (is_docstring or is_part):
            yield from find_texts(child)


def _write_part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{…}"


def _keep_if_prose(text: str) -> Iterator[str]:
    words = [word for word in text.split() if word.strip("-:;,.()'\"").isalpha()]
    if len(words) >= _LEAST_WORDS:
        yield text.replace("\n", "\\n")


def format_room(paths: list[Path]) -> str:
    """Return the approval file of a room."""
    return "\n".join(_list_texts_of(paths)) + "\n"


def main() -> int:
    """Write the files or name those that are out of date; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files")
    rooms = list_rooms()
    if parser.parse_args().write:
        APPROVED.mkdir(exist_ok=True)
        for path in {*APPROVED.glob("*.txt")} - {APPROVED / f"{name}.txt" for name in rooms}:
            path.unlink()
        for name, paths in rooms.items():
            (APPROVED / f"{name}.txt").write_text(format_room(paths), encoding="utf-8")
        return 0
    outdated = [
        name
        for name, paths in rooms.items()
        if not (APPROVED / f"{name}.txt").is_file()
        or (APPROVED / f"{name}.txt").read_text(encoding="utf-8") != format_room(paths)
    ]
    for name in outdated:
        print(f"tests/approved/{name}.txt is out of date: run `make wording`")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
