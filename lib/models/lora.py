"""Train LoRA adapters beside the frozen linear layers of a model, for `--lora-rank`.

A linear layer with an adapter returns W x + s B (A x) instead of W x (Hu et al. 2021, "LoRA:
low-rank adaptation of large language models"). A is [rank, in] and B is [out, rank]. The scale s is
alpha ÷ rank, or alpha ÷ √rank with rsLoRA (Kalajdzievski 2023). The model's own parameters are
frozen in the compute dtype; A and B are float32 master weights. A and B are submodules of their
layer, so their names are those in PEFT's files: `….q_proj.lora_A.weight`.

Transformers (5.23) keeps the weights of all experts of a layer in one parameter, [experts, rows,
columns]: Mixtral's and Qwen MoE's modules have gate_up_proj and down_proj, and no linear layer.
Such a parameter gets A [experts, rank, columns] and B [experts, rows, rank]. During the forward
pass of the experts, W + s B A replaces the parameter, so they may use the parameter in any way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands, log, units
from lib.core.errors import ArtifactError, UsageError
from lib.models import peft_adapter
from lib.models.keys import AddedModule
from lib.models.lora_targets import (
    ALL,
    choose_experts,
    choose_linears,
    count_features,
    is_transposed,
    list_expert_weights,
    list_linears,
)
from lib.models.peft_adapter import PeftAdapter
from lib.models.sharded import Placement, local_slice, local_tensor
from lib.models.tensors import COMPUTE_DTYPES

A = "lora_A"
B = "lora_B"
_FACTOR_NAME = re.compile(rf"(.+)\.({A}|{B})\.weight")
_EXPERTS_PREFIX = "lora_"  # of the submodule that contains the adapter of an experts' parameter
_SHOWN = 8


class Factor(AddedModule, nn.Linear):
    """A or B of an adapter. is_random: initialise it randomly, otherwise with zeros."""

    def __init__(self, inputs: int, outputs: int, is_random: bool) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta", dtype=torch.float32)
        self.is_random = is_random
        self.dropout = 0.0
        self.scale = 1.0

    def draw(self, full: Tensor) -> None:
        """Initialise the full parameter of A; B stays zero."""
        if self.is_random:
            nn.init.kaiming_uniform_(full, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return s A x, with dropout applied to x; x: [..., in] → [..., rank]."""
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        low = F.linear(x, self.weight)
        return low if self.scale == 1.0 else low * self.scale

    def add_to(self, output: Tensor, low: Tensor) -> Tensor:
        """Return output + B low; low: [..., rank] → [..., out].

        In compiled code the sum is a separate operation, which the compiler fuses with the next one
        that reads the output. Uncompiled, `addmm` reads and writes the output only once.
        """
        if torch.compiler.is_compiling():
            return output + F.linear(low, self.weight)
        return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), self.weight.t()).view_as(
            output
        )


class ExpertFactor(AddedModule):
    """A or B of all experts of a layer. is_random: initialise it randomly, otherwise with zeros."""

    def __init__(self, *shape: int, is_random: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32))
        self.is_random = is_random

    def draw(self, full: Tensor) -> None:
        """Initialise the full parameter of A, expert by expert; B stays zero."""
        for expert in full if self.is_random else ():
            nn.init.kaiming_uniform_(expert, a=math.sqrt(5))


class ExpertAdapter(nn.Module):
    """The adapter of a parameter that contains the weights of several experts."""

    def __init__(self, parameter: nn.Parameter, rank: int, scale: float) -> None:
        super().__init__()
        experts, rows, columns = parameter.shape
        self.lora_A = ExpertFactor(experts, rank, columns, is_random=True)
        self.lora_B = ExpertFactor(experts, rows, rank, is_random=False)
        self.scale = scale

    def add_to(self, weight: Tensor) -> Tensor:
        """Return W + s B A; weight: [experts, rows, columns], possibly with padded rows."""
        product = torch.bmm(self.lora_B.weight * self.scale, self.lora_A.weight)
        return weight + F.pad(product, (0, 0, 0, weight.shape[1] - product.shape[1]))


@dataclass(frozen=True)
class Lora:
    """Adds LoRA adapters to linear layers and freezes the rest of the model.

    targets: all-linear, attention, mlp, or a regular expression that matches the whole name of a
    linear layer or the last part of its name. precision: compute dtype, also of frozen parameters.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: str = ALL
    rslora: bool = False
    precision: str = "fp32"

    changes_memory_plan = True  # frozen parameters need no gradients and no optimizer state

    @property
    def scale(self) -> float:
        """Return the factor s of B (A x)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Freeze a model on the meta device and attach adapters.

        Returns the names of the adapters' parameters and a description for the log. Raises
        UsageError if the targets match no linear layer, or for dropout with experts.
        """
        experts = choose_experts(model, self.targets)
        if experts and self.dropout:
            raise UsageError(
                "--lora-dropout does not work with adapters of experts, because they change "
                "weights and do not see inputs",
                found=experts[0],
                run=commands.as_typed("--lora-dropout", 0),
            )
        dtype = COMPUTE_DTYPES[self.precision]
        freeze_parameters(model, dtype)
        narrow_layers = [
            name
            for name in choose_linears(model, self.targets)
            if min(count_features(model.get_submodule(name))) < self.rank
        ]
        if narrow_layers and log.rank() == 0:
            log.warn(
                f"--lora-rank {self.rank} is larger than the number of rows or columns of "
                f"{narrow_layers[0]}; a smaller rank can learn the same there"
            )
        added = self.attach(model)
        return (
            added,
            f"{self._describe(len(added) // 2 - len(experts), len(experts))}: "
            f"{units.count(sum(model.get_parameter(name).numel() for name in added))} of "
            f"{units.count(model.num_parameters())} parameters are trained; the rest is frozen "
            f"in {str(dtype).removeprefix('torch.')}{_describe_untargeted_experts(model)}",
        )

    def _describe(self, layers: int, experts: int) -> str:
        """Return the settings and the numbers of linear layers and expert parameters, as text."""
        expert_text = (
            f" and the experts of {units.counted(experts, 'parameter')}" if experts else ""
        )
        return (
            f"{'rsLoRA' if self.rslora else 'LoRA'}: rank {self.rank}, alpha {self.alpha:g}, "
            f"on {units.counted(layers, 'linear layer')}{expert_text} "
            f"({units.shorten_text(self.targets)})"
        )

    def attach(self, model: PreTrainedModel) -> set[str]:
        """Add adapters, on meta, to the targets of a model; return their parameters' names."""
        names = choose_linears(model, self.targets)
        for name in names:
            linear = model.get_submodule(name)
            out, inputs = count_features(linear)
            linear.add_module(A, Factor(inputs, self.rank, is_random=True))
            linear.add_module(B, Factor(self.rank, out, is_random=False))
            linear.lora_A.dropout = self.dropout
            linear.lora_A.scale = self.scale
            linear.register_forward_hook(_add_product)
        added = {f"{name}.{part}.weight" for name in names for part in (A, B)}
        experts = choose_experts(model, self.targets)
        return added | _attach_to_experts(model, experts, self.rank, self.scale)

    def owns(self, name: str) -> bool:
        """Return whether a parameter of this name belongs to an adapter."""
        return _FACTOR_NAME.fullmatch(name) is not None

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return W + s B A in float32, or the tensor itself if it has no adapter.

        model: without adapters; it may be on meta.
        """
        path = name.removesuffix(".weight")
        if f"{path}.{A}.weight" not in added:
            return _fold_experts(name, tensor, added, self.scale)
        product = added[f"{path}.{B}.weight"].float() @ added[f"{path}.{A}.weight"].float()
        if is_transposed(model.get_submodule(path)):
            product = product.t()
        return product.mul_(self.scale).add_(tensor)


def _add_product(linear: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add s B A x to the output of a linear layer.

    This is a forward hook, which copies of a model share.
    """
    return linear.lora_B.add_to(output, linear.lora_A(arguments[0]))


def _attach_to_experts(
    model: PreTrainedModel, names: list[str], rank: int, scale: float
) -> set[str]:
    """Add adapters, on meta, to parameters of experts; return the adapters' parameter names."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(_add_to_experts)
        # Recomputation may end early by an exception, and W must be restored then too.
        module.register_forward_hook(_restore_experts, always_call=True)
    for name in names:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).add_module(
            _EXPERTS_PREFIX + leaf, ExpertAdapter(model.get_parameter(name), rank, scale)
        )
    return {
        f"{_name_expert_adapter(name)}.{part}.weight"
        for name in names
        for part in ("lora_A", "lora_B")
    }


def _add_to_experts(module: nn.Module, _: Any) -> None:
    """Replace W by W + s B A.

    This is a forward pre-hook, which copies of a model share.
    """
    _restore_experts(module)
    targets = [
        name.removeprefix(_EXPERTS_PREFIX)
        for name, child in module.named_children()
        if isinstance(child, ExpertAdapter)
    ]
    module.frozen = {name: module._parameters[name] for name in targets}
    for name, weight in module.frozen.items():
        module._parameters[name] = module.get_submodule(_EXPERTS_PREFIX + name).add_to(weight)


def _restore_experts(module: nn.Module, *_: Any) -> None:
    """Replace W + s B A by W again."""
    module._parameters.update(module.__dict__.pop("frozen", {}))


def _name_expert_adapter(name: str) -> str:
    """Return the name of the adapter for a parameter that contains experts."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.{_EXPERTS_PREFIX}{leaf}"


def name_weight(factor: str) -> str:
    """Return the name of the weight that an A or B changes. factor: its name."""
    path = factor.removesuffix(".weight").rpartition(".")[0]
    parent, _, leaf = path.rpartition(".")
    if leaf.startswith(_EXPERTS_PREFIX):
        return f"{parent}.{leaf.removeprefix(_EXPERTS_PREFIX)}"
    return f"{path}.weight"


def _fold_experts(name: str, tensor: Tensor, added: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return W + s B A in float32, or the tensor itself if it has no adapter."""
    path = _name_expert_adapter(name)
    if f"{path}.lora_A.weight" not in added:
        return tensor
    product = added[f"{path}.lora_B.weight"].float() @ added[f"{path}.lora_A.weight"].float()
    return product.mul_(scale).add_(tensor)


def _describe_untargeted_experts(model: PreTrainedModel) -> str:
    """Return text for the log about experts without an adapter, or "" if there are none."""
    count = sum(
        parameter.numel()
        for name, parameter in list_expert_weights(model).items()
        if _name_expert_adapter(name) not in dict(model.named_modules())
    )
    return (
        f"; {units.count(count)} parameters are of fused experts, which have no adapters"
        if count
        else ""
    )


def freeze_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast and freeze all parameters of a model on the meta device; tied ones stay tied."""
    frozen: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in frozen:
                    frozen[parameter] = nn.Parameter(
                        parameter.detach().to(dtype), requires_grad=False
                    )
                module._parameters[name] = frozen[parameter]


def require_fits(model: PreTrainedModel, adapter: PeftAdapter) -> None:
    """Raise UsageError if an adapter does not belong to this model, which has no adapter yet.

    Raises ArtifactError if the adapter contains nothing for some linear layers that its config
    names.
    """
    linears = list_linears(model)
    shapes = dict[tuple[str, str], tuple[int, ...]]()
    for linear in linears.keys() & set(adapter.linears):
        out, inputs = count_features(model.get_submodule(linear))
        shapes |= {(linear, "A"): (adapter.rank, inputs), (linear, "B"): (out, adapter.rank)}
    if wrong := [
        f"{linear}: lora_{part} has shape {list(shape)}, but the model "
        + (
            f"needs {list(shapes[linear, part])}"
            if (linear, part) in shapes
            else "has no linear layer of that name in its blocks"
        )
        for (linear, part), shape in sorted(adapter.shapes.items())
        if shapes.get((linear, part)) != shape
    ]:
        raise UsageError(
            f"the adapter in {adapter.directory} does not belong to this "
            f"{model.config.model_type} model",
            found=units.join_lines(wrong, _SHOWN),
            expected="an adapter that was trained with this model as its base",
        )
    if missing := [
        linear
        for linear, kind in linears.items()
        if kind != "router"
        and linear not in adapter.linears
        and any(f".{linear}".endswith(f".{name}") for name in adapter.modules)
    ]:
        raise ArtifactError(
            f"the adapter in {adapter.directory} is incomplete",
            expected="A and B for each linear layer of the model that target_modules names",
            found=f"nothing for {len(missing)} of them:\n{units.join_lines(missing, _SHOWN)}",
        )


@torch.no_grad()
def load_adapter(model: PreTrainedModel, adapter: PeftAdapter) -> None:
    """Load the weights of an adapter from its directory into a model, which may be sharded.

    The adapter must have passed `require_fits`. Raises ArtifactError for values that are NaN, or
    infinite in the dtype of the parameters.
    """
    path = adapter.directory / peft_adapter.WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            for name, parameter in _list_adapter_parameters(model).items():
                full = file.get_tensor(peft_adapter.PREFIX + name).to(parameter.dtype)
                if not full.isfinite().all():
                    raise ArtifactError(
                        f"{path} is damaged",
                        found=f"{name} contains numbers that are NaN, infinite or too large for "
                        f"{parameter.dtype}",
                    )
                local_tensor(parameter).copy_(full[local_slice(parameter)])
    except SafetensorError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from error


def _list_adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if _FACTOR_NAME.fullmatch(name)
    }


@contextmanager
def warn_about_unused_adapters(model: nn.Module) -> Iterator[None]:
    """Warn about adapters that no forward pass uses while this context is open.

    Some families read the weight of a linear layer without calling the layer, so that an adapter
    would learn nothing. Experts are skipped, because the router may choose none of them.
    """
    used: set[str] = set()
    factors = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Factor) and name.endswith(A) and "expert" not in name
    }
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name))
        for name, module in factors.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    unused = [name.rpartition(".")[0] for name in factors if name not in used]
    if unused and log.rank() == 0:
        log.warn(
            f"a trial pass of the model did not use {units.counted(len(unused), 'adapter')}, "
            f"which may learn nothing: {units.join_lines(unused, _SHOWN)}"
        )


def select_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Lora` for a run. options: from the identity of the run."""
    return {
        "rank": options["lora_rank"],
        "alpha": options["lora_alpha"],
        "dropout": options.get("lora_dropout", 0.0),
        "targets": options.get("lora_targets", ALL),
        "rslora": options.get("lora_rslora", False),
        "precision": options["precision"],
    }
