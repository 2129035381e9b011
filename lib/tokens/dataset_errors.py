"""Messages for `-d` that names no dataset, with the commands that make one of the files there."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from lib.core import commands, manifest, paths
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST
from lib.tokens import columns, raw_reader, raw_shards

DATASETS_ROOT = Path("hf_datasets")
OPTION = ("-d", "--dataset-name", "--dataset")  # of stage 04, and of launch/airgap.py
_RAW_ROOT = Path("raw_text")
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/[\w.-]+")
# A first portion of a dataset whose files are known, and how much it is. Of any other, all files
# may be terabytes: only what describes them is fetched.
FIRST_FILES = {"allenai/c4": ("en/c4-train.0000*-of-01024.json.gz", "10 of 1,024 files, 3 GB")}
_DESCRIPTION = "README.md"
_OF_FILES = {".arrow", ".parquet", ".json", ".jsonl", ".gz", ".txt", ".csv"}
_SUFFIXES = _OF_FILES | {".ndjson", *raw_shards.COMPRESSIONS}
_OF_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
_LOOKED_AT = 1000  # files of a directory


def make_missing_error(path: Path) -> ArtifactError:
    """Return the error for a dataset that is not there, with what makes it of what is there."""
    there = sorted(p.name for p in DATASETS_ROOT.glob("*") if (p / MANIFEST).exists())
    left = manifest.describe_leftovers(path)
    if not left and _is_hub_name(path):
        return _make_unprepared_error(path.as_posix())
    remedy: manifest.Remedy = (
        {"hint": "-d takes one of these"}
        if there and not left
        else {"hint": "stages 01 and 02 make a dataset of raw text"}
    )
    if (left or not there) and (Path("splits").is_dir() or _RAW_ROOT.is_dir()):
        organise = [] if Path("splits").is_dir() else [commands.script("01_organize_data.py")]
        remedy = {
            "run": "\n".join(
                [
                    *organise,
                    commands.script(
                        "02_build_hf_dataset.py", "--data-folder", "splits", "--save-dir", path
                    ),
                ]
            )
        }
    return ArtifactError(
        f"dataset {path} does not exist",
        found=left or f"finished under {DATASETS_ROOT}/: {', '.join(there) or 'none'}",
        **remedy,
    )


def make_raw_text_error(path: Path, problem: str, found: str = "") -> UsageError:
    """Return the error for raw text where a dataset is needed, with the commands that make one."""
    name = "corpus" if (path / MANIFEST).exists() else _choose_name(path)
    target = DATASETS_ROOT / name
    if (target / MANIFEST).exists():
        hint = f"{target} may be what is meant:"
        run = commands.replaced(OPTION, path, target)
    elif _is_saved_file(path):
        hint = f"it is a file of the dataset {path.parent}:"
        run = commands.replaced(OPTION, path, path.parent)
    elif path.is_file() or not DATASETS_ROOT.resolve().is_relative_to(path.resolve()):
        hint = "make one:"
        run = _list_commands(path, name, (path,), is_chat=has_chats(path))
    else:
        hint = "stage 02 makes one of a directory of raw text"
        run = ""
    return UsageError(
        problem,
        found=found,
        expected="a dataset that stage 02 has made, Arrow "
        "files, or with --streaming JSON Lines or Parquet",
        hint=hint,
        run=run,
    )


def make_columns_error(path: Path, problem: str, names: Collection[str], found: str) -> UsageError:
    """Return the error for an Arrow dataset that has other columns, named here, than `text`."""
    if not columns.hold_chats(names):
        if "input_ids" in names:
            return UsageError(
                problem,
                found=found,
                hint="it is tokenised already: give stage 02 "
                "the text or the conversations that it was made of",
            )
        if "text" in names and found == columns.describe_text_problem({"text": "null"}):
            return UsageError(
                problem, found=found, expected="a split with rows, or a dataset without this split"
            )
        return UsageError(
            problem,
            found=found,
            hint=(
                "stage 02 makes a dataset of it with --fields NAME"
                if path.is_file()
                else "rename one with `dataset.rename_column`, or make it by stage 02 with --fields"
            ),
        )
    folder = path.parent if path.is_file() else path
    dataset = folder.parent if folder.name in ("train", "validation") else folder
    missing = ", ".join(name for name in columns.CHAT_COLUMNS if name not in names)
    return make_chats_error(
        path,
        f"{dataset} holds conversations, and was not made by stage 02",
        f"{found}; missing columns of a chat dataset: {missing}",
    )


def make_chats_error(path: Path, problem: str, found: str) -> UsageError:
    """Return the error for conversations that stage 02 did not write, with what converts them."""
    return UsageError(
        problem, found=found, hint="make a chat dataset of it:", run=list_chat_commands(path)
    )


def list_chat_commands(path: Path) -> str:
    """Return the commands that make a chat dataset of an Arrow dataset, and train on it.

    path: of the dataset, its split `train`, or a file in it.
    """
    if path.is_file() and not _is_saved_file(path):
        return _list_commands(path, f"{_choose_name(path)}-chat", (path, path.parent), is_chat=True)
    folder = path.parent if path.is_file() else path
    dataset = folder.parent if folder.name in ("train", "validation") else folder
    folder = folder / "train" if (folder / "dataset_dict.json").exists() else folder
    return _list_commands(folder, f"{dataset.resolve().name}-chat", (dataset, path), is_chat=True)


def make_streaming_error(path: Path, names: Collection[str]) -> UsageError | None:
    """Return the error for conversations with --streaming, None where the fields are others.

    path: as -d names it. names: of the fields of a record.
    """
    if not columns.hold_chats(names):
        return None
    problem = "--streaming reads plain text, and not conversations"
    found = ", ".join(names)
    if not path.exists():  # on the Hub
        return UsageError(
            problem,
            found=f"fields {found}",
            hint="stage 03 fetches the files, and "
            "stage 02 makes a dataset of them with --format chat",
        )
    drop = ("--streaming", "--text-field")
    return UsageError(
        problem,
        found=f"fields {found} in {path}",
        hint="make a chat dataset of it:",
        run=_list_commands(path, _choose_name(path), (path,), is_chat=True, drop=drop),
    )


def has_chats(path: Path) -> bool:
    """Return whether a raw file, or the first one in a directory, holds conversations."""
    files = [path] if path.is_file() else islice(path.rglob("*"), _LOOKED_AT)
    shard = next((file for file in files if raw_shards.is_shard(file.name)), None)
    if shard is None or not shard.is_file():
        return False
    return columns.hold_chats(raw_reader.read_field_names(shard, raw_shards.Span(shard.name)))


def _is_saved_file(path: Path) -> bool:
    """Return whether a path is a file of a dataset that `save_to_disk` wrote."""
    return path.is_file() and any((path.parent / mark).exists() for mark in _OF_SAVED)


def _choose_name(path: Path) -> str:
    """Return the name for a dataset of a directory, or of a file: its own without suffixes."""
    path = path.resolve() if path.is_dir() else path
    name = path.name
    while path.is_file() and Path(name).suffix.lower() in _SUFFIXES:
        name = Path(name).stem
    return name


def _find_data_folder(path: Path) -> tuple[list[str], Path]:
    """Return a directory for stage 02, and the command that makes it of a single file, if any.

    Files beside the one that was named, or below, are not taken.
    """
    if not path.is_file():
        return [], path
    splits = Path(f"splits-{_choose_name(path)}")
    words = ["--src-dir", path.parent, "--dst-root", splits, "--num-dirs", 1]
    words += ["--include", glob.escape(path.name)]
    if any(entry.is_dir() for entry in path.parent.iterdir()):
        words += ["--exclude", "*/*"]
    if path.is_symlink():
        words.append("--follow-symlinks")
    return [commands.script("01_organize_data.py", *words)], splits


def _list_commands(
    path: Path, name: str, given: Collection[Path], is_chat: bool, drop: Sequence[str] = ()
) -> str:
    """Return the commands that make a dataset of a directory or a file, and train on it.

    name: of the dataset. given: what -d may have named.
    """
    target = DATASETS_ROOT / name
    organise, folder = _find_data_folder(path)
    words = ["--data-folder", folder, "--save-dir", target]
    if is_chat:
        words += ["--format", columns.CHAT]
    make = [*organise, commands.script("02_build_hf_dataset.py", *words)]
    as_before = commands.as_typed(drop=drop)
    org, _, rest = next(iter(given)).name.partition("--")
    each = (
        commands.replaced(OPTION, text, target, drop=drop)
        for path in given
        for text in (path, path.name, f"{org}/{rest}")
    )
    train = next((command for command in each if command != as_before), as_before)
    return "\n".join([*make, train])


def _is_hub_name(path: Path) -> bool:
    """Tell whether a path that is not there can be the name of a dataset on the Hub."""
    name = _HUB_NAME.fullmatch(path.as_posix())
    if not name or path.suffix in _OF_FILES:
        return False
    return Path(name[1]) != DATASETS_ROOT and not Path(name[1]).exists()


def _make_unprepared_error(name: str) -> ArtifactError:
    """Return the error for the name of a dataset on the Hub, of which nothing is prepared here."""
    fetched, target = (root / paths.model_dir_name(name) for root in (_RAW_ROOT, DATASETS_ROOT))
    problem = f"dataset {name} is not prepared"
    expected = f"{target}, made by stage 02"
    if cached := sorted(set(_find_cached(name))):
        return ArtifactError(
            problem,
            expected=expected,
            found="\n".join(map(str, cached)),
            hint="the cache of `datasets` on this machine holds it:",
            run=commands.replaced(OPTION, name, cached[0]),
        )
    build = commands.script(
        "02_build_hf_dataset.py", "--data-folder", fetched, "--save-dir", target
    )
    if has_chats(fetched):
        build += f" --format {columns.CHAT}"
    has_record = (fetched / paths.RAW_RECORD / MANIFEST).exists()
    files = {path.name for path in fetched.iterdir()} if has_record else set()
    first, size = FIRST_FILES.get(name, (_DESCRIPTION, ""))
    fetch = commands.script("03_download_model.py", "--dataset-name", name, "--include", first)
    fields = "--fields NAME would keep only the field that holds the text:"
    if files - {_DESCRIPTION, paths.RAW_RECORD}:
        run = "\n".join([build, commands.as_typed()])
        return ArtifactError(problem, expected=expected, hint=fields, run=run)
    if size:
        return ArtifactError(
            problem,
            expected=expected,
            hint=f"on a machine with a network; these are {size}, a further --include fetches "
            f"more, and {fields}",
            run="\n".join([fetch, build, commands.as_typed()]),
        )
    is_described = _DESCRIPTION in files
    run = "" if is_described else fetch
    return ArtifactError(
        problem,
        expected=expected,
        found=f"only {fetched / _DESCRIPTION}" if is_described else "",
        hint="a dataset of the Hub can be terabytes. Its description names its files; stage 03 "
        f"fetches those that --include GLOB matches into {fetched}, and stage 02 makes {target} of "
        "them" + ("" if is_described else ". On a machine with a network, first the description:"),
        run=run,
    )


def _find_cached(name: str) -> Iterator[Path]:
    """Yield the directories of Arrow files that the cache of `datasets` holds of a dataset."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    root = Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()
    wanted = name.replace("/", "___").lower()
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name.lower() == wanted:
            yield from (file.parent for file in folder.rglob("*-train*.arrow"))
