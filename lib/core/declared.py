"""Declare options once, each as a field of a frozen dataclass.

`add_options` adds the options of the fields to a parser, `read_options` makes the object from
parsed options, and `from_values` from the arguments of a Python call.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from lib.core import options
from lib.core.errors import Problems
from lib.core.unknown_options import OTHER_TRAINERS, SIMILAR

Declared = TypeVar("Declared")

# The name of a value in --help, by its parser.
_METAVARS = {
    options.positive_int: "N",
    options.count: "N",
    options.seed: "N",
    options.positive: "X",
    options.non_negative: "X",
    options.factor: "X",
    options.on_off: "on|off",
    options.auto_on_off: "auto|on|off",
    Path: "DIR",
}


def flag(name: str) -> str:
    """Return a field's name as an option: job_name is `--job-name`."""
    return f"--{name.replace('_', '-')}"


class Role(Enum):
    """Says which ranks and launches of a run must be given the same value of an option."""

    RESULT = "it decides the result: each launch of a run must be given the same"
    ALIKE = "all ranks of a launch must be given the same"
    LOCAL = "not compared itself, though values derived from it may be"


def option(
    default: Any = dataclasses.MISSING,
    *flags: str,
    aliases: tuple[str, ...] = (),
    help: str = "",
    parse: Callable[[str], Any] = str,
    group: str = "",
    first: str = "",
    role: Role | None = None,
    renumbers: bool = False,
    quiet: bool | tuple[Any, ...] = False,
    only_typed: bool = False,
    **more: Any,
) -> Any:
    """Declare a field as an option, `--job-name` for job_name.

    Without a default the option is required. The default False makes it a flag, unless `parse` is
    given; a list makes it repeatable. flags: other spellings. aliases: names with the same meaning
    in other trainers, as they spell them; --help does not show them. help: empty if the parser has
    the option already. group: title of the group for this option and the options after it. first:
    the option's line on the short page of --help; empty if that page omits the option. role: see
    Role. renumbers: the option decides which sample has which index. quiet: the default does not
    enter a run's identity, so that runs older than the option can resume; a tuple lists all values
    that do not enter it. only_typed: no file of --config may set the option. more: arguments for
    argparse.
    """
    default_argument: dict[str, Any] = (
        {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    )
    return dataclasses.field(
        **default_argument,
        kw_only=True,
        metadata={
            "flags": flags,
            "aliases": aliases,
            "help": help,
            "parse": parse,
            "group": group,
            "first": first,
            "role": role,
            "renumbers": renumbers,
            "quiet": quiet,
            "only_typed": only_typed,
            "more": more,
        },
    )


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Contains the options that `Parser.add_common` adds to each stage."""

    config: Path | None = option(None)
    dry_run: bool = option(False)
    overwrite: bool = option(False)
    no_progress: bool = option(False)


def add_options(parser: argparse._ActionsContainer, declared: type, **other_help: str) -> None:
    """Add the options that a class declares, in the order of its fields.

    parser: the parser, or one of its groups for options that name no group. other_help: by field,
    help texts that replace the declared ones for this command.
    """
    groups = {group.title: group for group in parser._action_groups}
    container = parser
    for field in list_fields(declared):
        metadata = field.metadata
        default = default_of(field)
        if not metadata["help"]:
            continue
        if title := metadata["group"]:
            container = groups[title] = groups.get(title) or parser.add_argument_group(title)
        arguments = {**metadata["more"], "help": other_help.get(field.name, metadata["help"])}
        arguments |= {"required": True} if default is dataclasses.MISSING else {"default": default}
        if is_flag(declared, field.name):
            arguments["action"] = "store_true"
        else:
            arguments = {
                "metavar": _METAVARS.get(metadata["parse"]),
                **arguments,
                "type": metadata["parse"],
            }
            arguments = ({"action": "append"} if isinstance(default, list) else {}) | arguments
        flags = [flag(field.name), *metadata["flags"]]
        flags = sorted(flags, key=lambda text: text.startswith("--"))
        action = container.add_argument(*flags, **arguments)
        action.only_typed = metadata["only_typed"]  # type: ignore[attr-defined]
        options.add_aliases(container, action, map(flag, metadata["aliases"]))


def with_options_of(*sources: type, after: str) -> Callable[[type[Declared]], type[Declared]]:
    """Return a decorator that adds the options of other classes, after the field `after`.

    Write it below `@dataclass`. Raises TypeError for an option that two of the classes declare; a
    declaration that they inherit from the same class counts once.
    """

    def add_fields(target: type[Declared]) -> type[Declared]:
        fields = [field for source in sources for field in list_fields(source)]
        added = {field.name: field for field in fields}
        twice = {field.name for field in fields if field is not added[field.name]}
        if twice := twice | (added.keys() & target.__annotations__.keys()):
            raise TypeError(f"{', '.join(sorted(twice))}: declared twice")
        annotations: dict[str, Any] = {}
        for name, kind in target.__annotations__.items():
            annotations[name] = kind
            if name == after:
                annotations |= {field.name: field.type for field in added.values()}
        for name, field in added.items():
            fresh = dataclasses.field(
                default=field.default,
                default_factory=field.default_factory,
                kw_only=True,
                metadata=field.metadata,
            )
            setattr(target, name, fresh)
        target.__annotations__ = annotations
        return target

    return add_fields


def list_fields(declared: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class that are options, in the order of their declaration."""
    return [field for field in dataclasses.fields(declared) if field.metadata]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; dataclasses.MISSING without one."""
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def is_flag(declared: type, name: str) -> bool:
    """Return whether a field is an option without a value."""
    field = next(field for field in list_fields(declared) if field.name == name)
    return default_of(field) is False and field.metadata["parse"] is str


def first_page(declared: type) -> dict[str, str]:
    """Return the lines of the short page of --help, by field."""
    return {
        field.name: text for field in list_fields(declared) if (text := field.metadata["first"])
    }


def read_options(declared: type[Declared], opts: Any) -> Declared:
    """Return an object of a class that declares options, with the values from `opts`.

    opts: the parsed options, or an object of a class that declares these options and more.
    """
    return declared(**{field.name: getattr(opts, field.name) for field in list_fields(declared)})


def require_defaults(chosen: Any, needed: str) -> None:
    """Raise UsageError for the options without their default: they need another option.

    chosen: object of a class that declares options. needed: the other option, as typed.
    """
    problems = Problems()
    for field in list_fields(type(chosen)):
        if field.metadata["help"] and getattr(chosen, field.name) != default_of(field):
            name = flag(field.name)
            problems.add(f"{name} needs {needed}", expected=f"{needed}, or no {name}")
    problems.raise_if_any()


def drop_repeats(chosen: Declared) -> Declared:
    """Return the options without repeated values in lists; the first of equal values stays.

    So `--fields a,a` and `--fields a` describe the same artifact.
    """
    lists = {
        field.name: list(dict.fromkeys(getattr(chosen, field.name)))
        for field in list_fields(type(chosen))
        if isinstance(default_of(field), list)
    }
    return dataclasses.replace(chosen, **lists)  # type: ignore[type-var]


def identify_artifact(chosen: Any, *omitted: str) -> dict[str, Any]:
    """Return the options that decide what an artifact contains, as values to store.

    chosen: object of a class that declares options. omitted: names of further options that do not
    affect the content. An option declared with quiet=True is left out while it has its default, so
    that an artifact older than the option keeps its identity.
    """
    quiet = {
        field.name
        for field in list_fields(type(chosen))
        if field.metadata["quiet"] and getattr(chosen, field.name) == default_of(field)
    }
    return options.identity(chosen, *omitted, *quiet)


def fields_by_spelling(declared: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields by every name that a Python call may use: job_name, num_nodes, nodes."""
    return {
        text.lstrip("-").replace("-", "_"): field
        for field in list_fields(declared)
        for text in (field.name, *field.metadata["flags"], *field.metadata["aliases"])
    }


def require_known(names: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for unknown names of arguments, with the nearest names."""
    problems = Problems()
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
        problems.add(
            f"there is no argument {name}" + (f"; the nearest is {near[0]}" if near else "")
        )
    problems.raise_if_any(hint=OTHER_TRAINERS)


def merge_spellings(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options with field names as keys, without values that are None.

    values: the keys may be any spelling. Raises UsageError for an unknown name, or if two values of
    one field differ.
    """
    known = fields_by_spelling(declared)
    by_field = dict[str, Any]()
    problems = Problems()
    require_known(values, known)
    for name, value in values.items():
        if value is not None and by_field.setdefault(known[name].name, value) != value:
            problems.add(
                f"{name}={value!r} contradicts {by_field[known[name].name]!r}, given for "
                "another spelling of the same option",
                expected="one of them",
            )
    problems.raise_if_any()
    return by_field


def from_values(declared: type[Declared], **values: Any) -> Declared:
    """Return an object of a class that declares options. Raises one UsageError for all bad values.

    values: the keys may be any spelling of a field. None means the default.
    """
    known = fields_by_spelling(declared)
    by_field = merge_spellings(declared, values)
    problems = Problems()
    for name, value in by_field.items():
        field = known[name]
        try:
            by_field[name] = value = _parse_value(declared, field, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            problems.add(f"{flag(name)}: {error}")
        if value not in field.metadata["more"].get("choices", (value,)):
            problems.add(
                f"{flag(name)}: there is no {value!r}",
                expected=f"one of {', '.join(field.metadata['more']['choices'])}",
            )
    for field in list_fields(declared):
        if default_of(field) is dataclasses.MISSING and field.name not in by_field:
            problems.add(f"{flag(field.name)} is missing", expected=field.metadata["help"])
    problems.raise_if_any()
    return declared(**by_field)


def _parse_value(declared: type, field: dataclasses.Field[Any], value: Any) -> Any:
    """Parse a value as on the command line. Raises ValueError if the option refuses the value."""
    if is_flag(declared, field.name):
        if not isinstance(value, bool):
            raise ValueError(f"expected True or False, got {value!r}")
        return value
    default = default_of(field)
    parse = field.metadata["parse"]
    if isinstance(default, list):  # an option that may be repeated
        return [parse(str(item)) for item in (value if isinstance(value, list) else [value])]
    return value if value == default else parse(str(value))
