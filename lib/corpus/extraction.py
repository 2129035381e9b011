"""Check --extract, and count the documents that it would read, before anything is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.core import commands, log, manifest, paths, records, units
from lib.core.errors import Problems
from lib.corpus import kinds
from lib.corpus.extract.table import EXTRACTORS, find_version
from lib.corpus.inputs import FILE_LIST, InputFile
from lib.corpus.row_options import CHAT, RowOptions

_MOST_OPENED = 1_000  # the most files without a suffix to open


def require_extraction(row_options: RowOptions) -> None:
    """Raise UsageError if --extract contradicts other options, or if it needs a missing package."""
    problems = Problems()
    if row_options.extract and row_options.format == CHAT:
        problems.add(
            "--extract and --format chat exclude each other",
            expected="no --extract, because documents contain no conversations",
        )
    for kind in row_options.extract:
        for package in EXTRACTORS[kind].packages:
            if not find_version(package):
                problems.add(
                    f"--extract {kind} needs the package {package}, which is not installed",
                    hint="a bundle of `airgap.py pack --optional` contains its wheels; "
                    "or install it from a package index:",
                    run=commands.pip_install_optional(package),
                )
    problems.raise_if_any()


def identify_extraction(row_options: RowOptions) -> dict[str, dict[str, str]]:
    """Return the kinds in --extract with the versions that determine their text."""
    versions = {}
    for kind in row_options.extract:
        _, _, version, packages = EXTRACTORS[kind]
        versions[kind] = ", ".join(
            [f"{version}", *(f"{package} {find_version(package)}" for package in packages)]
        )
    return {"extract": versions} if versions else {}


def describe_extraction(row_options: RowOptions) -> dict[str, str]:
    """Return the line of the plan about --extract, by label."""
    return {"extract": ", ".join(row_options.extract)} if row_options.extract else {}


def warn_about_documents(row_options: RowOptions, folder: Path, files: Sequence[InputFile]) -> None:
    """Print how many PDF, DOCX, EPUB and HTML files are not extracted, and what to type.

    folder: the data folder. files: the files in it that are read.
    """
    if row_options.format == CHAT:
        return
    extracted = row_options.extract
    for text in (
        describe_left_out(folder, extracted),
        describe_skipped(count_documents(folder, files), extracted),
    ):
        if text:
            log.warn(text)


def count_documents(folder: Path, files: Sequence[InputFile]) -> Counter[str]:
    """Return the number of HTML, PDF, DOCX and EPUB files by kind, before they are read.

    A file is counted by its suffix. Files without any suffix are opened, but at most a thousand of
    them, spread evenly, because opening a million files would take minutes. Workers count by
    content later.
    """
    counts = Counter(filter(None, (kinds.name_document(file.path) for file in files)))
    nameless = [file for file in files if not kinds.find_suffix(file.path)]
    step = units.ceil_div(len(nameless), _MOST_OPENED) if nameless else 1
    for file in nameless[::step]:
        counts[_look_into(folder / file.path)] += step
    del counts[""]
    return counts


def _look_into(path: Path) -> str:
    """Return the kind of document in a file by its first bytes, "" for other files."""
    try:
        with path.open("rb") as file:
            head = file.read(kinds.HEAD_BYTES)
    except OSError:
        return ""  # a worker reports the error
    return kinds.sniff_document(path.name, head)


def describe_skipped(counts: Mapping[str, int], extracted: Sequence[str]) -> str:
    """Return a warning about documents that --extract does not name, "" if there are none.

    counts: files by kind. extracted: the kinds in --extract. The warning ends with the command
    that extracts them.
    """
    missing = [kind for kind in EXTRACTORS if counts.get(kind) and kind not in extracted]
    if not missing:
        return ""
    skipped = [kind for kind in missing if kind in kinds.BINARY_DOCUMENTS]
    parts = []
    if skipped:
        parts.append(f"{_count_files(skipped, counts)} skipped")
    if kinds.HTML in missing:
        parts.append(f"{_count_files([kinds.HTML], counts)} read with tags")
    command = commands.as_typed(
        "--extract", ",".join(missing), "--overwrite", drop=["--overwrite", "--dry-run"]
    )
    needed = dict.fromkeys(package for kind in missing for package in EXTRACTORS[kind].packages)
    absent = [package for package in needed if not find_version(package)]
    steps = [*map(commands.pip_install_optional, absent), command]
    condition = f" (needs {' and '.join(absent)}, not installed here)" if absent else ""
    return (
        f"the input contains {', and '.join(parts)}; to extract their text{condition}, run:\n  "
        + "\n  ".join(steps)
    )


def describe_left_out(folder: Path, extracted: Sequence[str]) -> str:
    """Return a warning about documents that are not in the splits, "" if there are none.

    folder: the splits. extracted: the kinds in --extract. Earlier versions of stage 01 left out
    PDF, DOCX and EPUB files as binary files.
    """
    kinds_extracted = [kind for kind in kinds.BINARY_DOCUMENTS if kind in extracted]
    path = folder / FILE_LIST
    if not kinds_extracted or not path.exists() or not (folder / paths.MANIFEST).exists():
        return ""
    counts: Counter[str] = Counter()
    with path.open(encoding="ascii") as lines:
        for line in lines:
            if '"skipped": "binary"' in line:
                counts[kinds.name_document(str(records.parse_json(line)["path"]))] += 1
    kinds_found = [kind for kind in kinds_extracted if counts[kind]]
    if not kinds_found:
        return ""
    remedy = manifest.make_remedy(
        manifest.read_if_any(folder) or {}, "--overwrite", dst_root=folder
    )
    return (
        f"an earlier version of stage 01 left out {_join_counts(kinds_found, counts)}. The "
        f"current version takes such files:\n  {remedy.get('run') or remedy.get('hint')}"
    )


def _join_counts(kinds_found: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return the number of files by kind: `2 PDF and 1 DOCX files`, `1 PDF file`."""
    *names, last = [f"{counts[kind]:,} {EXTRACTORS[kind].label}" for kind in kinds_found]
    joined = f"{', '.join(names)} and {last}" if names else last
    return f"{joined} {units.plural(sum(counts[kind] for kind in kinds_found), 'file')}"


def _count_files(kinds_found: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return the number of files by kind, as the beginning of a clause that describes them."""
    verb = "is" if sum(counts[kind] for kind in kinds_found) == 1 else "are"
    return f"{_join_counts(kinds_found, counts)}, which {verb}"
