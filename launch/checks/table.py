"""Print the tables of check.py network: a row for each node, and the bandwidth of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from launch.checks.findings import INFO, Finding
from lib.core import log, units

_MATRIX_NODES = 16
_SLOWEST_PAIRS = 10


def print_tables(
    facts: dict[int, dict[str, Any]],
    speed: dict[str, Any],
    hosts: dict[int, str],
    findings: list[Finding],
) -> None:
    """Print both tables, and mark nodes with an error or a warning."""
    heads = [
        "node",
        "host",
        "ranks",
        "TFLOP/s",
        "all-reduce GB/s",
        "all-gather GB/s",
        "latency µs",
        "disk write",
        "disk read",
        "/dev/shm",
        "clock",
    ]
    rows = [
        [str(node), hosts[node], *_format_cells(node, node_facts, speed)]
        for node, node_facts in sorted(facts.items())
    ]
    marks = ["", *(_format_mark(node, findings) for node in sorted(facts))]
    _print_rows([heads, *rows], marks)
    world = speed["world"]
    if "error" not in world and len(facts) > 1:
        log.info(
            f"all ranks together: all-reduce {world['all_reduce']:.3g} GB/s, all-gather "
            f"{world['all_gather']:.3g} GB/s, latency {world['latency_us']:.0f} µs"
        )
    if speed["pairs"]:
        _print_pairs(sorted(facts), speed["pairs"])


def _format_cells(node: int, node_facts: dict[str, Any], speed: dict[str, Any]) -> list[str]:
    """Return the cells of a node.

    Its network speed is that of its best pair or, if no pair was measured, of all ranks.
    """
    pairs = [
        pair
        for key, pair in speed["pairs"].items()
        if str(node) in key.split("-") and "error" not in pair
    ]
    if not speed["pairs"] and "error" not in speed["world"]:
        pairs = [speed["world"]]

    def format_best(choose: Callable[..., float], kind: str) -> str:
        return f"{choose(pair[kind] for pair in pairs):.3g}" if pairs else "-"

    disk = node_facts["disk"]
    return [
        str(node_facts["ranks"]),
        f"{min(node_facts['compute'].values()):.3g}" if node_facts["compute"] else "-",
        format_best(max, "all_reduce"),
        format_best(max, "all_gather"),
        format_best(min, "latency_us"),
        *(f"{units.size(disk[key])}/s" if key in disk else "-" for key in ("write", "read")),
        units.size(node_facts["shm"]["total"]) if "total" in node_facts["shm"] else "-",
        f"{1000 * node_facts['clock']['offset_s']:+.1f} ms",
    ]


def _format_mark(node: int, findings: list[Finding]) -> str:
    """Return the checks with an error or a warning about this node alone."""
    checks = [
        finding.check for finding in findings if finding.node == node and finding.severity != INFO
    ]
    return f"← {', '.join(dict.fromkeys(checks))}" if checks else ""


def _print_pairs(nodes: list[int], pairs: dict[str, dict[str, Any]]) -> None:
    """Print the matrix of pairs, or the slowest pairs if there are many nodes."""
    if len(nodes) > _MATRIX_NODES:
        log.info(
            f"\nthe {_SLOWEST_PAIRS} slowest pairs of {len(pairs)} (GB/s: all-reduce, all-gather)"
        )
        slowest = sorted(pairs.items(), key=lambda item: item[1].get("all_reduce", 0))[
            :_SLOWEST_PAIRS
        ]
        _print_rows(
            [
                [key, _format_cell(pair, "all_reduce"), _format_cell(pair, "all_gather")]
                for key, pair in slowest
            ]
        )
        return
    log.info("\nGB/s between nodes: all-reduce above the diagonal, all-gather below")
    rows = [["", *map(str, nodes)]]
    for row_node in nodes:
        rows.append(
            [
                str(row_node),
                *(
                    "·"
                    if row_node == column_node
                    else _format_cell(
                        pairs.get(f"{min(row_node, column_node)}-{max(row_node, column_node)}"),
                        "all_reduce" if row_node < column_node else "all_gather",
                    )
                    for column_node in nodes
                ),
            ]
        )
    _print_rows(rows)


def _format_cell(pair: dict[str, Any] | None, kind: str) -> str:
    if pair is None:
        return "-"
    return f"{pair[kind]:.3g}" if kind in pair else "failed"


def _print_rows(rows: list[list[str]], marks: Sequence[str] = ()) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, mark in zip_longest(rows, marks, fillvalue=""):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        log.info("  ".join([*cells, mark]).rstrip())
