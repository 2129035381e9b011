"""Find the parameter groups of FSDP2, whose attributes its versions name differently."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def list_groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups that FSDP made for a module itself, [] if there are none."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11


def find_groups(model: nn.Module) -> list[Any]:
    """Return each parameter group of a model once; several modules may share one."""
    groups = {id(group): group for module in model.modules() for group in list_groups(module)}
    return list(groups.values())
