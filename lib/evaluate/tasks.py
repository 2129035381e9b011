"""Read the tasks of a suite, a directory of files, and report all problems in them at once.

NAME.jsonl, NAME.jsonl.gz       a line is {"context", "choices", "gold"} or {"context", "answer"}
NAME.yaml, NAME.json            optional header of the task: metric, licence, source, …
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import paths, records
from lib.core.errors import Problems, UsageError
from lib.core.json_lines import CheckedLines, name_type

SMALL = "small"  # the name of the suite in this package
ACCURACY = "accuracy"
PER_CHAR = "accuracy_per_char"
PER_TOKEN = "accuracy_per_token"
BITS_PER_BYTE = "bits_per_byte"
METRICS = (ACCURACY, PER_CHAR, PER_TOKEN, BITS_PER_BYTE)
UNKNOWN = "not named"  # the licence of a task whose header does not name it

_SMALL_ROOT = Path(__file__).parent / "small"
_HEADER_KEYS = ("metric", "licence", "source", "description", "delimiter")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
# Names that no task may have: eval/loss/NAME, for example, is the loss on a dataset.
_TAKEN = {"loss", "perplexity", "bits_per_byte"}
_SUFFIXES = (".jsonl", ".jsonl.gz")
_SHOWN = 10  # bad lines of a file


class Request(NamedTuple):
    """Contains a text to score and its context."""

    context: str
    continuation: str


class Item(NamedTuple):
    """Contains a question: one request for each choice, and the index of the right choice.

    An item with one request has an answer without alternatives.
    """

    requests: tuple[Request, ...]
    gold: int = 0


@dataclass(frozen=True)
class Task:
    """Contains a task of a suite.

    metric: one of METRICS, the figure that the table shows. licence: name of the data's licence.
    """

    name: str
    items: tuple[Item, ...]
    metric: str
    licence: str = UNKNOWN
    source: str = ""

    @property
    def has_choices(self) -> bool:
        """Return whether the model chooses among several texts."""
        return len(self.items[0].requests) > 1

    @property
    def chance(self) -> float | None:
        """Return the mean accuracy of random choices, None for a task without choices."""
        if not self.has_choices:
            return None
        return sum(1 / len(item.requests) for item in self.items) / len(self.items)

    def keys(self) -> list[str]:
        """Return the keys of the task's figures in metrics.jsonl."""
        names = METRICS if self.has_choices else (BITS_PER_BYTE,)
        return [f"eval/{self.name}/{name}" for name in names]


def find_suite(text: str, cache_dir: Path = Path(".cache")) -> Path:
    """Return the directory of a suite: `small`, a path, or a name in the cache.

    Raises UsageError if there is none.
    """
    if text == SMALL and not Path(text).is_dir():
        return _SMALL_ROOT
    prepared = paths.suites_root(cache_dir) / text
    directory = next((path for path in (Path(text), prepared) if path.is_dir()), None)
    if directory is None:
        names = sorted(
            path.name for path in paths.suites_root(cache_dir).glob("*") if path.is_dir()
        )
        raise UsageError(
            f"there is no suite {text}",
            expected=f"{SMALL}, or a directory of tasks",
            found=f"in {paths.suites_root(cache_dir)}: {', '.join(names) or 'none'}",
        )
    return directory


def read_suite(directory: Path, limit: int | None = None) -> list[Task]:
    """Return the tasks of a suite in the order of their names.

    limit: number of items to keep at the beginning of each task; None keeps all. Raises one
    UsageError or ArtifactError that lists all problems with their lines.
    """
    problems = Problems()
    files = list(_list_files(directory))
    if not files:
        problems.add(
            f"{directory} contains no task",
            expected="NAME.jsonl files",
        )
    names = [name for name, _ in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(f"{directory} contains several files for the task {name}")
    tasks = []
    for name, path in files:
        if not _NAME.fullmatch(name):
            problems.add(
                f"{path} cannot name a task",
                expected="a file name of at most 100 letters, digits, _, . and -",
            )
            continue
        if name in _TAKEN:
            problems.add(
                f"{path}: a task cannot be named {name}, since eval/{name} is another metric",
                hint="rename the file",
            )
            continue
        task = problems.collect(partial(_read_task, name, path))
        if task is not None:
            tasks.append(task if limit is None else replace(task, items=task.items[:limit]))
    problems.raise_if_any()
    return tasks


def count_requests(tasks: Iterable[Task]) -> int:
    """Return the number of texts that the tasks score."""
    return sum(len(item.requests) for task in tasks for item in task.items)


def _list_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each task, sorted by name."""
    yield from sorted(
        (path.name.removesuffix(".gz").removesuffix(".jsonl"), path)
        for path in directory.iterdir()
        if path.name.endswith(_SUFFIXES) and not path.name.startswith(".")
    )


def _find_text_problem(content: Mapping[str, Any], key: str, may_be_empty: bool) -> str:
    """Return the problem of a text in a line, or ""."""
    if key not in content:
        return f"{key!r} is missing"
    value = content[key]
    if not isinstance(value, str):
        return f"{key!r} must be a string, found {name_type(value)}"
    if not value and not may_be_empty:
        return f"{key!r} is empty"
    return "" if _is_text(value) else f"{key!r} contains a lone surrogate, which is not text"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_task(name: str, path: Path) -> Task:
    """Read the task in a file. Raises UsageError or ArtifactError with all of its problems."""
    header = _read_header(path.with_name(name))
    lines = CheckedLines(path, "task", "item", _SHOWN)
    items = []
    kinds = set()
    for number, content in lines:
        line_problems = list(_find_line_problems(content))
        for problem in line_problems:
            lines.add(number, problem)
        if line_problems:
            continue
        choices = content.get("choices", [content.get("answer")])
        kinds.add("choices" in content)
        if len(kinds) > 1:
            lines.add(number, "all lines of a task must have 'choices', or all must have 'answer'")
            continue
        context = content["context"]
        requests = tuple(_join_choice(context, choice, header["delimiter"]) for choice in choices)
        items.append(Item(requests, content["gold"] if "choices" in content else 0))
    lines.raise_if_any(len(items))
    metric = header["metric"] or (ACCURACY if True in kinds else BITS_PER_BYTE)
    if metric != BITS_PER_BYTE and True not in kinds:
        raise UsageError(
            f"the metric of {path} is {metric}, but its lines have no choices",
            expected=f"metric: {BITS_PER_BYTE}, or 'choices' and 'gold' in each line",
        )
    return Task(name, tuple(items), metric, header["licence"] or UNKNOWN, header["source"])


def _find_line_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a line of a task."""
    if problem := _find_text_problem(content, "context", may_be_empty=True):
        yield problem
    if ("choices" in content) == ("answer" in content):
        yield "it needs either 'choices' and 'gold', or 'answer'"
        return
    if "answer" in content:
        if problem := _find_text_problem(content, "answer", may_be_empty=False):
            yield problem
        return
    choices = content["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        yield "'choices' must be a list of at least two strings"
        return
    for index, choice in enumerate(choices):
        if problem := _find_text_problem({f"choices[{index}]": choice}, f"choices[{index}]", False):
            yield problem
    gold = content.get("gold")
    if type(gold) is not int or not 0 <= gold < len(choices):
        found = f"found {gold}" if type(gold) is int else f"found {name_type(gold)}"
        yield f"'gold' must be an index from 0 to {len(choices) - 1}, {found}"


def _join_choice(context: str, choice: str, delimiter: str) -> Request:
    """Return the request for a choice, with a delimiter if no space separates the texts."""
    is_apart = not context or context[-1].isspace() or choice[0].isspace()
    return Request(context, choice if is_apart else delimiter + choice)


def _read_header(stem: Path) -> dict[str, str]:
    """Return the header of a task, with a text for each key. Raises UsageError if it is invalid."""
    header = {"metric": "", "licence": "", "source": "", "description": "", "delimiter": " "}
    path = next(
        (
            candidate
            for suffix in (".yaml", ".json")
            if (candidate := stem.with_name(stem.name + suffix)).is_file()
        ),
        None,
    )
    if path is None:
        return header
    try:
        content = records.read_yaml(path)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise UsageError(f"{path} is not a valid header", found=str(error)) from None
    problems = []
    if not isinstance(content, dict):
        content = {}
        problems.append("expected keys and values")
    for name, value in content.items():
        key = "licence" if name == "license" else name
        if key not in _HEADER_KEYS:
            problems.append(f"unknown key {key!r}; the keys are {', '.join(_HEADER_KEYS)}")
        elif not isinstance(value, str):
            problems.append(f"{key} must be a text, found {name_type(value)}")
        elif key == "metric" and value not in METRICS:
            problems.append(f"unknown metric {value!r}; the metrics are {', '.join(METRICS)}")
        else:
            header[key] = value
    if problems:
        raise UsageError(f"{path} is not a valid header", found="\n".join(problems))
    return header
