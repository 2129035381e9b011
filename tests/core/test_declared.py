# covers: lib/core/declared.py
"""Options of a declared dataclass, from a command line or from a Python call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lib.core import declared, options
from lib.core.declared import option
from lib.core.errors import UsageError


@dataclass(frozen=True)
class Base:
    nodes: int = option(
        1,
        aliases=("num_nodes", "cluster.nodes"),
        group="where",
        parse=options.positive_int,
        metavar="N",
        help="nodes",
    )
    kind: str = option("a", group="what", choices=("a", "b"), help="kind")


@dataclass(frozen=True)
class JobOptions(Base):
    job_name: str = option(group="where", metavar="J", help="name")
    is_fast: bool = option(False, help="soon")
    parts: list[str] = option([], metavar="P", help="parts")
    follow: bool = option(True, parse=options.on_off, metavar="on|off", help="go on")


def parse_job(*argv: str) -> JobOptions:
    parser = options.Parser("Test.")
    declared.add_options(parser, JobOptions, kind="another kind")
    assert [group.title for group in parser._action_groups[2:]] == ["where", "what"]
    assert "another kind (default: a)" in parser.format_help()
    return declared.read_options(JobOptions, parser.parse(argv))


def test_parsed_options_become_an_object() -> None:
    assert parse_job("--job-name", "x") == JobOptions(job_name="x")
    assert parse_job("--job_name=x", "--nodes", "3", "--is-fast", "--follow", "off") == JobOptions(
        job_name="x", nodes=3, is_fast=True, follow=False
    )
    for argv, message in (((), "--job-name"), (("--job-name", "x", "--nodes", "0"), "above 0")):
        with pytest.raises(UsageError, match=message):
            parse_job(*argv)


def test_an_alias_is_accepted_and_not_shown(capsys: pytest.CaptureFixture) -> None:
    for alias in ("--num_nodes", "--num-nodes", "--cluster.nodes"):
        assert parse_job("--job-name", "x", alias, "3").nodes == 3
    assert declared.from_values(JobOptions, job_name="x", num_nodes=3).nodes == 3
    with pytest.raises(UsageError, match="num_nodes=3 contradicts 2"):
        declared.from_values(JobOptions, job_name="x", nodes=2, num_nodes=3)
    with pytest.raises(SystemExit):
        parse_job("--help")
    assert "--nodes N" in (shown := capsys.readouterr().out) and "num-nodes" not in shown


def test_a_value_that_is_given_twice_counts_once() -> None:
    words = ("--job-name", "x", "--parts", "b", "--parts", "a", "--parts", "b")
    assert declared.drop_repeats(parse_job(*words)).parts == ["b", "a"]


def test_python_values_are_checked_like_a_command_line() -> None:
    assert declared.from_values(JobOptions, job_name="x", nodes=3, follow=False).nodes == 3
    for text in (["a", "b"], "a"):
        assert declared.from_values(JobOptions, job_name="x", parts=text).parts == [*text]
    with pytest.raises(UsageError) as caught:
        declared.from_values(JobOptions, job_name="x", nodes=0, kind="c")
    assert len(caught.value.several) == 2
    assert "--nodes: expected" in str(caught.value)
    assert "--kind: there is no" in str(caught.value)
