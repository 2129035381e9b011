"""Options that are declared once, each as a field of a frozen dataclass.

`add` makes the options of a parser from the fields, `read` makes the object from what was parsed,
and `made` from what a program says.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from lib.core import options
from lib.core.errors import Problems
from lib.core.options import Options

Declared = TypeVar("Declared")

# What stands for a value in --help, by what reads it.
_METAVARS = {options.positive_int: "N", options.count: "N", options.seed: "N",
             options.positive: "X", options.non_negative: "X", options.on_off: "on|off",
             options.auto_on_off: "auto|on|off", Path: "DIR"}


def flag(name: str) -> str:
    """Return a field's name as it is typed: job_name is `--job-name`."""
    return f"--{name.replace('_', '-')}"


class Role(Enum):
    """Says what the ranks and the launches of one run have to do with an option."""

    RESULT = "it decides the result: a launch that goes on with a run must be given the same"
    ALIKE = "all ranks of a launch must be given the same"
    LOCAL = "not compared itself, though what follows from it may be"


def option(default: Any = dataclasses.MISSING, *flags: str, help: str = "",
           parse: Callable[[str], Any] = str, group: str = "", first: str = "",
           role: Role | None = None, renumbers: bool = False, quiet: bool = False,
           **more: Any) -> Any:
    """Declare a field as the option of its name, `--job-name` for job_name.

    Without a default it has to be given; one that is False makes it a flag, unless `parse` reads a
    value, and one that is a list an option that may be repeated. flags: its other spellings. help:
    empty for an option that the parser has already. group: the title of the group that it and those
    behind it stand in. first: what the short page of --help says of it; empty: it is not there.
    role: see Role. renumbers: a change gives samples other numbers. quiet: the default is no part
    of a run's identity, so that runs older than the option go on. more: what argparse takes.
    """
    given: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) \
        else {"default": default}
    return dataclasses.field(**given, kw_only=True, metadata={
        "flags": flags, "help": help, "parse": parse, "group": group, "first": first, "role": role,
        "renumbers": renumbers, "quiet": quiet, "more": more})


def add(parser: argparse.ArgumentParser, declared: type, **other_help: str) -> None:
    """Add the options that a class declares, in the order of its fields.

    other_help: by field, what this command says of an option instead of its declaration.
    """
    groups = {group.title: group for group in parser._action_groups}
    where: argparse._ActionsContainer = parser
    for field in fields(declared):
        about, default = field.metadata, default_of(field)
        if not about["help"]:
            continue
        if title := about["group"]:
            where = groups[title] = groups.get(title) or parser.add_argument_group(title)
        more = {**about["more"], "help": other_help.get(field.name, about["help"])}
        more |= {"required": True} if default is dataclasses.MISSING else {"default": default}
        if default is False and about["parse"] is str:
            more["action"] = "store_true"
        else:
            more = {"metavar": _METAVARS.get(about["parse"]), **more, "type": about["parse"]}
            more |= {"action": "append"} if isinstance(default, list) else {}
        flags = [flag(field.name), *about["flags"]]
        where.add_argument(*sorted(flags, key=lambda text: text.startswith("--")), **more)


def fields(declared: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class that are options, in the order of their declaration."""
    return [field for field in dataclasses.fields(declared) if field.metadata]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; dataclasses.MISSING where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING \
        else field.default_factory()


def first_page(declared: type) -> dict[str, str]:
    """Return what the short page of --help says, by field."""
    return {field.name: text for field in fields(declared) if (text := field.metadata["first"])}


def read(declared: type[Declared], opts: Options) -> Declared:
    """Return what a class declares, as it was parsed."""
    return declared(**{field.name: getattr(opts, field.name) for field in fields(declared)})


def made(declared: type[Declared], **values: Any) -> Declared:
    """Return what a program asks for; UsageError tells all that a command line could not say."""
    problems = Problems()
    for field in fields(declared):
        about = field.metadata
        if (value := values.get(field.name, default_of(field))) == default_of(field):
            continue
        try:
            about["parse"](str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.add(f"{flag(field.name)}: {error}")
        if value not in about["more"].get("choices", (value,)):
            problems.add(f"{flag(field.name)}: there is no {value!r}",
                         expected=f"one of {', '.join(about['more']['choices'])}")
    problems.raise_if_any()
    return declared(**values)
