"""Find out which ranks hung in a collective, and for which ranks they waited."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from lib.core import records, units

_ONE_HANG_S = 600.0  # files written further apart belong to different hangs

Collective = tuple[str, int, str]  # group, number within it, name


def describe_hang(files: list[Path]) -> str:
    """Return a text about the collective in which most ranks hung, "" if none did.

    files: logs/rank_*.collectives.json, as lib/parallel/flight_recorder.py writes them.
    """
    dumps = [dump for path in files if (dump := _read_dump(path))]
    newest = max((dump["time"] for dump in dumps), default=0.0)
    dumps = [dump for dump in dumps if newest - dump["time"] < _ONE_HANG_S]
    hung: dict[Collective, set[int]] = defaultdict(set)
    reached: dict[tuple[str, int], int] = {}  # (group, rank) → its last collective
    members: dict[str, set[int]] = {}
    for dump in dumps:
        rank = dump["rank"]
        pending = [e for e in dump["entries"] if e["pending"]]
        members |= {name: set(ranks) for name, ranks in dump["groups"].items()}
        for entry in dump["entries"]:
            member = entry["process_group"][0], rank
            reached[member] = max(reached.get(member, 0), entry["collective_seq_id"])
        if pending:
            first = min(pending, key=lambda e: e["time_created_ns"])
            group = first["process_group"][0]
            number = first["collective_seq_id"]
            hung[group, number, first["profiling_name"]].add(rank)
    if not hung:
        return ""
    (group, number, name), ranks = max(hung.items(), key=lambda item: len(item[1]))
    late = {r for r in members.get(group, ranks) if reached.get((group, r), 0) < number}
    label = statistics.mode(
        entry["process_group"][1]
        for dump in dumps
        for entry in dump["entries"]
        if entry["process_group"][0] == group
    )
    location = f"in {name}, number {number:,} of group {label}"
    if not late:
        return (
            f"{_format_ranks(ranks)} hung {location}, which all ranks have reached: check the "
            "network"
        )
    return f"{_format_ranks(ranks)} hung {location}, and waited for {_format_ranks(late)}"


def _read_dump(path: Path) -> dict[str, Any] | None:
    """Return the file of a rank, None if it is torn or has another format."""
    try:
        dump = records.read_json(path)
        assert isinstance(dump["rank"], int) and isinstance(dump["time"], float)
        assert all(isinstance(rank, int) for ranks in dump["groups"].values() for rank in ranks)
        for entry in dump["entries"]:
            assert isinstance(entry["collective_seq_id"], int)
            assert isinstance(entry["time_created_ns"], int)
            assert isinstance(entry["profiling_name"], str) and len(entry["process_group"]) == 2
            assert all(isinstance(word, str) for word in entry["process_group"])
            entry["pending"] = bool(entry["pending"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None
    return dump


def _format_ranks(ranks: set[int]) -> str:
    return f"{units.plural(len(ranks), 'rank')} {units.first_of(ranks)}"
