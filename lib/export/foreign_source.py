"""Find the checkpoint of another trainer that stage 05 exports, and the model that it belongs to.

The trainer wrote it with torch.distributed.checkpoint (DCP): one file per rank, and `.metadata`.
Such a checkpoint contains no digests, so its bytes cannot be verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.core import artifacts, commands, file_identity, hashing, paths, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import DCP_METADATA, Experiment
from lib.models import directory, lookup

OPTION = "--from-dcp"
# Subdirectories in which trainers keep a DCP checkpoint: `checkpoint` of an offline pipeline, and
# `pytorch_model_fsdp_0` of accelerate, which the Hugging Face Trainer uses too.
_FOLDERS = ("", "checkpoint", "pytorch_model_fsdp_0")
# Files with the training progress, of the offline pipeline and of the Hugging Face Trainer.
_PROGRESS_FILES = ("state.json", "trainer_state.json")
_PROGRESS_FIELDS = ("epoch", "global_step")
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


@dataclass(frozen=True)
class ForeignSource:
    """The checkpoint of another trainer, and the model directory that its export needs.

    checkpoint: the directory with `.metadata`. model_dir: the directory with the config and the
    tokenizer. identities: of the files of both, before any of them was read. progress: epoch and
    step, if a file beside the weights contains them.
    """

    checkpoint: Path
    model_dir: Path
    identities: file_identity.Identities
    progress: dict[str, int | float]

    @classmethod
    def find(cls, root: Path, model_name: str, cache_dir: Path) -> ForeignSource:
        """Find the checkpoint in a directory, and a model by its name or directory.

        Raises the errors of `find_foreign_checkpoint` and `lookup.find_model`.
        """
        checkpoint = find_foreign_checkpoint(root)
        model_dir = lookup.find_model(model_name, cache_dir)
        files = [checkpoint / DCP_METADATA, *sorted(checkpoint.glob("*.distcp"))]
        identities = file_identity.read_identities(files + directory.list_model_files(model_dir))
        progress = _read_progress([checkpoint, checkpoint.parent])
        return cls(checkpoint, model_dir, identities, progress)

    def describe_progress(self) -> str:
        """Return the step and epoch of the other trainer as text, "" if unknown."""
        return " of ".join(
            f"{words} {self.progress[name]:,}"
            for name, words in (("global_step", "step"), ("epoch", "epoch"))
            if name in self.progress
        )

    def list_inputs(self) -> dict[str, str]:
        """Return the digests of the inputs that decide the content of the export.

        Of the files with tensors, only the sizes count.
        """
        sizes = [
            [path.name, file.bytes]
            for path, file in self.identities.items()
            if file and path.parent == self.checkpoint
        ]
        metadata = hashing.file_digest(self.checkpoint / DCP_METADATA, "sha256")
        tokenizer = {
            path.name: hashing.file_digest(path, "sha256")
            for path in artifacts.list_tokenizer_files(self.model_dir)
        }
        return {
            "checkpoint": hashing.fingerprint([metadata, sizes]),
            "config": hashing.file_digest(self.model_dir / directory.CONFIG, "sha256"),
            "tokenizer": hashing.fingerprint(tokenizer),
        }

    def require_unchanged(self) -> None:
        """Raise UsageError if a file has changed since it was found."""
        file_identity.require_same(
            self.identities,
            f"the checkpoint {self.checkpoint} or the model {self.model_dir}",
            "it was read",
        )


def find_foreign_checkpoint(root: Path) -> Path:
    """Return the directory of the checkpoint in a directory, without reading its tensors.

    Raises ArtifactError if there is none or if it is incomplete, and UsageError for a checkpoint
    of this project.
    """
    if path := _find_own_checkpoint(root):
        raise UsageError(
            f"{path} is a checkpoint of this project, so it needs no {OPTION}",
            run=commands.script(
                "05_export_checkpoint.py",
                *("-e", path.parents[1], "--step", paths.step_of(path.name)),
            ),
        )
    folders = [root / name for name in _FOLDERS]
    found = next((path for path in folders if (path / DCP_METADATA).is_file()), None)
    if found is None:
        raise _make_missing_error(root, folders)
    return found


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


def _make_missing_error(root: Path, folders: list[Path]) -> ArtifactError:
    """Return the error for a path that is no directory, or for a directory without `.metadata`."""
    if not root.is_dir():
        return ArtifactError(f"{OPTION}: there is no directory {root}")
    interrupted = next((path for path in folders if any(path.glob("*.distcp"))), None)
    if interrupted is not None:
        return ArtifactError(
            f"{interrupted} has no {DCP_METADATA}, which a save writes last: "
            "the save was interrupted",
            hint="use an older checkpoint of that run",
        )
    others = list(islice(_list_below(root), _SHOWN + 1))
    remedy = next((hint for name, hint in _OTHER_FORMATS.items() if any(root.glob(name))), "")
    return ArtifactError(
        f"{OPTION}: {root} is not a checkpoint of torch.distributed.checkpoint",
        expected=f"a directory with {DCP_METADATA} and .distcp files, or one that contains such a "
        f"directory under the name {' or '.join(filter(None, _FOLDERS))}",
        found=f"several checkpoints below it; name one of them\n{units.join_lines(others, _SHOWN)}"
        if others
        else "",
        hint="" if others else remedy or "for a directory with config.json and safetensors, use -m",
    )


def _list_below(root: Path) -> Iterator[str]:
    """Yield the checkpoints in the children and grandchildren of a directory."""
    for pattern in (f"*/{DCP_METADATA}", f"*/*/{DCP_METADATA}"):
        yield from (str(path.parent) for path in sorted(root.glob(pattern)))
