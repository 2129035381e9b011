"""Hub weights (safetensors) into a sharded model, each rank reading only its part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.core import threads
from lib.core.errors import ArtifactError
from lib.models import keys, resolve
from lib.models.initialise import restore_buffers
from lib.models.recipes import Recipe
from lib.models.shards import local_slice, local_tensor, tie_again
from lib.models.tensors import Checkpoint

_READERS = 4  # threads; each holds one tensor's part at a time
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
        names_of = list(keys.same_tensor(model).values())

        def fill(names: list[str]) -> bool:
            recipes = [plan.recipes[name] for name in names if name in plan.recipes]
            return _fill(tensors[names[0]], recipes, checkpoint)
        with threads.pool(_READERS, "reader") as readers:
            whole = list(readers.map(fill, names_of))
        _raise_if_any(model_dir, [
            f"{' and '.join(names)} hold different values, but config.json ties them; set "
            "tie_word_embeddings to false there"
            for names, agrees in zip(names_of, whole, strict=True) if not agrees])


def _fill(tensor: Tensor, recipes: list[Recipe], checkpoint: Checkpoint) -> bool:
    """Copy this rank's part into a tensor; False when a tied weight has two different contents."""
    target, part = local_tensor(tensor), local_slice(tensor)
    if not recipes or target.numel() == 0:
        return True
    first = recipes[0].read(checkpoint, part)
    target.copy_(first)
    return all(torch.equal(first, other.read(checkpoint, part)) for other in recipes[1:])


def _raise_if_any(model_dir: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN
        raise ArtifactError(
            f"the weights of {model_dir} do not fit its config.json",
            found="\n".join(problems[:_SHOWN]) + (f"\n… and {more} more" if more > 0 else ""),
            **resolve.remedy(model_dir, "--overwrite"))
