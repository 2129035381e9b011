"""Decide what a run trains: all weights, or an adapter beside weights that stay frozen.

All questions about this are put to a TrainedPart. To train another part, write a subclass and name
it in TRAINED_PARTS; lib/models/model_changes.py changes the model itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lib.core import commands, declared, patterns, units
from lib.core.errors import Problems, UsageError
from lib.models import peft_adapter
from lib.models.options import FLOAT8_RECIPES
from lib.models.peft_adapter import PeftAdapter
from lib.optim.optimizers import OPTIMIZERS
from lib.train.config import DEFAULTS, Config
from lib.train.mode import Mode, list_requested

ADAPTER = "adapter"  # name of the adapter of --lora-from among the inputs of a run
# The options that an adapter defines; the dropout may differ.
ADAPTER_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "lora_dropout")
LR_WITH_WEIGHTS = 3e-5
SCRATCH_LR = 3e-4
# A model with fewer parameters is small; from scratch its default is that of the optimizer.
_SMALL = 50_000_000
_LARGEST_RANK = 65_536


class TrainedPart(Mode):
    """What a run trains.

    freezes_base: the weights of the model stay as they are. So each launch reads them, checkpoints
    record their digests, and a run from scratch makes no sense. lr_factor: by how much usual
    learning rates are larger than those for all weights. lr_reason: why, "" for no reason.
    """

    freezes_base: ClassVar[bool]
    lr_factor: ClassVar[int] = 1
    lr_reason: ClassVar[str] = ""

    @classmethod
    def choose_lr(cls, scratch_parameters: int, optimizer: str) -> tuple[str, float]:
        """Return why a learning rate is the default, and that learning rate.

        scratch_parameters: number of parameters if the weights are initialised from the seed; 0 for
        a model with weights. optimizer: a key of OPTIMIZERS.
        """
        if not scratch_parameters:
            return cls.lr_reason or "a model with weights", LR_WITH_WEIGHTS * cls.lr_factor
        reason = f"{units.count(scratch_parameters)} parameters from scratch"
        if scratch_parameters < _SMALL:
            return f"{reason}, {optimizer}", OPTIMIZERS[optimizer].small_lr
        return reason, SCRATCH_LR

    @classmethod
    @abstractmethod
    def require_weights(cls, model_dir: Path) -> None:
        """Raise UsageError if this cannot be trained beside random weights.

        Call it if the weights of a model directory are initialised from the seed.
        """


class AllWeights(TrainedPart):
    """All weights of the model."""

    freezes_base = False

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return True: this is what a run trains if nothing else is asked for."""
        return True

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for each option of an adapter."""
        for name in ADAPTER_OPTIONS:
            if getattr(config, name) != getattr(DEFAULTS, name):
                problems.add(
                    f"{declared.flag(name)} belongs to --lora-rank",
                    expected="the rank of the adapters: 8 to 256 as a rule",
                )

    @classmethod
    def require_weights(cls, model_dir: Path) -> None:
        """Do nothing: random weights can be trained."""


class LoraAdapter(TrainedPart):
    """A LoRA adapter, as --lora-rank describes it or as it lies in the directory of --lora-from."""

    freezes_base = True
    lr_factor = 10  # "LoRA without regret" (Schulman et al. 2025)
    lr_reason = "LoRA"

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return whether a rank or an adapter is given."""
        return bool(config.lora_rank or config.lora_from)

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for each option of the adapter with an impossible value, and for fp8."""
        if config.lora_alpha is not None and (
            problem := peft_adapter.find_odd_alpha(config.lora_alpha)
        ):
            problems.add(f"--lora-alpha {config.lora_alpha:g} cannot be used", expected=problem)
        if config.lora_dropout >= 1:
            problems.add(f"--lora-dropout must be below 1, got {config.lora_dropout:g}")
        if config.lora_rank > _LARGEST_RANK:
            problems.add(
                f"--lora-rank {config.lora_rank} is more than any linear layer has rows or columns",
                expected="8 to 256 as a rule",
            )
        if config.precision in FLOAT8_RECIPES:
            problems.add(
                "--precision fp8 does not work with LoRA: each pass would cast the frozen weights",
                run=commands.as_typed("--precision", "bf16"),
            )
        if config.lora_from is None and (problem := patterns.find_problem(config.lora_targets)):
            problems.add(
                f"--lora-targets {config.lora_targets!r} is not a regular expression that can be "
                "used",
                found=problem,
                expected="'q_proj|v_proj', say",
            )

    @classmethod
    def require_weights(cls, model_dir: Path) -> None:
        """Raise UsageError: an adapter of random weights is of no use."""
        raise UsageError(
            f"--lora-rank needs a base model with weights, and those of {model_dir} would be "
            "initialised from the seed",
            expected="-m with a model that was trained before",
            hint="without --lora-rank, the whole model is trained",
        )


TRAINED_PARTS: tuple[type[TrainedPart], ...] = (LoraAdapter, AllWeights)


def choose_trained(config: Config) -> type[TrainedPart]:
    """Return the first part that the options ask for."""
    return list_requested(TRAINED_PARTS, config)[0]


# Only the first launch loads the adapter of --lora-from; later launches load the checkpoints of the
# run. The directory of the adapter may be deleted by then, so the identity of the run contains its
# fingerprint.
def find_adapter(config: Config, identity: Mapping[str, Any]) -> PeftAdapter | None:
    """Return the adapter of --lora-from, None without that option.

    It is also None if the directory is gone but the run's checkpoints contain the adapter.
    identity: see Inputs. Raises UsageError or ArtifactError as `peft_adapter.read_adapter`.
    """
    is_kept = ADAPTER in identity.get("inputs", {})
    directory = config.lora_from
    if directory is None or (is_kept and not directory.exists()):
        return None
    return peft_adapter.read_adapter(directory)


def identify_adapter(
    config: Config, adapter: PeftAdapter | None, identity: Mapping[str, Any]
) -> dict[str, str]:
    """Return the fingerprint of the --lora-from adapter as an identity's input, {} without one."""
    if config.lora_from is None:
        return {}
    return {ADAPTER: adapter.fingerprint if adapter else identity["inputs"][ADAPTER]}


def take_adapter_options(
    config: Config, adapter: PeftAdapter | None, recorded: Mapping[str, Any]
) -> Config:
    """Use the options of the adapter of --lora-from; UsageError if other values were typed.

    If the adapter's directory is gone, uses the options of the resumed run instead: recorded.
    """
    values: dict[str, Any] = {
        name: getattr(adapter, name.removeprefix("lora_"))
        if adapter
        else recorded.get(name, getattr(DEFAULTS, name))
        for name in ADAPTER_OPTIONS
    }
    adapter_values = {}
    problems = Problems()
    for name, value in values.items():
        typed = getattr(config, name)
        default = getattr(DEFAULTS, name)
        if typed == default != value:
            adapter_values[name] = value
        elif typed not in (default, value) and name != "lora_dropout":  # which is free to change
            problems.add(
                f"{declared.flag(name)} {typed} is not that of {config.lora_from}",
                found=str(value),
                hint="leave it out: the adapter defines it",
            )
    problems.raise_if_any()
    return config.with_values("--lora-from", **adapter_values)
