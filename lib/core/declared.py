"""Options that are declared once, each as a field of a frozen dataclass.

`add` makes the options of a parser from the fields, `read` makes the object from what was parsed,
and `made` from what a program says.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from lib.core import elsewhere, options, unknown
from lib.core.errors import Problems
from lib.core.options import Options

Declared = TypeVar("Declared")

# What stands for a value in --help, by what reads it.
_METAVARS = {
    options.positive_int: "N",
    options.count: "N",
    options.seed: "N",
    options.positive: "X",
    options.non_negative: "X",
    options.on_off: "on|off",
    options.auto_on_off: "auto|on|off",
    Path: "DIR",
}


def flag(name: str) -> str:
    """Return a field's name as it is typed: job_name is `--job-name`."""
    return f"--{name.replace('_', '-')}"


class Role(Enum):
    """Says what the ranks and the launches of one run have to do with an option."""

    RESULT = "it decides the result: a launch that goes on with a run must be given the same"
    ALIKE = "all ranks of a launch must be given the same"
    LOCAL = "not compared itself, though what follows from it may be"


def option(
    default: Any = dataclasses.MISSING,
    *flags: str,
    help: str = "",
    parse: Callable[[str], Any] = str,
    group: str = "",
    first: str = "",
    role: Role | None = None,
    renumbers: bool = False,
    quiet: bool | tuple[Any, ...] = False,
    **more: Any,
) -> Any:
    """Declare a field as the option of its name, `--job-name` for job_name.

    Without a default it has to be given; one that is False makes it a flag, unless `parse` reads a
    value, and one that is a list an option that may be repeated. flags: its other spellings. help:
    empty for an option that the parser has already. group: the title of the group that it and those
    behind it stand in. first: what the short page of --help says of it; empty: it is not there.
    role: see Role. renumbers: a change gives samples other numbers. quiet: the default is no part
    of a run's identity, so that runs older than the option go on; a tuple names the values of
    which this is true. more: what argparse takes.
    """
    given: dict[str, Any] = (
        {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    )
    return dataclasses.field(
        **given,
        kw_only=True,
        metadata={
            "flags": flags,
            "help": help,
            "parse": parse,
            "group": group,
            "first": first,
            "role": role,
            "renumbers": renumbers,
            "quiet": quiet,
            "more": more,
        },
    )


def add(parser: argparse.ArgumentParser, declared: type, **other_help: str) -> None:
    """Add the options that a class declares, in the order of its fields.

    other_help: by field, what this command says of an option instead of its declaration.
    """
    groups = {group.title: group for group in parser._action_groups}
    where: argparse._ActionsContainer = parser
    for field in fields(declared):
        about = field.metadata
        default = default_of(field)
        if not about["help"]:
            continue
        if title := about["group"]:
            where = groups[title] = groups.get(title) or parser.add_argument_group(title)
        more = {**about["more"], "help": other_help.get(field.name, about["help"])}
        more |= {"required": True} if default is dataclasses.MISSING else {"default": default}
        if is_flag(declared, field.name):
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
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def is_flag(declared: type, name: str) -> bool:
    """Tell whether a field is an option without a value."""
    field = next(field for field in fields(declared) if field.name == name)
    return default_of(field) is False and field.metadata["parse"] is str


def first_page(declared: type) -> dict[str, str]:
    """Return what the short page of --help says, by field."""
    return {field.name: text for field in fields(declared) if (text := field.metadata["first"])}


def read(declared: type[Declared], opts: Options) -> Declared:
    """Return what a class declares, as it was parsed."""
    return declared(**{field.name: getattr(opts, field.name) for field in fields(declared)})


def spellings(declared: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields by every name that a program may give them: job_name, num_nodes, nodes."""
    return {
        text.lstrip("-").replace("-", "_"): field
        for field in fields(declared)
        for text in elsewhere.spellings([flag(field.name), *field.metadata["flags"]])
    }


def require_known(given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for the names of arguments that are not known, with what is near them."""
    problems = Problems()
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=unknown.SIMILAR)
        problems.add(
            f"there is no argument {name}" + (f"; the nearest is {near[0]}" if near else ""),
            hint=elsewhere.advice(name, [flag(each) for each in known]),
        )
    problems.raise_if_any()


def by_field(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of their fields, without those that are None.

    values: by any spelling; UsageError where two of one field differ, or there is no such field.
    """
    known = spellings(declared)
    given = dict[str, Any]()
    problems = Problems()
    require_known(values, known)
    for name, value in values.items():
        if value is not None and given.setdefault(known[name].name, value) != value:
            problems.add(
                f"{name}={value!r} contradicts {given[known[name].name]!r}, which another "
                "spelling of the same option says",
                expected="one of them",
            )
    problems.raise_if_any()
    return given


def made(declared: type[Declared], **values: Any) -> Declared:
    """Return what a program asks for; UsageError tells all that a command line could not say.

    values: by any spelling of a field; None stands for the default.
    """
    known = spellings(declared)
    given = by_field(declared, values)
    problems = Problems()
    for name, value in given.items():
        field = known[name]
        try:
            given[name] = value = _accepted(declared, field, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.add(f"{flag(name)}: {error}")
        if value not in field.metadata["more"].get("choices", (value,)):
            problems.add(
                f"{flag(name)}: there is no {value!r}",
                expected=f"one of {', '.join(field.metadata['more']['choices'])}",
            )
    for field in fields(declared):
        if default_of(field) is dataclasses.MISSING and field.name not in given:
            problems.add(f"{flag(field.name)} is missing", expected=field.metadata["help"])
    problems.raise_if_any()
    return declared(**given)


def _accepted(declared: type, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value as the option's parser would; ValueError when it would not take it."""
    if is_flag(declared, field.name):
        if not isinstance(value, bool):
            raise ValueError(f"expected True or False, got {value!r}")
        return value
    return value if value == default_of(field) else field.metadata["parse"](str(value))
