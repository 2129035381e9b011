"""Read full tensors from a model's files, and run a model with only one part of it in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.models import keys, weights
from lib.models.architecture import decoder_layers
from lib.models.tensors import HubTensors, StoredTensors

# Module, attribute, full name, and the parameter on meta that the module has while it is not used.
Places = list[tuple[nn.Module, str, str, nn.Parameter]]


class OpenTensors(StoredTensors, Protocol):
    """Stored tensors in open files."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close the files."""


class StoredModel:
    """Reads one tensor of a model at a time, by module name. Tied tensors have several names.

    model: on meta. The files do not contain parameters that a model change has added.
    """

    def __init__(
        self, model: PreTrainedModel, model_dir: Path, files: OpenTensors | None = None
    ) -> None:
        """Open the files. Raises ArtifactError if they do not fit the model.

        files: the tensors to read instead of the safetensors files in the directory.
        """
        self._model = model
        self._files: OpenTensors = files or HubTensors(model_dir)
        self._recipes = weights.plan_reading(model, self._files, model_dir).recipes
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
        }
        for names in keys.group_tied(model).values():
            recipe = next((self._recipes[name] for name in names if name in self._recipes), None)
            if recipe is not None:  # buffers that the constructor computes may be missing
                self._recipes |= dict.fromkeys(names, recipe)

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, value, trace)

    def read_all(self, names: Sequence[str]) -> list[Tensor]:
        """Return several tensors, each as `read` returns it."""
        return [self.read(name) for name in names]

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype, or a missing buffer as the constructor sets it."""
        if name not in self._recipes:
            return weights.build_twin(self._model).get_buffer(name)
        full = tuple(slice(0, size) for size in self._shapes[name])
        return self._recipes[name].read(self._files, full)


@contextmanager
def stream_parts(model: PreTrainedModel, read: Callable[[str], Tensor]) -> Iterator[None]:
    """Let a model on meta compute in float32 on the CPU, reading each part when it is needed.

    Parts are the decoder blocks and the other modules with parameters. A part is read before its
    forward pass and is on meta again after it. read: returns the full parameter or persistent
    buffer of a name.
    """
    _load_buffers(model, read)
    hooks = []
    for part, places in _list_parts(model):
        hooks += [
            part.register_forward_pre_hook(partial(_load_part, places, read), prepend=True),
            part.register_forward_hook(partial(_drop_part, places), always_call=True),
        ]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def _list_parts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Places]]:
    """Yield each part, and the modules and attributes where its parameters are registered."""
    blocks = decoder_layers(model)
    for name, module in model.named_modules():
        is_block = name in blocks
        if not is_block and any(name.startswith(f"{block}.") for block in blocks):
            continue
        places = [
            (owner, leaf, f"{path}.{leaf}" if path else leaf, parameter)
            for path, owner in (module.named_modules(prefix=name) if is_block else [(name, module)])
            for leaf, parameter in owner._parameters.items()
            if parameter is not None
        ]
        if places:
            yield module, places


def _load_part(places: Places, read: Callable[[str], Tensor], *_: object) -> None:
    for module, leaf, name, _parameter in places:
        module._parameters[leaf] = nn.Parameter(read(name).float(), requires_grad=False)


def _drop_part(places: Places, *_: object) -> None:
    for module, leaf, _name, parameter in places:
        module._parameters[leaf] = parameter


@torch.no_grad()
def _load_buffers(model: PreTrainedModel, read: Callable[[str], Tensor]) -> None:
    """Allocate and fill all buffers. They are small, so they stay in memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    weights.restore_buffers(model)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            buffer.copy_(read(name))
