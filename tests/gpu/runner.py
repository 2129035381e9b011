"""Run items, each in its own process with a time limit, and write their results.

An item that measures runs alone. Several of the others run at the same time: they are small, and
mostly wait for compilers and imports.
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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.items import Item, find_item
from tests.gpu.place import FIGURES_FILE, NotHere, Place, kill_tree

PASSED = "passed"
FAILED = "failed"
TOO_SLOW = "too slow"
NOT_HERE = "not here"
NOT_RUN = "not run"
OUTCOMES = (PASSED, FAILED, TOO_SLOW, NOT_HERE, NOT_RUN)
_MIN_TIME_LEFT_S = 12.0  # no item is started later, however short its estimate
_SLOW_FACTOR = 2  # for the limit, in a rehearsal or if each process imports everything again
_ERROR_LINES = 25
_LOG_CHARACTERS = 20_000


class Session(NamedTuple):
    """Values that all items of an invocation share.

    place: each item gets a copy of it with its own directory. facts: of `describe_machine`.
    deadline: by time.monotonic(). jobs: how many items may run at the same time.
    """

    place: Place
    facts: dict[str, Any]
    deadline: float
    jobs: int = 1


class _Running(NamedTuple):
    """A running item. until: when to kill it, monotonic. limit: the seconds it may take itself."""

    item: Item
    place: Place
    process: Any
    answer: Connection
    began: float
    until: float
    limit: float


def run_items(items: Sequence[Item], session: Session) -> Counter[str]:
    """Run items in their order and return the number of items by outcome.

    Each result is on the disk before another item starts.
    """
    waiting = deque(items)
    running = list[_Running]()
    counts = Counter[str]()
    while waiting or running:
        while waiting and _can_begin(waiting[0], running, session.jobs):
            item = waiting.popleft()
            if refusal := _find_refusal(item, session):
                counts[refusal[0]] += 1
                _write_result(session, item, refusal, 0.0, _make_work(session, item))
            else:
                running.append(_start_item(item, session))
        for ended, result in _collect_ended(running) if running else ():
            running.remove(ended)
            counts[result[0]] += 1
            _write_result(
                session, ended.item, result, time.monotonic() - ended.began, ended.place.work
            )
            shutil.rmtree(ended.place.work, ignore_errors=True)
    return counts


def format_counts(counts: Counter[str]) -> str:
    """Return the counts by outcome in one line; passed, failed and not run even if 0."""
    return ", ".join(
        f"{counts[outcome]} {outcome}"
        for outcome in OUTCOMES
        if counts[outcome] or outcome in (PASSED, FAILED, NOT_RUN)
    )


def choose_exit_code(counts: Counter[str]) -> int:
    """Return 1 if an item failed or was too slow, else 3 if one was not run, else 0."""
    if counts[FAILED] or counts[TOO_SLOW]:
        return 1
    return 3 if counts[NOT_RUN] else 0


def _can_begin(item: Item, running: list[_Running], jobs: int) -> bool:
    if not running:
        return True
    return not item.alone and not running[0].item.alone and len(running) < jobs


def _find_refusal(item: Item, session: Session) -> tuple[str, str] | None:
    """Return the outcome of an item that cannot run, with the reason; None if it can."""
    place = session.place
    seconds_left = session.deadline - time.monotonic()
    if place.on_gpu and place.gpus < item.gpus:
        return NOT_HERE, f"it needs {item.gpus} GPUs"
    seconds_needed = max(_MIN_TIME_LEFT_S, item.estimate if place.on_gpu else 0)
    if seconds_left < seconds_needed:
        time_left = f"{max(0, seconds_left):.0f} s were left"
        return NOT_RUN, f"no time: {time_left}, and the item takes about {seconds_needed:.0f} s"
    return None


def _make_work(session: Session, item: Item) -> Path:
    work = session.place.work / "items" / item.name
    work.mkdir(parents=True)
    return work


def _start_item(item: Item, session: Session) -> _Running:
    """Start the process of an item."""
    shared = session.place
    place = replace(shared, work=_make_work(session, item), figures={})
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context(place.start).Process(
        target=_run_item, args=(item.name, place, theirs)
    )
    process.start()
    theirs.close()
    is_fast = place.start == "fork" and place.on_gpu
    began = time.monotonic()
    limit = float(item.limit * (1 if is_fast else _SLOW_FACTOR))
    return _Running(item, place, process, ours, began, min(began + limit, session.deadline), limit)


def _collect_ended(running: list[_Running]) -> list[tuple[_Running, tuple[str, str]]]:
    """Wait until an item ends or uses up its time; return (item, (outcome, error)) of each."""
    until = min(item_process.until for item_process in running)
    answered = wait(
        [item_process.answer for item_process in running], max(0.0, until - time.monotonic())
    )
    ended = [
        item_process
        for item_process in running
        if item_process.answer in answered or time.monotonic() >= item_process.until
    ]
    results = [
        (item_process, _read_result(item_process, item_process.answer in answered))
        for item_process in ended
    ]
    for item_process in ended:
        kill_tree(item_process.process.pid)
        item_process.process.join()
        item_process.answer.close()
    return results


def _read_result(ended: _Running, has_answered: bool) -> tuple[str, str]:
    seconds = time.monotonic() - ended.began
    if not has_answered and seconds < ended.limit:
        return NOT_RUN, f"no time: the deadline came after {seconds:.0f} s of it"
    if not has_answered:
        return TOO_SLOW, f"it was killed after {seconds:.0f} s\n{_read_log_tail(ended.place.work)}"
    try:
        return ended.answer.recv()
    except EOFError:
        ended.process.join(5)
        code = ended.process.exitcode
        return (
            FAILED,
            f"its process ended with {code}\n{_read_log_tail(ended.place.work)}",
        )


def _run_item(name: str, place: Place, answer: Connection) -> None:
    """Run an item in this process and send its outcome and error."""
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


def _read_log_tail(work: Path) -> str:
    """Return the last lines that an item or one of its stages has printed."""
    logs = sorted(work.glob("*log"), key=lambda path: path.stat().st_mtime)
    return (
        "\n".join(logs[-1].read_text(errors="replace").splitlines()[-_ERROR_LINES:]) if logs else ""
    )


def _write_result(
    session: Session, item: Item, result: tuple[str, str], seconds: float, work: Path
) -> None:
    """Append a result to its file and sync it to the disk; print it in one line."""
    outcome, error = result
    figures = work / FIGURES_FILE
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
    if outcome == PASSED:
        session.place.earlier[item.name] = row["figures"]
    with (out / f"{item.command}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if outcome in (FAILED, TOO_SLOW):
        with (out / f"{item.command}.log").open("a", encoding="utf-8") as file:
            for log in sorted(work.glob("*log")):
                text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
                file.write(f"=== {item.name} {log.name}\n{text}\n")
    lines = (
        [row["figures"].get("in_one_line", "")]
        if outcome == PASSED
        else error.strip().splitlines()[-1:]
    )
    print(
        f"{outcome:<9} {seconds:>6.1f} s  {item.name}{': ' + lines[0][:200] if any(lines) else ''}",
        flush=True,
    )
