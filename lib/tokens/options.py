"""Declare the options of data, samples and conversations, without importing numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.core import options
from lib.core.declared import Role, option
from lib.core.options import or_switch, positive_int

SEQ_LENGTH = 1024  # tokens, the default where the model allows it
SYNTHETIC = "synthetic"  # the name of random tokens as a value of -d
DEFAULT_TOKENS = 100_000_000  # in an epoch of them
TEXT = "text"  # the field of raw shards that contains the text, unless --streaming names one


@dataclass(frozen=True)
class DataOptions:
    """The options of preparing and reading text."""

    prepare_only: bool = option(
        False,
        group="the run",
        role=Role.LOCAL,
        help="tokenise the dataset, or verify an existing token store, print two samples of each "
        "dataset with the trained tokens marked, and stop before training",
    )
    streaming: str = option(
        "",
        role=Role.LOCAL,
        parse=or_switch(TEXT, ""),
        nargs="?",
        const=TEXT,
        metavar="FIELD",
        help="for quick trials: -d is a directory of raw JSON Lines or Parquet shards, tokenised "
        "while training; needs --max-steps. FIELD: the field or column that contains the text, "
        f"without a value {TEXT} (default: off)",
    )
    online: bool = option(
        False,
        role=Role.LOCAL,
        help="with --streaming: -d is a dataset on the Hugging Face Hub, ORG/NAME, or "
        "ORG/NAME/GLOB for some of its files; they are downloaded when needed and kept in "
        "--cache-dir",
    )


@dataclass(frozen=True)
class SampleOptions:
    """The options of a sample: its length, and what it consists of."""

    seq_length: int = option(
        None,
        "-s",
        "--seq-len",
        aliases=(
            "max_seq_length",
            "max_length",
            "block_size",
            "model_max_length",
            "sequence_len",
            "max_context_width",
            "training.seq_len",
        ),
        group="length and batch",
        role=Role.RESULT,
        renumbers=True,
        parse=positive_int,
        first="tokens per sample",
        help=f"sequence length: tokens per sample (default: {SEQ_LENGTH} or the model's limit)",
    )
    packing: str = option(
        None,
        aliases=("sample_packing",),
        role=Role.RESULT,
        renumbers=True,
        parse=or_switch("documents", "none"),
        nargs="?",
        const="documents",
        choices=("concat", "documents", "none"),
        help="concat: samples are windows over the concatenated documents. documents: samples "
        "consist of whole documents with padding, and attention does not cross their boundaries. "
        "none: a sample is one document with padding, for models that cannot keep documents "
        "apart (default: documents with a chat dataset, else concat)",
    )


@dataclass(frozen=True)
class ChatOptions:
    """The options of turning conversations into samples."""

    chat_template: Path | None = option(
        None,
        aliases=("chat_template_path",),
        group="the run",
        role=Role.LOCAL,
        parse=Path,
        metavar="FILE|chatml|plain",
        help="chat datasets: Jinja template that renders conversations; chatml and plain are "
        "built in (default: the model's)",
    )
    chat_template_kwargs: str = option(
        "",
        role=Role.RESULT,
        quiet=True,
        renumbers=True,
        parse=options.parse_variables,
        metavar="JSON",
        help="chat datasets: variables for the chat template, such as "
        "'{\"enable_thinking\": false}'; those of a record come first (default: none)",
    )
    train_on: str = option(
        "assistant",
        role=Role.RESULT,
        quiet=True,
        renumbers=True,
        choices=("assistant", "last", "all"),
        help="chat datasets: train on all answers of the assistant, only the last "
        "answer, or all tokens",
    )
    too_long: str = option(
        "drop",
        role=Role.RESULT,
        quiet=True,
        renumbers=True,
        choices=("drop", "split"),
        help="chat datasets: what to do with a conversation of more than --seq-length tokens: drop "
        "it, or split it between turns and repeat the system prompt in each part",
    )


def is_synthetic(argument: str) -> bool:
    """Return whether a value of -d asks for synthetic tokens; the number may be wrong."""
    return argument.partition(":")[0] == SYNTHETIC
