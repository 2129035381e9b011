"""Options that are declared once, each as a field of a frozen dataclass.

`add` makes the options of a parser from the fields, `read` makes the object from what was parsed,
and `made` from what a program says.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from lib.core.errors import Problems
from lib.core.options import Options

Declared = TypeVar("Declared")


def flag(name: str) -> str:
    """Return a field's name as it is typed: job_name is `--job-name`."""
    return f"--{name.replace('_', '-')}"


def option(default: Any = dataclasses.MISSING, *, help: str, parse: Callable[[str], Any] = str,
           group: str = "", **more: Any) -> Any:
    """Declare a field as the option of its name, `--job-name` for job_name.

    Without a default it has to be given; one that is False makes it a flag, unless `parse` reads a
    value. group: the title of the group that it and those behind it stand in. more: what argparse
    takes, such as metavar.
    """
    return dataclasses.field(default=default, kw_only=True, metadata={
        "help": help, "parse": parse, "group": group, **more})


def add(parser: argparse.ArgumentParser, declared: type, **other_help: str) -> None:
    """Add the options that a class declares, in the order of its fields.

    other_help: by field, what this command says of an option instead of its declaration.
    """
    groups = {group.title: group for group in parser._action_groups}
    where: argparse._ActionsContainer = parser
    for field in dataclasses.fields(declared):
        more = {**field.metadata, "help": other_help.get(field.name, field.metadata["help"])}
        parse, title = more.pop("parse"), more.pop("group")
        if title:
            where = groups[title] = groups.get(title) or parser.add_argument_group(title)
        if field.default is dataclasses.MISSING:
            more["required"] = True
        else:
            more["default"] = field.default
        is_flag = field.default is False and parse is str
        more |= {"action": "store_true"} if is_flag else {"type": parse}
        where.add_argument(flag(field.name), **more)


def read(declared: type[Declared], opts: Options) -> Declared:
    """Return what a class declares, as it was parsed."""
    return declared(**{field.name: getattr(opts, field.name)
                       for field in dataclasses.fields(declared)})


def made(declared: type[Declared], **values: Any) -> Declared:
    """Return what a program asks for; UsageError tells all that a command line could not say."""
    problems = Problems()
    for field in dataclasses.fields(declared):
        told = field.metadata
        if (value := values.get(field.name, field.default)) == field.default:
            continue
        try:
            told["parse"](str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.add(f"{flag(field.name)}: {error}")
        if value not in told.get("choices", (value,)):
            problems.add(f"{flag(field.name)}: there is no {value!r}",
                         expected=f"one of {', '.join(told['choices'])}")
    problems.raise_if_any()
    return declared(**values)
