"""Read the options of stage 04: for the stage itself, and for launchers before they start it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.core import commands, config_file, declared, log, options, paths
from lib.core.errors import UsageError
from lib.train.config import Config
from lib.train.output.kinds import choose_kind

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = commands.TRAINER
# The model and dataset of launchers if no option names others.
RECIPE = ROOT / "recipes" / "scratch-1b-g5.yaml"
DATASET = "c4"
_FROM_SCRATCH = ("--from-scratch", "--model-size=1B")


def add_options(parser: options.Parser) -> None:
    """Add all options of stage 04 to a parser."""
    declared.add_options(parser, Config)
    parser.add_common(workers="tokenise")


def read_options(parser: options.Parser, argv: Sequence[str]) -> Config:
    """Return the options of a command line and of its --config; UsageError for invalid ones."""
    opts = parser.parse(argv)
    paths.expand_save_dir(opts)
    config = declared.read_options(Config, opts)
    # A model that the options create has no weights.
    return replace(config, from_scratch=True) if config.makes_model else config


def parse_options(words: Sequence[str]) -> Config:
    """Return the options that stage 04 would use, of these words; UsageError as parse_typed."""
    config = parse_typed(words)
    return choose_kind(config).fill_options(config)


def parse_typed(words: Sequence[str]) -> Config:
    """Return the options that stage 04 would read from words; UsageError if it would refuse them.

    The error suggests the help of stage 04, not the help of the launcher that calls this.
    """
    try:
        return read_options(_make_parser(), words)
    except UsageError as error:
        if error.run in (commands.help_of(), commands.help_of("--help-all")):
            error.run = commands.script(SCRIPT, "--help-all")
        raise


def expand_config(words: Sequence[str]) -> list[str]:
    """Return words with --config replaced by the options in its file; UsageError if invalid."""
    expanded: list[str] = []
    follows_config = False
    for word in _make_parser().expand_config(words):
        if not follows_config and word.partition("=")[0] != "--config":
            expanded.append(word)
        follows_config = word == "--config"
    return expanded


def drop_overridden(words: Sequence[str]) -> list[str]:
    """Return words of a command line with each option once: the last value counts.

    Options that may be repeated stay as they are.
    """
    parser = _make_parser()
    groups: list[tuple[str, list[str]]] = []  # an option, and the words that belong to it
    for word in words:
        flag = parser.to_our_name(word.partition("=")[0])
        action = parser._option_string_actions.get(flag) if word.startswith("-") else None
        if action:
            is_list = isinstance(action.default, list)
            groups.append(("" if is_list else action.dest, [word]))
        else:
            groups = groups or [("", [])]
            groups[-1][1].append(word)
    last = {dest: number for number, (dest, _) in enumerate(groups)}
    return [
        word
        for number, (dest, group) in enumerate(groups)
        if not dest or last[dest] == number
        for word in group
    ]


def to_words(values: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line. values: by name of their field in `Config`."""
    words: list[str] = []
    for name, value in values.items():
        if declared.is_flag(Config, name):
            words += [declared.flag(name)] if value else []
        else:
            words += [
                f"{declared.flag(name)}={config_file.value_as_word(item)}"
                for item in (value if isinstance(value, list | tuple) else [value])
            ]
    return words


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def missing_dashes_error(example: str) -> UsageError:
    """Return the error for a launcher that was given no options of stage 04."""
    return UsageError(
        "`--` is missing, or nothing follows it",
        expected=f"the options of the launcher, then `--`, then those of {SCRIPT}: -- {example}",
    )


def take_stage_options(
    words: Sequence[str], launcher_flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Split a launcher's command line into its own words and the options of stage 04.

    launcher_flags: the launcher's own options, which it keeps even if stage 04 has them too.
    """
    launcher_words: list[str] = []
    stage_words: list[str] = []
    stage_flags = _make_parser()._option_string_actions
    target = launcher_words
    for word in words:
        if word.startswith("-"):
            is_stage_option = _is_option(word, stage_flags) and not _is_option(word, launcher_flags)
            target = stage_words if is_stage_option else launcher_words
        target.append(word)
    return launcher_words, stage_words


def _is_option(word: str, flags: Collection[str]) -> bool:
    """Return whether a word is one of these options, in our or another trainer's spelling."""
    name = word.partition("=")[0]
    return (name.replace("_", "-") if name.startswith("--") else name) in flags


def add_recipe(words: Sequence[str]) -> list[str]:
    """Add the options of a 1B model from scratch if a command line names no model.

    A --tokenizer that names a model of the Hub becomes the directory where stage 03 stores it.
    """
    typed = parse_options(words)
    if typed.tokenizer and len(typed.tokenizer.parts) == 2 and typed.tokenizer.parts[0] != "..":
        prepared = paths.models_root(typed.cache_dir) / paths.model_dir_name(str(typed.tokenizer))
        words = [*words, f"--tokenizer={prepared}"]
    if typed.model_name or typed.makes_model or typed.config:
        return [*words]
    has_data = bool(typed.dataset_name)
    is_random = bool(typed.tokenizer) or not choose_kind(typed).reads_weights
    if has_data and not is_random:
        return [*words]
    recipe = expand_config([f"--config={RECIPE}"])
    if is_random:
        recipe = [
            *(word for word in recipe if not word.startswith("--model-name=")),
            *_FROM_SCRATCH,
        ]
    dataset = [] if has_data else [f"--dataset-name={DATASET}"]
    log.info(
        f"no model is given: training a 1B model from scratch with recipes/{RECIPE.name}"
        + (f", on {DATASET}" if dataset else "")
    )
    return [*recipe, *dataset, *words]


def require_names(config: Config, run: str = "", hint: str = "") -> None:
    """Raise UsageError if the name of the run or the dataset is missing. run, hint: as there."""
    names = {
        "-e NAME or PATH (of the run)": config.experiment_name,
        "-d (a dataset)": config.dataset_name,
    }
    if missing := [name for name, value in names.items() if not value]:
        raise UsageError(
            f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing",
            expected="-e exp -d hf_datasets/corpus, say",
            hint=hint,
            run=run,
        )


def _make_parser() -> options.Parser:
    parser = options.Parser(None)
    add_options(parser)
    return parser
