# covers: docs/how-to/speed.md
"""The tables of memory and learning rates in docs/how-to/speed.md agree with the code."""

from __future__ import annotations

import functools
import re
from types import ModuleType

import pytest

from lib.train import checks
from tests.conftest import ROOT
from tests.scripts import load_script


def table(first_cell: str) -> list[list[str]]:
    """Return the cells of the rows of a table."""
    text = (ROOT / "docs/how-to/speed.md").read_text()
    lines = text[text.index(f"| {first_cell} |") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


TABLE = table("1 × 4,096 tokens")
ADAPTED = table("full training or LoRA, 1 × 4,096 tokens")


@functools.cache
def load_benchmark() -> ModuleType:
    """Return the script that prints the tables of memory."""
    return load_script("benchmarks/memory.py")


def test_models_are_compared_with_and_without_adapters() -> None:
    memory_script = load_benchmark()
    heads, _, *rows = ADAPTED
    assert heads[1:] == ["1 GPU", "8 GPUs", "64 GPUs"] and memory_script.LORA_TABLE[1] == [1, 8, 64]
    assert [row[0] for row in rows] == [
        name + adapted for name in memory_script.LORA_TABLE[0] for adapted in ("", ", LoRA r=16")
    ]
    for full, adapted in zip(rows[::2], rows[1::2], strict=True):
        full_row = next(row for row in TABLE if row[0] == full[0])
        assert full[1:] == [full_row[TABLE[0].index(gpus)] for gpus in heads[1:]]
        assert all(
            re.fullmatch(r"\d+ (none|selective|full)(, host \d+)?", cell) for cell in adapted[1:]
        )


def test_no_learning_rate_in_the_table_draws_a_warning() -> None:
    for size, scratch, warmup, trained_on, _ in table("model")[2:]:
        parameters = max(
            int(number) * 10 ** {"M": 6, "B": 9}[unit]
            for number, unit in re.findall(r"(\d+)([MB])", size)
        )
        assert re.match("15 %" if size == "below 50M" else r"1 %|2,000|8,000", warmup)
        for is_scratch, rates in ((True, scratch), (False, trained_on)):
            for rate in re.findall(r"[\d.]+e-\d", rates):
                assert not checks.describe_high_lr(float(rate), parameters, is_scratch), (
                    size,
                    rate,
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "rank"),
    [
        pytest.param("Llama 3.2 1B", 8, 0, marks=pytest.mark.long),
        ("Mixtral 8x7B", 16, 0),
        ("Llama 3.1 8B", 64, 16),
    ],
)
def test_a_cell_is_what_the_memory_check_computes(name: str, gpus: int, rank: int) -> None:
    rows = ADAPTED if rank else TABLE
    row, printed = (
        load_benchmark().format_row(name, [gpus], 4096, 80.0, rank).strip("| ").split(" | ")
    )
    printed = printed.split()
    documented = next(cells for cells in rows if cells[0] == row)[
        rows[0].index(f"{gpus} GPUs")
    ].split()
    assert printed[1:] == documented[1:] and float(printed[0]) == pytest.approx(
        float(documented[0]), rel=0.03
    )
