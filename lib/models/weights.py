"""Load pretrained weights into a model, or initialise it randomly from a seed; restore buffers.

The model may be sharded. Each rank reads or keeps only its part, without any collective.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import log, units, workers
from lib.core.errors import ArtifactError
from lib.core.paths import short_name
from lib.models import directory, keys, lookup
from lib.models.architecture import decoder_layers
from lib.models.host_draws import HostDraws
from lib.models.keys import AddedModule, LoadPlan
from lib.models.recipes import Recipe
from lib.models.sharded import (
    local_slice,
    local_tensor,
    own_class,
    own_classes,
    plain,
    restore_ties,
)
from lib.models.tensors import HubTensors, StoredTensors

FullParameters = dict[str, tuple[nn.Parameter, nn.Parameter]]  # name → (shard, full parameter)
Kept = Set[tuple[type[nn.Module], str]]  # parameters by class and attribute of their module

_READERS = 4  # threads; each has the part of one tensor in memory
_SHOWN = 40


def load_pretrained(model: PreTrainedModel, model_dir: Path) -> None:
    """Load the parameters and buffers of a model in place from a directory.

    model: sharded (DTensor parameters) or plain, allocated with `to_empty`. Values are cast to the
    dtype of the parameter. Raises ArtifactError with all tensors that are missing, unexpected or of
    another shape.
    """
    with HubTensors(model_dir) as stored:
        load_stored(model, stored, partial(_raise_if_any, model_dir))
        warn_of_unused_tensors(model, stored, model_dir)


def warn_of_unused(model: PreTrainedModel, model_dir: Path) -> None:
    """Warn about the weights of a directory that a model does not load, if it still has weights.

    model: may be on meta.
    """
    if not directory.list_missing_weights(model_dir):
        with HubTensors(model_dir) as stored:
            warn_of_unused_tensors(model, stored, model_dir)


def warn_of_unused_tensors(model: PreTrainedModel, stored: StoredTensors, model_dir: Path) -> None:
    """Warn about stored tensors that a model does not load. model_dir: where they are stored."""
    unused = keys.plan_loading(model, stored.shapes).unused
    if not unused or log.rank() != 0:
        return
    count = sum(math.prod(stored.shapes[key]) for key in unused)
    parts = sorted({re.sub(r"^([^.]+\.[^.]+(\.\d+)?).*", r"\1", key) for key in unused})
    listed = ", ".join(parts[:3]) + (" …" if parts[3:] else "")
    log.warn(
        f"{own_class(model).__name__} does not use {units.count(count)} parameters ({listed}) of "
        f"{short_name(model_dir)}; they are not trained, and an export does not contain them"
    )


@torch.no_grad()
def load_stored(
    model: PreTrainedModel, stored: StoredTensors, raise_if_any: Callable[[list[str]], None]
) -> None:
    """Load the parameters and buffers of a model in place from stored tensors.

    model: see `load_pretrained`. raise_if_any: raises an error that lists its argument, the reasons
    why the tensors do not fit, unless there are none.
    """
    restore_ties(model)
    plan, problems = plan_stored(model, stored)
    raise_if_any(problems)
    tensors = model.state_dict(keep_vars=True)
    restore_buffers(model)
    names_of = list(keys.group_tied(model).values())

    def load_tied(names: list[str]) -> bool:
        recipes = [plan.recipes[name] for name in names if name in plan.recipes]
        return _load_tensor(tensors[names[0]], recipes, stored)

    with workers.thread_pool(_READERS, "reader") as readers:
        agreements = list(readers.map(load_tied, names_of))
    raise_if_any(
        [
            f"{' and '.join(names)} have different values, but config.json ties them; set "
            "tie_word_embeddings to false there"
            for names, agree in zip(names_of, agreements, strict=True)
            if not agree
        ]
    )


def plan_reading(model: PreTrainedModel, stored: StoredTensors, model_dir: Path) -> LoadPlan:
    """Return the plan for loading a model from its files.

    Raises ArtifactError with all tensors that are missing, unexpected, or of another shape or
    dtype.
    """
    plan, problems = plan_stored(model, stored)
    _raise_if_any(model_dir, problems)
    return plan


def plan_stored(model: PreTrainedModel, stored: StoredTensors) -> tuple[LoadPlan, list[str]]:
    """Return the plan for loading a model from stored tensors, and all reasons why they do not fit.

    model: may be on meta.
    """
    plan = keys.plan_loading(model, stored.shapes)
    wrong_dtypes = keys.list_wrong_dtypes(model, plan, stored.dtypes)
    return plan, stored.problems + plan.problems + wrong_dtypes


def _load_tensor(tensor: Tensor, recipes: list[Recipe], stored: StoredTensors) -> bool:
    """Load this rank's part of a tensor. Returns False if tied weights have different values."""
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


def initialise_model(model: PreTrainedModel, seed: int) -> None:
    """Initialise all parameters by the family's own rules, and restore the buffers.

    model: sharded or plain, allocated with `to_empty`. The result depends on the seed and the
    model, but not on the sharding or the device. The numbers are drawn in host memory, of
    which this needs for a short time as much as this rank's part of one block.
    """
    restore_ties(model)
    uninitialised: list[str] = []
    with workers.thread_pool(torch.get_num_threads(), "draws") as pool:
        draws = HostDraws(seed, pool)
        for name, block, with_children in _find_blocks(model):
            with (
                own_classes(block),
                _unsharded(block, name, with_children, model.all_tied_weights_keys) as parameters,
            ):
                draws.begin({full: local_slice(shard) for shard, full in parameters.values()})
                with _own_random_stream(f"{seed}/{name}"), draws:
                    _apply_rules(block, _find_owner(model, name), with_children)
                uninitialised += _copy_shards(parameters)
                draws.begin({})  # it holds the tensors of this block
    _copy_constructed(model, uninitialised, seed)
    restore_buffers(model)


@torch.no_grad()
def draw_added(model: PreTrainedModel, seed: int) -> None:
    """Initialise the adapters in a model, see lora.py.

    model: sharded or plain, allocated. As in PEFT, A is initialised by Kaiming's uniform rule with
    a = √5 and B is zero, so the adapters do not change the model's outputs yet. The result depends
    only on the seed and the names.
    """
    for name, module in model.named_modules():
        if isinstance(module, AddedModule):
            with _own_random_stream(f"{seed}/{name}"):
                for parameter in module.parameters(recurse=False):
                    full = torch.zeros(plain(parameter).shape)
                    module.draw(full)
                    local_tensor(parameter).copy_(full[local_slice(parameter)])


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Set every buffer to the value that the family's constructor computes (RoPE tables, masks).

    The model is built a second time, with parameters on meta, because that works for all families.
    """
    twin = build_twin(model)
    for name, buffer in model.named_buffers():
        local_tensor(buffer).copy_(twin.get_buffer(name))


@torch.no_grad()
def _copy_constructed(model: PreTrainedModel, names: list[str], seed: int) -> None:
    """Replace NaN in parameters, by name, by the values that their constructors give them.

    Each kind of parameter has a twin of its own, so its values do not depend on which other ones
    this rank needs.
    """
    kinds: dict[tuple[type[nn.Module], str], list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        kinds.setdefault((own_class(model.get_submodule(path)), leaf), []).append(name)
    for kind, same_kind in kinds.items():
        twin = build_twin(model, {kind}, seed)
        for name in same_kind:
            parameter = model.get_parameter(name)
            shard = local_tensor(parameter)
            constructed = twin.get_parameter(name)[local_slice(parameter)].to(shard)
            shard.copy_(torch.where(shard.isnan(), constructed, shard))


def build_twin(model: PreTrainedModel, keys: Kept = frozenset(), seed: int = 0) -> PreTrainedModel:
    """Build the model again on the CPU, with all parameters on meta except for `keys`."""
    with _parameters_on_meta(keys), torch.device("cpu"), _own_random_stream(f"{seed}"):
        return own_class(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)


def _find_blocks(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the name and module of each unit of initialisation, and whether it includes children.

    Units are the modules that contain decoder blocks, each without its children, and all children
    of these modules (blocks, embeddings, output layer), each with its own children.
    """
    parents = {""}
    for layer in decoder_layers(model):
        parts = layer.split(".")
        parents |= {".".join(parts[:i]) for i in range(len(parts))}
    for name, module in model.named_modules():
        if name in parents:
            yield name, module, False
        elif name.rpartition(".")[0] in parents:
            yield name, module, True


def _find_owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost PreTrainedModel that contains a module and that initialises it."""
    owner = model
    module = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


@torch.no_grad()
def _apply_rules(module: nn.Module, owner: PreTrainedModel, with_children: bool) -> None:
    """Run the family's initialisation, children first, as `initialize_weights` does."""
    if with_children:
        for child in module.children():
            _apply_rules(child, child if isinstance(child, PreTrainedModel) else owner, True)
        owner._init_weights(module)
    elif next(module.parameters(recurse=False), None) is not None:
        owner._init_weights(module)


@contextlib.contextmanager
def _unsharded(
    block: nn.Module, name: str, with_children: bool, tied: dict[str, str]
) -> Iterator[FullParameters]:
    """Replace the parameters of a block by unsharded ones in host memory within this context.

    This rank's part of each is NaN, and the system allocates memory only for what is written. A
    parameter that is tied to another one is on meta, where initialising it has no effect.
    """
    parameters: FullParameters = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for path, module in block.named_modules() if with_children else [("", block)]:
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = ".".join(filter(None, (name, path, leaf)))
            device = "meta" if full_name in tied else "cpu"
            empty = torch.empty(plain(parameter).shape, device=device, dtype=parameter.dtype)
            empty[local_slice(parameter)] = torch.nan
            full = nn.Parameter(empty, requires_grad=False)
            places.append((module, leaf, parameter))
            module._parameters[leaf] = full
            if full_name not in tied:
                parameters[full_name] = (parameter, full)
    try:
        yield parameters
    finally:
        for module, leaf, parameter in places:
            module._parameters[leaf] = parameter


@torch.no_grad()
def _copy_shards(parameters: FullParameters) -> list[str]:
    """Copy this rank's part of each parameter; return the names of those that contain NaN there."""
    uninitialised = []
    for name, (parameter, full) in parameters.items():
        part = full[local_slice(parameter)]
        local_tensor(parameter).copy_(part)
        if part.isnan().any():
            uninitialised.append(name)
    return uninitialised


@contextlib.contextmanager
def _own_random_stream(key: str) -> Iterator[None]:
    """Seed the generator of the CPU from a key, and restore its state afterwards."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _parameters_on_meta(keys: Kept) -> Iterator[None]:
    """Move each parameter to meta as soon as a module registers it. Buffers stay on the CPU.

    `torch.device("meta")` would also move the buffers. At most one parameter is allocated at a
    time, and its memory is not touched.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        register(module, name, parameter)
        if parameter is not None and (type(module), name) not in keys:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
