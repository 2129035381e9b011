"""Hub weights (safetensors) into a sharded model, each rank reading only its part."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from lib.core.errors import ArtifactError
from lib.models import keys
from lib.models.identity import INDEX, WEIGHTS
from lib.models.initialise import restore_buffers
from lib.models.recipes import Part, Recipe, Shape
from lib.models.shards import local_slice, local_tensor, tie_again

_FLOATING = {"F64", "F32", "F16", "BF16"}
_SHOWN = 40


def load_pretrained(model: PreTrainedModel, model_dir: Path) -> None:
    """Fill a model's parameters and buffers in place from a Hub checkpoint.

    model: sharded (DTensor parameters) or plain, materialised with `to_empty`. Uses no collective;
    every rank reads its own slices. Values are cast to the parameter's dtype.
    Raises ArtifactError listing all keys that are missing, unexpected or of another shape.
    """
    tie_again(model)
    with Checkpoint(model_dir) as checkpoint, torch.no_grad():
        plan = keys.load_plan(model, checkpoint.shapes)
        tensors = model.state_dict(keep_vars=True)
        wrong_dtype = [f"{key}: holds {checkpoint.dtypes[key]} instead of floating point numbers"
                       for name, recipe in plan.recipes.items()
                       if tensors[name].is_floating_point()
                       for key in recipe.names() if checkpoint.dtypes[key] not in _FLOATING]
        _raise_if_any(model_dir, checkpoint.problems + plan.problems + wrong_dtype)
        restore_buffers(model)
        unequal = []
        for names in keys.same_tensor(model).values():
            recipes = [plan.recipes[name] for name in names if name in plan.recipes]
            if not _fill(tensors[names[0]], recipes, checkpoint):
                unequal.append(f"{' and '.join(names)} hold different values, but config.json ties "
                               "them; set tie_word_embeddings to false there")
        _raise_if_any(model_dir, unequal)


class Checkpoint:
    """The tensors of a directory's safetensors files, mapped into memory and read in part.

    shapes, dtypes: by Hub name. problems: one sentence per file or tensor that cannot be read.
    """

    def __init__(self, model_dir: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[str] = []
        self._files: dict[str, Any] = {}
        self._open = ExitStack()
        file_of = _index(model_dir)
        whole = {name: self._add(model_dir / name)
                 for name in sorted(set(file_of.values()) or {WEIGHTS})}
        self.problems += [f"missing: {key} is not in {file}, where {INDEX} says it is"
                          for key, file in file_of.items()
                          if whole[file] and key not in self.shapes]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, key: str, part: Part | None = None) -> Tensor:
        """Return a tensor, or only the part of it, which alone is read from disk."""
        file = self._files[key]
        # A tensor without dimensions has no slices.
        return file.get_slice(key)[part] if part else file.get_tensor(key)

    def _add(self, path: Path) -> bool:
        """Take in a file's tensors; False, with a problem noted, when that is impossible."""
        try:
            file = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError:
            self.problems.append(f"missing: the file {path.name}")
            return False
        except (SafetensorError, OSError) as error:
            self.problems.append(f"damaged: the file {path.name} ({error})")
            return False
        for key in file.keys():  # noqa: SIM118 (no dict)
            entry = file.get_slice(key)
            self.shapes[key], self.dtypes[key] = tuple(entry.get_shape()), entry.get_dtype()
            self._files[key] = file
        return True


def _fill(tensor: Tensor, recipes: list[Recipe], checkpoint: Checkpoint) -> bool:
    """Copy this rank's part into a tensor; False when a tied weight has two different contents."""
    target, part = local_tensor(tensor), local_slice(tensor)
    if not recipes or target.numel() == 0:
        return True
    first = recipes[0].read(checkpoint, part)
    target.copy_(first)
    return all(torch.equal(first, other.read(checkpoint, part)) for other in recipes[1:])


def _index(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor as the index says, empty when there is but one file."""
    path = model_dir / INDEX
    if (model_dir / WEIGHTS).is_file() or not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(file) for key, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArtifactError(f"{path} is damaged",
                            expected="a JSON object with a weight_map") from None


def _raise_if_any(model_dir: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN
        raise ArtifactError(
            f"the weights of {model_dir} do not fit its config.json",
            found="\n".join(problems[:_SHOWN]) + (f"\n… and {more} more" if more > 0 else ""),
            run="fetch the model again with 03_download_model.py --overwrite")
