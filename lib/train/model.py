"""Build the model of a run on the meta device, shard it, and load or initialise its weights."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from lib.core import commands, log, units
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.options import AUTO
from lib.core.paths import short_name
from lib.models import architecture, directory, lora, model_changes, rope
from lib.models.model_changes import ModelChange
from lib.models.options import FLOAT8_RECIPES
from lib.models.sharded import Placement, is_frozen
from lib.models.weights import draw_added, initialise_model, load_pretrained
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.optim.optimizers import OPTIMIZERS, list_without_blocks, read_options
from lib.parallel import (
    attention,
    attention_kernel,
    context,
    context_trial,
    experts,
    experts_trial,
    parallelize,
    precision,
    routers,
)
from lib.parallel.activation_offload import make_activation_offload
from lib.parallel.compiling import Compiler
from lib.parallel.layout import ParallelLayout
from lib.parallel.placement import count_ranks_in, list_cut_shapes
from lib.parallel.routers import BIAS, RouterLoad
from lib.train import batch_division, disagreements, plan
from lib.train.config import Config
from lib.train.inputs import Inputs
from lib.train.model_files import require_same_base_on_all_nodes
from lib.train.output.output import Output
from lib.train.trained import choose_trained


def build_model(config: Config, inputs: Inputs) -> PreTrainedModel:
    """Return the model on the meta device, with the changes that the memory estimate depends on.

    Raises UsageError if this model or machine does not support --seq-length or --precision, or if
    the adapter of --lora-from does not fit the model.
    """
    settings = rope.RopeSettings.from_options(config, config.seq_length)
    shape = rope.read_config(inputs.model_dir, config.trust_remote_code, settings)
    longest = longest_sequence(shape)
    if longest and config.seq_length > longest:
        raise UsageError(
            f"--seq-length {config.seq_length} is longer than the model allows",
            expected=f"at most {longest} (max_position_embeddings in config.json)",
            hint="--rope-scaling and --rope-theta extend the context of a model",
        )
    if config.precision in FLOAT8_RECIPES:
        is_open = config.batch_size == AUTO
        size = None if is_open else plan.get_pass(config, config.batch_size)
        precision.require_float8(bool(config.plan_gpus), config.compile, size)
    disagreements.report_disagreements(config, inputs, shape)
    model = architecture.build_on_meta(
        inputs.model_dir,
        attention.choose_attention(
            config.attention, plan.needs_boundaries(config), config.precision, shape
        ),
        config.trust_remote_code,
        shape,
    )
    rope.require_used(model, settings)
    experts.use_own_function(model)
    if inputs.adapter:
        lora.require_fits(model, inputs.adapter)
    changes = _select_changes(config, changes_memory_plan=True)
    for description in model_changes.apply_changes(model, changes, Placement()).descriptions:
        log.detail(description)
    return model


def longest_sequence(shape: PretrainedConfig) -> int | None:
    """Return the longest sequence that a model allows, in tokens; None for no limit."""
    return getattr(shape.get_text_config(), "max_position_embeddings", None)


def require_usable(config: Config, output: Output, inputs: Inputs, model: PreTrainedModel) -> None:
    """Raise UsageError or ArtifactError if a run cannot train this model and write its output.

    Only the memory and the data are checked later. Warns if the hardware only emulates the compute
    dtype.
    """
    _require_router_method(config, model)
    _require_whole_blocks(config, model)
    if config.plan_gpus or config.prepare_only:  # perhaps for a run on other machines
        return
    precision.warn_if_emulated(config.precision)
    batch = batch_division.divide_batch(config, 0, plan.get_world_size()).global_batch
    identity = config.identity(inputs.fingerprints, batch)
    output.require_usable_directory(config, inputs, identity)


def _require_router_method(config: Config, model: PreTrainedModel) -> None:
    """Raise UsageError if a typed --router-aux-loss would have no effect."""
    if not isinstance(config.router_aux_loss, float):
        return
    name = model.config.model_type
    method = routers.find_method(model, routers.find_routers(model))
    if not method:
        raise UsageError(
            f"--router-aux-loss {config.router_aux_loss:g} has no meaning for this model",
            found=f"{name}, which has no routers that the pipeline can balance",
            run=commands.as_typed("--router-aux-loss", "off"),
        )
    if method == BIAS and choose_trained(config).freezes_base:
        raise UsageError(
            f"--router-aux-loss {config.router_aux_loss:g} moves the biases of {name}'s routers, "
            "which a LoRA adapter cannot contain",
            run=commands.as_typed("--router-aux-loss", "off"),
        )


def _require_whole_blocks(config: Config, model: PreTrainedModel) -> None:
    """Raise UsageError if sharding would cut the blocks in which an optimizer stores its state."""
    block = OPTIMIZERS[config.optimizer].block
    launched = [] if config.prepare_only else [plan.get_world_size()]
    for ranks in config.plan_gpus.counts if config.plan_gpus else launched:
        shard_size = min(config.shard_size or ranks, ranks)
        cut = list_cut_shapes(model, shard_size, block)
        if block > 1 and cut:
            raise UsageError(
                f"--optimizer {config.optimizer} cannot be sharded over {shard_size} ranks",
                found=f"ranks would share the rows of an expert (shape "
                f"{' × '.join(map(str, cut[0]))}), and so cut blocks of {block} values of the "
                "optimizer state",
                hint="--shard-size N with no more ranks than experts, or --optimizer "
                + list_without_blocks(),
            )


def shard_model(
    config: Config,
    inputs: Inputs,
    model: PreTrainedModel,
    layout: ParallelLayout,
    compiler: Compiler | None,
) -> RouterLoad:
    """Shard the model, allocate its memory, and return the counter of its experts' load.

    Loads only the frozen weights, because no checkpoint contains them. Raises
    UsageError if the model's files have changed since this launch started.
    """
    load = _make_router_load(config, model, layout.device)
    offload = choose_update_device(config, layout) != layout.device
    shard_size = layout.fsdp.size(-1)
    placement = Placement(shard_size, offload, layout.device.type, count_ranks_in(shard_size))
    changes = _select_changes(config, changes_memory_plan=False)
    for description in model_changes.apply_changes(model, changes, placement).descriptions:
        log.detail(description)
    log.detail(
        "sharded: "
        + parallelize.parallelize(
            model,
            layout.fsdp,
            config.precision,
            config.activation_checkpointing,
            compiler,
            offload,
            config.keep_gathered,
            make_activation_offload(config.activation_offload, layout.device),
        )
    )
    if group := parallelize.find_reduction_group(model):
        layout.set_timeout(group)
    parallelize.materialise_model(model, layout.device, offload)
    if is_frozen(model):
        _load_frozen(config, inputs, model, layout)
    return load


def _select_changes(config: Config, changes_memory_plan: bool) -> list[ModelChange]:
    """Return the model changes that the memory estimate depends on, or all other changes."""
    settings = model_changes.select_settings(config.values_of(Role.RESULT))
    changes = model_changes.build_changes(settings)
    return [change for change in changes if change.changes_memory_plan == changes_memory_plan]


def _load_frozen(
    config: Config, inputs: Inputs, model: PreTrainedModel, layout: ParallelLayout
) -> None:
    if inputs.scratch:  # only --bench trains adapters of random weights
        initialise_model(model, config.seed)
        return
    require_same_base_on_all_nodes(inputs, layout)
    began = time.monotonic()
    load_pretrained(model, inputs.model_dir)
    inputs.require_unchanged()
    log.detail(
        f"frozen weights: read from {short_name(inputs.model_dir)} in "
        f"{units.duration(time.monotonic() - began)}"
    )


def choose_update_device(config: Config, layout: ParallelLayout) -> torch.device:
    """Return the device of a rank's shards, gradients and optimizer state."""
    return torch.device("cpu") if config.cpu_offload else layout.device


def load_first_weights(
    config: Config, inputs: Inputs, model: nn.Module, layout: ParallelLayout
) -> None:
    """Load or initialise the weights of a run that starts without a checkpoint.

    With LoRA, this concerns only the adapter: `shard_model` has loaded the frozen weights. Raises
    UsageError if the model's files have changed since this launch started.
    """
    began = time.monotonic()
    if inputs.adapter:
        lora.load_adapter(model, inputs.adapter)
        log.detail(f"LoRA: adapter loaded from {inputs.adapter.directory}")
    elif is_frozen(model):
        draw_added(model, config.seed)
        log.detail(f"LoRA: adapter initialised from seed {config.seed}")
    elif inputs.scratch:
        initialise_model(model, config.seed)
    else:
        load_pretrained(model, inputs.model_dir)
        inputs.require_unchanged()
    if not is_frozen(model):
        log.detail(
            f"weights: {units.count(model.num_parameters())} parameters "
            f"{describe_weights(config, inputs)} in {units.duration(time.monotonic() - began)}"
        )
    torch.manual_seed(config.seed + 1_000_003 * layout.rank)  # dropout differs between ranks


def describe_weights(config: Config, inputs: Inputs) -> str:
    """Return a phrase that says where the initial weights come from."""
    if inputs.scratch:
        return f"initialised from seed {config.seed}"
    return (
        f"{'missing' if directory.list_missing_weights(inputs.model_dir) else 'read'} from "
        f"{short_name(inputs.model_dir)}"
    )


def set_up_kernels(config: Config, model: PreTrainedModel, layout: ParallelLayout) -> None:
    """Choose the kernels of attention and of experts, and log them. All ranks must call this."""
    attention.avoid_device_reads(model, config.packing, config.seq_length)
    kernel = attention_kernel.pick_attention_kernel(
        model, config.packing, config.precision, layout.device, config.seq_length
    )
    log.detail(f"attention: {kernel}")
    if name := experts_trial.choose_experts_function(model, layout):
        log.detail(f"experts: {name}")
    if shared := layout.context:
        context_trial.require_divisible(
            model, layout, config.packing, config.precision, config.seq_length
        )
        size = (config.batch_size, config.seq_length)
        log.detail(f"context: {context.describe(shared, model.config, *size, config.precision)}")


def describe_balance(config: Config, model: PreTrainedModel) -> dict[str, str]:
    """Return the row about load balancing for `show_head`; {} for a model without experts.

    model: may be on the meta device.
    """
    model_routers = routers.find_routers(model)
    method = routers.find_method(model, model_routers)
    reason = config.settled_by.get("router_aux_loss", "as typed")
    value = config.router_aux_loss
    if not method:
        has_experts = model_routers or getattr(
            model.config.get_text_config(), "num_experts_per_tok", None
        )
        if not has_experts:
            return {}
        name = model.config.model_type
        return {"experts": f"no load balancing, which is not available for {name} models"}
    if not isinstance(value, float):
        return {"experts": f"no load balancing ({_explain_off(reason, method)})"}
    count = units.counted(len(model_routers), "router")
    if method == BIAS:
        return {
            "experts": f"the biases of {count} move by {value:g} a step towards an "
            f"even load ({reason})"
        }
    note = ""
    if not routers.has_trained_inputs(model, model_routers):
        note = "; without effect, since no trained weight comes before a router"
    return {"experts": f"load-balancing loss × {value:g} over {count} ({reason}){note}"}


def _explain_off(reason: str, method: str) -> str:
    """Return why the load balancing is off, in words. reason: see Config.settled_by."""
    if reason != "fine-tuning":
        return reason
    if method == BIAS:
        return "fine-tuning keeps the biases of the routers"
    return "fine-tuning, and the model's config does not set output_router_logits"


def _make_router_load(config: Config, model: PreTrainedModel, device: torch.device) -> RouterLoad:
    """Return the counter that balances the load of a model's experts. Call it before sharding."""
    model_routers = routers.find_routers(model)
    coefficient = config.router_aux_loss
    if not isinstance(coefficient, float):
        return RouterLoad(model_routers, device, "", 0.0)
    method = routers.find_method(model, model_routers)
    return RouterLoad(model_routers, device, method, coefficient)


def make_optimizer(
    config: Config, model: PreTrainedModel, layout: ParallelLayout, compiler: Compiler | None
) -> tuple[Optimizer, StepGuard]:
    """Return the optimizer of a sharded model, and the guard that clips and checks its steps."""
    wrap = compiler.for_part(f"the update of {config.optimizer}").wrap if compiler else None
    optimizer = registry.build_optimizer(
        config.optimizer, model, config.lr, read_options(config.optimizer, config), wrap
    )
    device = choose_update_device(config, layout)
    guard = StepGuard(
        config.precision,
        config.spike_factor,
        device,
        layout.ranks,
        fold=layout.device.type == "cuda",
        divisor=parallelize.gradient_divisor(layout.fsdp),
    )
    return optimizer, guard
