"""The model of a run: built without memory, sharded, and given its first weights."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.models import architecture, directory, lora, model_changes
from lib.models.model_changes import ModelChange
from lib.models.sharded import Placement, is_frozen
from lib.models.weights import draw_added, initialise, load_pretrained
from lib.optim.registry import OPTIMIZERS, list_without_blocks
from lib.parallel import attention, attention_kernel, experts, experts_trial, parallelize, precision
from lib.parallel.compiling import Compiler
from lib.parallel.layout import ParallelLayout
from lib.parallel.placement import count_ranks_in, list_cut_shapes
from lib.parallel.routers import RouterLoad
from lib.train import balance, earlier, plan
from lib.train.config import AUTO, Config
from lib.train.inputs import Inputs
from lib.train.model_files import require_same_on_all_nodes

_SEQ_LENGTH = 1024


def build_model(
    config: Config, experiment: Experiment, inputs: Inputs
) -> tuple[Config, PreTrainedModel]:
    """Return the model on the meta device, and the options with what it and the hardware decide.

    All is checked that can be before the long work begins. Raises UsageError or ArtifactError when
    the options exceed the model, the batch cannot be divided, or the experiment's directory cannot
    be used.
    """
    if config.precision is None:
        config = config.with_values(
            "hardware", precision="bf16" if config.plan_gpus else precision.default_precision()
        )
    shape = architecture.read_config(inputs.model_dir, config.trust_remote_code)
    if config.attention == "flash":
        config = replace(
            config,
            attention="auto"
            if config.plan_gpus
            else attention.resolve_flash(config.precision, shape),
        )
    model = architecture.build_on_meta(
        inputs.model_dir,
        attention.pick_implementation(config.attention, config.packing, config.precision, shape),
        config.trust_remote_code,
    )
    experts.use_own_function(model)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if config.seq_length is None:
        config = config.with_values("model", seq_length=min(_SEQ_LENGTH, longest or _SEQ_LENGTH))
    elif longest and config.seq_length > longest:
        raise UsageError(
            f"--seq-length {config.seq_length} is longer than the model allows",
            expected=f"at most {longest} (max_position_embeddings in config.json)",
        )
    if config.precision == "fp8":
        batch = None if config.batch_size == AUTO else config.batch_size
        precision.require_float8(bool(config.plan_gpus), config.compile, batch, config.seq_length)
    elif config.fp8_recipe != "tensorwise":
        raise UsageError(
            f"--fp8-recipe {config.fp8_recipe} belongs to --precision fp8",
            found=f"--precision {config.precision}",
        )
    config = balance.settle(config, model, inputs)
    if inputs.adapter:
        lora.require_fits(model, inputs.adapter)
    changes = _select_changes(config, changes_memory_plan=True)
    for description in model_changes.apply_changes(model, changes, Placement()).descriptions:
        log.info(description)
    _require_whole_blocks(config, model)
    if not (config.plan_gpus or config.prepare_only):  # for a run on other machines, perhaps
        precision.warn_if_emulated(config.precision)
        batch = plan.divide(config, 0, plan.launched_size()).global_batch
        earlier.require_free_name(
            config, experiment, inputs.begun, config.identity(inputs.fingerprints, batch)
        )
        _require_writable(experiment.root)
    return config, model


def _require_whole_blocks(config: Config, model: PreTrainedModel) -> None:
    """Raise UsageError when ranks would share what an optimizer keeps together."""
    block = OPTIMIZERS[config.optimizer].block
    here = [] if config.prepare_only else [plan.launched_size()]
    for ranks in config.plan_gpus or here:
        shard_size = min(config.shard_size or ranks, ranks)
        cut = list_cut_shapes(model, shard_size, block)
        if block > 1 and cut:
            raise UsageError(
                f"--optimizer {config.optimizer} cannot be shared by {shard_size} ranks",
                found=f"parameters of {' × '.join(map(str, cut[0]))}, of which ranks share the "
                f"rows of each expert: blocks of {block} numbers would be cut",
                hint="--shard-size N with no more ranks than experts, or --optimizer "
                + list_without_blocks(),
            )


def _require_writable(directory: Path) -> None:
    """Raise UsageError when a directory can be neither written to nor made."""
    there = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"{directory} cannot be written",
            found=f"{there} is {'read-only' if there.is_dir() else 'a file'}",
            hint="--save-dir DIR names another place",
        )


def shard(
    config: Config,
    inputs: Inputs,
    model: PreTrainedModel,
    layout: ParallelLayout,
    compiler: Compiler | None,
) -> RouterLoad:
    """Shard the model and give it memory, without content but for what is frozen.

    No checkpoint holds that. Returns what counts the load of the model's experts. Raises UsageError
    when the model's files have changed since it was planned.
    """
    load = balance.watch(config, model, layout.device)
    offload = update_device(config, layout) != layout.device
    shard_size = layout.fsdp.size(-1)
    placement = Placement(shard_size, offload, layout.device.type, count_ranks_in(shard_size))
    changes = _select_changes(config, changes_memory_plan=False)
    for description in model_changes.apply_changes(model, changes, placement).descriptions:
        log.info(description)
    log.info(
        "sharded: "
        + parallelize.parallelize(
            model,
            layout.fsdp,
            config.precision,
            config.activation_checkpointing,
            compiler,
            offload,
            bool(config.keep_gathered),
        )
    )
    parallelize.materialise(model, layout.device, offload)
    if is_frozen(model):
        _load_frozen(inputs, model, layout)
    return load


def _select_changes(config: Config, changes_memory_plan: bool) -> list[ModelChange]:
    """Return the changes of the model that come before the memory plan, or those after it."""
    settings = model_changes.select_settings(config.values_of(Role.RESULT))
    changes = model_changes.build_changes(settings)
    return [change for change in changes if change.changes_memory_plan == changes_memory_plan]


def _load_frozen(inputs: Inputs, model: PreTrainedModel, layout: ParallelLayout) -> None:
    require_same_on_all_nodes(inputs, layout)
    began = time.monotonic()
    load_pretrained(model, inputs.model_dir)
    inputs.require_unchanged()
    log.info(
        f"frozen weights: read from {inputs.model_dir} in "
        f"{units.duration(time.monotonic() - began)}"
    )


def update_device(config: Config, layout: ParallelLayout) -> torch.device:
    """Return where a rank's shards, gradients and states of the optimizer lie."""
    return torch.device("cpu") if config.cpu_offload else layout.device


def first_weights(config: Config, inputs: Inputs, model: nn.Module, layout: ParallelLayout) -> None:
    """Fill a model that no checkpoint has filled; UsageError when its files have changed.

    Of one with a frozen part, which `shard` has filled, that are its adapters.
    """
    began = time.monotonic()
    if inputs.adapter:
        lora.load_adapter(model, inputs.adapter)
        log.info(f"adapters: taken from {inputs.adapter.directory}")
    elif is_frozen(model):
        draw_added(model, config.seed)
        log.info(f"adapters: drawn from seed {config.seed}")
    elif inputs.scratch:
        initialise(model, config.seed)
    else:
        load_pretrained(model, inputs.model_dir)
        inputs.require_unchanged()
    if not is_frozen(model):
        log.info(
            f"weights: {units.count(model.num_parameters())} parameters "
            f"{weights_of(config, inputs)} in {units.duration(time.monotonic() - began)}"
        )
    torch.manual_seed(config.seed + 1_000_003 * layout.rank)  # dropout differs between ranks


def weights_of(config: Config, inputs: Inputs) -> str:
    """Return where the first weights come from, in words."""
    if inputs.scratch:
        return f"drawn from seed {config.seed}"
    return (
        f"{'missing' if directory.list_missing_weights(inputs.model_dir) else 'read'} from "
        f"{inputs.model_dir}"
    )


def pick_kernels(config: Config, model: PreTrainedModel, layout: ParallelLayout) -> None:
    """Decide how the model attends, and which function computes its experts; print both.

    All ranks must call this.
    """
    attention.avoid_device_reads(model, config.packing, config.seq_length)
    kernel = attention_kernel.pick_kernel(model, config.packing, config.precision, layout.device)
    log.info(f"attention: {kernel}")
    if name := experts_trial.pick_function(model, layout):
        log.info(f"experts: {name}")
