"""Reads the options of stage 04 for launchers, before they start anything."""

from __future__ import annotations

from collections.abc import Sequence

from lib.core import commands, options
from lib.core.errors import Problems, UsageError
from lib.train.command_line import add_options, read_options
from lib.train.config import Config

SCRIPT = "04_train_fsdp.py"


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and behind the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1:]


def nothing_behind(example: str) -> UsageError:
    """Return the error of a launcher that gets no options of stage 04."""
    return UsageError("`--` is missing, or nothing stands behind it",
                      expected="the options of the launcher, then `--`, then those of "
                               f"{SCRIPT}: -- {example}")


def expanded(words: Sequence[str]) -> list[str]:
    """Return options with those that --config holds in its place; UsageError as `parse`."""
    kept: list[str] = []
    follows = False
    for word in _parser().expanded(words):
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
