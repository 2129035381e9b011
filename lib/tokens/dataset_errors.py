"""Create the errors for a `-d` that names no dataset, with commands that build one."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lib.core import commands, manifest, paths
from lib.core.artifacts import NotADataset
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.paths import MANIFEST
from lib.tokens import columns, raw_reader, raw_shards

DATASETS_ROOT = Path("hf_datasets")
OPTION = ("-d", "--dataset-name", "--dataset")  # in stage 04 and launch/airgap.py
_RAW_ROOT = Path("raw_text")
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/[\w.-]+")
# A first portion of a dataset whose files are known, and its size. The files of any other dataset
# may be terabytes, so only its description is fetched.
FIRST_FILES = {"allenai/c4": ("en/c4-train.0000*-of-01024.json.gz", "10 of 1,024 files, 3 GB")}
_DESCRIPTION = "README.md"
_OF_FILES = {".arrow", ".parquet", ".json", ".jsonl", ".gz", ".txt", ".csv"}
_SUFFIXES = _OF_FILES | {".ndjson", *raw_shards.COMPRESSIONS}
_OF_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
# Columns of datasets that other trainers have tokenised, and what these were made from. The last
# row fits any of them.
_PREPARED: tuple[tuple[set[str], str, str], ...] = (
    ({"images", "videos", "audios"}, "LLaMA-Factory", "the files that its dataset_info.json names"),
    ({"completion_mask"}, "TRL", "the dataset that SFTTrainer was given"),
    ({"assistant_masks"}, "TRL", "the dataset that SFTTrainer was given"),
    ({"seq_lengths"}, "TRL", "the dataset that SFTTrainer was given"),
    ({"position_ids", "labels"}, "Axolotl", "the datasets in the YAML file of the run"),
    (set(), "another program", "the texts or the conversations that it was made from"),
)
_MOST_FILES = 1000  # of a directory


def make_missing_error(path: Path) -> ArtifactError:
    """Return the error for a missing dataset, with commands that build it from local files."""
    finished = sorted(p.name for p in DATASETS_ROOT.glob("*") if (p / MANIFEST).exists())
    leftovers = manifest.describe_leftovers(path)
    if not leftovers and _is_hub_name(path):
        return _make_unprepared_error(path.as_posix())
    remedy: manifest.Remedy = (
        {"hint": "choose one of these with -d"}
        if finished and not leftovers
        else {"hint": "stages 01 and 02 build a dataset from raw text"}
    )
    if (leftovers or not finished) and (Path("splits").is_dir() or _RAW_ROOT.is_dir()):
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
        found=leftovers or f"finished under {DATASETS_ROOT}/: {', '.join(finished) or 'none'}",
        **remedy,
    )


def make_content_error(path: Path, error: NotADataset) -> UsageError:
    """Return the error for a path without a dataset, with commands that choose or build one."""
    if not error.datasets:
        return make_raw_text_error(path, error.problem, error.found)
    first, *others = error.datasets
    return UsageError(
        f"{path} is not a dataset but contains {'several' if others else 'one'}",
        found=", ".join(dataset.name for dataset in error.datasets),
        hint=f"choose one with -d, for example {first.name}:" if others else "choose it with -d:",
        run=commands.replace_value(OPTION, path, first),
    )


def make_raw_text_error(path: Path, problem: str, found: str = "") -> UsageError:
    """Return the error for raw text instead of a dataset, with commands that build one."""
    name = "corpus" if (path / MANIFEST).exists() else _choose_name(path)
    target = DATASETS_ROOT / name
    if (target / MANIFEST).exists():
        hint = f"did you mean {target}?"
        run = commands.replace_value(OPTION, path, target)
    elif _is_saved_file(path):
        hint = f"it is a file of the dataset {path.parent}. Use the directory:"
        run = commands.replace_value(OPTION, path, path.parent)
    elif path.is_file() or not DATASETS_ROOT.resolve().is_relative_to(path.resolve()):
        hint = "build a dataset:"
        run = _list_commands(path, name, (path,), is_chat=has_chats(path))
    else:
        hint = "stage 02 builds a dataset from a directory of raw text"
        run = ""
    return UsageError(
        problem,
        found=found,
        expected="a dataset made by stage 02, Arrow files, or with --streaming JSON Lines or "
        "Parquet",
        hint=hint,
        run=run,
    )


def make_columns_error(path: Path, problem: str, names: Collection[str], found: str) -> UsageError:
    """Return the error for an Arrow dataset without a column `text`. names: its columns."""
    if not columns.are_chat_columns(names):
        if "input_ids" in names:
            trainer, source = next(
                (trainer, source) for marks, trainer, source in _PREPARED if marks <= {*names}
            )
            return UsageError(
                problem,
                found=found,
                hint=f"it is tokenised already, by {trainer}, for a tokenizer that it does not "
                f"name. Give stage 02 {source}; stage 04 tokenises them and masks the labels",
            )
        if "text" in names and found == columns.describe_text_problem({"text": "null"}):
            return UsageError(
                problem, found=found, expected="a split with rows, or a dataset without this split"
            )
        return UsageError(
            problem,
            found=found,
            hint=(
                "stage 02 builds a dataset from it with --fields NAME"
                if path.is_file()
                else "rename a column with `dataset.rename_column`, or use stage 02 with --fields"
            ),
        )
    folder = path.parent if path.is_file() else path
    dataset = folder.parent if folder.name in ("train", "validation") else folder
    missing = ", ".join(name for name in columns.CHAT_COLUMNS if name not in names)
    return make_chats_error(
        path,
        f"{dataset} contains conversations and was not made by stage 02",
        f"{found}; missing columns of a chat dataset: {missing}",
    )


def make_chats_error(path: Path, problem: str, found: str) -> UsageError:
    """Return the error for chats that stage 02 did not write, with commands to convert them."""
    return UsageError(
        problem, found=found, hint="build a chat dataset from it:", run=list_chat_commands(path)
    )


def list_chat_commands(path: Path) -> str:
    """Return the commands that build a chat dataset from an Arrow dataset, and train on it.

    path: the dataset, its split `train`, or a file in it.
    """
    if path.is_file() and not _is_saved_file(path):
        return _list_commands(path, f"{_choose_name(path)}-chat", (path, path.parent), is_chat=True)
    folder = path.parent if path.is_file() else path
    dataset = folder.parent if folder.name in ("train", "validation") else folder
    folder = folder / "train" if (folder / "dataset_dict.json").exists() else folder
    return _list_commands(folder, f"{dataset.resolve().name}-chat", (dataset, path), is_chat=True)


def make_streaming_error(path: Path, names: Collection[str]) -> UsageError | None:
    """Return the error for conversations with --streaming, or None for other fields.

    path: the value of -d. names: the fields of a record.
    """
    if not columns.are_chat_columns(names):
        return None
    problem = "--streaming reads plain text, not conversations"
    found = ", ".join(names)
    if not path.exists():  # on the Hub
        return UsageError(
            problem,
            found=f"fields {found}",
            hint="stage 03 fetches the files, and stage 02 builds a dataset from them with "
            "--format chat",
        )
    drop = ("--streaming",)
    return UsageError(
        problem,
        found=f"fields {found} in {path}",
        hint="build a chat dataset from it:",
        run=_list_commands(path, _choose_name(path), (path,), is_chat=True, drop=drop),
    )


def has_chats(path: Path) -> bool:
    """Return whether a raw or Arrow file, or the first one of a directory, contains chats."""
    files = [path] if path.is_file() else islice(path.rglob("*"), _MOST_FILES)
    shard = next(
        (file for file in files if raw_shards.is_shard(file.name) or file.suffix == ".arrow"), None
    )
    if shard is None or not shard.is_file():
        return False
    if shard.suffix == ".arrow":
        with suppress(StageError):  # stage 02 reports the damage
            return columns.are_chat_columns(columns.read_column_types(shard))
        return False
    return columns.are_chat_columns(raw_reader.read_field_names(shard, raw_shards.Span(shard.name)))


def _is_saved_file(path: Path) -> bool:
    """Return whether a path is a file of a dataset that `save_to_disk` wrote."""
    return path.is_file() and any((path.parent / mark).exists() for mark in _OF_SAVED)


def _choose_name(path: Path) -> str:
    """Return a name for the dataset built from a path: the name of the path without suffixes."""
    path = path.resolve() if path.is_dir() else path
    name = path.name
    while path.is_file() and Path(name).suffix.lower() in _SUFFIXES:
        name = Path(name).stem
    return name


def _find_data_folder(path: Path) -> tuple[list[str], Path]:
    """Return the commands that prepare a directory for stage 02, and that directory.

    A directory needs no command. For a single file, stage 01 makes a directory with that file only.
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
    path: Path, name: str, paths: Collection[Path], is_chat: bool, drop: Sequence[str] = ()
) -> str:
    """Return the commands that build a dataset from a directory or a file, and train on it.

    name: the name of the new dataset. paths: the possible values of -d in the typed command.
    """
    target = DATASETS_ROOT / name
    organise, folder = _find_data_folder(path)
    words = ["--data-folder", folder, "--save-dir", target]
    if is_chat:
        words += ["--format", columns.CHAT]
    build_commands = [*organise, commands.script("02_build_hf_dataset.py", *words)]
    typed = commands.as_typed(drop=drop)
    org, _, rest = next(iter(paths)).name.partition("--")
    candidates = (
        commands.replace_value(OPTION, text, target, drop=drop)
        for path in paths
        for text in (path, path.name, f"{org}/{rest}")
    )
    train = next((command for command in candidates if command != typed), typed)
    return "\n".join([*build_commands, train])


def _is_hub_name(path: Path) -> bool:
    """Return whether a missing path can be the name of a dataset on the Hub."""
    name = _HUB_NAME.fullmatch(path.as_posix())
    if not name or path.suffix in _OF_FILES:
        return False
    return Path(name[1]) != DATASETS_ROOT and not Path(name[1]).exists()


def _make_unprepared_error(name: str) -> ArtifactError:
    """Return the error for the name of a Hub dataset that is not prepared on this machine."""
    fetched, target = (root / paths.model_dir_name(name) for root in (_RAW_ROOT, DATASETS_ROOT))
    problem = f"dataset {name} is not prepared"
    expected = f"{target}, made by stage 02"
    if cached := sorted(set(_find_cached_files(name))):
        return ArtifactError(
            problem,
            expected=expected,
            found="\n".join(map(str, cached)),
            hint="the cache of `datasets` on this machine contains it:",
            run=commands.replace_value(OPTION, name, cached[0]),
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
    fields = "--fields NAME would keep only the field that contains the text:"
    if files - {_DESCRIPTION, paths.RAW_RECORD}:
        run = "\n".join([build, commands.as_typed()])
        return ArtifactError(problem, expected=expected, hint=fields, run=run)
    if size:
        return ArtifactError(
            problem,
            expected=expected,
            hint=f"run this on a machine with a network. It fetches {size}; a further --include "
            f"fetches more, and {fields}",
            run="\n".join([fetch, build, commands.as_typed()]),
        )
    is_described = _DESCRIPTION in files
    run = "" if is_described else fetch
    return ArtifactError(
        problem,
        expected=expected,
        found=f"only {fetched / _DESCRIPTION}" if is_described else "",
        hint="a dataset on the Hub can be terabytes. Its description names its files. Stage 03 "
        f"fetches the files that --include GLOB matches into {fetched}, and stage 02 builds "
        f"{target} from them"
        + ("" if is_described else ". On a machine with a network, fetch the description first:"),
        run=run,
    )


def _find_cached_files(name: str) -> Iterator[Path]:
    """Yield the directories in the cache of `datasets` with Arrow files of a dataset."""
    root = Path(os.environ.get("HF_DATASETS_CACHE") or paths.find_hf_home() / "datasets")
    root = root.expanduser()
    folder_name = name.replace("/", "___").lower()
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name.lower() == folder_name:
            yield from (file.parent for file in folder.rglob("*-train*.arrow"))
