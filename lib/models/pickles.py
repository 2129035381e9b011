"""Convert pickled weights to safetensors without running code in the pickles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.core import manifest
from lib.core.errors import UsageError
from lib.models import architecture
from lib.models.directory import INDEX, WEIGHTS
from lib.models.tensor_file import write_tensors
from lib.models.tensors import DTYPES


def convert_pickles(
    directory: Path, names: Sequence[str], advance: Callable[[int], None], trust_code: bool = False
) -> list[dict[str, Any]]:
    """Replace pickles by safetensors, file by file, and return the manifest entries.

    names: one file or all shards; their digests must have been checked. advance: called with the
    size in bytes of each converted pickle. Each pickle is deleted after its content has been
    written. trust_code: see architecture.read_config. Raises UsageError if a pickle contains
    anything other than tensors.
    """
    tied = architecture.build_on_meta(directory, trust_code=trust_code).all_tied_weights_keys
    entries: list[dict[str, Any]] = []
    file_of: dict[str, str] = {}
    total = 0
    for name in names:
        pickled = directory / name
        target = pickled.with_name(WEIGHTS if len(names) == 1 else _shard_name(name))
        tensors = _drop_tied(_read_pickle(pickled), tied)
        entries.append(write_tensors(target, tensors))
        file_of |= {key: target.name for key in tensors}
        total += sum(tensor.nbytes for tensor in tensors.values())
        advance(pickled.stat().st_size)
        del tensors  # they are mapped from the file that is deleted next
        pickled.unlink()
    if len(names) > 1:
        manifest.write_json(
            directory / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of}
        )
        entries.append(manifest.file_entry(directory, directory / INDEX, "sha256"))
    return entries


def _shard_name(name: str) -> str:
    return f"{name.removesuffix('.bin').replace('pytorch_model', 'model')}.safetensors"


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a pickle, mapped from the file if its format allows that."""

    def load(mmap: bool) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they only concern torch's own code
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        try:
            content = load(mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            content = load(mmap=False)
    except Exception as error:  # damaged files cause many kinds of errors in torch
        # torch's own message, which suggests to turn off the protection, is not shown.
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UsageError(
            f"{path.name} cannot be read without running its code"
            if forbidden
            else f"{path.name} is damaged or not a PyTorch file",
            expected="a dictionary of tensors, as torch.save writes them",
            found=f"it calls {forbidden[1]}" if forbidden else type(error).__name__,
        ) from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    others = (
        [
            f"{key}: {type(value).__name__}"
            for key, value in content.items()
            if not isinstance(value, Tensor)
            or value.dtype not in DTYPES
            or value.layout is not torch.strided
        ]
        if isinstance(content, dict)
        else [type(content).__name__]
    )
    if others:
        raise UsageError(
            f"{path.name} contains other objects than tensors",
            found="\n".join(others[:5]),
            expected="a dictionary of tensors, as torch.save writes them",
        )
    return content


def _drop_tied(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Drop the second name of each tied weight if both names share their memory.

    Other tensors that share memory are stored twice, because safetensors cannot express sharing.
    """

    def memory(tensor: Tensor) -> tuple[int, torch.Size]:
        return tensor.data_ptr(), tensor.shape

    return {
        key: tensor
        for key, tensor in tensors.items()
        if not (
            (source := tied.get(key, key)) in tensors
            and source != key
            and memory(tensors[source]) == memory(tensor)
        )
    }
