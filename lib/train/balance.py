"""Whether a run keeps the load of its experts even, and how: what --router-aux-loss comes to."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lib.core import commands, units
from lib.core.errors import UsageError
from lib.parallel import routers
from lib.parallel.routers import BIAS, LOSS, RouterLoad
from lib.train.config import OFF, Config
from lib.train.inputs import KEPT, Inputs

_BIAS_STEP = 1e-3  # of DeepSeek-V3 (arXiv 2412.19437, section 4.2)


def settle(config: Config, model: PreTrainedModel, inputs: Inputs) -> Config:
    """Return the options with a number for --router-aux-loss, or with off.

    model: on the meta device. Raises UsageError for a number that this model has no use for.
    """
    method = routers.find_method(model, routers.find_routers(model))
    given = config.router_aux_loss
    asks = routers.is_loss_in_config(model)
    routers.turn_off_family_loss(model)
    if isinstance(given, float):
        _require_of_use(config, model, method)
        return config
    if given == OFF or not method:
        return config
    if inputs.begun or inputs.named:  # by a launch that had it off, or was older than the option
        return config.with_values(KEPT, router_aux_loss=OFF)
    coefficient = routers.find_coefficient(model) if method == LOSS else _BIAS_STEP
    if inputs.scratch:
        return config.with_values("from scratch", router_aux_loss=coefficient or OFF)
    if method == LOSS and asks:
        return config.with_values("the model's config", router_aux_loss=coefficient or OFF)
    return config.with_values("fine-tuning", router_aux_loss=OFF)


def _require_of_use(config: Config, model: PreTrainedModel, method: str) -> None:
    """Raise UsageError if nothing would follow from a number that was typed."""
    name = model.config.model_type
    if not method:
        raise UsageError(
            f"--router-aux-loss {config.router_aux_loss:g} has no meaning for this model",
            found=f"{name}, which has no routers that the pipeline can balance",
            run=commands.as_typed("--router-aux-loss", "off"),
        )
    if method == BIAS and config.trains_lora:
        raise UsageError(
            f"--router-aux-loss {config.router_aux_loss:g} moves the biases of {name}'s routers, "
            "which a LoRA adapter cannot contain",
            run=commands.as_typed("--router-aux-loss", "off"),
        )


def describe(config: Config, model: PreTrainedModel) -> dict[str, str]:
    """Return what the head of a run says of the balance of its experts; {} without experts.

    model: on the meta device.
    """
    found = routers.find_routers(model)
    method = routers.find_method(model, found)
    why = config.settled_by.get("router_aux_loss", "as typed")
    value = config.router_aux_loss
    if not method:
        has_experts = found or getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        if not has_experts:
            return {}
        name = model.config.model_type
        return {"experts": f"no load balancing, which is not available for {name} models"}
    if not isinstance(value, float):
        return {"experts": f"no load balancing ({_why_off(why, method)})"}
    count = units.counted(len(found), "router")
    if method == BIAS:
        return {
            "experts": f"the biases of {count} move by {value:g} a step towards an "
            f"even load ({why})"
        }
    note = ""
    if not routers.has_trained_inputs(model, found):
        note = "; no trained weight comes before a router, so that it changes nothing"
    return {"experts": f"load-balancing loss × {value:g} over {count} ({why}){note}"}


def _why_off(why: str, method: str) -> str:
    """Return why there is no load balancing where the family has it."""
    if why != "fine-tuning":
        return why
    if method == BIAS:
        return "fine-tuning keeps the biases of the routers"
    return "fine-tuning, and the model's config does not set output_router_logits"


def watch(config: Config, model: PreTrainedModel, device: torch.device) -> RouterLoad:
    """Return what counts the load of a model's experts and balances it; before it is sharded."""
    found = routers.find_routers(model)
    value = config.router_aux_loss
    if not isinstance(value, float):
        return RouterLoad(found, device, "", 0.0)
    return RouterLoad(found, device, routers.find_method(model, found), value)
