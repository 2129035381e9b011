"""Reads the options of stage 04 for launchers, before they start anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.core import aliases, commands, config_file, declared, log, options, paths
from lib.core.errors import Problems, UsageError
from lib.train.command_line import add_options, read_options
from lib.train.config import Config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "04_train_fsdp.py"
# What is trained where nothing says so, on the dataset that launch/prepare.py makes by itself.
RECIPE = ROOT / "recipes" / "scratch-1b-g5.yaml"
DATASET = "c4"
_FROM_SCRATCH = ("--from-scratch", "--model-size=1B")


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and behind the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def taken_out(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a launcher's words without the options of stage 04 that stand among them, and those.

    own: the options of the launcher, which are its own also where stage 04 has them.
    """
    kept: list[str] = []
    train: list[str] = []
    theirs = _parser()._option_string_actions
    where = kept
    for word in words:
        if word.startswith("-"):
            where = train if _has(theirs, word) and not _has(own, word) else kept
        where.append(word)
    return kept, train


def _has(flags: Collection[str], word: str) -> bool:
    name = word.partition("=")[0]
    return (name.replace("_", "-") if name.startswith("--") else name) in flags or bool(
        aliases.find_option(name, flags)
    )


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Return what a program gives for options as it is typed; given: by the names of fields."""
    words: list[str] = []
    for name, value in given.items():
        if declared.is_flag(Config, name):
            words += [declared.flag(name)] if value else []
        else:
            words += [
                f"{declared.flag(name)}={config_file.value_as_word(each)}"
                for each in (value if isinstance(value, list | tuple) else [value])
            ]
    return words


def completed(words: Sequence[str]) -> list[str]:
    """Return options of stage 04, with those of a 1B from scratch where nothing says what to train.

    A --tokenizer that is a model of the Hub means the directory where stage 03 puts it.
    """
    asked = parse(words)
    if asked.tokenizer and len(asked.tokenizer.parts) == 2 and asked.tokenizer.parts[0] != "..":
        prepared = paths.models_root(asked.cache_dir) / paths.model_dir_name(str(asked.tokenizer))
        words = [*words, f"--tokenizer={prepared}"]
    if asked.model_name or asked.model_size or asked.config:
        return [*words]
    if asked.dataset_name and not asked.tokenizer:
        return [*words]
    recipe = expanded([f"--config={RECIPE}"])
    if asked.tokenizer:
        recipe = [
            *(word for word in recipe if not word.startswith("--model-name=")),
            *_FROM_SCRATCH,
        ]
    named = [] if asked.dataset_name else [f"--dataset-name={DATASET}"]
    log.info(
        f"what to train is not given: a 1B from scratch, as recipes/{RECIPE.name} says"
        + (f", on {DATASET}" if named else "")
    )
    return [*recipe, *named, *words]


def nothing_behind(example: str) -> UsageError:
    """Return the error of a launcher that gets no options of stage 04."""
    return UsageError(
        "`--` is missing, or nothing stands behind it",
        expected=f"the options of the launcher, then `--`, then those of {SCRIPT}: -- {example}",
    )


def expanded(words: Sequence[str]) -> list[str]:
    """Return options with those that --config holds in its place; UsageError as `parse`."""
    kept: list[str] = []
    follows = False
    for word in _parser().expand_config(words):
        if not follows and word.partition("=")[0] != "--config":
            kept.append(word)
        follows = word == "--config"
    return kept


def parse(words: Sequence[str]) -> Config:
    """Return what stage 04 makes of its options; UsageError tells what it would not take."""
    try:
        return read_options(_parser(), words)
    except UsageError as error:
        if error.run in (commands.help_of(), commands.help_of("--help-all")):
            error.run = commands.script(SCRIPT, "--help-all")
        raise


def parse_in(directory: Path, words: Sequence[str]) -> Config:
    """Return what stage 04 makes of options that were typed in a directory; errors as `parse`."""
    asking = _parser()
    placed: list[str] = []
    follows = False
    for word in words:
        flag, equals, value = word.partition("=")
        is_config = asking.to_our_name(flag) == "--config"
        if follows:
            word = str(directory / word)
        elif is_config and equals:
            word = f"{flag}={directory / value}"
        follows = is_config and not equals and not follows
        placed.append(word)
    return parse(placed)


def check_ranks(config: Config, ranks: int) -> None:
    """Raise UsageError when so many ranks cannot share the work that the options ask for."""
    from lib.train import plan

    problems = Problems()
    problems.collect(lambda: plan.divide(config, 0, ranks))
    problems.collect(lambda: plan.degrees(config).replicas(ranks))
    problems.raise_if_any()


def _parser() -> options.Parser:
    parser = options.Parser(None)
    add_options(parser)
    return parser
