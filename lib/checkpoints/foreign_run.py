"""Find the checkpoint of another trainer, from which a new run loads its initial weights.

The trainer wrote it with torch.distributed.checkpoint (DCP): one file per rank, and `.metadata`.
Such a checkpoint contains no digests, so its bytes cannot be verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lib.checkpoints import commit
from lib.core import commands, file_identity, hashing, paths, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import Experiment

OPTION = "--resume-from-foreign"
METADATA = ".metadata"
# Subdirectories in which trainers keep a DCP checkpoint: `checkpoint` of an offline pipeline, and
# `pytorch_model_fsdp_0` of accelerate, which the Hugging Face Trainer uses too.
_FOLDERS = ("", "checkpoint", "pytorch_model_fsdp_0")
# Files with the training progress, of the offline pipeline and of the Hugging Face Trainer.
_PROGRESS_FILES = ("state.json", "trainer_state.json")
_PROGRESS_FIELDS = ("epoch", "global_step")
_SCHEDULERS = ("lr_scheduler.pt", "scheduler.pt", "scheduler.bin")
# Files of checkpoints in other formats, and what to do with them.
_OTHER_FORMATS = {
    "pytorch_model_fsdp*.bin": "accelerate saved one pickle (FULL_STATE_DICT). Save again with "
    "SHARDED_STATE_DICT, or rename it to pytorch_model.bin beside config.json and the tokenizer, "
    "and give that directory to -m, which prints the command that converts it",
    "zero_to_fp32.py": "DeepSpeed saved it: `python zero_to_fp32.py . OUT --safe_serialization` in "
    "this directory writes safetensors, which need config.json and the tokenizer beside them for "
    "-m",
    "latest_checkpointed_iteration.txt": "Megatron-LM saved it; its tools/checkpoint/convert.py "
    "writes a directory for -m",
    "*.pt": "these are pickles; write safetensors with the trainer that saved them",
    "*.safetensors": "these are safetensors: put config.json and the tokenizer of the model beside "
    "them, and use -m",
}
_SHOWN = 8


class ForeignRun(NamedTuple):
    """A checkpoint of another trainer.

    directory: contains `.metadata`. files: the identities of its files, read before the
    fingerprint, which covers `.metadata` and the sizes of the files. progress: epoch and step, if a
    file beside the weights contains them. scheduler: name of the file with the state of the
    learning-rate schedule, "" if there is none.
    """

    directory: Path
    files: file_identity.Identities
    fingerprint: str
    progress: dict[str, int | float]
    scheduler: str

    def describe_progress(self) -> str:
        """Return the step and epoch of the other trainer as text, "" if unknown."""
        return " of ".join(
            f"{words} {self.progress[name]:,}"
            for name, words in (("global_step", "step"), ("epoch", "epoch"))
            if name in self.progress
        )

    def describe_omissions(self) -> str:
        """Return a text that lists the state that a new run does not load."""
        file = f" ({self.scheduler})" if self.scheduler else ""
        return f"optimizer state, learning-rate schedule{file}, step and position in the data"


def find_foreign_run(root: Path, option: str = OPTION) -> ForeignRun:
    """Return the checkpoint in a directory, without reading its tensors.

    option: the option that names the directory, for the errors. Raises ArtifactError if there is
    none or if it is incomplete, and UsageError for a checkpoint of this project.
    """
    if path := _find_own_checkpoint(root):
        export = ("-e", path.parents[1], "--step", paths.step_of(path.name))
        raise UsageError(
            f"{path} is a checkpoint of this project, so it needs no {option}",
            run=commands.as_typed("--resume", path, drop=[option])
            if option == OPTION
            else commands.script("05_export_checkpoint.py", *export),
        )
    folders = [root / name for name in _FOLDERS]
    directory = next((path for path in folders if (path / METADATA).is_file()), None)
    if directory is None:
        raise _make_missing_error(root, folders, option)
    files = file_identity.read_identities(
        [directory / METADATA, *sorted(directory.glob("*.distcp"))]
    )
    sizes = [[path.name, file.bytes] for path, file in files.items() if file]
    return ForeignRun(
        directory,
        files,
        hashing.fingerprint([hashing.file_digest(directory / METADATA, "sha256"), sizes]),
        _read_progress([directory, directory.parent]),
        next((name for name in _SCHEDULERS if (directory.parent / name).is_file()), ""),
    )


def _find_own_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of this project in a directory, or the newest one of a run there."""
    for path in (root, root.parent):
        if (path / commit.COMMIT).is_file():
            return path.resolve()
    for checkpoints in (root, Experiment(root.parent, root.name).checkpoints):
        if newest := commit.find_newest(checkpoints):
            return newest.path.resolve()
    return None


def _read_progress(folders: list[Path]) -> dict[str, int | float]:
    """Return the step and epoch from the first known file that contains them."""
    for path in (folder / name for folder in folders for name in _PROGRESS_FILES):
        content: dict[str, Any] = records.read_mapping(path)
        progress = {
            name: content[name]
            for name in _PROGRESS_FIELDS
            if type(content.get(name)) in (int, float) and 0 <= content[name] < math.inf
        }
        if progress:
            return progress
    return {}


def _make_missing_error(root: Path, folders: list[Path], option: str) -> ArtifactError:
    """Return the error for a path that is no directory, or for a directory without `.metadata`."""
    if not root.is_dir():
        return ArtifactError(f"{option}: there is no directory {root}")
    interrupted = next((path for path in folders if any(path.glob("*.distcp"))), None)
    if interrupted is not None:
        return ArtifactError(
            f"{interrupted} has no {METADATA}, which a save writes last: the save was interrupted",
            hint="use an older checkpoint of that run",
        )
    others = list(islice(_list_below(root), _SHOWN + 1))
    remedy = next((hint for name, hint in _OTHER_FORMATS.items() if any(root.glob(name))), "")
    return ArtifactError(
        f"{option}: {root} is not a checkpoint of torch.distributed.checkpoint",
        expected=f"a directory with {METADATA} and .distcp files, or one that contains such a "
        f"directory under the name {' or '.join(filter(None, _FOLDERS))}",
        found=f"several checkpoints below it; name one of them\n{units.join_lines(others, _SHOWN)}"
        if others
        else "",
        hint="" if others else remedy or "for a directory with config.json and safetensors, use -m",
    )


def _list_below(root: Path) -> Iterator[str]:
    """Yield the checkpoints in the children and grandchildren of a directory."""
    for pattern in (f"*/{METADATA}", f"*/*/{METADATA}"):
        yield from (str(path.parent) for path in sorted(root.glob(pattern)))
