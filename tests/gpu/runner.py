"""Run items, each in a process of its own with a time limit, and write down how each ended.

An item that measures runs alone. The others run beside each other, several at a time: they are
small, and mostly wait for compilers and imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.items import Item, find_item
from tests.gpu.place import FIGURES, NotHere, Place, kill

PASSED = "passed"
FAILED = "failed"
TOO_SLOW = "too slow"
NOT_HERE = "not here"
NOT_RUN = "not run"
OUTCOMES = (PASSED, FAILED, TOO_SLOW, NOT_HERE, NOT_RUN)
_SHORTEST_S = 12.0  # an item is not begun with less time left, however short its estimate
_SLOWER = 2  # times the limit, if processes import everything again, and in a rehearsal
_ERROR_LINES = 25
_LOG_CHARACTERS = 20_000


class Session(NamedTuple):
    """Holds what all items of an invocation share.

    place: of which each item gets a copy with a directory of its own. facts: of the machine.
    deadline: by time.monotonic(). jobs: the most items beside each other.
    """

    place: Place
    facts: dict[str, Any]
    deadline: float
    jobs: int = 1


class _Running(NamedTuple):
    """Holds an item that runs. until: when it is killed. limit: seconds that it may take itself."""

    item: Item
    place: Place
    process: Any
    answer: Connection
    began: float
    until: float
    limit: float


def run_items(items: Sequence[Item], session: Session) -> Counter[str]:
    """Run items in their order and return how many ended in which way.

    Each result is on the disk before another item begins.
    """
    waiting = deque(items)
    running = list[_Running]()
    counts = Counter[str]()
    while waiting or running:
        while waiting and _may_begin(waiting[0], running, session.jobs):
            item = waiting.popleft()
            if refusal := _refusal(item, session):
                counts[refusal[0]] += 1
                _write(session, item, refusal, 0.0, _make_work(session, item))
            else:
                running.append(_begin(item, session))
        for done, result in _ended(running) if running else ():
            running.remove(done)
            counts[result[0]] += 1
            _write(session, done.item, result, time.monotonic() - done.began, done.place.work)
            shutil.rmtree(done.place.work, ignore_errors=True)
    return counts


def summary(counts: Counter[str]) -> str:
    """Return the counts of outcomes in one line; passed and failed even if they are 0."""
    return ", ".join(
        f"{counts[outcome]} {outcome}"
        for outcome in OUTCOMES
        if counts[outcome] or outcome in (PASSED, FAILED, NOT_RUN)
    )


def exit_code(counts: Counter[str]) -> int:
    """Return 1 if an item failed or was too slow, else 3 if one was not run, else 0."""
    if counts[FAILED] or counts[TOO_SLOW]:
        return 1
    return 3 if counts[NOT_RUN] else 0


def _may_begin(item: Item, running: list[_Running], jobs: int) -> bool:
    if not running:
        return True
    return not item.alone and not running[0].item.alone and len(running) < jobs


def _refusal(item: Item, session: Session) -> tuple[str, str] | None:
    """Return the outcome of an item that cannot run, and why."""
    place = session.place
    left = session.deadline - time.monotonic()
    if place.on_gpu and place.gpus < item.gpus:
        return NOT_HERE, f"it needs {item.gpus} GPUs"
    needed = max(_SHORTEST_S, item.estimate if place.on_gpu else 0)
    if left < needed:
        return NOT_RUN, f"no time: {max(0, left):.0f} s were left, and it takes about {needed:.0f}"
    return None


def _make_work(session: Session, item: Item) -> Path:
    work = session.place.work / "items" / item.name
    work.mkdir(parents=True)
    return work


def _begin(item: Item, session: Session) -> _Running:
    """Start the process of an item."""
    shared = session.place
    place = Place(
        shared.kit, _make_work(session, item), shared.out, shared.device, shared.gpus, shared.start
    )
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context(place.start).Process(
        target=_run_item, args=(item.name, place, theirs)
    )
    process.start()
    theirs.close()
    is_fast = place.start == "fork" and place.on_gpu
    began = time.monotonic()
    limit = float(item.limit * (1 if is_fast else _SLOWER))
    return _Running(item, place, process, ours, began, min(began + limit, session.deadline), limit)


def _ended(running: list[_Running]) -> list[tuple[_Running, tuple[str, str]]]:
    """Wait until an item has ended or used up its time; return each, its outcome and its error."""
    until = min(each.until for each in running)
    answered = wait([each.answer for each in running], max(0.0, until - time.monotonic()))
    ended = [each for each in running if each.answer in answered or time.monotonic() >= each.until]
    results = [(each, _result(each, each.answer in answered)) for each in ended]
    for each in ended:
        kill(each.process.pid)
        each.process.join()
        each.answer.close()
    return results


def _result(ended: _Running, has_answered: bool) -> tuple[str, str]:
    seconds = time.monotonic() - ended.began
    if not has_answered and seconds < ended.limit:
        return NOT_RUN, f"no time: the deadline came after {seconds:.0f} s of it"
    if not has_answered:
        return TOO_SLOW, f"it was killed after {seconds:.0f} s\n{_tail(ended.place.work)}"
    try:
        return ended.answer.recv()
    except EOFError:
        ended.process.join(5)
        return FAILED, f"its process ended by {ended.process.exitcode}\n{_tail(ended.place.work)}"


def _run_item(name: str, place: Place, answer: Connection) -> None:
    """Run an item in this process and send how it ended."""
    os.setsid()
    with (place.work / "log").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        find_item(name).run(place)
        answer.send((PASSED, ""))
    except NotHere as reason:
        answer.send((NOT_HERE, str(reason)))
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        answer.send((FAILED, "\n".join(text.strip().splitlines()[-_ERROR_LINES:])))
    time.sleep(3600)  # the parent process kills this one and all its children


def _tail(work: Path) -> str:
    """Return the last lines of what an item and its stages have printed."""
    logs = sorted(work.glob("*log"), key=lambda path: path.stat().st_mtime)
    return (
        "\n".join(logs[-1].read_text(errors="replace").splitlines()[-_ERROR_LINES:]) if logs else ""
    )


def _write(
    session: Session, item: Item, result: tuple[str, str], seconds: float, work: Path
) -> None:
    """Append a result to its file, which is on the disk afterwards, and print it in a line."""
    outcome, error = result
    figures = work / FIGURES
    out = session.place.out
    row = {
        "item": item.name,
        "outcome": outcome,
        "rehearsed": not session.place.on_gpu,
        "seconds": round(seconds, 1),
        "estimated_seconds": item.estimate,
        "command": f"python benchmarks/gpu.py --only {item.name}",
        "figures": json.loads(figures.read_text()) if figures.exists() else {},
        "error": error,
        "machine": session.facts,
    }
    with (out / f"{item.command}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if outcome in (FAILED, TOO_SLOW):
        with (out / f"{item.command}.log").open("a", encoding="utf-8") as file:
            for part in sorted(work.glob("*log")):
                text = part.read_text(errors="replace")[-_LOG_CHARACTERS:]
                file.write(f"=== {item.name} {part.name}\n{text}\n")
    said = (
        [row["figures"].get("in_one_line", "")]
        if outcome == PASSED
        else error.strip().splitlines()[-1:]
    )
    print(
        f"{outcome:<9} {seconds:>6.1f} s  {item.name}{': ' + said[0][:200] if any(said) else ''}",
        flush=True,
    )
