"""Estimate the hours and the cost of a job before it starts.

The time of a step is the estimate of stage 04 (lib/train/estimates.py) for the GPUs and the network
in launch/cloud/kube/templates/instances.yaml, which also contains the prices.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launch.cloud.kube import raw_text
from launch.cloud.kube.job import Job
from lib.core import commands, log, paths, records, units
from lib.core.options import AUTO
from lib.models import directory, scratch_sizes
from lib.planning import peaks
from lib.tokens.options import SEQ_LENGTH
from lib.train import command_line, estimates
from lib.train.config import Config
from lib.train.estimates import Hardware, ModelCost
from lib.train.plan import Plan
from lib.train.trained import choose_trained

# The number of parameters in the name of a model, such as 8B; not in 8x7B or 30B-A3B.
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![\w.]|-A\d)")
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}


class NoEstimate(Exception):
    """The time of a job is unknown; the text is the reason."""


def log_cost(job: Job) -> None:
    """Print the time of the job, its derivation, and the costs."""
    log.info("cost, by estimate:")
    log.table(describe_cost(job))


def describe_cost(job: Job) -> dict[str, str]:
    """Return rows of a table: the time of the job, its derivation, and the costs."""
    rows: dict[str, str] = {}
    hours = 0.0
    try:
        seconds_per_step, rows["step"] = _estimate_step(job)
        config = command_line.parse_options(job.train)
        steps = config.step_limit
        if steps is None:
            raise NoEstimate("the options set no number of steps (--max-steps)")
        hours = steps * seconds_per_step / 3600
        rows["time"] = (
            f"{units.duration(3600 * hours)} for {units.counted(steps, 'step')}, in addition to "
            "the start of the pods, checkpoints and validation"
        )
    except NoEstimate as reason:
        rows["time"] = f"unknown: {reason}"
    rows["money"] = _describe_price(job, hours)
    return rows


def _describe_price(job: Job, hours: float) -> str:
    """Return the costs of all nodes as text. hours: of the job; 0 gives the costs per hour."""
    name = job.instance_type or "this instance type"
    file = commands.path_of("launch/cloud/kube/templates/instances.yaml")
    if not (price := job.price):
        return f"unknown: no price of {name} in {file}"
    paid = job.nodes + job.spares
    spares = f" ({units.counted(job.spares, 'spare')} among them)" if job.spares else ""
    nodes = f"{units.counted(paid, 'node')}{spares} × ${price:,} ({name} in {file})"
    if not hours:
        return f"${paid * price:,.2f} per hour = {nodes}"
    return f"${hours * paid * price:,.2f} = {hours:.3g} hours × {nodes}"


def _estimate_step(job: Job) -> tuple[float, str]:
    """Return the time of a step in seconds, and its derivation. Raises NoEstimate."""
    config = command_line.parse_options(job.train)
    hardware = _get_hardware(job, config)
    if config.global_batch_size is None and config.batch_size in (None, AUTO):
        raise NoEstimate("the run chooses its batch on the GPUs (--global-batch-size)")
    config = config.with_values(
        "estimate", max_steps=1, num_epochs=None, seq_length=config.seq_length or SEQ_LENGTH
    )
    cost, source = measure_model(config)
    plan = Plan.of(config, {}, None, ranks=hardware.ranks)
    seconds = estimates.estimate_step_seconds(plan, cost, hardware)
    if seconds is None:
        raise NoEstimate("the model is too small for an estimate")
    computing, waiting = estimates.split_step_seconds(plan, cost, hardware)
    text = (
        f"{computing:.3g} s for {plan.tokens_per_step:,} tokens × {cost.flops / 1e9:.3g} GFLOP "
        f"({source}) at {estimates.describe_utilisation(hardware)}"
    )
    if hardware.nodes > 1:
        gbps = job.node["gbps"]
        text += f" + {waiting:.3g} s of waiting for {gbps:g} Gbit/s between nodes, at least"
    return seconds, f"{seconds:.3g} s = {text}"


def _get_hardware(job: Job, config: Config) -> Hardware:
    """Return the GPUs of a job and the network between its nodes. Raises NoEstimate."""
    if not job.gpus_per_node:
        raise NoEstimate("there is no estimate for CPUs")
    gpu = job.node.get("gpu", "")
    peak = peaks.find_listed_peak(gpu)
    if not peak or config.precision == "fp32":
        raise NoEstimate(
            f"no peak of {gpu or 'the GPUs of ' + (job.instance_type or 'any node')} is known"
            + (" in fp32" if config.precision == "fp32" else "")
        )
    hardware = Hardware(job.nodes * job.gpus_per_node, peak, f"data sheet of the {gpu}")
    gbps = job.node.get("gbps")
    if not gbps or choose_trained(config).freezes_base or config.batch_size in (None, AUTO):
        return hardware  # adapters communicate little; without a batch, communication is unknown
    return replace(hardware, nodes=job.nodes, network=gbps * 1e9 / 8)


def measure_model(config: Config) -> tuple[ModelCost, str]:
    """Return the cost of a model for the estimate, and its source. Raises NoEstimate."""
    name = config.model_name or ""
    prepared = paths.models_root(config.cache_dir) / paths.model_dir_name(name)
    model_dir = prepared if prepared.exists() else Path(name)
    size = config.model_size
    if not size and not model_dir.exists():
        size = name.removeprefix(raw_text.SCRATCH_PREFIX)  # stage 03 will create it
    attention = 0.0
    if size in scratch_sizes.SIZES:
        shape = scratch_sizes.SIZES[size]
        rows = scratch_sizes.pad_vocabulary(config.vocab_size or shape.vocabulary)
        parameters = shape.parameters(rows)
        products = parameters if shape.tied else parameters - rows * shape.hidden
        attention = 12.0 * shape.layers * shape.hidden * config.seq_length
        source = f"{units.count(parameters)} parameters from scratch"
    elif name and (parameters := directory.count_parameters(model_dir)):
        if _has_experts(model_dir):
            raise NoEstimate("each token uses only some experts of the model")
        products = parameters
        source = f"{units.count(parameters)} parameters"
    elif named := _BILLIONS.search(name):
        products = parameters = round(float(named[1]) * 1e9)
        source = f"{units.count(parameters)} parameters, according to the name {name}"
    else:
        raise NoEstimate(f"the size of {name} is unknown on this machine")
    per_parameter = 4 if choose_trained(config).freezes_base else 6
    flops = per_parameter * products + attention
    return ModelCost(parameters, flops, attention, 0.0, bool(config.model_size), False), source


def _has_experts(model_dir: Path) -> bool:
    with suppress(OSError, ValueError, TypeError):
        return bool(_EXPERTS & set(records.read_json(model_dir / directory.CONFIG)))
    return False
