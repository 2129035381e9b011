"""Messages for `-d` that names no dataset, with the commands that make one of the files there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lib.core import commands, manifest, paths
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST
from lib.tokens import columns, raw_shards

DATASETS_ROOT = Path("hf_datasets")
OPTION = ("-d", "--dataset-name", "--dataset")  # of stage 04, and of launch/airgap.py
_RAW_ROOT = Path("raw_text")
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/[\w.-]+")
# Files of data, and not the README, licence and lists that lie beside them on the Hub.
_DATA = ("*.parquet", "*.jsonl*", "*.json.gz")
_OF_FILES = {".arrow", ".parquet", ".json", ".jsonl", ".gz", ".txt", ".csv"}


def missing(path: Path) -> ArtifactError:
    """Return the error for a dataset that is not there, with what makes it of what is there."""
    there = sorted(p.name for p in DATASETS_ROOT.glob("*") if (p / MANIFEST).exists())
    left = manifest.unfinished(path)
    if not left and _is_of_the_hub(path):
        return _not_prepared(path.as_posix())
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


def raw(path: Path, problem: str, found: str = "") -> UsageError:
    """Return the error for raw text where a dataset is needed, with the commands that make one."""
    folder = path.parent if path.is_file() else path
    target = DATASETS_ROOT / ("corpus" if (folder / MANIFEST).exists() else folder.resolve().name)
    with_target = commands.replaced(OPTION, path, target)
    streamed = commands.as_typed("--streaming", "--max-steps", 100)
    if (target / MANIFEST).exists():
        hint = f"{target} may be what is meant:"
        run = with_target
    elif not DATASETS_ROOT.resolve().is_relative_to(folder.resolve()):
        hint = "make one:"
        run = "\n".join(
            (
                commands.script(
                    "02_build_hf_dataset.py", "--data-folder", folder, "--save-dir", target
                ),
                with_target,
            )
        )
    elif path.is_file() and raw_shards.is_shard(path.name):
        hint = "stage 02 reads directories; to try the file as it is:"
        run = streamed
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


def text(path: Path, problem: str, names: Collection[str], found: str) -> UsageError:
    """Return the error for an Arrow dataset that has other columns, named here, than `text`."""
    if not columns.hold_chats(names):
        if "input_ids" in names:
            return UsageError(
                problem,
                found=found,
                hint="it is tokenised already: give stage 02 "
                "the text or the conversations that it was made of",
            )
        if "text" in names and found == columns.lack({"text": "null"}):
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
    return chats(
        path,
        f"{dataset} holds conversations, and was not made by stage 02",
        f"{found}; missing columns of a chat dataset: {missing}",
    )


def chats(path: Path, problem: str, found: str) -> UsageError:
    """Return the error for conversations that stage 02 did not write, with what converts them."""
    return UsageError(
        problem, found=found, hint="make a chat dataset of it:", run=commands_for_chats(path)
    )


def commands_for_chats(path: Path) -> str:
    """Return the commands that make a chat dataset of an Arrow dataset, and train on it.

    path: of the dataset, its split `train`, or a file in it.
    """
    folder = path.parent if path.is_file() else path
    dataset = folder.parent if folder.name in ("train", "validation") else folder
    if (folder / "dataset_dict.json").exists():
        folder = folder / "train"
    return _chat_commands(folder, f"{dataset.resolve().name}-chat", (dataset, path))


def streamed_chats(path: Path, names: Collection[str]) -> UsageError | None:
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
    folder = path.parent if path.is_file() else path
    return UsageError(
        problem,
        found=f"fields {found} in {path}",
        hint="make a chat dataset of it:",
        run=_chat_commands(
            folder, folder.resolve().name, (path,), drop=("--streaming", "--text-field")
        ),
    )


def _chat_commands(
    folder: Path, name: str, given: Collection[Path], drop: Sequence[str] = ()
) -> str:
    """Return the commands that make a chat dataset of a folder, and train on it.

    given: what -d may have named.
    """
    target = DATASETS_ROOT / name
    make = commands.script(
        "02_build_hf_dataset.py", "--data-folder", folder, "--save-dir", target, "--format", "chat"
    )
    as_before = commands.as_typed(drop=drop)
    org, _, rest = next(iter(given)).name.partition("--")
    each = (
        commands.replaced(OPTION, text, target, drop=drop)
        for path in given
        for text in (path, path.name, f"{org}/{rest}")
    )
    train = next((command for command in each if command != as_before), as_before)
    return f"{make}\n{train}"


def _is_of_the_hub(path: Path) -> bool:
    """Tell whether a path that is not there can be the name of a dataset on the Hub."""
    name = _HUB_NAME.fullmatch(path.as_posix())
    if not name or path.suffix in _OF_FILES:
        return False
    return Path(name[1]) != DATASETS_ROOT and not Path(name[1]).exists()


def _not_prepared(name: str) -> ArtifactError:
    """Return the error for the name of a dataset on the Hub, of which nothing is prepared here."""
    fetched, target = (root / paths.model_dir_name(name) for root in (_RAW_ROOT, DATASETS_ROOT))
    problem = f"dataset {name} is not prepared"
    expected = f"{target}, made by stage 02"
    if cached := sorted(set(_cached(name))):
        return ArtifactError(
            problem,
            expected=expected,
            found="\n".join(map(str, cached)),
            hint="the cache of `datasets` on this machine holds it:",
            run=commands.replaced(OPTION, name, cached[0]),
        )
    words = [word for glob in _DATA for word in ("--include", glob)]
    fetch = (
        []
        if (fetched / paths.RAW_RECORD / MANIFEST).exists()
        else [commands.script("03_download_model.py", "--dataset-name", name, *words)]
    )
    build = commands.script(
        "02_build_hf_dataset.py", "--data-folder", fetched, "--save-dir", target
    )
    return ArtifactError(
        problem,
        expected=expected,
        hint=("on a machine with a network; --include chooses the files, and " if fetch else "")
        + "--fields NAME would keep only the field that holds the text:",
        run="\n".join([*fetch, build, commands.as_typed()]),
    )


def _cached(name: str) -> Iterator[Path]:
    """Yield the directories of Arrow files that the cache of `datasets` holds of a dataset."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    root = Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()
    wanted = name.replace("/", "___").lower()
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name.lower() == wanted:
            yield from (file.parent for file in folder.rglob("*-train*.arrow"))
