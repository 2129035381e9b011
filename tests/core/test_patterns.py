# covers: lib/core/patterns.py
"""Regular expressions that backtrack for long are refused, usual ones are accepted."""

from __future__ import annotations

import time

import pytest

from lib.core import patterns


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
    ],
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    assert patterns.find_problem(pattern) == ""


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
    ],
)
def test_patterns_that_backtrack_are_refused(pattern: str) -> None:
    began = time.process_time()
    assert patterns.find_problem(pattern)
    assert time.process_time() - began < 5
