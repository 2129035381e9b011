"""`--dry-run`: the plan of a run, for the ranks of this launch or for each of --plan-gpus."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.errors import Problems, UsageError
from lib.planning import memory, saving
from lib.tokens import encode, packing, store
from lib.train import checks, fitting, flops, outlook, startup, streaming
from lib.train import plan as plans
from lib.train.config import Config
from lib.train.outlook import Hardware
from lib.train.plan import Plan
from lib.train.startup import Data, Inputs


def print_plan(config: Config, inputs: Inputs, model: PreTrainedModel) -> None:
    """Print what a run would do; touches nothing.

    Raises UsageError when a batch cannot be divided, after everything else has been printed.
    """
    work, problems = startup.work_of(config, inputs, model), Problems()
    log.info("plan:")
    log.table({"model": f"{startup.model_of(config, inputs)} ({model.config.model_type}, "
                        f"{units.count(work.parameters)} parameters)",
               "weights": startup.weights_of(config, inputs), "dataset": startup.dataset_of(inputs),
               "precision": f"float32 masters, {config.precision} compute", **_ranks(config)})
    data, samples = _data(config, inputs)
    asked = fitting.planned(config, model) or {plans.launched_size(): config}
    for ranks, given in asked.items():
        if config.plan_gpus:
            log.info(f"on {ranks:,} GPU{'s' * (ranks > 1)}:")
        asked[ranks] = given = fitting.limit(given, samples, ranks)
        plan = problems.collect(lambda ranks=ranks, given=given: startup.make_plan(
            given, inputs, samples, ranks=ranks))
        if plan is None:
            log.info("  not possible: the error at the end says why")
            continue
        if data:
            problems.collect(lambda plan=plan: checks.require_room(
                config, plan.total_steps, has_begun=bool(inputs.begun)))
        _tell(config, plan, data, work, _hardware(config, ranks))
    if config.plan_gpus:
        _plan_memory(config, model, asked, data.most_documents if data else packing.FEWEST)
    problems.raise_if_any()
    log.info("dry run: nothing was written")


def _ranks(config: Config) -> dict[str, str]:
    """Say why the plan is for one rank, when it is."""
    if config.plan_gpus or "WORLD_SIZE" in os.environ:
        return {}
    return {"ranks": "1, as this command was started; torchrun starts more, and --plan-gpus N "
                     "plans for N GPUs"}


def _tell(config: Config, plan: Plan, data: Data | None, work: outlook.Work, hardware: Hardware,
          ) -> None:
    """Print the numbers of a plan. data: None when its samples are an estimate."""
    numbers = startup.describe(plan, data) if data else plan.describe()
    if config.plan_gpus or config.plan_step_seconds:
        numbers["best interval"] = saving.describe(
            round(work.checkpoint), hardware.ranks, config.plan_mtbf_hours, config.plan_write_gbps,
            config.ckpt_async, config.plan_step_seconds, outlook.step_seconds(plan, work, hardware))
    log.table(numbers | outlook.rows(plan, work, hardware))
    if unusual := outlook.advice(plan, work, hardware):
        log.warn(unusual)
    startup.tell_doubts(plan, work, bool(data.held_out) if data else work.validates)


def _data(config: Config, inputs: Inputs) -> tuple[Data | None, int | None]:
    """Return the data with its samples, or only an estimate of these where it is not prepared."""
    if inputs.shards:
        return Data(streaming.part(config, inputs.shards), []), None
    targets = [store.directory(config.cache_dir, corpus.dataset,
                               store.identity(corpus.dataset, inputs.model_dir))
               for corpus in inputs.corpora]
    if missing := [str(target) for target in targets if not target.exists()]:
        tokens = sum(encode.estimated_tokens(corpus.dataset, inputs.model_dir)
                     for corpus in inputs.corpora)
        log.info(f"  tokens are not prepared yet ({', '.join(missing)}): the run makes them first, "
                 f"or --prepare-only; {units.count(tokens)} are estimated from a sample of the "
                 "text, and so is all that follows from their number")
        return None, tokens // config.seq_length
    stores = [store.open_store(target, config.token_reads) for target in targets]
    if config.packing == "documents" and not all(
            packing.directory(tokens, config.seq_length).exists() for tokens in stores):
        log.info("  the documents are not packed yet: the run does it first, or --prepare-only; "
                 "the samples are estimated as if nothing had to be padded")
        return None, sum(len(tokens.splits["train"].tokens) for tokens in stores) \
            // config.seq_length
    data = startup.data_of(config, inputs, stores)
    return data, len(data.train)


def _hardware(config: Config, ranks: int) -> Hardware:
    """Return what --plan-gpus means, or what is here."""
    if config.plan_gpus:
        if config.plan_gpu_tflops:
            return Hardware(ranks, config.plan_gpu_tflops * 1e12, "--plan-gpu-tflops", "GPU")
        peak, name = flops.usual_gpu(config.precision)
        return Hardware(ranks, peak, f"data sheet of the {name}; --plan-gpu-tflops for others",
                        "GPU")
    on_gpu = torch.cuda.is_available()
    peak, where = flops.device_peak(torch.device("cuda" if on_gpu else "cpu"), config.precision)
    return Hardware(ranks, peak, where, "GPU" if on_gpu else "rank")


def _plan_memory(config: Config, model: PreTrainedModel, asked: dict[int, Config],
                 most_documents: int) -> None:
    """Print the memory on --plan-gpus, or why a model of this family cannot be traced."""
    try:
        has = config.plan_gpu_memory
        cases = [plans.memory_case(given, model, ranks, True, has * (1 << 30), most_documents)
                 for ranks, given in asked.items()]
        memory.tell(model, cases, has, config.compile is not False, not config.no_progress)
    except UsageError:
        raise
    except Exception as error:  # the rest of the plan is worth having
        log.warn(f"the memory could not be traced: {type(error).__name__}: {error}")
