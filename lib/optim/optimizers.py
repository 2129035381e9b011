"""List the optimizers with their options and sizes, without importing torch.

To add an optimizer, add a row to OPTIMIZERS and a module of its name; no other module knows an
optimizer by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from lib.core import declared, units
from lib.core.declared import Role, option
from lib.core.options import non_negative

if TYPE_CHECKING:
    from torch import nn

Groups = list[dict[str, Any]]
# Returns the compiled function, or its argument `instead` if it cannot be compiled.
Wrap = Callable[..., Callable[..., None]]
# A moment in bf16 has 8 significant bits, so it must fall by more than 1/512 in a step to change.
_MAX_BF16_BETA = 0.99
_OUTSIDE = re.compile("embed|wte|wpe|lm_head")  # beginnings of the names of modules
_NO_MATRIX = re.compile("(bias|A_log|D)$")  # ends of the names of parameters
_BLOCK = 256  # numbers of a row with one scale in 8-bit moments


@dataclass(frozen=True)
class AdamWOptions:
    """The options of all kinds of AdamW."""

    weight_decay: float = option(
        0.1,
        aliases=("optimizer.weight_decay",),
        role=Role.RESULT,
        parse=non_negative,
        help="weight decay of matrices; norms and biases have none",
    )
    beta1: float = option(
        0.9,
        aliases=("adam_beta1", "optimizer.beta1"),
        role=Role.RESULT,
        parse=non_negative,
        help="AdamW: decay rate of the first moment",
    )
    beta2: float = option(
        0.95,
        aliases=("adam_beta2", "optimizer.beta2"),
        role=Role.RESULT,
        parse=non_negative,
        help="AdamW: decay rate of the second moment",
    )

    def find_problems(self) -> Iterator[str]:
        """Yield what is wrong with the values."""
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if beta >= 1:
                yield f"--{name} must be below 1, got {beta:g}"


@dataclass(frozen=True)
class MomentOptions(AdamWOptions):
    """The options of AdamW with torch's kernel."""

    optimizer_states: str = option(
        "fp32",
        role=Role.RESULT,
        quiet=True,
        choices=("fp32", "bf16"),
        help="AdamW: precision of the moments; bf16 takes 4 instead of 8 bytes per parameter",
    )

    def find_problems(self) -> Iterator[str]:
        """Yield what is wrong with the values."""
        yield from super().find_problems()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if self.optimizer_states == "bf16" and beta > _MAX_BF16_BETA:
                yield (
                    f"--optimizer-states bf16 needs a --{name} of at most {_MAX_BF16_BETA:g}, got "
                    f"{beta:g}: bf16 would round away the decay of the moment"
                )


@dataclass(frozen=True)
class MuonOptions(AdamWOptions):
    """The options of Muon; those of AdamW are for the parameters that are no matrices of blocks."""

    muon_coefficients: str = option(
        "jordan",
        role=Role.RESULT,
        quiet=True,
        choices=("jordan", "polar-express"),
        help="Muon: coefficients of its five Newton–Schulz steps",
    )


def decay_matrices(parameters: Sequence[tuple[str, nn.Parameter]], options: Any) -> Groups:
    """Return two groups: matrices, which decay, and norms and biases, which do not.

    All one-dimensional tensors count as norms and biases, as in the Hugging Face Trainer.
    """
    return [
        {
            "params": [p for _, p in parameters if p.ndim >= 2],
            "weight_decay": options.weight_decay,
        },
        {"params": [p for _, p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of matrices (experts).

    Blocks are in a list of modules, so their names contain a number; so do the embeddings and
    output layers of models with several codebooks. Factors of LoRA do not count: each is only a
    part of a matrix. Nor do stacks of vectors: the biases of experts, the states of Mamba.
    """
    parts = name.split(".")
    is_matrix = len(shape) in (2, 3) and min(shape[-2:]) > 1  # a convolution has a side of 1
    is_in_block = any(map(str.isdigit, parts)) and not any(map(_OUTSIDE.match, parts))
    return is_matrix and is_in_block and not _NO_MATRIX.search(parts[-1]) and ".lora_" not in name


def split_block_matrices(parameters: Sequence[tuple[str, nn.Parameter]], options: Any) -> Groups:
    """Return a group of the matrices of blocks, `is_muon`, and those of `decay_matrices`."""
    chosen = [p for name, p in parameters if is_block_matrix(name, p.shape)]
    others = [(name, p) for name, p in parameters if not is_block_matrix(name, p.shape)]
    return [
        {"params": chosen, "weight_decay": options.weight_decay, "is_muon": True},
        *decay_matrices(others, options),
    ]


@dataclass(frozen=True)
class OptimizerSpec:
    """All that the other packages need to know about an optimizer.

    The key of its row is the name of its module in this room. The module's function
    `build(groups, lr, options, wrap)` returns the optimizer; `wrap` is None, or compiles an update.
    A context `as_on_gpu()` of the module, if there is one, lets a step on the CPU allocate as much
    as one on a GPU, for memory estimates.

    options: a frozen dataclass of declared options (`lib/core/declared.py`) with a method
    `find_problems`. They become options of stage 04; an optimizer refuses options that only others
    declare. A new option needs `quiet=True`, so that older runs can be resumed. state_bytes: (name,
    shape, options) → bytes of the state of a parameter, without the step count. make_groups: (named
    trainable parameters, options) → parameter groups, which may have settings of their own; empty
    groups are dropped. small_lr: the default learning rate of small models from scratch
    (docs/explanation/from-scratch.md). largest_lr: the learning rate above which training cannot
    work. summary: a text for --help, empty for the default. smaller: the optimizer to suggest if
    the states take too much memory. block: the number of consecutive elements of a row that must be
    on the same rank. is_compiled: `build` uses `wrap`. caution: a warning for runs that start from
    trained weights. is_joint: an update works on several blocks at once, so its memory is not a sum
    over the blocks.

    An optimizer has a method `new_state(parameter)`, whose tensors (except `step`) are sharded like
    the parameter. If its `found_inf` is 1, `step()` changes no weight, state or count, and does not
    wait for the device. If it has `_step_supports_amp_scaling`, it divides the gradients by
    `grad_scale` if that is set. Each parameter group contains parameters of one mesh.
    """

    options: type
    state_bytes: Callable[[str, Sequence[int], Any], int]
    make_groups: Callable[[Sequence[tuple[str, nn.Parameter]], Any], Groups] = decay_matrices
    small_lr: float = 2e-3
    largest_lr: float = 0.1
    summary: str = ""
    smaller: str = ""
    block: int = 1
    is_compiled: bool = False
    caution: str = ""
    is_joint: bool = False


def _two_moments(name: str, shape: Sequence[int], options: MomentOptions) -> int:
    return (4 if options.optimizer_states == "bf16" else 8) * math.prod(shape)


def _8bit_moments(name: str, shape: Sequence[int], options: AdamWOptions) -> int:
    """Return the bytes of two moments: codes and one scale per block, float32 for vectors."""
    if len(shape) < 2:
        return 8 * math.prod(shape)
    scales = shape[0] * units.ceil_div(math.prod(shape[1:]), _BLOCK)
    return 2 * (math.prod(shape) + 4 * scales)


def _momentum_or_moments(name: str, shape: Sequence[int], options: MuonOptions) -> int:
    return (4 if is_block_matrix(name, shape) else 8) * math.prod(shape)


# AdamW moves each weight by up to the learning rate in each step, and weights are far below 1.
DEFAULT = "adamw"
OPTIMIZERS = {
    DEFAULT: OptimizerSpec(MomentOptions, _two_moments, smaller="adamw8bit"),
    "adamw8bit": OptimizerSpec(
        AdamWOptions,
        _8bit_moments,
        summary="stores each moment in 1 byte per parameter instead of 4",
        block=_BLOCK,
        is_compiled=True,
    ),
    "muon": OptimizerSpec(
        MuonOptions,
        _momentum_or_moments,
        split_block_matrices,
        small_lr=4e-3,
        summary="moves the matrices of blocks in orthogonal directions, for training from scratch",
        caution="Muon suits models that were trained with it. Fine-tuned by Muon, Qwen2.5-7B, "
        "which AdamW has trained, scored lower than by AdamW: 70.8 against 71.4 in MMLU, 77.4 "
        "against 79.3 in HumanEval (arXiv 2502.16982, section 3.5)",
        is_joint=True,
    ),
}


@dataclass(frozen=True)
class Choice:
    """An optimizer by its name in OPTIMIZERS, and its options (None: the defaults)."""

    name: str = DEFAULT
    options: Any = None

    @classmethod
    def of(cls, config: Any) -> Choice:
        """Return the choice of a run. config: see `read_options`."""
        return cls(config.optimizer, read_options(config.optimizer, config))

    @property
    def spec(self) -> OptimizerSpec:
        """Return the row of the optimizer."""
        return OPTIMIZERS[self.name]

    def state_bytes(self, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of the state of a parameter, without the step count."""
        return self.spec.state_bytes(name, shape, self.options or self.spec.options())


def list_option_classes() -> list[type]:
    """Return the classes that declare the options of optimizers, each once."""
    return list(dict.fromkeys(spec.options for spec in OPTIMIZERS.values()))


def describe_choices() -> str:
    """Return for --help what distinguishes the optimizers from the default."""
    return "; ".join(f"{name} {spec.summary}" for name, spec in OPTIMIZERS.items() if spec.summary)


def describe_small_lrs() -> str:
    """Return for --help the default learning rate of small models from scratch."""
    usual = write_rate(OPTIMIZERS[DEFAULT].small_lr)
    rates = {name: write_rate(spec.small_lr) for name, spec in OPTIMIZERS.items()}
    own = ", ".join(f"{name}: {rate}" for name, rate in rates.items() if rate != usual)
    return f"{usual} ({own})" if own else usual


def write_rate(lr: float) -> str:
    """Return a learning rate as people write it, such as 2e-3."""
    return f"{Decimal(str(lr)):e}"


def list_compiled() -> str:
    """Return the names of the optimizers whose update is compiled, for --help."""
    return " and ".join(name for name, spec in OPTIMIZERS.items() if spec.is_compiled)


def list_without_blocks() -> str:
    """Return for a hint the names of the optimizers that do not divide rows into blocks."""
    return " or ".join(name for name, spec in OPTIMIZERS.items() if spec.block == 1)


def read_options(kind: str, config: Any) -> Any:
    """Return the options of an optimizer. config: an object that has all of them as attributes."""
    return declared.read_options(OPTIMIZERS[kind].options, config)


def find_option_problems(kind: str, config: Any) -> Iterator[str]:
    """Yield what is wrong with the options: invalid values, and options of other optimizers."""
    options = read_options(kind, config)
    yield from options.find_problems()
    owners: dict[str, list[str]] = {}
    for name, spec in OPTIMIZERS.items():
        for field in declared.list_fields(spec.options):
            if not hasattr(options, field.name) and getattr(config, field.name) != field.default:
                owners.setdefault(field.name, []).append(name)
    for option_name, names in owners.items():
        yield f"{declared.flag(option_name)} belongs to --optimizer {' or '.join(names)}"
