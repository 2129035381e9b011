"""Report the findings of a check: the problem, its severity and a remedy."""

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
    """One result of a check.

    severity: `error` (training will fail or be wrong), `warning` (it will be slow, or may fail)
    or `info`. check: what was checked. remedy: advice, as a command if there is one. node: the
    number of the node, if the finding is about a single node.
    """

    severity: str
    check: str
    text: str
    remedy: str = ""
    node: int | None = None


class NotReady(StageError):
    """A check found a problem that is too severe for --fail-on."""

    def __init__(self, problem: str, code: int) -> None:
        super().__init__(problem)
        self.code = code


def not_checked(check: str, why: str) -> Finding:
    """Return the finding of a check that is impossible here. why: the reason."""
    return Finding(INFO, check, f"not checked: {why}")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in order of severity; those of equal severity keep their order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def print_findings(findings: Iterable[Finding]) -> None:
    """Print findings, the most severe first, each with its remedy below."""
    for found in worst_first(findings):
        log.info(f"{found.severity:<8} {found.check}: {found.text}")
        for line in found.remedy.splitlines():
            log.info(f"{'':<8}   → {line}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that reports findings."""
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
        help="also write all findings to a file (default: none)",
    )


def output_file(text: str) -> Path:
    """Parse the path of a file that rank 0 will write.

    Raises ArgumentTypeError if it is a directory or cannot be written.
    """
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
    """Write findings, the most severe first, and more values under their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {key: value for key, value in asdict(finding).items() if key != "node"}
        for finding in worst_first(findings)
    ]
    manifest.write_json(path, {"findings": rows, **more})


def report(findings: list[Finding], opts: argparse.Namespace, what: str) -> None:
    """Print findings, write them if --json is given, and conclude. what: the subject of the check.

    Raises NotReady as `conclude` does.
    """
    print_findings(findings)
    if opts.json:
        write_json(opts.json, findings)
    conclude(findings, opts.fail_on, what)


def conclude(findings: Iterable[Finding], fail_on: str, what: str) -> None:
    """Print that `what` is ready. Raises NotReady for a finding of severity `fail_on` or worse."""
    counted = Counter(finding.severity for finding in findings)
    counts = ", ".join(
        units.counted(counted[name], name) for name in (ERROR, WARNING) if counted[name]
    )
    if counted[ERROR]:
        raise NotReady(f"{what} is not ready: {counts}", EXIT_ERROR)
    if counted[WARNING] and fail_on == WARNING:
        raise NotReady(f"{what} is not ready: {counts}", EXIT_WARNING)
    log.info(f"{what} is ready" + (f", with {counts}" if counts else ""))
