"""Settle the options that nobody typed, by one ordered list of rules.

`RULES` lists every option that can be left open, with the rule that gives it a value. To add a
derived option, add a field to a room's options and a row to `RULES`. A rule is called while its
option is None or `auto`, after the rows above it, and returns
`config.with_values(REASON, option=value)`. The head of a run prints the value with the reason, in
the row `settled` (lib/train/overview.py). Ranks may choose different values for options that depend
on memory; they agree on them afterwards (`agree_on_options`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.core.options import AUTO, OFF
from lib.tokens.options import SEQ_LENGTH
from lib.train import batch_division, checks, plan, trained
from lib.train.config import EARLIER_LAUNCH, Config
from lib.train.inputs import Inputs
from lib.train.output.output import Output

if TYPE_CHECKING:  # imports torch, which a run that is complete does not wait for
    from transformers import PreTrainedModel

    from lib.parallel.layout import ParallelLayout
    from lib.planning.memory_check import MemoryCheck
    from lib.train.launches import Launch

_BIAS_STEP = 1e-3  # of DeepSeek-V3 (arXiv 2412.19437, section 4.2)


class Known(IntEnum):
    """Names the facts that a rule needs. A launch learns them in this order."""

    FILES = 1  # the model's and datasets' files, and earlier launches; torch is not imported
    HARDWARE = 2  # this machine, and the model's config
    MODEL = 3  # the modules of the model, on the meta device
    MEMORY = 4  # the memory of this rank, and how much a step takes


@dataclass
class Facts:
    """The facts that rules use. model, memory: None until known. notes: lines for the log."""

    inputs: Inputs
    model: PreTrainedModel | None = None
    memory: MemoryCheck | None = None
    notes: list[str] = field(default_factory=list)


def _is_open(config: Config, names: list[str]) -> bool:
    return any(getattr(config, name) in (None, AUTO) for name in names)


class OptionRule(NamedTuple):
    """The rule that gives values to options that were left open.

    options: the names of their fields, separated by blanks. known: the facts that the rule needs.
    settle: returns the config with values for these options, or unchanged if the rule cannot
    decide. applies: returns whether to call `settle`; None to call it if any of the options is None
    or `auto`.
    """

    options: str
    known: Known
    settle: Callable[[Config, Facts], Config]
    applies: Callable[[Config], bool] | None = None

    def is_due(self, config: Config) -> bool:
        """Return whether to call `settle`."""
        return self.applies(config) if self.applies else _is_open(config, self.options.split())


class SettledOptions(NamedTuple):
    """The options of a run, with the model and the memory check that decided some of them."""

    config: Config
    model: PreTrainedModel
    memory: MemoryCheck


def settle_from_files(config: Config, inputs: Inputs) -> Config:
    """Return the options after the rules that need only files; these decide the run's identity.

    Takes milliseconds and logs nothing. Raises UsageError if options contradict the files or each
    other.
    """
    settled = apply_rules(config, Facts(inputs), Known.FILES)
    checks.require_falling(settled)
    return settled


def settle_options(config: Config, output: Output, inputs: Inputs) -> SettledOptions:
    """Return the options of this launch, with a value for each one that a rank can decide alone.

    Checks the options against the model and the run's directory before the memory is estimated,
    which may take a minute. Raises UsageError or ArtifactError for options that this model, this
    machine or this directory does not allow.
    """
    from lib.parallel import routers
    from lib.planning.memory_check import MemoryCheck
    from lib.train import model

    facts = Facts(inputs)
    config = apply_rules(config, facts, Known.HARDWARE)
    for note in facts.notes:
        log.detail(note)
    facts.model = model.build_model(config, inputs)
    config = apply_rules(config, facts, Known.MODEL)
    checks.require_falling(config)
    routers.turn_off_family_loss(
        facts.model
    )  # only now: the rule for --router-aux-loss asks for it
    model.require_usable(config, output, inputs, facts.model)
    facts.memory = MemoryCheck.for_this_rank(facts.model)
    return SettledOptions(apply_rules(config, facts, Known.MEMORY), facts.model, facts.memory)


def agree_on_options(
    config: Config, launch: Launch, samples: int | None, layout: ParallelLayout
) -> Config:
    """Return the options that all ranks use from now on. All ranks must call this.

    samples: number of samples in an epoch, None if unknown.
    """
    from lib.train import launches, memory_fit

    agreed = memory_fit.agree_on_memory(config, samples, layout)
    return launches.drop_one_time_options(agreed, launch.has_begun)


def apply_rules(config: Config, facts: Facts, known: Known) -> Config:
    """Apply all rules that need no more than `known`, in their order."""
    for rule in RULES:
        if rule.known <= known and rule.is_due(config):
            config = rule.settle(config, facts)
    return config


def _keep_option(name: str) -> Callable[[Config, Facts], Config]:
    """Return a rule that keeps the value with which the run was started."""

    def keep(config: Config, facts: Facts) -> Config:
        value = facts.inputs.get_earlier_option(name)
        return config.with_values(EARLIER_LAUNCH, **{name: value}) if value else config

    return keep


def _keep_global_batch(config: Config, facts: Facts) -> Config:
    """Keep the global batch with which the run was started.

    With another number of ranks, another --batch-size or other memory, the same global batch is
    only divided differently. Raises UsageError if it cannot be divided.
    """
    batch = facts.inputs.identity.get("options", {}).get("global_batch_size")
    is_auto = config.batch_size == AUTO
    if not batch or config.prepare_only or (config.resume_with_changes and not is_auto):
        return config
    new_config = config.with_values(EARLIER_LAUNCH, global_batch_size=batch, grad_accum_steps=None)
    if is_auto:
        return new_config
    typed = batch_division.divide_batch(config, 0, plan.get_world_size())
    if typed.global_batch == batch:
        return config
    samples = f"the {units.counted(batch, 'sample')} of a step that the run was started with"
    try:
        divided = batch_division.divide_batch(new_config, 0, plan.get_world_size())
    except UsageError as error:
        size = batch_division.find_batch_size(new_config, plan.get_world_size())
        raise UsageError(
            f"{samples} cannot be divided",
            expected=error.expected,
            hint="use another number of ranks or another --batch-size; --resume-with-changes with "
            "--max-steps resumes with the global batch of the options that you typed",
            run=commands.as_typed("-b", size, drop=("-b", "--batch-size")) if size else "",
        ) from error
    if config.batch_size is not None:  # else a GPU may divide it otherwise: see _fill_batch_size
        facts.notes.append(
            f"{samples} are kept: {divided.micro_batch} per process × {divided.accumulation} "
            f"accumulation × {plan.describe_readers(divided.dp_size, config.context_parallel)}; "
            "the options alone would "
            f"make it {typed.global_batch:,}"
        )
    return new_config


def _fill_packing(config: Config, facts: Facts) -> Config:
    return facts.inputs.source.fill_packing(config)


def _take_adapter_options(config: Config, facts: Facts) -> Config:
    recorded = facts.inputs.identity.get("options", {})
    return trained.take_adapter_options(config, facts.inputs.adapter, recorded)


def _keep_router_aux_loss(config: Config, facts: Facts) -> Config:
    value = facts.inputs.identity.get("options", {}).get("router_aux_loss")
    return config.with_values(EARLIER_LAUNCH, router_aux_loss=value) if value else config


def _keep_default_lr(config: Config, facts: Facts) -> Config:
    """Keep the default that the run to resume has chosen; it may have been another one then.

    So a complete run from scratch is recognised without its model. A learning rate that was typed
    has to be typed again.
    """
    value = facts.inputs.settled.get("lr")
    return config.with_values(EARLIER_LAUNCH, lr=value) if value else config


def _fill_lr(config: Config, facts: Facts) -> Config:
    """Choose by the number of parameters from scratch, so only when the model is known."""
    parameters = 0
    if facts.inputs.scratch:
        if facts.model is None:
            return config
        parameters = facts.model.num_parameters()
    reason, lr = trained.choose_trained(config).choose_lr(parameters, config.optimizer)
    return config.with_values(reason, lr=lr)


def _fill_min_lr(config: Config, facts: Facts) -> Config:
    if config.lr is None:
        return config
    return config.with_values("a tenth of --lr", min_lr=config.lr / 10)


def _fill_lora_alpha(config: Config, facts: Facts) -> Config:
    return config.with_values("2 × --lora-rank", lora_alpha=2.0 * config.lora_rank)


def _fill_batch_size(config: Config, facts: Facts) -> Config:
    """Use `auto` on a GPU unless --global-batch-size is typed, else 1.

    A resumed run keeps its global batch, except with --resume-with-changes.
    """
    from lib.planning import capacity

    is_typed = config.global_batch_size and "global_batch_size" not in config.settled_by
    on_gpu = bool(config.plan_gpus) or capacity.get_device().type == "cuda"
    if on_gpu and not is_typed and not config.prepare_only:
        auto = _with_auto_batch(config)
        if auto.resume_with_changes or auto.global_batch_size:
            return auto
        return _keep_global_batch(auto, facts)
    if config.settled_by.get("global_batch_size") == EARLIER_LAUNCH:
        divided = batch_division.divide_batch(config, 0, plan.get_world_size())
        described = plan.describe_batch(divided, config.seq_length or 1, config.context_parallel)
        facts.notes.append(
            f"the {units.counted(divided.global_batch, 'sample')} of a step that the run was "
            f"started with are kept: {described}"
        )
    return replace(config, batch_size=1)


def _with_auto_batch(config: Config) -> Config:
    changes: dict[str, Any] = {"batch_size": AUTO}  # else a number, as its type says
    return replace(config, **changes)


def _fill_precision(config: Config, facts: Facts) -> Config:
    from lib.parallel import precision

    return config.with_values(
        "hardware", precision="bf16" if config.plan_gpus else precision.default_precision()
    )


def _pick_attention(config: Config, facts: Facts) -> Config:
    """Replace `flash` by flash_attention_2 if its package can train here, else by `auto`."""
    from lib.models import architecture
    from lib.parallel import attention

    if config.plan_gpus:
        return replace(config, attention=AUTO)
    shape = architecture.read_config(facts.inputs.model_dir, config.trust_remote_code)
    return replace(config, attention=attention.resolve_flash(config.precision, shape))


def _pick_context_method(config: Config, facts: Facts) -> Config:
    """Choose what the ranks that share a row exchange, by the attention heads of the model."""
    from lib.models import architecture
    from lib.parallel import context

    shape = architecture.read_config(facts.inputs.model_dir, config.trust_remote_code)
    method = context.choose_method(config.context_parallel_method, config.context_parallel, shape)
    if method == config.context_parallel_method:
        return config
    return config.with_values("attention heads", context_parallel_method=method)


def _fill_seq_length(config: Config, facts: Facts) -> Config:
    from lib.models import rope
    from lib.train import model

    settings = rope.RopeSettings.from_options(config, None)
    shape = rope.read_config(facts.inputs.model_dir, config.trust_remote_code, settings)
    longest = model.longest_sequence(shape)
    return config.with_values("model", seq_length=min(SEQ_LENGTH, longest or SEQ_LENGTH))


def _fill_router_aux_loss(config: Config, facts: Facts) -> Config:
    """Turn on load balancing from scratch; in fine-tuning, only if the model's config does.

    A resumed run without a recorded value keeps load balancing off.
    """
    from lib.parallel import routers

    model = facts.model
    assert model is not None
    method = routers.find_method(model, routers.find_routers(model))
    if not method:
        return config
    if facts.inputs.earlier_run or facts.inputs.named_checkpoint:
        return config.with_values(EARLIER_LAUNCH, router_aux_loss=OFF)
    is_loss = method == routers.LOSS
    coefficient = routers.find_coefficient(model) if is_loss else _BIAS_STEP
    if facts.inputs.scratch:
        return config.with_values("from scratch", router_aux_loss=coefficient or OFF)
    if is_loss and routers.is_loss_in_config(model):
        return config.with_values("the model's config", router_aux_loss=coefficient or OFF)
    return config.with_values("fine-tuning", router_aux_loss=OFF)


def _recompute_fully(config: Config, facts: Facts) -> Config:
    return config.with_values("--activation-offload", activation_checkpointing="full")


def _fit_in_memory(config: Config, facts: Facts) -> Config:
    """Choose values that fit in the memory of this rank; other ranks may choose differently."""
    from lib.train import memory_fit

    assert facts.memory is not None
    if config.plan_gpus or config.prepare_only:
        return config
    return memory_fit.fit_to_this_rank(config, facts.memory, facts.inputs.recomputed)


RULES = (
    OptionRule("global_batch_size", Known.FILES, _keep_global_batch),
    OptionRule("packing", Known.FILES, _fill_packing),
    OptionRule(
        " ".join(trained.ADAPTER_OPTIONS),
        Known.FILES,
        _take_adapter_options,
        applies=lambda config: config.lora_from is not None,
    ),
    OptionRule("seq_length", Known.FILES, _keep_option("seq_length")),
    OptionRule("precision", Known.FILES, _keep_option("precision")),
    OptionRule("router_aux_loss", Known.FILES, _keep_router_aux_loss),
    OptionRule("lr", Known.FILES, _keep_default_lr),
    OptionRule("lr", Known.FILES, _fill_lr),
    OptionRule("min_lr", Known.FILES, _fill_min_lr),
    OptionRule(
        "lora_alpha",
        Known.FILES,
        _fill_lora_alpha,
        applies=lambda config: bool(config.lora_rank) and config.lora_alpha is None,
    ),
    OptionRule(
        "activation_checkpointing",
        Known.FILES,
        _recompute_fully,
        applies=lambda config: (
            config.activation_offload and config.activation_checkpointing == AUTO
        ),
    ),
    OptionRule(
        "batch_size global_batch_size",
        Known.HARDWARE,
        _fill_batch_size,
        applies=lambda config: config.batch_size is None,
    ),
    OptionRule("precision", Known.HARDWARE, _fill_precision),
    OptionRule(
        "attention",
        Known.HARDWARE,
        _pick_attention,
        applies=lambda config: config.attention == "flash",
    ),
    OptionRule(
        "context_parallel_method",
        Known.HARDWARE,
        _pick_context_method,
        applies=lambda config: config.context_parallel > 1,
    ),
    OptionRule("seq_length", Known.HARDWARE, _fill_seq_length),
    OptionRule("router_aux_loss", Known.MODEL, _fill_router_aux_loss),
    OptionRule(
        "activation_checkpointing shard_size batch_size",
        Known.MEMORY,
        _fit_in_memory,
        applies=lambda config: True,  # it also decides whether weights stay gathered
    ),
)
