"""Report the findings of a check: the problem, its severity and a remedy."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.core import log, manifest, output_file, units
from lib.core.errors import StageError

ERROR, WARNING, INFO = SEVERITIES = ("error", "warning", "info")
EXIT_WARNING = 5
EXIT_ERROR = 6


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    severity: `error` (training will fail or be wrong), `warning` (it will be slow, or may fail)
    or `info`. check: what was checked. remedy: advice in words, or a command that shows more. node:
    the rank of the node, if the finding is about a single node. run: the commands that fix it, one
    per line, to be typed as they stand.
    """

    severity: str
    check: str
    text: str
    remedy: str = ""
    node: int | None = None
    run: str = ""


class NotReady(StageError):
    """A check found a problem of the severity of --fail-on or worse."""

    def __init__(self, problem: str, code: int) -> None:
        super().__init__(problem)
        self.code = code


def not_checked(check: str, why: str) -> Finding:
    """Return the finding of a check that is impossible here. why: the reason."""
    return Finding(INFO, check, f"not checked: {why}")


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in order of severity; those of equal severity keep their order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def print_findings(findings: Iterable[Finding]) -> None:
    """Print findings, the most severe first, each with its remedy below."""
    for finding in sort_by_severity(findings):
        log.info(f"{finding.severity:<8} {finding.check}: {finding.text}")
        for line in finding.remedy.splitlines():
            log.info(f"{'':<8}   → {line}")
        for line in finding.run.splitlines():
            log.info(f"{'':<8}   run: {line}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that reports findings."""
    parser.add_argument(
        "--fail-on",
        choices=(ERROR, WARNING),
        default=ERROR,
        help=f"least severity that fails the command; it then exits with "
        f"{EXIT_ERROR} for an error, {EXIT_WARNING} for a warning",
    )
    output_file.add_json_option(parser, "findings", "findings")


def write_json(path: Path, findings: Iterable[Finding], **values: object) -> None:
    """Write findings, the most severe first, and more values under their names."""
    rows = [
        {key: value for key, value in asdict(finding).items() if key != "node"}
        for finding in sort_by_severity(findings)
    ]
    output_file.write_output(path, manifest.format_json({"findings": rows, **values}))


def report_findings(findings: list[Finding], opts: argparse.Namespace, subject: str) -> None:
    """Print findings, write them if --json is given, and print whether the subject is ready.

    subject: for example "this cluster". Raises NotReady as `require_ready` does.
    """
    print_findings(findings)
    if opts.json:
        write_json(opts.json, findings)
    require_ready(findings, opts.fail_on, subject)


def require_ready(findings: Iterable[Finding], fail_on: str, subject: str) -> None:
    """Print that the subject is ready. Raises NotReady for a finding as severe as `fail_on`."""
    verb = "are" if subject.startswith("these") else "is"
    counts_by_severity = Counter(finding.severity for finding in findings)
    counts = ", ".join(
        units.counted(counts_by_severity[name], name)
        for name in (ERROR, WARNING)
        if counts_by_severity[name]
    )
    if counts_by_severity[ERROR]:
        raise NotReady(f"{subject} {verb} not ready: {counts}", EXIT_ERROR)
    if counts_by_severity[WARNING] and fail_on == WARNING:
        raise NotReady(f"{subject} {verb} not ready: {counts}", EXIT_WARNING)
    log.info(f"{subject} {verb} ready" + (f", with {counts}" if counts else ""))
