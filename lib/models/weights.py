"""Gives a model its first weights: those of the Hub, or drawn from a seed; and its buffers.

The model may be sharded: each rank reads, or keeps, only its part. No collective is used.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import units, workers
from lib.core.errors import ArtifactError
from lib.models import keys, lookup
from lib.models.architecture import decoder_layers
from lib.models.keys import Added, LoadPlan
from lib.models.recipes import Recipe
from lib.models.sharded import local_slice, local_tensor, own_class, own_classes, plain, tie_again
from lib.models.tensors import HubTensors

Drawn = dict[str, tuple[nn.Parameter, nn.Parameter]]  # name → parameter (a shard), full size
Kept = Set[tuple[type[nn.Module], str]]  # parameters by the class and attribute that hold them

_READERS = 4  # threads; each holds one tensor's part at a time
_SHOWN = 40


def load_pretrained(model: PreTrainedModel, model_dir: Path) -> None:
    """Fill a model's parameters and buffers in place from a Hub checkpoint.

    model: sharded (DTensor parameters) or plain, materialised with `to_empty`. Values are cast to
    the dtype of the parameter.
    Raises ArtifactError listing all keys that are missing, unexpected or of another shape.
    """
    tie_again(model)
    with HubTensors(model_dir) as stored, torch.no_grad():
        plan = plan_reading(model, stored, model_dir)
        tensors = model.state_dict(keep_vars=True)
        restore_buffers(model)
        names_of = list(keys.group_tied(model).values())

        def fill(names: list[str]) -> bool:
            recipes = [plan.recipes[name] for name in names if name in plan.recipes]
            return _fill(tensors[names[0]], recipes, stored)

        with workers.thread_pool(_READERS, "reader") as readers:
            whole = list(readers.map(fill, names_of))
        _raise_if_any(
            model_dir,
            [
                f"{' and '.join(names)} hold different values, but config.json ties them; set "
                "tie_word_embeddings to false there"
                for names, agrees in zip(names_of, whole, strict=True)
                if not agrees
            ],
        )


def plan_reading(model: PreTrainedModel, stored: HubTensors, model_dir: Path) -> LoadPlan:
    """Return how the tensors of a model are made of those in its files.

    Raises ArtifactError listing all that are missing, unexpected, or of another shape or dtype.
    """
    plan = keys.plan_loading(model, stored.shapes)
    _raise_if_any(
        model_dir,
        stored.problems + plan.problems + keys.list_wrong_dtypes(model, plan, stored.dtypes),
    )
    return plan


def _fill(tensor: Tensor, recipes: list[Recipe], stored: HubTensors) -> bool:
    """Copy this rank's part into a tensor; False when a tied weight has two different contents."""
    target = local_tensor(tensor)
    part = local_slice(tensor)
    if not recipes or target.numel() == 0:
        return True
    first = recipes[0].read(stored, part)
    target.copy_(first)
    return all(torch.equal(first, other.read(stored, part)) for other in recipes[1:])


def _raise_if_any(model_dir: Path, problems: list[str]) -> None:
    if problems:
        raise ArtifactError(
            f"the weights of {model_dir} do not fit its config.json",
            found=units.join_lines(problems, _SHOWN),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw all parameters by the family's own rules, then restore the buffers.

    model: sharded or plain, materialised with `to_empty`. The result depends on the seed, the
    names of the blocks and the kind of device, never on how the model is sharded. Needs
    the memory of one unsharded block for a moment.
    """
    tie_again(model)
    undrawn: list[str] = []
    for name, block, whole in _find_blocks(model):
        with (
            own_classes(block),
            _full_size(block, name, whole, model.all_tied_weights_keys) as drawn,
            _own_random_stream(f"{seed}/{name}", {full.device for _, full in drawn.values()}),
        ):
            _apply_rules(block, _find_owner(model, name), whole)
            undrawn += _copy_shards(drawn)
    if undrawn:
        _copy_constructed(model, undrawn, seed)
    restore_buffers(model)


@torch.no_grad()
def draw_added(model: PreTrainedModel, seed: int) -> None:
    """Draw the first weights of the adapters in a model, see lora.py.

    model: sharded or plain, materialised. As PEFT does: A by Kaiming's uniform rule with a = √5, B
    zero, so that the model computes what it did without. The result depends on the seed and the
    names alone.
    """
    for name, module in model.named_modules():
        if isinstance(module, Added):
            with _own_random_stream(f"{seed}/{name}"):
                for parameter in module.parameters(recurse=False):
                    full = torch.zeros(plain(parameter).shape)
                    module.draw(full)
                    local_tensor(parameter).copy_(full[local_slice(parameter)])


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Give every buffer the value that the family's constructor computes (RoPE tables, masks).

    Builds the model a second time, with parameters on meta: right for any family, while a rule per
    kind of buffer would be right only for those it knows.
    """
    twin = build_twin(model)
    for name, buffer in model.named_buffers():
        local_tensor(buffer).copy_(twin.get_buffer(name))


@torch.no_grad()
def _copy_constructed(model: PreTrainedModel, names: list[str], seed: int) -> None:
    """Give parameters for which the family has no rule the value of their constructor."""
    kept = {
        (own_class(model.get_submodule(path)), leaf)
        for path, _, leaf in (name.rpartition(".") for name in names)
    }
    twin = build_twin(model, kept, seed)
    for name in names:
        parameter = model.get_parameter(name)
        local_tensor(parameter).copy_(twin.get_parameter(name)[local_slice(parameter)])


def build_twin(model: PreTrainedModel, kept: Kept = frozenset(), seed: int = 0) -> PreTrainedModel:
    """Return the model built again on the CPU, with all parameters but the kept ones on meta."""
    with _parameters_on_meta(kept), torch.device("cpu"), _own_random_stream(f"{seed}"):
        return own_class(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)


def _find_blocks(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield every module whose weights are drawn at once: name, module, with its children or not.

    Those are the decoder layers, the other modules beside them, and what holds either (alone).
    """
    holders = {""}
    for layer in decoder_layers(model):
        parts = layer.split(".")
        holders |= {".".join(parts[:i]) for i in range(len(parts))}
    for name, module in model.named_modules():
        if name in holders:
            yield name, module, False
        elif name.rpartition(".")[0] in holders:
            yield name, module, True


def _find_owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost pretrained model around a module: its rules hold there."""
    owner = model
    module = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


@torch.no_grad()
def _apply_rules(module: nn.Module, owner: PreTrainedModel, whole: bool) -> None:
    """Run the family's initialisation, children first, as `initialize_weights` does."""
    if whole:
        for child in module.children():
            _apply_rules(child, child if isinstance(child, PreTrainedModel) else owner, True)
        owner._init_weights(module)
    elif next(module.parameters(recurse=False), None) is not None:
        owner._init_weights(module)


@contextlib.contextmanager
def _full_size(block: nn.Module, name: str, whole: bool, tied: dict[str, str]) -> Iterator[Drawn]:
    """Put unsharded parameters full of NaN in the place of a block's own for the while.

    A parameter tied to one elsewhere is put on meta, where drawing it costs and changes nothing.
    """
    drawn: Drawn = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for path, module in block.named_modules() if whole else [("", block)]:
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = ".".join(filter(None, (name, path, leaf)))
            device = "meta" if full_name in tied else parameter.device
            full = nn.Parameter(
                torch.full(plain(parameter).shape, torch.nan, device=device, dtype=parameter.dtype),
                requires_grad=False,
            )
            places.append((module, leaf, parameter))
            module._parameters[leaf] = full
            if full_name not in tied:
                drawn[full_name] = (parameter, full)
    try:
        yield drawn
    finally:
        for module, leaf, parameter in places:
            module._parameters[leaf] = parameter


@torch.no_grad()
def _copy_shards(drawn: Drawn) -> list[str]:
    """Copy this rank's part of each drawn parameter; return the names of those left undrawn."""
    undrawn = []
    for name, (parameter, full) in drawn.items():
        local_tensor(parameter).copy_(full[local_slice(parameter)])
        if full.isnan().any():
            undrawn.append(name)
    return undrawn


@contextlib.contextmanager
def _own_random_stream(key: str, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seed the generators of CPU and GPU from a key, and give them their old state back."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def _parameters_on_meta(kept: Kept) -> Iterator[None]:
    """Move each parameter to meta as soon as a module registers it; buffers stay real.

    `torch.device("meta")` would take the buffers along. At most one parameter is real at a time,
    and its memory is not touched.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        register(module, name, parameter)
        if parameter is not None and (type(module), name) not in kept:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
