"""Reads full tensors of a model out of its files, and computes with one part of it in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.models import keys, weights
from lib.models.architecture import decoder_layers
from lib.models.tensors import HubTensors

# Module, attribute, name and the parameter that is there while it is not needed: on meta.
Places = list[tuple[nn.Module, str, str, nn.Parameter]]


class StoredModel:
    """Reads one tensor at a time; a tied one under any of its names.

    model: what the files are of, on meta; what adapters have added to it is not in them.
    """

    def __init__(self, model: PreTrainedModel, model_dir: Path) -> None:
        """Raise ArtifactError when the files do not fit the model."""
        self._model = model
        self._files = HubTensors(model_dir)
        self._recipes = weights.plan_reading(model, self._files, model_dir).recipes
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
        }
        for names in keys.group_tied(model).values():
            recipe = next((self._recipes[name] for name in names if name in self._recipes), None)
            if recipe is not None:  # a buffer may be missing, where the constructor computes it
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
        """Return several tensors."""
        return [self.read(name) for name in names]

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype that it is stored in, or a buffer as it is constructed."""
        if name not in self._recipes:
            return weights.build_twin(self._model).get_buffer(name)
        whole = tuple(slice(0, size) for size in self._shapes[name])
        return self._recipes[name].read(self._files, whole)


@contextmanager
def stream_parts(model: PreTrainedModel, read: Callable[[str], Tensor]) -> Iterator[None]:
    """Let a model on meta compute in float32 on the CPU: each part is read before its forward.

    Parts are the decoder blocks, and what has parameters beside them. They are on meta again after
    it. read: returns what a parameter or persistent buffer holds, by its name.
    """
    _fill_buffers(model, read)
    hooks = []
    for part, places in _parts(model):
        hooks += [
            part.register_forward_pre_hook(partial(_fill, places, read), prepend=True),
            part.register_forward_hook(partial(_drop, places), always_call=True),
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


def _parts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Places]]:
    """Yield each part with the places of its parameters."""
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


def _fill(places: Places, read: Callable[[str], Tensor], *_: object) -> None:
    for module, leaf, name, _parameter in places:
        module._parameters[leaf] = nn.Parameter(read(name).float(), requires_grad=False)


def _drop(places: Places, *_: object) -> None:
    for module, leaf, _name, parameter in places:
        module._parameters[leaf] = parameter


@torch.no_grad()
def _fill_buffers(model: PreTrainedModel, read: Callable[[str], Tensor]) -> None:
    """Give all buffers memory and their values: few numbers, which stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    weights.restore_buffers(model)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            buffer.copy_(read(name))
