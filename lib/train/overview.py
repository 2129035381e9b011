"""What a run is going to do: told at its start, and by `--dry-run` for other machines too."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.core import declared, log, units
from lib.core.errors import Problems, UsageError
from lib.models.sharded import describe_size
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout
from lib.planning import flops, memory, saving, sizes
from lib.tokens import encode, packing, store
from lib.tokens.chat import write
from lib.train import checks, estimates, memory_fit
from lib.train import plan as plans
from lib.train.config import Config
from lib.train.data import Data, chat_policy, mix, shards_of_rank
from lib.train.estimates import Hardware, ModelCost
from lib.train.inputs import Inputs
from lib.train.model import describe_balance, describe_weights
from lib.train.plan import Plan


def show_head(
    plan: Plan,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    cost: ModelCost,
    hardware: Hardware,
) -> None:
    """Print what the run is, at its start."""
    config = plan.config
    log.info(
        f"experiment {config.save_dir / config.experiment_name}: "
        f"{_model_of(config, inputs)}, {describe_size(model)}"
    )
    held_out = " + ".join(units.counted(len(part.samples), "sample") for part in data.held_out)
    no_split = (
        "none with --streaming"
        if data.samples is None
        else "none that fills a sample (stage 02 makes a split with --validation-percent)"
    )
    log.table(
        {
            "dataset": inputs.datasets,
            "validation": held_out or no_split,
            **_settled(config),
            **describe_balance(config, model),
            **data.describe(plan),
            **estimates.describe_cost(plan, cost, hardware),
        }
    )
    _tell_doubts(plan, cost, hardware, bool(data.held_out))
    log.info(
        f"peak for MFU: {hardware.peak / 1e12:.4g} TFLOP/s per rank ({hardware.source}); "
        + flops.described(model, config.seq_length)
    )


def hardware_of(config: Config, layout: ParallelLayout) -> Hardware:
    """Return what the ranks of this launch can reach; a CPU is measured."""
    peak, where = flops.device_peak(layout.device, config.precision)
    return Hardware(layout.ranks, peak, where, "GPU" if layout.device.type == "cuda" else "rank")


def show_plan(config: Config, inputs: Inputs, model: PreTrainedModel) -> None:
    """Print what a run would do; touches nothing.

    Raises UsageError when a batch cannot be divided, after everything else has been printed.
    """
    cost = measure_cost(config, inputs, model)
    problems = Problems()
    log.info("plan:")
    masters = f"float32 masters{parallelize.describe_frozen(model)}"
    log.table(
        {
            "model": f"{_model_of(config, inputs)} "
            f"({model.config.model_type}, {describe_size(model)})",
            "weights": describe_weights(config, inputs),
            "dataset": inputs.datasets,
            "precision": f"{masters}, {config.precision} compute",
            **_settled(config),
            **describe_balance(config, model),
            **_ranks(config),
        }
    )
    data, samples = _data(config, inputs)
    asked = memory_fit.fit_planned(config, inputs, model) or {plans.launched_size(): config}
    for ranks, given in asked.items():
        if config.plan_gpus:
            log.info(f"on {units.counted(ranks, 'GPU')}:")
        given = memory_fit.limit_batch(given, samples, ranks)
        asked[ranks] = given
        plan = problems.collect(partial(Plan.of, given, inputs.fingerprints, samples, ranks=ranks))
        if plan is None:
            log.info("  not possible: the error at the end says why")
            continue
        if not plan.fills_a_step:
            log.warn(_too_short(plan, ranks))
        if data:
            problems.collect(
                partial(
                    checks.require_enough_steps,
                    config,
                    plan.total_steps,
                    has_begun=bool(inputs.begun),
                )
            )
        _tell(config, plan, data, cost, _hardware(config, ranks))
    if config.plan_gpus:
        _plan_memory(config, model, asked, data.most_documents if data else None)
    problems.raise_if_any()
    log.info("dry run: nothing was written")


def _too_short(plan: Plan, ranks: int) -> str:
    """Return the warning for data that does not fill a step on so many GPUs."""
    return (
        f"on {units.counted(ranks, 'GPU')} the dataset is too small for one step "
        f"({plan.samples:,} samples in an epoch, {plan.division.global_batch:,} in a step): a run "
        "there is refused, and the figures are those of one step"
    )


def _settled(config: Config) -> dict[str, str]:
    """Return the options that nobody typed and no default decided, each with what did."""
    values = {name: getattr(config, name) for name in config.settled_by}
    words = {name: _in_words(value) for name, value in values.items() if value is not None}
    said = [
        f"{declared.flag(name)} {text} ({config.settled_by[name]})" for name, text in words.items()
    ]
    return {"settled": ", ".join(said)} if said else {}


def _in_words(value: Any) -> str:
    """Return the value of an option as a person types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return units.shortened(f"{value:g}" if isinstance(value, float) else str(value))


def _ranks(config: Config) -> dict[str, str]:
    """Say why the plan is for one rank, when it is."""
    if config.plan_gpus or "WORLD_SIZE" in os.environ:
        return {}
    return {
        "ranks": "1, as this command was started; torchrun starts more, and --plan-gpus N "
        "plans for N GPUs"
    }


def _tell(
    config: Config, plan: Plan, data: Data | None, cost: ModelCost, hardware: Hardware
) -> None:
    """Print the numbers of a plan. data: None when its samples are an estimate."""
    numbers = data.describe(plan) if data else plan.describe()
    if config.plan_gpus or config.plan_step_seconds:
        numbers["best interval"] = saving.describe(
            round(cost.checkpoint),
            hardware.ranks,
            config.plan_mtbf_hours,
            config.plan_write_gbps,
            config.ckpt_async,
            config.plan_step_seconds,
            estimates.estimate_step_seconds(plan, cost, hardware),
        )
    log.table(numbers | estimates.describe_cost(plan, cost, hardware))
    _tell_doubts(plan, cost, hardware, bool(data.held_out) if data else cost.validates)


def _tell_doubts(plan: Plan, cost: ModelCost, hardware: Hardware, has_validation: bool) -> None:
    """Warn of options that are odd for a run of this length and a model of this size."""
    config = plan.config
    doubts = [
        estimates.suggest_global_batch(plan, cost, hardware),
        checks.describe_high_lr(config.lr, cost.parameters, cost.scratch, bool(config.lora_rank)),
        *checks.list_unusual_options(config, plan.total_steps, has_validation),
    ]
    for doubt in filter(None, doubts):
        if log.rank() == 0:
            log.warn(doubt)


def _data(config: Config, inputs: Inputs) -> tuple[Data | None, int | None]:
    """Return the data with its samples, or only an estimate of these where it is not prepared."""
    if inputs.shards:
        return Data(shards_of_rank(config, inputs.shards), []), None
    policies = [chat_policy(config, inputs.template, corpus.dataset) for corpus in inputs.corpora]
    targets = [
        store.find_store_dir(
            config.cache_dir,
            corpus.dataset,
            store.make_identity(
                corpus.dataset, inputs.model_dir, policy.identity() if policy else None
            ),
        )
        for corpus, policy in zip(inputs.corpora, policies, strict=True)
    ]
    if missing := [str(target) for target in targets if not target.exists()]:
        tokens = sum(
            write.estimate_tokens(corpus.dataset, inputs.model_dir, policy)
            if policy
            else encode.estimate_tokens(corpus.dataset, inputs.model_dir)
            for corpus, policy in zip(inputs.corpora, policies, strict=True)
        )
        log.info(
            f"  tokens are not prepared yet ({', '.join(missing)}): the run makes them first, "
            f"or --prepare-only; {units.count(tokens)} are estimated from a sample of the "
            "text, and so is all that follows from their number"
        )
        # Of packs the last one need not be full.
        return None, -(
            -tokens // config.seq_length
        ) if config.packing == "documents" else tokens // config.seq_length
    stores = [store.open_store(target, config.token_reads) for target in targets]
    if config.packing == "documents" and not all(
        packing.find_packs_dir(tokens, config.seq_length).exists() for tokens in stores
    ):
        log.info(
            "  the documents are not packed yet: the run does it first, or --prepare-only; "
            "the samples are estimated as if nothing had to be padded"
        )
        return None, sum(
            len(tokens.splits["train"].tokens) for tokens in stores
        ) // config.seq_length
    data = mix(config, inputs, stores)
    return data, data.samples


def _hardware(config: Config, ranks: int) -> Hardware:
    """Return what --plan-gpus means, or what is here."""
    if config.plan_gpus:
        if config.plan_gpu_tflops:
            return Hardware(ranks, config.plan_gpu_tflops * 1e12, "--plan-gpu-tflops", "GPU")
        peak, name = flops.usual_gpu(config.precision)
        return Hardware(
            ranks, peak, f"data sheet of the {name}; --plan-gpu-tflops for others", "GPU"
        )
    on_gpu = torch.cuda.is_available()
    peak, where = flops.device_peak(torch.device("cuda" if on_gpu else "cpu"), config.precision)
    return Hardware(ranks, peak, where, "GPU" if on_gpu else "rank")


def _plan_memory(
    config: Config, model: PreTrainedModel, asked: dict[int, Config], most_documents: int | None
) -> None:
    """Print the memory on --plan-gpus, or why a model of this family cannot be traced."""
    try:
        has = config.plan_gpu_memory
        cases = [
            plans.step_config(given, model, ranks, True, most_documents)
            for ranks, given in asked.items()
        ]
        memory.print_memory_table(model, cases, has, not config.no_progress)
    except UsageError:
        raise
    except Exception as error:  # the rest of the plan is worth having
        log.warn(f"the memory could not be traced: {type(error).__name__}: {error}")


def measure_cost(config: Config, inputs: Inputs, model: PreTrainedModel) -> ModelCost:
    """Return what an estimate of the run must know of the model."""
    return ModelCost(
        model.num_parameters(),
        flops.per_token(model, config.seq_length),
        sizes.count_checkpoint(model, config.optimizer),
        inputs.scratch,
        any("validation" in corpus.dataset.splits for corpus in inputs.corpora),
    )


def _model_of(config: Config, inputs: Inputs) -> str:
    """Return the name of the model of a run."""
    if not config.model_size:
        return str(inputs.model_dir)
    tokenizer = "a tokenizer trained on the dataset"
    if config.tokenizer:
        tokenizer = f"the tokenizer of {config.tokenizer}"
    elif config.streaming:
        tokenizer = "a token for each byte"
    return f"{config.model_size} from scratch with {tokenizer}"
