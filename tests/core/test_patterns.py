# covers: lib/core/patterns.py
"""Regular expressions that backtrack for long are refused, usual ones are accepted."""

from __future__ import annotations

import re
import signal
import time

import pytest

from lib.core import patterns
from lib.core.errors import UsageError


@pytest.mark.parametrize(
    "pattern",
    [
        "all-linear",
        "q_proj|v_proj",
        ".*",
        ".*_proj",
        r"model\.layers\.\d+\..*_proj",
        r"model\.layers\.(0|1|12)\.(mlp\.up|self_attn\.q)_proj",
        "(q|k|v)_proj",
        "(?:gate|up)_proj?",
        "[qkv]_proj",
        r".*\.(1[0-9]|2[0-9])\..*",
        "(?i:Q_PROJ)",
        r"(?=.*attn).*_proj",
        "a{1}b?",
        r"(?:base\.)?model\.layers\.\d\d?\.(?:attn|mlp)?.*_proj",
        r".*\.\d+\..*_projs?",
        rf"model\.layers\.({'|'.join(map(str, range(100)))})\..*(q|k|v|o|gate|up|down)_proj",
        "|".join(f"model.layers.{n}.self_attn.(q|k)_proj" for n in range(100)),
        r"(model|base)\.(layers|blocks)\.(1|2|3)\.(mlp|attn)\.(up|down|gate)_(proj|lin)",
    ],
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    began = time.process_time()
    assert patterns.find_problem(pattern) == ""
    assert time.process_time() - began < 1  # 0.01, but the garbage collector may run meanwhile


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z_.0-9]+)+!",
        "(a*)*b",
        "(?:a+){2,}b",
        "((a+)b?)+c",
        "(a|a)*b",
        "(a|ab)+c",
        "(?:(?:a+))*?b",
        "(.*)+",
        "(x(?=a*))*b",
        ".*.*.*.*x",
        ".*.*.*.*.*.*.*.*!",
        "[a-z]+[a-z]+[a-z]+[a-z]+!",
        "(a{1,9}){1,9}b",
        "(",
        "[",
        "*",
        "a" * 30_000,
        "(" * 2000 + ")" * 2000,
        "a{1,99999999999999}",
        ".?" * 26 + "#",
        "(?:.?){26}#",
        "(?:.??){26}#",
        "(?:a?)+b",
        "(?:.*.*)?(?:.*.*)?#",
        "(.*a){20}",
        "(?:[a-z_.0-9]|.|[^!])" * 24 + "!",
        "(?=" + "(?:.|[a-z]|[^!])" * 24 + "!).*",
        "(?:|.)" * 30 + "#",
        "(?:(?:.|[^!])(?:.|[^!])|..|[^!].)" * 13 + "!",
    ],
)
def test_patterns_that_backtrack_are_refused(pattern: str) -> None:
    began = time.process_time()
    assert patterns.find_problem(pattern)
    assert time.process_time() - began < 5


def test_matching_real_names_has_a_time_limit() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    began = time.process_time()
    slow = pytest.raises(UsageError, match="--lora-targets x")
    with slow, patterns.limit_time("--lora-targets x"):
        re.fullmatch("(?:a|.|[^!])" * 24 + "!", "a" * 40)
    assert time.process_time() - began < 10
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
