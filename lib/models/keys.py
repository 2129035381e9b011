"""Map the names of a model's parameters to the names of the tensors in its Hub checkpoint.

Nearly all families use the same names. For the others, transformers has a registry of renamings and
conversions: Mixtral's experts, for example, are one tensor each on the Hub and one fused tensor in
the module. Only this module reads the registry. Its functions are internal to transformers, and
were the same in 5.17, 5.20 and 5.23.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, WeightConverter
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lib.models.recipes import Converted, Recipe, Renamed, stack_experts
from lib.models.sharded import own_classes, without_padding
from lib.models.tensors import FLOATING, Shape

_KNOWN: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()  # see _has_conversions


class AddedModule(torch.nn.Module):
    """Base class of modules that a model change adds. Hub checkpoints lack their parameters."""

    def draw(self, full: Tensor) -> None:
        """Initialise the full parameter, which the caller passes as zeros on the CPU."""


def list_expected(model: PreTrainedModel) -> dict[str, Shape]:
    """Return the names and shapes of the tensors that `save_pretrained` writes for a model.

    The model may be on meta or sharded, because no values are read.
    """
    return {
        key: tuple(tensor.shape)
        for key, tensor in _revert_tensors(model, _list_saved(model)).items()
    }


def group_for_export(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the names of all parameters and persistent buffers to export, in groups.

    Call `convert_to_hub` with one complete group at a time. Nearly all groups have one name, but
    some families store several parameters in one Hub tensor. Each tied parameter occurs once. The
    order is the one in which `save_pretrained` fills its files.
    """
    saved = dict(sorted(_list_saved(model).items(), key=lambda item: dot_natural_key(item[0])))
    groups: list[list[str]] = []
    group_of: dict[str, list[str]] = {}  # Hub name → group
    for name, tensor in saved.items():
        keys = _revert_tensors(model, {name: tensor})
        group = next((group_of[key] for key in keys if key in group_of), None)
        if group is None:
            groups.append(group := [])
        group.append(name)
        group_of.update(dict.fromkeys(keys, group))
    # If a renaming depends on several names at once, all parameters must be converted together.
    if group_of.keys() != _revert_tensors(model, saved).keys():
        return [tuple(saved)]
    return [tuple(group) for group in groups]


def convert_to_hub(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hub names and values of the tensors of one export group.

    tensors: full (not sharded) values by module name. Results may be views that are not contiguous.
    """
    yield from _revert_tensors(model, tensors).items()


@dataclass
class LoadPlan:
    """The recipes for loading a model from a checkpoint, and the tensors that do not fit.

    recipes: by module name. problems: one message per tensor that is missing, unexpected or of
    another shape. unused: Hub names of the weights that the class of the model does not load.
    """

    recipes: dict[str, Recipe] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def plan_loading(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> LoadPlan:
    """Return the plan for loading a checkpoint. shapes: the shapes of its tensors, by Hub name.

    Accepts all names that `from_pretrained` accepts: names without the prefix of the base model,
    legacy names, and one or both names of tied weights.
    """
    plan = LoadPlan()
    targets = _list_tensors(model)
    for name, recipe, shape in _find_recipes(model, targets, shapes, plan):
        if name not in targets or name in plan.recipes:
            plan.problems.append(f"unexpected: {', '.join(recipe.keys)}")
            continue
        plan.recipes[name] = recipe
        if shape != tuple(targets[name].shape):
            plan.problems += _list_absent(model, name, targets[name], shapes) or [
                f"{name}: expected shape {tuple(targets[name].shape)}, found {shape}"
            ]
    plan.problems += _list_missing(model, targets, plan.recipes, shapes)
    # Families used to save buffers (masks, RoPE tables), which are computed now.
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    plan.unused = [
        key
        for key in plan.unused
        if key.rpartition(".")[2] not in buffers and math.prod(shapes[key]) > 1
    ]
    return plan


def list_wrong_dtypes(
    model: PreTrainedModel, plan: LoadPlan, dtypes: Mapping[str, str]
) -> list[str]:
    """Return a message for each tensor that has integers instead of floats, or vice versa.

    dtypes: dtypes of the checkpoint's tensors, by the names in its files.
    """
    tensors = _list_tensors(model)
    return sorted(
        f"{key}: expected {'floating-point numbers' if is_float else 'whole numbers'}, "
        f"found {dtypes[key]}"
        for name, recipe in plan.recipes.items()
        for is_float in [tensors[name].is_floating_point()]
        for key in recipe.keys
        if (dtypes[key] in FLOATING) != is_float
    )


def group_tied(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return the names of each parameter and persistent buffer, by the `id()` of the tensor.

    A tied tensor has several names.
    """
    names = defaultdict(list)
    for name, tensor in _list_tensors(model).items():
        names[id(tensor)].append(name)
    return dict(names)


def _list_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers under all of their names."""
    ignored = set(model._keys_to_ignore_on_save or ()) | {
        name
        for path, module in model.named_modules()
        if isinstance(module, AddedModule)
        for name, _ in module.named_parameters(prefix=path)
    }
    return {
        name: without_padding(tensor, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and name not in ignored
    }


def _list_saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` saves, by module name, as empty meta tensors."""
    tensors = {name: _empty_on_meta(tensor.shape) for name, tensor in _list_tensors(model).items()}
    # For meta tensors, transformers looks up in the model which names are tied.
    return remove_tied_weights_from_state_dict(tensors, model)


def _empty_on_meta(shape: Shape) -> Tensor:
    return torch.empty(shape, device="meta")


def _has_conversions(model: PreTrainedModel) -> bool:
    """Return whether some names or tensors differ from those on the Hub.

    transformers looks through all modules of a model for each tensor. Its answer is the same each
    time, so it is kept as long as the model is.
    """
    if model not in _KNOWN:
        with own_classes(model):
            _KNOWN[model] = bool(get_model_conversion_mapping(model, add_legacy=False))
    return _KNOWN[model]


def _revert_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not _has_conversions(model):
        return dict(tensors)
    with own_classes(model):
        return revert_weight_conversion(model, dict(tensors))


def _find_recipes(
    model: PreTrainedModel,
    targets: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    plan: LoadPlan,
) -> Iterator[tuple[str, Recipe, Shape]]:
    """Yield name, recipe and shape of every parameter that results from the checkpoint's tensors.

    Adds the other tensors to the plan, as unused or as problems. Does the same as transformers'
    `convert_and_load_state_dict_in_model` without reading tensors.
    """
    with own_classes(model):
        conversions = get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    collected: dict[str, dict[str, list[str]]] = {}  # first target name → pattern → Hub names
    ignored = _find_ignored(model)
    prefix = model.base_model_prefix
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and key in targets:
            name, pattern = rename_source_key(key, [], [], prefix, targets)
        if name not in targets:
            if ignored and ignored.search(name):
                plan.unused.append(key)
            else:
                plan.problems.append(f"unexpected: {key}")
        elif pattern is None:
            yield name, Renamed((key,)), tuple(shapes[key])
        else:
            collected.setdefault(name, {}).setdefault(pattern, []).append(key)
    for first, sources in collected.items():
        converter = by_pattern[next(iter(sources))]
        yield from _convert_tensors(model, first, sources, converter, shapes, plan.problems)


def _convert_tensors(
    model: PreTrainedModel,
    first: str,
    sources: dict[str, list[str]],
    converter: WeightConverter,
    shapes: Mapping[str, Shape],
    problems: list[str],
) -> Iterator[tuple[str, Recipe, Shape]]:
    """Yield name, recipe and shape of each parameter that one conversion produces.

    The conversion runs on meta tensors, to find the shapes.
    """

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        run = copy.deepcopy(converter)
        for pattern, keys in sources.items():
            for key in keys:
                run.add_tensor(first, key, pattern, tensors[key])
        results = run.convert(first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }

    keys = tuple(key for pattern in sources for key in sources[pattern])
    try:
        parameters = convert({key: _empty_on_meta(shapes[key]) for key in keys})
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        problems.append(f"{first}: cannot be converted from {keys[0]} and similar: {error}")
        return
    for name, tensor in parameters.items():
        recipe = stack_experts(converter, sources, tensor.ndim) if len(parameters) == 1 else None
        yield name, recipe or Converted(keys, convert, name), tuple(tensor.shape)


def _find_ignored(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Return the pattern of tensors in old checkpoints that models no longer read."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # Layers for multi-token prediction follow the others. Families ignore those of one size only.
    text = model.config.get_text_config()
    count = getattr(text, "num_hidden_layers", None) or 0
    predicting = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns |= {rf"(^|\.)layers\.{count + extra}\." for extra in range(predicting)}
    buffers = [name for name, _ in model.named_buffers()]
    # As in transformers' `_adjust_missing_and_unexpected_keys`: these buffers used to be
    # persistent.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _list_missing(
    model: PreTrainedModel,
    targets: Mapping[str, Tensor],
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, Shape],
) -> list[str]:
    """Return a message for each parameter that the checkpoint lacks.

    For a tied parameter one name is enough. Buffers may be missing if the family says so.
    """
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    problems = []
    for names in group_tied(model).values():
        name = names[0]
        if any(alias in recipes for alias in names) or (
            not isinstance(targets[name], torch.nn.Parameter)
            and any(pattern.search(name) for pattern in optional)
        ):
            continue
        absent = _list_absent(model, name, targets[name], shapes) or [f"missing: {name}"]
        if targets[name] is getattr(model.get_output_embeddings(), "weight", None):
            absent[-1] += (
                " (tie_word_embeddings in config.json is false, or missing; if the model was "
                "trained with tied embeddings, set it to true there)"
            )
        problems += absent
    return problems


def _list_absent(
    model: PreTrainedModel, name: str, tensor: Tensor, shapes: Mapping[str, Shape]
) -> list[str]:
    """Return a message for each Hub tensor of a parameter that the checkpoint lacks."""
    keys = _revert_tensors(model, {name: _empty_on_meta(tensor.shape)})
    return [f"missing: {key}" for key in keys if key not in shapes]
