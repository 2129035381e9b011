"""`--dry-run`: the plan of a run, for the ranks of this launch or for each of --plan-gpus."""

from __future__ import annotations

import os

import torch

from lib.core import log, units
from lib.core.errors import Problems, UsageError
from lib.core.options import Options
from lib.planning import saving
from lib.tokens import encode, packing, store
from lib.train import batch_size, checks, flops, memory_plan, outlook, startup, streaming
from lib.train import plan as plans
from lib.train.outlook import Hardware
from lib.train.plan import Plan
from lib.train.startup import Data, Inputs, Setting


def print_plan(opts: Options, inputs: Inputs, setting: Setting) -> None:
    """Print what a run would do; touches nothing.

    Raises UsageError when a batch cannot be divided, after everything else has been printed.
    """
    work, problems = startup.work_of(opts, inputs, setting), Problems()
    log.info("plan:")
    log.table({"model": f"{startup.model_of(opts, inputs)} ({setting.model.config.model_type}, "
                        f"{units.count(work.parameters)} parameters)",
               "weights": startup.weights_of(opts, inputs), "dataset": startup.dataset_of(inputs),
               "precision": f"float32 masters, {setting.precision} compute", **_ranks(opts)})
    data, samples = _data(opts, inputs, setting)
    asked = batch_size.planned(opts, setting) or {plans.launched_size(): opts}
    for ranks, given in asked.items():
        if opts.plan_gpus:
            log.info(f"on {ranks:,} GPU{'s' * (ranks > 1)}:")
        batch_size.limit(given, setting, samples, ranks)
        plan = problems.collect(lambda ranks=ranks, given=given: startup.make_plan(
            given, inputs, setting.seq_length, setting.precision, samples, ranks=ranks))
        if plan is None:
            log.info("  not possible: the error at the end says why")
            continue
        if data:
            problems.collect(lambda plan=plan: checks.require_room(
                opts, plan.total_steps, has_begun=bool(inputs.begun)))
        _tell(opts, plan, data, work, _hardware(opts, setting, ranks))
    if opts.plan_gpus:
        _plan_memory(opts, setting, asked, data.most_documents if data else packing.FEWEST)
    problems.raise_if_any()
    log.info("dry run: nothing was written")


def _ranks(opts: Options) -> dict[str, str]:
    """Say why the plan is for one rank, when it is."""
    return {"ranks": "1, as this command was started; torchrun starts more, and --plan-gpus N "
                     "plans for N GPUs"} if not opts.plan_gpus and "WORLD_SIZE" not in os.environ \
        else {}


def _tell(opts: Options, plan: Plan, data: Data | None, work: outlook.Work, hardware: Hardware,
          ) -> None:
    """Print the numbers of a plan. data: None when its samples are an estimate."""
    numbers = startup.describe(plan, data) if data else plan.describe()
    if opts.plan_gpus or opts.plan_step_seconds:
        numbers["best interval"] = saving.describe(
            round(work.checkpoint), hardware.ranks, opts,
            outlook.step_seconds(plan, work, hardware))
    log.table(numbers | outlook.rows(plan, work, hardware))
    if unusual := outlook.advice(plan, work, hardware):
        log.warn(unusual)
    startup.tell_doubts(plan, work, bool(data.held_out) if data else work.validates)


def _data(opts: Options, inputs: Inputs, setting: Setting) -> tuple[Data | None, int | None]:
    """Return the data with its samples, or only an estimate of these where it is not prepared."""
    if inputs.shards:
        return Data(streaming.part(opts, inputs.shards), []), None
    targets = [store.directory(opts.cache_dir, corpus.source,
                               store.identity(corpus.source, inputs.model_dir))
               for corpus in inputs.corpora]
    if missing := [str(target) for target in targets if not target.exists()]:
        tokens = sum(encode.estimated_tokens(corpus.source, inputs.model_dir)
                     for corpus in inputs.corpora)
        log.info(f"  tokens are not prepared yet ({', '.join(missing)}): the run makes them first, "
                 f"or --prepare-only; {units.count(tokens)} are estimated from a sample of the "
                 "text, and so is all that follows from their number")
        return None, tokens // setting.seq_length
    stores = [store.open_store(target, opts.token_reads) for target in targets]
    if opts.packing == "documents" and not all(
            packing.directory(tokens, setting.seq_length).exists() for tokens in stores):
        log.info("  the documents are not packed yet: the run does it first, or --prepare-only; "
                 "the samples are estimated as if nothing had to be padded")
        return None, sum(len(tokens.splits["train"].tokens) for tokens in stores) \
            // setting.seq_length
    data = startup.data_of(opts, inputs, stores, setting.seq_length)
    return data, len(data.train)


def _hardware(opts: Options, setting: Setting, ranks: int) -> Hardware:
    """Return what --plan-gpus means, or what is here."""
    if opts.plan_gpus:
        if opts.plan_gpu_tflops:
            return Hardware(ranks, opts.plan_gpu_tflops * 1e12, "--plan-gpu-tflops", "GPU")
        peak, name = flops.usual_gpu(setting.precision)
        return Hardware(ranks, peak, f"data sheet of the {name}; --plan-gpu-tflops for others",
                        "GPU")
    on_gpu = torch.cuda.is_available()
    peak, where = flops.device_peak(torch.device("cuda" if on_gpu else "cpu"), setting.precision)
    return Hardware(ranks, peak, where, "GPU" if on_gpu else "rank")


def _plan_memory(opts: Options, setting: Setting, asked: dict[int, Options], most_documents: int,
                 ) -> None:
    """Print the memory on --plan-gpus, or why a model of this family cannot be traced."""
    try:
        memory_plan.tell(opts, setting, asked, most_documents)
    except UsageError:
        raise
    except Exception as error:  # the rest of the plan is worth having
        log.warn(f"the memory could not be traced: {type(error).__name__}: {error}")
