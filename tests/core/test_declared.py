"""Options that a dataclass declares: the parser that they make, and the same from a program."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lib.core import declared, options
from lib.core.declared import option
from lib.core.errors import UsageError


@dataclass(frozen=True)
class Base:
    nodes: int = option(1, group="where", parse=options.positive_int, metavar="N", help="nodes")
    kind: str = option("a", group="what", choices=("a", "b"), help="kind")


@dataclass(frozen=True)
class Wanted(Base):
    job_name: str = option(group="where", metavar="J", help="name")
    is_fast: bool = option(False, help="soon")
    follow: bool = option(True, parse=options.on_off, metavar="on|off", help="go on")


def parsed(*argv: str) -> Wanted:
    parser = options.Parser("Test.")
    declared.add_options(parser, Wanted, kind="another kind")
    assert [group.title for group in parser._action_groups[2:]] == ["where", "what"]
    assert "another kind (default: a)" in parser.format_help()
    return declared.read_options(Wanted, parser.parse(argv))


def test_fields_are_options_and_what_is_parsed_is_the_object() -> None:
    assert parsed("--job-name", "x") == Wanted(job_name="x")
    assert parsed("--job_name=x", "--nodes", "3", "--is-fast", "--follow", "off") == Wanted(
        job_name="x", nodes=3, is_fast=True, follow=False
    )
    for argv, says in (((), "--job-name"), (("--job-name", "x", "--nodes", "0"), "above 0")):
        with pytest.raises(UsageError, match=says):
            parsed(*argv)


def test_a_program_is_told_what_a_command_line_would_be_told() -> None:
    assert declared.from_values(Wanted, job_name="x", nodes=3, follow=False).nodes == 3
    with pytest.raises(UsageError) as caught:
        declared.from_values(Wanted, job_name="x", nodes=0, kind="c")
    assert len(caught.value.several) == 2
    assert "--nodes: expected a whole number above 0" in str(caught.value)
    assert "--kind: there is no 'c'" in str(caught.value)
