"""Recognise training, validation and test data, and descriptions of data, by the names of files.

The library `datasets`, the Hub and most trainers name the splits of a dataset by a word in the name
of a file or directory: `train.jsonl` beside `valid.jsonl`, `data/test-00000-of-00002.parquet`,
`train/` beside `test/`. A word counts where the names of two splits stand side by side in one
directory. So a lone directory `test/` of source code is no split, and neither is `latest.txt`.

A data card, a licence or checksums beside files of records describe them and are no documents. In a
folder of texts, a README is a text like the others.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
_STRICTNESS = ("", TRAIN, VALIDATION, TEST)
# A set that is used for evaluation during training is `eval` in many trainers, so it is validation.
_WORDS = {
    TRAIN: "train|training|trn|trainval",
    VALIDATION: "valid|validation|validate|val|dev|devel|development|eval|evaluation",
    TEST: "test|testing|tst|devtest|testdev|held[-_. ]?out|hold[-_. ]?out|unseen",
}
_LETTER = r"[^\W\d_]"
_WORD = re.compile(
    rf"(?<!{_LETTER})(?:"
    + "|".join(f"(?P<{role}>{words})" for role, words in _WORDS.items())
    + rf")(?:[-_. ]?(?:set|data|split))?(?!{_LETTER})"
)
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_LETTERS = re.compile(rf"\*|{_LETTER}+")
_PACKED = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd")
_DATA = (
    *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather"),
    *(".yaml", ".yml"),
)
_CODE = re.compile(
    r"\.(?:bash|bat|cc?|cfg|clj|cmake|cpp|cs|css|cuh?|cxx|dart|el|ex|f90|fs|go|gradle|hp?p?|hs|ini|"
    r"ipynb|java|jl|jsx?|kt|lua|m|mjs|mk|ml|php|pl|pm|proto|ps1|pyi?|pyx|r|rb|rs|scala|scss|sh|sql|"
    r"swift|tf|toml|tsx?|vim|vue|zig)"
)
_README = re.compile(r"readme(?:\.\w+)?")
_DESCRIPTION = re.compile(
    r"readme(?:\.\w+)?|(?:un)?licen[cs]e(?:[-_.].*)?|copying(?:\..*)?|notice(?:\.\w+)?|"
    r"citation\..*|dataset_infos\.json|(?:.*[-_.])?(?:croissant|metadata)\.json|"
    r"croissant.*\.json|datapackage\.json|"
    r".*\.(?:md5|crc|crc32|asc|sig|(?:md5|sha\d+)(?:sums?)?)|(?:md5|sha\d+)sums?(?:\.txt)?|"
    r"checksums?(?:\..*)?|_success|_metadata|_common_metadata|_(?:committed|started)_.*|"
    r"thumbs\.db|desktop\.ini"
)
_RECORDS = tuple(suffix for suffix in _DATA if suffix not in (".yaml", ".yml"))


@dataclass(frozen=True)
class _Member:
    """A file or directory with a word of a split in its name.

    key: the letters of the name with `*` for the word; the names of the splits of one text share
    it. is_bare: the name contains nothing but the word. is_data: a file of records.
    """

    role: str
    key: str
    is_directory: bool
    is_bare: bool
    is_data: bool


def find_role(name: str) -> str:
    """Return the split that the name of a file or directory names, "" if it names none.

    Of several words, test counts before validation, and validation before train.
    """
    words = {str(match.lastgroup) for match in _WORD.finditer(_lower(name))}
    return max(words, key=_STRICTNESS.index, default="")


def assign_roles(paths: Collection[str]) -> dict[str, str]:
    """Return TRAIN, VALIDATION or TEST for each file that is named as a split of a dataset.

    paths: all files of a tree, relative to its root, with `/` between parts. Source code is no
    split by its file name, but it may be in the directory of a split.
    """
    named = [path for path in paths if _WORD.search(_lower(path))]
    members = _list_members(named)
    code = {place for path in named if _is_code(path) for place in _list_directories(path)}
    roles = {
        place: member.role
        for directory in members.values()
        for place, member in _select_splits(directory, code)
    }
    assigned = {}
    for path in named:
        found = [roles.get(place, "") for place in (*_list_directories(path), path)]
        if role := max(found, key=_STRICTNESS.index):
            assigned[path] = role
    return assigned


def find_unpaired(paths: Collection[str], roles: Collection[str]) -> list[str]:
    """Return the files of records that are named as validation or test data and stand alone.

    roles: the files to which `assign_roles` has assigned a split.
    """
    return [
        path
        for path in paths
        if path not in roles
        and _is_data(path)
        and any(
            find_role(name) in (VALIDATION, TEST)
            for place in (*_list_directories(path), path)
            if (name := posixpath.basename(place))
            and (place == path or _make_member(name, True).is_bare)
        )
    ]


def find_descriptions(paths: Iterable[str], is_card: Callable[[str], bool]) -> set[str]:
    """Return the files that describe the records beside them: data cards, licences, checksums.

    is_card: returns whether a file with the name of a README is the card of a dataset. Such a card
    also describes records in directories below. Any other README counts only if its directory
    contains records and neither texts nor code.
    """
    candidates: dict[str, list[str]] = defaultdict(list)
    # Numbers of files by directory: directly in it, and in the whole tree below.
    records: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    records_below: Counter[str] = Counter()
    texts_below: Counter[str] = Counter()
    for path in paths:
        directory, name = posixpath.split(path)
        if _DESCRIPTION.fullmatch(name.lower()):
            candidates[directory].append(path)
            continue
        is_record = _strip_suffix(name.lower(), _PACKED).endswith(_RECORDS)
        (records if is_record else texts)[directory] += 1
        (records_below if is_record else texts_below).update(["", *_list_directories(path)])
    found: set[str] = set()
    for directory, names in candidates.items():
        if not records_below[directory]:
            continue
        is_pure = not texts[directory] and (records[directory] or not texts_below[directory])
        cards = (path for path in names if _README.fullmatch(posixpath.basename(path).lower()))
        if is_pure or any(map(is_card, cards)):
            found.update(names)
    return found


def _lower(name: str) -> str:
    """Return a name in lower case, with `-` between the words of trainData."""
    return _CAPITAL.sub("-", name).lower()


def _list_members(paths: Iterable[str]) -> dict[str, dict[str, _Member]]:
    """Return the files and directories with a word of a split, by directory and path."""
    members: dict[str, dict[str, _Member]] = defaultdict(dict)
    for path in paths:
        for place in (*_list_directories(path), path):
            parent, name = posixpath.split(place)
            is_directory = place != path
            if place not in members[parent] and (is_directory or not _is_code(path)):
                member = _make_member(name, is_directory)
                if member.role:
                    members[parent][place] = member
    return members


def _make_member(name: str, is_directory: bool) -> _Member:
    stem = _lower(name)
    role = find_role(name)
    if not is_directory:
        stem = _strip_suffix(stem, _PACKED)
    is_data = not is_directory and stem.endswith(_DATA)
    key = "".join(_LETTERS.findall(_WORD.sub("*", _strip_suffix(stem, _DATA) if is_data else stem)))
    bare = stem if is_directory else posixpath.splitext(stem)[0]
    is_bare = "".join(_LETTERS.findall(_WORD.sub("*", bare))) == "*"
    return _Member(role, key, is_directory, is_bare, is_data)


def _select_splits(
    members: dict[str, _Member], code: Collection[str]
) -> Iterator[tuple[str, _Member]]:
    """Yield the members of one directory if two splits of a dataset stand side by side in it.

    code: directories with source code. A project has directories such as `dev` and `test`, so these
    count only beside a split `train`.
    """
    has_train = any(member.role == TRAIN for member in members.values())
    usable = {place: member for place, member in members.items() if has_train or place not in code}
    if _has_two_splits(set(usable.values())):
        yield from usable.items()


def _has_two_splits(members: Collection[_Member]) -> bool:
    """Return whether the names of two members differ in little but the word of their split."""
    roles: dict[str, set[str]] = defaultdict(set)
    for member in members:
        kind = "directories" if member.is_directory else "files"
        roles[f"key {member.key}"].add(member.role)
        roles[f"all {kind}"].add(member.role)
        if member.is_data:
            roles["data"].add(member.role)
        if member.is_bare:
            roles[f"bare {kind}"].add(member.role)
    bare_files = roles["bare files"]
    groups = [group for name, group in roles.items() if name.startswith(("key", "data"))]
    groups.append(roles["bare directories"] | bare_files | roles["data"])
    groups += [roles[f"all {kind}"] for kind in ("directories", "files") if roles[f"bare {kind}"]]
    return any(len(group) > 1 for group in groups)


def _list_directories(path: str) -> list[str]:
    """Return the directories above a file, the outermost first: `a`, `a/b` for a/b/c."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _strip_suffix(name: str, suffixes: Iterable[str]) -> str:
    return next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name)


def _is_data(path: str) -> bool:
    return _strip_suffix(path.lower(), _PACKED).endswith(_DATA)


def _is_code(path: str) -> bool:
    return bool(_CODE.fullmatch(posixpath.splitext(path.lower())[1]))


def find_source(path: str) -> str:
    """Return the source of a file: its top-level directory, "" if it is in none."""
    return path.partition("/")[0] if "/" in path else ""
