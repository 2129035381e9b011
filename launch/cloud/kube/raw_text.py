"""Declare the raw text of a dataset, and list the commands of the stages that prepare a run."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lib.core import options, paths
from lib.core.declared import flag, option
from lib.core.errors import UsageError
from lib.train import command_line
from lib.train.config import Config
from lib.train.output.kinds import choose_kind
from lib.train.sources.table import choose_source

SCRATCH_PREFIX = "scratch-"  # prefix of models that stage 03 makes from a size
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DATASETS = Path("hf_datasets")
_VOCABULARY = 32_000
_QUICK = "test-quick"


@dataclass(frozen=True)
class RawText:
    """The raw text of a dataset that does not exist yet."""

    data: str = option(
        "",
        group="raw text of a dataset that does not exist yet",
        metavar="ORG/NAME|DIR",
        help="dataset on the Hub, or a directory of files, such as /bucket/raw "
        f"(default: the first file of allenai/c4 for {command_line.DATASET}; required for others)",
    )
    include: list[str] = option(
        [],
        metavar="GLOB",
        help="files of a dataset on the Hub, by path; may be repeated; '*' for all (default: "
        "none; required for the Hub)",
    )
    fields: str = option(
        "",
        metavar="A,B.C",
        help="keys of structured documents to keep (default: every string)",
    )
    format: str = option(
        "text", choices=("text", "chat"), help="chat: keep the conversations in the files"
    )
    validation_percent: float = option(
        1.0,
        aliases=("validation_split_percentage",),
        parse=options.percent,
        metavar="P",
        help="percentage of the rows for the validation split",
    )
    quick: bool = option(
        False,
        help="make the small dataset and model of `make test-quick` from the source code of "
        "Python's standard library, and replace earlier ones",
    )

    def words(self) -> list[str]:
        """Return the options as command-line arguments for launch/cloud/prepare.py."""
        values = {name: value for name, value in asdict(self).items() if name != "quick"}
        return [
            *(["--quick"] if self.quick else []),
            *(
                f"{flag(name)}={item}"
                for name, value in values.items()
                for item in (value if isinstance(value, list) else [value])
                if item != ""
            ),
        ]


_C4_TEXT = RawText(data="allenai/c4", include=["en/c4-train.00000-of-01024.json.gz"], fields="text")


def list_preparation_steps(raw: RawText, config: Config, train: list[str]) -> Iterator[list[str]]:
    """Yield the commands that prepare a run in this directory, in their order.

    train: options of stage 04. config: the same options, parsed. Existing artifacts are kept.
    Raises UsageError if the raw text of a dataset is unknown.
    """
    yield from _list_quick_steps() if raw.quick else _list_missing_steps(raw, config)
    if choose_kind(config).keeps_files:  # a bench trains at once, by default without data
        yield [command_line.SCRIPT, *train, "--prepare-only"]


def _list_missing_steps(raw: RawText, config: Config) -> Iterator[list[str]]:
    """Yield the commands that make the dataset and the model of a run, if they do not exist."""
    named = config.dataset_name if choose_source(config).needs_tokenizer else []
    missing = [path for path in map(_find_dataset_dir, named) if not path.exists()]
    if len(missing) > 1:
        raise UsageError(
            f"{len(missing)} datasets are missing, but --data is the raw text of one",
            found=", ".join(map(str, missing)),
            expected="one dataset at a time",
        )
    for path in missing:
        yield from _list_dataset_steps(raw, path)
    yield from _list_model_steps(config)


def _list_quick_steps() -> Iterator[list[str]]:
    """Yield the commands that make the small dataset and model of `make test-quick`."""
    text = Path(sysconfig.get_paths()["stdlib"]) / "json"  # exists wherever Python does
    splits = f"splits_{_QUICK}"
    dataset = str(_DATASETS / _QUICK)
    organize = ["01_organize_data.py", "--src-dir", str(text), "--dst-root", splits]
    yield [*organize, "--num-dirs", "2", "--include", "*.py", "--mode", "copy"]
    yield ["02_build_hf_dataset.py", "--data-folder", splits, "--save-dir", dataset, "--overwrite"]
    model = ["03_download_model.py", "--from-scratch", "--model-size", "tiny", "--overwrite"]
    tokenizer = ["--train-tokenizer", dataset, "--vocab-size", "512"]
    yield [*model, "--model-name", _QUICK, *tokenizer]


def _find_dataset_dir(word: str) -> Path:
    """Return the directory that -d means: DIR, or NAME under hf_datasets/."""
    name = word.partition("=")[0]
    return Path(name) if "/" in name or Path(name).exists() else _DATASETS / name


def _list_dataset_steps(raw: RawText, dataset: Path) -> Iterator[list[str]]:
    if not raw.data and dataset.name != command_line.DATASET:
        raise UsageError(
            f"{dataset} does not exist, and there is no --data to make it from",
            expected="--data ORG/NAME of the Hub, or --data DIR",
        )
    if not raw.data:
        raw = replace(
            raw,
            data=_C4_TEXT.data,
            include=raw.include or _C4_TEXT.include,
            fields=raw.fields or _C4_TEXT.fields,
        )
    files = Path(raw.data)
    splits = Path("splits") / dataset.name
    if _HUB_NAME.fullmatch(raw.data) and not files.exists():
        if not raw.include:
            raise UsageError(
                f"--data {raw.data} needs --include GLOB: a dataset of the Hub can be terabytes",
                expected="files to fetch, such as 'en/*.json.gz', or '*' for all of them",
            )
        files = Path("raw_text") / paths.model_dir_name(raw.data)
        yield [
            "03_download_model.py",
            "--dataset-name",
            raw.data,
            *(f"--include={glob}" for glob in raw.include),
        ]
    # Hard links to files in a bucket are impossible; symbolic links need no space on the volume.
    mode = ["--mode", "symlink"] if files.is_absolute() else []
    yield ["01_organize_data.py", "--src-dir", str(files), "--dst-root", str(splits), *mode]
    yield [
        "02_build_hf_dataset.py",
        "--data-folder",
        str(splits),
        "--save-dir",
        str(dataset),
        *(["--fields", raw.fields] if raw.fields else []),
        *(["--format", raw.format] if raw.format != "text" else []),
        f"--validation-percent={raw.validation_percent}",
    ]


def _list_model_steps(config: Config) -> Iterator[list[str]]:
    models = paths.models_root(config.cache_dir)
    name = config.model_name or ""
    if config.tokenizer and config.tokenizer.parent == models and not config.tokenizer.exists():
        yield ["03_download_model.py", "--model-name", config.tokenizer.name.replace("--", "/", 1)]
    if not name or Path(name).exists() or (models / paths.model_dir_name(name)).exists():
        return
    if name.startswith(SCRATCH_PREFIX):
        yield [
            "03_download_model.py",
            "--from-scratch",
            "--model-name",
            name,
            "--model-size",
            name.removeprefix(SCRATCH_PREFIX),
            "--vocab-size",
            str(_VOCABULARY),
            "--train-tokenizer",
            str(_find_dataset_dir(config.dataset_name[0])),
        ]
    else:
        yield ["03_download_model.py", "--model-name", name]
