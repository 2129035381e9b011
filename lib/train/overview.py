"""Print the plan of a run, at its start or in a dry run, which may be for other machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.core import declared, log, units
from lib.core.errors import Problems, UsageError
from lib.core.paths import Experiment, short_name
from lib.models import rope
from lib.models.rope import RopeSettings
from lib.models.sharded import describe_size
from lib.models.weights import warn_of_unused
from lib.optim.optimizers import Choice
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout
from lib.planning import flops, memory, peaks, sizes
from lib.tokens.prompts import Prompt
from lib.train import checks, estimates, memory_fit, sampling
from lib.train import plan as plans
from lib.train.config import Config
from lib.train.data import Data, prepare_prompts
from lib.train.estimates import Hardware, ModelCost
from lib.train.inputs import Inputs
from lib.train.model import describe_balance, describe_weights
from lib.train.output.output import Output
from lib.train.plan import Plan
from lib.train.source import SampleSource
from lib.train.trained import choose_trained


def show_head(
    plan: Plan,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    cost: ModelCost,
    hardware: Hardware,
    output: Output,
) -> None:
    """Log the model, the data, the settled options and the estimates of a run at its start.

    A run with a rank log prints data, steps, checkpoints and the log, below the model.
    """
    config = plan.config
    rows = data.describe(plan) | output.describe_cost(plan, cost, hardware)
    log.detail(f"{output.title}: {describe_model(config, inputs)}, {describe_size(model)}")
    held_out = " + ".join(units.counted(len(part.samples), "sample") for part in data.held_out)
    no_split = "none that fills a sample (stage 02 makes a split with --validation-percent)"
    if inputs.source.option:
        no_split = f"none with {inputs.source.option}"
    log.table(
        {
            "dataset": inputs.source,
            "validation": held_out or no_split,
            **_describe_rope(config, model),
            **_describe_settled(config),
            **describe_balance(config, model),
            **rows,
            **_describe_samples(config, data.prompts, cost, hardware),
        },
        log.detail,
    )
    if output.keeps_files:
        _print_head(plan, inputs, rows, held_out, output.experiment)
    _warn_about_unusual_options(plan, cost, hardware, bool(data.held_out), output, inputs.source)
    if hardware.peak:
        log.detail(
            f"peak for MFU: {hardware.peak / 1e12:.4g} TFLOP/s per GPU ({hardware.source}); "
            + flops.describe_per_token(model, config.seq_length)
            + ("; less for packed documents" if config.packing == "documents" else "")
        )


def _print_head(
    plan: Plan, inputs: Inputs, rows: dict[str, str], held_out: str, experiment: Experiment
) -> None:
    """Print the lines that a person reads at the start. rows: those of the plan."""
    epoch = "" if plan.samples is None else f", {rows['epoch']}"
    ranks = plans.get_world_size()
    devices = units.counted(ranks, "GPU" if torch.cuda.is_available() else "CPU rank")
    for name, text in {
        "data": f"{inputs.source}{epoch}, {f'{held_out} for' if held_out else 'no'} validation",
        "steps": f"{rows['steps']} on {devices}",
        "checkpoints": f"{rows['checkpoints']}, in {experiment.checkpoints}",
        "log": str(experiment.rank_log(log.rank())),
    }.items():
        log.info(f"{name}: {text}")


def _describe_samples(
    config: Config, prompts: Sequence[Prompt], cost: ModelCost, hardware: Hardware
) -> dict[str, str]:
    """Return a row with the cost of samples, {} without prompts."""
    if not prompts:
        return {}
    return {"samples": sampling.describe_cost(config, prompts, cost, hardware)}


def get_hardware(config: Config, layout: ParallelLayout) -> Hardware:
    """Return the devices of this launch."""
    if layout.device.type == "cpu":
        return Hardware(layout.ranks, None)
    return Hardware(layout.ranks, *flops.find_peak(config.precision))


def show_plan(config: Config, inputs: Inputs, model: PreTrainedModel, output: Output) -> None:
    """Print the plan of a dry run, and write nothing.

    Raises UsageError if a batch cannot be divided, after everything else has been printed.
    """
    cost = measure_cost(config, inputs, model)
    prompts = prepare_prompts(config, inputs.model_dir, inputs.template)
    problems = Problems()
    log.info("plan:")
    masters = f"float32 masters{parallelize.describe_frozen(model)}"
    log.table(
        {
            "model": f"{describe_model(config, inputs)} "
            f"({model.config.model_type}, {describe_size(model)})",
            "weights": describe_weights(config, inputs),
            "dataset": inputs.source,
            "precision": f"{masters}, {config.precision} compute",
            **_describe_rope(config, model),
            **_describe_settled(config),
            **describe_balance(config, model),
            **_describe_ranks(config),
        }
    )
    if not inputs.scratch:
        warn_of_unused(model, inputs.model_dir)
    encoding = inputs.encode_for(model.config.get_text_config().vocab_size)
    data, samples = inputs.source.estimate_samples(config, encoding)
    configs = memory_fit.fit_to_planned_gpus(config, inputs, model) or {
        plans.get_world_size(): config
    }
    for ranks, filled in configs.items():
        if config.plan_gpus:
            log.info(f"on {units.counted(ranks, 'GPU')}:")
        limited = memory_fit.limit_batch(filled, samples, ranks)
        configs[ranks] = limited
        plan = problems.collect(
            partial(Plan.of, limited, inputs.fingerprints, samples, ranks=ranks)
        )
        if plan is None:
            log.info("  not possible: see the error at the end")
            continue
        if not plan.fills_a_step:
            log.warn(_describe_shortage(plan, ranks))
        if data:
            problems.collect(
                partial(
                    checks.require_enough_steps,
                    config,
                    plan.total_steps,
                    has_begun=bool(inputs.earlier_run),
                )
            )
        hardware = _get_planned_hardware(config, ranks)
        _print_numbers(plan, data, cost, hardware, output, inputs.source)
        log.table(_describe_samples(config, prompts, cost, hardware))
    if config.plan_gpus:
        most_documents = data.most_documents if data else None
        _print_memory(config, model, configs, config.plan_gpus.gib, most_documents)
    problems.raise_if_any()
    log.info("dry run: nothing was written")


def _describe_shortage(plan: Plan, ranks: int) -> str:
    """Return the warning that the data does not fill a step on this number of GPUs."""
    return (
        f"on {units.counted(ranks, 'GPU')} the dataset is too small for one step "
        f"({plan.samples:,} samples in an epoch, {plan.division.global_batch:,} in a step): stage "
        "04 would refuse the run, and the figures are for one step"
    )


def _describe_settled(config: Config) -> dict[str, str]:
    """Return the options that the rules of settle.py have filled in, each with the reason."""
    values = {name: getattr(config, name) for name in config.settled_by}
    texts = [
        f"{declared.flag(name)} {_format_value(value)} ({config.settled_by[name]})"
        for name, value in values.items()
        if value is not None
    ]
    return {"settled": ", ".join(texts)} if texts else {}


def _format_value(value: Any) -> str:
    """Return the value of an option as a user types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return units.shorten_text(f"{value:g}" if isinstance(value, float) else str(value))


def _describe_rope(config: Config, model: PreTrainedModel) -> dict[str, str]:
    """Return a row about the RoPE settings, {} if the model keeps its own."""
    return rope.describe(model.config, RopeSettings.from_options(config, config.seq_length))


def _describe_ranks(config: Config) -> dict[str, str]:
    """Return a row that explains why the plan is for one rank; {} if torchrun started this."""
    if config.plan_gpus or "WORLD_SIZE" in os.environ:
        return {}
    return {
        "ranks": "1, because torchrun did not start this command; --plan-gpus N plans for N GPUs"
    }


def _print_numbers(
    plan: Plan,
    data: Data | None,
    cost: ModelCost,
    hardware: Hardware,
    output: Output,
    source: SampleSource,
) -> None:
    """Print the rows of a plan. data: None if the number of samples is an estimate."""
    numbers = data.describe(plan) if data else plan.describe()
    log.table(numbers | output.describe_cost(plan, cost, hardware))
    has_validation = bool(data.held_out) if data else cost.validates
    _warn_about_unusual_options(plan, cost, hardware, has_validation, output, source)


def _warn_about_unusual_options(
    plan: Plan,
    cost: ModelCost,
    hardware: Hardware,
    has_validation: bool,
    output: Output,
    source: SampleSource,
) -> None:
    """Warn about options that are unusual for a run of this length and a model of this size."""
    config = plan.config
    warnings = [
        estimates.suggest_global_batch(plan, cost, hardware),
        output.suggest_options(plan, cost, hardware),
        checks.describe_high_lr(config.lr, cost.parameters, cost.scratch, choose_trained(config)),
        checks.describe_optimizer_risk(config, cost.scratch),
        *checks.list_unusual_options(config, plan.total_steps, has_validation, source.option),
    ]
    for warning in filter(None, warnings):
        if log.rank() == 0:
            log.warn(warning)


def _get_planned_hardware(config: Config, ranks: int) -> Hardware:
    """Return the GPUs of --plan-gpus, or the devices of this machine."""
    if config.plan_gpus:
        peak, name = peaks.find_planned_gpu(config.precision)
        return Hardware(ranks, peak, f"data sheet of the {name}")
    if torch.cuda.is_available():
        return Hardware(ranks, *flops.find_peak(config.precision))
    return Hardware(ranks, None)


def _print_memory(
    config: Config,
    model: PreTrainedModel,
    configs: dict[int, Config],
    gib: float,
    most_documents: int | None,
) -> None:
    """Print the memory per GPU of --plan-gpus, or a warning if the model cannot be traced.

    configs: options by number of GPUs. gib: memory of each GPU. most_documents: see
    plan.make_step_config.
    """
    try:
        steps = [
            plans.make_step_config(filled, model, ranks, True, most_documents)
            for ranks, filled in configs.items()
        ]
        memory.print_memory_table(model, steps, gib, not config.no_progress)
    except UsageError:
        raise
    except Exception as error:  # the rest of the plan is still useful
        log.warn(f"the memory could not be traced: {type(error).__name__}: {error}")


def measure_cost(config: Config, inputs: Inputs, model: PreTrainedModel) -> ModelCost:
    """Return the facts about the model that the estimates of the run need."""
    return ModelCost(
        model.num_parameters(),
        flops.count_per_token(model, config.seq_length),
        flops.count_attention(model, config.seq_length),
        sizes.count_checkpoint(model, Choice.of(config)),
        inputs.scratch,
        inputs.source.has_validation,
    )


def describe_model(config: Config, inputs: Inputs) -> str:
    """Return the name of the model of a run."""
    if not config.makes_model:
        return short_name(inputs.model_dir)
    tokenizer = inputs.source.new_tokenizer
    if config.tokenizer:
        tokenizer = f"with the tokenizer of {config.tokenizer}"
    return f"{config.model_size} from scratch {tokenizer}"
