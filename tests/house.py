"""Measure the form of the code: python -m tests.house --help.

This takes a few seconds, since it reads the code without running it. It is among the tests since it
shares their rules (tests/form.py). Other packages are measured like lib/, so their figures can be
compared. It does not measure how many modules one must open to follow a flow: a trace of a run also
contains all modules that are only imported.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import itertools
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import form

ROOT = Path(__file__).resolve().parent.parent
_COVERS = "# covers: "
_CLOUD = Path("launch/cloud")  # behind a fence
_START = ("04_train_fsdp.py", "launch/monitor.py", "launch/supervise.py", "lib/train/config.py")
_LINES = "lines of lib and launchers / launch/cloud / tests"
_REACHED = "modules that stage 04 / monitor / supervise / train/config reach"
_ASKING = "files that ask for a mode"
# The options and classes that name a mode, and the modules that own the answer. The last one reads
# the command lines of other processes.
_MODES = {"bench", "streaming", "online", "SyntheticSource", "is_synthetic"}
_MODE_OWNERS = (
    "lib/train/sources/*",
    "lib/train/output/kinds.py",
    "lib/tokens/*",
    "lib/runs/processes.py",
)
_SHORT_MODULE = 60
_LONG_MODULE = 450
_LONG_FUNCTION = 60
_LONGEST_FUNCTION = 75


@dataclass
class Measure:
    """Counts of the modules of one tree."""

    modules: list[int] = field(default_factory=list)  # lines of each
    functions: list[int] = field(default_factory=list)  # lines of each, also of nested ones
    public: int = 0  # functions and methods that should have a docstring
    documented: int = 0
    comments: int = 0
    code_lines: int = 0  # lines that are not blank
    broken: Counter[str] = field(default_factory=Counter)  # violations by rule of form

    def add(self, path: Path) -> None:
        """Count a module, unless it is an __init__.py with only a docstring."""
        text = path.read_text(encoding="utf-8")
        tree = form.parse_text(text)
        if path.name == "__init__.py" and len(tree.body) <= 1:
            return
        self.modules.append(len(text.splitlines()))
        self.code_lines += sum(bool(line.strip()) for line in text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments += sum(token.type == tokenize.COMMENT for token in tokens)
        self.broken.update(rule for rule, _ in form.violations(text))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
        for function in _public_functions(tree):
            self.public += 1
            self.documented += bool(ast.get_docstring(function))


def _public_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module and the methods of its public classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and not node.name.startswith("_"):
            yield node


def measure_modules(paths: Sequence[Path]) -> Measure:
    """Return the figures of the table for these modules: sizes, functions, docstrings."""
    result = Measure()
    for path in paths:
        result.add(path)
    return result


def describe_tree(root: Path, package: Path) -> dict[str, str]:
    """Return the rows of a tree. root: directory of README.md and tests/. package: to be measured.

    For this project, the violations of form are counted in all of its code, not only in lib/.
    """
    paths = sorted(package.rglob("*.py"))
    counts = measure_modules(paths)
    is_ours = (root / "04_train_fsdp.py").is_file()
    code = measure_modules(_list_code(root)) if is_ours else counts
    train = measure_modules(sorted((package / "train").rglob("*.py"))) if is_ours else Measure()
    readme = root / "README.md"
    rows = {
        "modules": f"{len(counts.modules):,}",
        "… in lib/train": str(len(train.modules)) if is_ours else "",
        "lines": f"{sum(counts.modules):,}",
        "lines of a module: median, 90 %": _format_spread(counts.modules),
        f"modules under {_SHORT_MODULE}, over {_LONG_MODULE} lines": (
            f"{_count_below(counts.modules)}, {_count_above(counts.modules, _LONG_MODULE)}"
        ),
        "lines of a function: median, 90 %": _format_spread(counts.functions),
        f"functions over {_LONG_FUNCTION}, over {_LONGEST_FUNCTION} lines": (
            f"{_count_above(counts.functions, _LONG_FUNCTION)}, "
            f"{_count_above(counts.functions, _LONGEST_FUNCTION)}"
        ),
        "public functions with a docstring": f"{counts.documented / max(1, counts.public):.0%}",
        "comments per 100 lines": f"{100 * counts.comments / max(1, counts.code_lines):.1f}",
    }
    for rule in (*form.RULES, form.BACKSLASHES):
        rows[rule] = f"{code.broken[rule]:,}"
    rows.update(_describe_reach(root) if is_ours else {_LINES: "", _REACHED: "", _ASKING: ""})
    rows["modules that no test covers"] = str(len(find_untested(root))) if is_ours else ""
    rows["lines of README.md"] = (
        str(len(readme.read_text(encoding="utf-8").splitlines())) if readme.is_file() else ""
    )
    return rows


def _describe_reach(root: Path) -> dict[str, str]:
    """Return the rows of lines outside and inside the fence, and of what four modules reach."""
    launchers = sorted((root / "launch").rglob("*.py"))
    cloud = [path for path in launchers if path.is_relative_to(root / _CLOUD)]
    core = {*(root / "lib").rglob("*.py"), *launchers} - {*cloud}
    tests = (root / "tests").rglob("*.py")
    lines = [sum(map(_count_lines, group)) for group in (core, cloud, tests)]
    reached = [len(find_reached(root, root / name)) for name in _START]
    return {
        _LINES: " / ".join(f"{count:,}" for count in lines),
        _REACHED: " / ".join(map(str, reached)),
        _ASKING: str(len(find_mode_questions(root))),
    }


def find_mode_questions(root: Path) -> list[Path]:
    """Return the stages, modules and launchers that ask for the output of a launch or its source.

    Modules that own a mode may ask: the kinds of output, and the sources. Paths are below root.
    """
    modules = [path for room in ("lib", "launch") for path in (root / room).rglob("*.py")]
    paths = (path.relative_to(root) for path in [*root.glob("0[1-5]_*.py"), *modules])
    return sorted(
        path
        for path in paths
        if not any(fnmatch.fnmatchcase(path.as_posix(), owner) for owner in _MODE_OWNERS)
        and not _MODES.isdisjoint(_list_used_names(root / path))
    )


def _list_used_names(path: Path) -> Iterator[str]:
    """Yield the attributes and names that a module reads."""
    for node in ast.walk(form.parse_text(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def find_reached(root: Path, start: Path) -> set[Path]:
    """Return the modules of this project that a file imports, lazily or through others."""
    reached: set[Path] = set()
    waiting = [start] if start.is_file() else []
    while waiting:
        for name in _list_imports(waiting.pop()):
            path = root.joinpath(*name.split(".")).with_suffix(".py")
            if path not in reached and path.is_file():
                reached.add(path)
                waiting.append(path)
    return reached


def _list_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(form.parse_text(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _list_code(root: Path) -> list[Path]:
    folders = ("lib", "launch", "benchmarks", "tests")
    paths = (path for name in folders for path in (root / name).rglob("*.py"))
    return sorted([*root.glob("0[1-5]_*.py"), *paths])


def _count_below(lines: Sequence[int]) -> int:
    return sum(count < _SHORT_MODULE for count in lines)


def _count_above(lines: Sequence[int], limit: int) -> int:
    return sum(count > limit for count in lines)


def _format_spread(lines: Sequence[int]) -> str:
    if len(lines) < 2:
        return ""
    return f"{statistics.median(lines):.0f}, {statistics.quantiles(lines, n=10)[-1]:.0f}"


def list_covered(test_file: Path) -> list[str]:
    """Return the paths and patterns in the `# covers:` lines at the head of a test file."""
    head = itertools.takewhile(
        lambda line: line.startswith(_COVERS), test_file.read_text(encoding="utf-8").splitlines()
    )
    return [name for line in head for name in line.removeprefix(_COVERS).split(", ")]


def find_tests(root: Path, path: Path) -> list[Path]:
    """Return the test files that cover a file. path: below root."""
    return [
        test_file.relative_to(root)
        for test_file in sorted((root / "tests").rglob("test_*.py"))
        if any(fnmatch.fnmatchcase(path.as_posix(), name) for name in list_covered(test_file))
    ]


def find_untested(root: Path) -> list[Path]:
    """Return the stages and the modules of lib/ and launch/ that no test file covers."""
    names = {name for test in (root / "tests").rglob("test_*.py") for name in list_covered(test)}
    modules = [path for room in ("lib", "launch") for path in (root / room).rglob("*.py")]
    return [
        path.relative_to(root)
        for path in sorted([*root.glob("0[1-5]_*.py"), *modules])
        if path.name != "__init__.py"
        and not any(fnmatch.fnmatchcase(path.relative_to(root).as_posix(), name) for name in names)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure the form of the code.")
    parser.add_argument(
        "--at",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="another checkout of this project, such as one of `git worktree add DIR COMMIT`; "
        "may be repeated (default: none)",
    )
    parser.add_argument(
        "--package",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="the directory of another package, measured like lib/; may be repeated "
        "(default: none)",
    )
    parser.add_argument(
        "--tests-of",
        type=Path,
        metavar="FILE",
        help="list the test files that cover a file, such as lib/optim/guard.py, by their "
        "`# covers:` lines (default: measure)",
    )
    args = parser.parse_args()
    for root in args.at:
        if not (root / "lib").is_dir():
            parser.error(f"there is no checkout of this project in {root} (no {root / 'lib'})")
    for package in args.package:
        if not package.is_dir():
            parser.error(f"there is no directory {package}")
    if args.tests_of:
        if not (ROOT / args.tests_of).is_file():
            parser.error(f"there is no {args.tests_of}")
        print("\n".join(map(str, find_tests(ROOT, args.tests_of))))
        return
    columns = {
        **{root.name: describe_tree(root, root / "lib") for root in args.at},
        "here": describe_tree(ROOT, ROOT / "lib"),
        **{package.name: describe_tree(package.parent, package) for package in args.package},
    }
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns["here"]:
        print(f"| {name} | {' | '.join(rows[name] for rows in columns.values())} |")


if __name__ == "__main__":
    main()
