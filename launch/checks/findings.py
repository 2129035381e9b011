"""Tells what a check of a machine or a cluster found: what, how bad, what to do about it."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.core import log, manifest, units
from lib.core.errors import StageError

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")
EXIT_WARNING = 5
EXIT_ERROR = 6


@dataclass(frozen=True)
class Finding:
    """Holds one thing that a check has to say.

    severity: `error` (training will fail or be wrong), `warning` (it will be slow, or may fail)
    or `info`. check: what was looked at. remedy: what to do, as a command where there is one.
    node: the only one that it is about, if there is one.
    """

    severity: str
    check: str
    text: str
    remedy: str = ""
    node: int | None = None


class NotReady(StageError):
    """Says that a check found something as severe as the caller does not tolerate."""

    def __init__(self, problem: str, code: int) -> None:
        super().__init__(problem)
        self.code = code


def not_checked(check: str, why: str) -> Finding:
    """Return the finding of a check that could not be made here."""
    return Finding(INFO, check, f"not checked: {why}")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in order of severity; equal ones keep theirs."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def show(findings: Iterable[Finding]) -> None:
    """Print findings, the worst first, each with its remedy below."""
    for found in worst_first(findings):
        log.info(f"{found.severity:<8} {found.check}: {found.text}")
        for line in found.remedy.splitlines():
            log.info(f"{'':<8}   → {line}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that ends in findings."""
    parser.add_argument(
        "--fail-on",
        choices=(ERROR, WARNING),
        default=ERROR,
        help=f"least severity that fails the command; it then exits with "
        f"{EXIT_ERROR} for an error, {EXIT_WARNING} for a warning",
    )
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="also write everything that was found to a file (default: none)",
    )


def output_file(text: str) -> Path:
    """Parse the path of a file that rank 0 will write, as far as can be seen before the work."""
    path = Path(text)
    if log.rank() > 0:
        return path
    there = next(found for found in (path, *path.absolute().parents) if found.exists())
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, not a file to write")
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {there} is a file")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {there} is read-only")
    return path


def write_json(path: Path, findings: Iterable[Finding], **more: object) -> None:
    """Write findings, the worst first, and whatever else was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {key: value for key, value in asdict(finding).items() if key != "node"}
        for finding in worst_first(findings)
    ]
    manifest.write_json(path, {"findings": rows, **more})


def report(findings: list[Finding], opts: argparse.Namespace, what: str) -> None:
    """Show and write what was found, and conclude, as the options of `add_options` say."""
    show(findings)
    if opts.json:
        write_json(opts.json, findings)
    conclude(findings, opts.fail_on, what)


def conclude(findings: Iterable[Finding], fail_on: str, what: str) -> None:
    """Say whether `what` is ready; NotReady when something is at least as severe as `fail_on`."""
    counted = Counter(finding.severity for finding in findings)
    counts = ", ".join(
        units.counted(counted[name], name) for name in (ERROR, WARNING) if counted[name]
    )
    if counted[ERROR]:
        raise NotReady(f"{what} is not ready: {counts}", EXIT_ERROR)
    if counted[WARNING] and fail_on == WARNING:
        raise NotReady(f"{what} is not ready: {counts}", EXIT_WARNING)
    log.info(f"{what} is ready" + (f", with {counts}" if counts else ""))
