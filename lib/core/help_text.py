"""Format --help: a usage of one line, and a default at the end of each option's help."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress

_COLUMNS = 80
_DEFAULT = re.compile(r"\((?:default: .*|required.*)\)$")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's layout and ends each help text with its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return with_default(action)


class HelpAll(argparse.Action):
    """Prints every option, for a parser whose --help is a short page."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        with suppress(OSError):  # the reader, such as `head`, has gone
            sys.stdout.write(parser.format_all())  # type: ignore[attr-defined]
        parser.exit()


def with_default(action: argparse.Action) -> str:
    """Return the help of an option with its default, unless the help names the default itself.

    Percent signs are doubled, as argparse needs them.
    """
    text = action.help or ""
    default = action.default
    if (
        default is argparse.SUPPRESS
        or _DEFAULT.search(text)
        or not (action.option_strings or action.nargs == "?")
    ):
        return text
    if action.required:
        return f"{text} (required)"
    if action.nargs == 0 or isinstance(default, bool):
        return f"{text} (default: {'on' if default else 'off'})"
    if default in (None, "", []):
        return text
    return f"{text} (default: {str(default).replace('%', '%%')})"


def format_usage(parser: argparse.ArgumentParser) -> str:
    """Return a usage of one line: required options, and `[options]` for the rest."""
    needed = [
        _spell_option(action)
        for action in parser._actions
        if action.option_strings and action.required
    ]
    places = [_spell_positional(action) for action in parser._actions if not action.option_strings]
    return " ".join([parser.prog, *places, *needed, "[options]"])


def format_short_page(parser: argparse.ArgumentParser, usage: str, first: Mapping[str, str]) -> str:
    """Return the page of the most important options, one line each, and the names of the groups.

    first: the purpose of each of these options, without its default; the keys are destinations of
    argparse. The page begins with the docstring up to its second empty line: a sentence, and the
    first commands to try.
    """
    head = "\n\n".join((parser.description or "").strip().split("\n\n")[:2])
    by_name = {action.dest: action for action in reversed(parser._actions)}
    named = {name: _spell_option(by_name[name]) for name in first}
    width = max(map(len, named.values())) + 2
    lines = [
        f"  {named[name]:<{width}}{text} {_find_default(by_name[name])}"
        for name, text in first.items()
    ]
    groups = "; ".join(
        (group.title or "").partition(" (")[0] for group in parser._action_groups[2:]
    )
    more = len([action for action in parser._actions if action.option_strings]) - len(first)
    return "\n".join(
        [
            f"usage: {usage}",
            "",
            head,
            "",
            f"the {len(first)} options that matter most:",
            *lines,
            "",
            *textwrap.wrap(f"--help-all shows {more} more options, by group: {groups}", _COLUMNS),
            "",
        ]
    )


def _spell_option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or [])}"
    return action.option_strings[0] + value


def _spell_positional(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(action.choices or [action.dest]))
    return f"[{name}]" if action.nargs == "?" else name


def _find_default(action: argparse.Action) -> str:
    match = _DEFAULT.search(with_default(action))
    return match[0].replace("%%", "%") if match else ""
