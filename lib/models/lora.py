"""`--lora-rank`: low-rank adapters beside frozen linears.

A linear of the blocks gives W x + s B (A x) instead of W x: Hu et al. 2021, "LoRA: low-rank
adaptation of large language models". A is [rank, in], B is [out, rank], and s is alpha ÷ rank, or
alpha ÷ √rank with rsLoRA (Kalajdzievski 2023). W and all else of the model is frozen and kept in
the dtype it computes in; A and B are float32 masters. They are modules beneath the linear that they
belong to, so their names are those of PEFT's files: `….q_proj.lora_A.weight`.
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
from lib.models.keys import Added
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
_OWNED = re.compile(rf"(.+)\.({A}|{B})\.weight")
_EXPERTS = "lora_"
_SHOWN = 8


class Factor(Added, nn.Linear):
    """Holds A or B of an adapter. drawn: its first values are, else they are zero."""

    def __init__(self, inputs: int, outputs: int, drawn: bool) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta", dtype=torch.float32)
        self.drawn = drawn
        self.dropout = 0.0
        self.scale = 1.0

    def draw(self, full: Tensor) -> None:
        """Give A its first values; those of B are zero."""
        if self.drawn:
            nn.init.kaiming_uniform_(full, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return s A x for x after dropout; x: [..., in] → [..., rank]."""
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        low = F.linear(x, self.weight)
        return low if self.scale == 1.0 else low * self.scale

    def add_to(self, output: Tensor, low: Tensor) -> Tensor:
        """Return output + B low; low: [..., rank] → [..., out].

        In compiled code the sum is an operation of its own, which the compiler makes part of the
        next one that reads the output, and without a copy of it. Uncompiled, the product adds to
        the output in one pass.
        """
        if torch.compiler.is_compiling():
            return output + F.linear(low, self.weight)
        return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), self.weight.t()).view_as(
            output
        )


class ExpertFactor(Added):
    """Holds A or B of all experts. drawn: its first values are, else they are zero."""

    def __init__(self, *shape: int, drawn: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32))
        self.drawn = drawn

    def draw(self, full: Tensor) -> None:
        """Give A its first values, expert by expert; those of B are zero."""
        for expert in full if self.drawn else ():
            nn.init.kaiming_uniform_(expert, a=math.sqrt(5))


class ExpertAdapter(nn.Module):
    """Stands beside the parameter that it belongs to."""

    def __init__(self, parameter: nn.Parameter, rank: int, scale: float) -> None:
        super().__init__()
        experts, rows, columns = parameter.shape
        self.lora_A = ExpertFactor(experts, rank, columns, drawn=True)
        self.lora_B = ExpertFactor(experts, rows, rank, drawn=False)
        self.scale = scale

    def added_to(self, whole: Tensor) -> Tensor:
        """Return W + s B A; whole: [experts, rows, columns], perhaps with rows of padding."""
        product = torch.bmm(self.lora_B.weight * self.scale, self.lora_A.weight)
        return whole + F.pad(product, (0, 0, 0, whole.shape[1] - product.shape[1]))


@dataclass(frozen=True)
class Lora:
    """Gives linears an adapter each and freezes all else.

    targets: all-linear, attention, mlp, or a regular expression that matches the whole name of a
    linear or the last part of it. precision: what the model computes in, and is frozen in.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: str = ALL
    rslora: bool = False
    precision: str = "fp32"

    before_plans = True  # the plan of memory is of the adapted model

    @property
    def scale(self) -> float:
        """Return s."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Freeze a meta-device model and attach its adapters.

        Returns the names of their parameters, and a sentence about them. Raises UsageError where
        the targets match nothing that can have an adapter, and for dropout with experts.
        """
        experts = choose_experts(model, self.targets)
        if experts and self.dropout:
            raise UsageError(
                "--lora-dropout cannot be had with adapters of experts, which are "
                "added to the weights and see no inputs",
                found=experts[0],
                run=commands.as_typed("--lora-dropout", 0),
            )
        dtype = COMPUTE_DTYPES[self.precision]
        freeze(model, dtype)
        narrow = [
            name
            for name in choose_linears(model, self.targets)
            if min(count_features(model.get_submodule(name))) < self.rank
        ]
        if narrow and log.rank() == 0:
            log.warn(
                f"--lora-rank {self.rank} is more than {narrow[0]} has rows or columns: a "
                "smaller rank can learn the same there"
            )
        added = self.attach(model)
        return (
            added,
            f"{self._named(len(added) // 2 - len(experts), len(experts))}: "
            f"{units.count(sum(model.get_parameter(name).numel() for name in added))} of "
            f"{units.count(model.num_parameters())} parameters are trained; the rest is frozen "
            f"in {str(dtype).removeprefix('torch.')}{_describe_untargeted_experts(model)}",
        )

    def _named(self, linears: int, experts: int) -> str:
        """Say what these adapters are, and on how many linears and weights of experts."""
        of_experts = f" and the experts of {units.counted(experts, 'parameter')}" if experts else ""
        return (
            f"{'rsLoRA' if self.rslora else 'LoRA'}: rank {self.rank}, alpha {self.alpha:g}, "
            f"on {units.counted(linears, 'linear')}{of_experts} ({units.shortened(self.targets)})"
        )

    def attach(self, model: PreTrainedModel) -> set[str]:
        """Put adapters beneath the targets of a model, on meta; return their parameters' names."""
        names = choose_linears(model, self.targets)
        for name in names:
            linear = model.get_submodule(name)
            out, inputs = count_features(linear)
            linear.add_module(A, Factor(inputs, self.rank, drawn=True))
            linear.add_module(B, Factor(self.rank, out, drawn=False))
            linear.lora_A.dropout = self.dropout
            linear.lora_A.scale = self.scale
            linear.register_forward_hook(_add_product)
        added = {f"{name}.{part}.weight" for name in names for part in (A, B)}
        experts = choose_experts(model, self.targets)
        return added | _attach_to_experts(model, experts, self.rank, self.scale)

    def owns(self, name: str) -> bool:
        """Tell whether a name is that of an adapter."""
        return _OWNED.fullmatch(name) is not None

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return W + s B A in float32, or the tensor itself where it has no adapter.

        model: without adapters, perhaps on meta.
        """
        path = name.removesuffix(".weight")
        if f"{path}.{A}.weight" not in added:
            return _fold_experts(name, tensor, added, self.scale)
        product = added[f"{path}.{B}.weight"].float() @ added[f"{path}.{A}.weight"].float()
        if is_transposed(model.get_submodule(path)):
            product = product.t()
        return product.mul_(self.scale).add_(tensor)


def _add_product(linear: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add s B A x to what a linear has given for x; a hook, which copies of a model share."""
    return linear.lora_B.add_to(output, linear.lora_A(arguments[0]))


def _attach_to_experts(
    model: PreTrainedModel, names: list[str], rank: int, scale: float
) -> set[str]:
    """Put adapters beside weights of experts, on meta; return their parameters' names."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(_add_to_experts)
        # Also where recomputation ends early, by an exception.
        module.register_forward_hook(_restore_experts, always_call=True)
    for name in names:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).add_module(
            _EXPERTS + leaf, ExpertAdapter(model.get_parameter(name), rank, scale)
        )
    return {
        f"{_adapter_of_experts(name)}.{part}.weight"
        for name in names
        for part in ("lora_A", "lora_B")
    }


def _add_to_experts(module: nn.Module, _: Any) -> None:
    """Put W + s B A in the place of W; a hook, which copies of a model share."""
    _restore_experts(module)
    module.frozen = {
        name.removeprefix(_EXPERTS): module._parameters[name.removeprefix(_EXPERTS)]
        for name, child in module.named_children()
        if isinstance(child, ExpertAdapter)
    }
    for name, whole in module.frozen.items():
        module._parameters[name] = module.get_submodule(_EXPERTS + name).added_to(whole)


def _restore_experts(module: nn.Module, *_: Any) -> None:
    """Put W back in its place."""
    module._parameters.update(module.__dict__.pop("frozen", {}))


def _adapter_of_experts(name: str) -> str:
    """Return the name of the adapter of such a weight."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.{_EXPERTS}{leaf}"


def _fold_experts(name: str, tensor: Tensor, added: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return W + s B A in float32, or the tensor itself where it has no adapter."""
    path = _adapter_of_experts(name)
    if f"{path}.lora_A.weight" not in added:
        return tensor
    product = added[f"{path}.lora_B.weight"].float() @ added[f"{path}.lora_A.weight"].float()
    return product.mul_(scale).add_(tensor)


def _describe_untargeted_experts(model: PreTrainedModel) -> str:
    """Say how many parameters of experts stay without an adapter; nothing where there are none."""
    numbers = sum(
        parameter.numel()
        for name, parameter in list_expert_weights(model).items()
        if _adapter_of_experts(name) not in dict(model.named_modules())
    )
    return (
        f"; {units.count(numbers)} parameters are of fused experts, which have no adapters"
        if numbers
        else ""
    )


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Make all parameters of a meta-device model frozen ones of a dtype; ties stay."""
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
    """Raise UsageError where an adapter is not of this model, which has none yet.

    Raises ArtifactError if it lacks linears of this model that its config names.
    """
    linears = list_linears(model)
    here = dict[tuple[str, str], tuple[int, ...]]()
    for linear in linears.keys() & set(adapter.linears):
        out, inputs = count_features(model.get_submodule(linear))
        here |= {(linear, "A"): (adapter.rank, inputs), (linear, "B"): (out, adapter.rank)}
    if wrong := [
        f"{linear}: lora_{part} of {list(shape)}, and the model "
        + (
            f"needs {list(here[linear, part])}"
            if (linear, part) in here
            else "has no such linear in its blocks"
        )
        for (linear, part), shape in sorted(adapter.shapes.items())
        if here.get((linear, part)) != shape
    ]:
        raise UsageError(
            f"the adapter in {adapter.directory} is not of this {model.config.model_type} model",
            found=units.join_lines(wrong, _SHOWN),
            expected="the model that it was trained beside",
        )
    if lacking := [
        linear
        for linear, kind in linears.items()
        if kind != "router"
        and linear not in adapter.linears
        and any(f".{linear}".endswith(f".{name}") for name in adapter.modules)
    ]:
        raise ArtifactError(
            f"the adapter in {adapter.directory} is not whole",
            expected="A and B for each linear of the model that target_modules names",
            found=f"nothing for {len(lacking)} of them:\n{units.join_lines(lacking, _SHOWN)}",
        )


@torch.no_grad()
def fill(model: PreTrainedModel, adapter: PeftAdapter) -> None:
    """Fill the adapters of a model, sharded or plain, from the files that they fit.

    Raises ArtifactError for numbers that are NaN or infinite in the dtype of the parameters.
    """
    path = adapter.directory / peft_adapter.WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            for name, parameter in _parameters(model).items():
                full = file.get_tensor(peft_adapter.PREFIX + name).to(parameter.dtype)
                if not full.isfinite().all():
                    raise ArtifactError(
                        f"{path} is damaged",
                        found=f"{name} has numbers that are "
                        f"NaN or infinite, or beyond {parameter.dtype}",
                    )
                local_tensor(parameter).copy_(full[local_slice(parameter)])
    except SafetensorError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from error


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if _OWNED.fullmatch(name)
    }


@contextmanager
def telling_of_idle(model: nn.Module) -> Iterator[None]:
    """Warn of adapters that no forward pass of the while has used.

    Where a family takes the weight of a linear without calling it, an adapter would learn nothing.
    """
    used: set[str] = set()
    factors = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Factor) and name.endswith(A) and "expert" not in name
    }  # which no token of the trial may have chosen
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: used.add(name))
        for name, module in factors.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    idle = [name.rpartition(".")[0] for name in factors if name not in used]
    if idle and log.rank() == 0:
        log.warn(
            f"{units.counted(len(idle), 'adapter')} had no part in a trial of the model, and "
            f"may learn nothing: {units.join_lines(idle, _SHOWN)}"
        )


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's adapters. options: of its identity."""
    return {
        "rank": options["lora_rank"],
        "alpha": options["lora_alpha"],
        "dropout": options.get("lora_dropout", 0.0),
        "targets": options.get("lora_targets", ALL),
        "rslora": options.get("lora_rslora", False),
        "precision": options["precision"],
    }
