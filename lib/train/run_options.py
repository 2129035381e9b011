"""The first options of stage 04: what is trained, on what, where it lies and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.core import options
from lib.core.declared import Role, option
from lib.core.options import count, positive_int
from lib.models import scratch

RESULT, ALIKE, LOCAL = Role


@dataclass(frozen=True)
class RunOptions:
    """Says which run it is, and of which model and data."""

    experiment_name: str = option(
        None,
        "-e",
        group="the run",
        role=LOCAL,
        first="name of the run; it lies in outputs/",
        metavar="NAME",
        help="name of the run, a directory under --save-dir; or the path of that directory "
        "(needed)",
    )
    dataset_name: list[str] = option(
        [],
        "-d",
        role=LOCAL,
        first="dataset of stage 02; several make a mixture",
        metavar="DIR[=WEIGHT]",
        help="dataset: a directory, or a name under hf_datasets/; several, each with its share of "
        "the samples, make a mixture: -d a=0.7 -d b=0.3 (needed)",
    )
    model_name: str | None = option(
        None,
        "-m",
        role=LOCAL,
        first="model of stage 03",
        metavar="NAME|DIR",
        help="model that stage 03 prepared, or any model directory (default: the run's, or the "
        "only one)",
    )
    save_dir: Path = option(
        None,
        role=LOCAL,
        parse=Path,
        help="where experiments lie (default: outputs, or where -e leads)",
    )
    checkpoint_dir: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        help="as --save-dir; without -e it is the directory of the run itself, with the "
        "checkpoints in DIR/checkpoints (default: none)",
    )
    cache_dir: Path = option(
        Path(".cache"), role=LOCAL, parse=Path, help="where prepared models and token stores lie"
    )
    seed: int = option(
        0,
        role=RESULT,
        renumbers=True,
        parse=options.seed,
        help="decides order of samples, initial weights and dropout",
    )
    from_scratch: bool = option(
        False, role=RESULT, help="draw the weights from the seed, even if the model has some"
    )
    model_size: str | None = option(
        None,
        role=RESULT,
        quiet=True,
        choices=tuple(scratch.SIZES),
        help="with --from-scratch: make a model of this size, without stage 03 (default: none, the"
        " model is -m)",
    )
    vocab_size: int | None = option(
        None,
        role=RESULT,
        quiet=True,
        parse=positive_int,
        help="with --model-size: tokens of its vocabulary, padded to a multiple of "
        f"{scratch.VOCABULARY_MULTIPLE} (default: what --tokenizer has, else 1,024 for 1M, "
        "4,096 for tiny, 32,000 for the others)",
    )
    tokenizer: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        help="with --model-size: directory with the tokenizer to use (default: one is trained on "
        "-d; with --streaming, one with a token for each byte)",
    )
    trust_remote_code: bool = option(
        False,
        role=LOCAL,
        help="run the code that stage 03 fetched with a model of a type that transformers does not"
        " know; taken from the command line alone",
    )
    prepare_only: bool = option(
        False, role=LOCAL, help="make the token store, or verify the one there, and stop"
    )
    show_samples: int = option(
        0,
        role=LOCAL,
        parse=count,
        help="print N samples of each dataset once its tokens are there, what is trained apart "
        "from what is only read",
    )
    streaming: bool = option(
        False,
        role=LOCAL,
        help="for trying things out: -d is a directory of raw JSON Lines or Parquet shards, "
        "tokenised while training; needs --max-steps",
    )
    text_field: str | None = option(
        None,
        role=LOCAL,
        metavar="NAME",
        help="with --streaming: field or column that holds the text (default: text)",
    )
    online: bool = option(
        False,
        role=LOCAL,
        help="with --streaming: -d is a dataset on the Hugging Face Hub, whose files are fetched "
        "when needed and kept in the cache directory",
    )
    include: list[str] = option(
        [],
        role=LOCAL,
        metavar="GLOB",
        help="with --online: files of the dataset, by path; may be repeated (default: all)",
    )
    chat_template: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        metavar="FILE|chatml|plain",
        help="of chat datasets: template in Jinja to render conversations by; chatml and plain "
        "ship with the project (default: the model's)",
    )
    train_on: str = option(
        "assistant",
        role=RESULT,
        quiet=True,
        renumbers=True,
        choices=("assistant", "last", "all"),
        help="of chat datasets: what is trained, the answers of the assistant, the last of them, "
        "or all tokens",
    )
    too_long: str = option(
        "drop",
        role=RESULT,
        quiet=True,
        renumbers=True,
        choices=("drop", "split"),
        help="of chat datasets: what becomes of a conversation that has more tokens than a sample;"
        " split: it is cut between turns, each part with the system prompt",
    )
    token_reads: str = option(
        "mmap",
        role=LOCAL,
        choices=("mmap", "pread"),
        help="how tokens are read: mapped, or by pread for file systems that map badly",
    )
    resume: str = option(
        "auto",
        role=ALIKE,
        metavar="auto|never|PATH",
        help="go on from the newest valid checkpoint, refuse to, or from this one",
    )
    resume_with_changes: bool = option(
        False,
        role=ALIKE,
        help="go on although data, batch, seed or other settings that decide the result have "
        "changed; needs --max-steps",
    )
