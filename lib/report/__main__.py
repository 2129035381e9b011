"""Write report.html, a page about one run, or one that compares several runs.

  python -m lib.report outputs/exp                    write outputs/exp/report.html
  python -m lib.report outputs/exp outputs/other --out both.html

The command reads metrics.jsonl, events.jsonl, samples.jsonl, state.json and config.yaml. The page
is one file that needs no network. You can write it at any time, even while the run trains, and on
any machine that has these files.
"""

from __future__ import annotations

import sys
from functools import partial

from lib.core import log, manifest, options, output_file, paths, stage
from lib.core.errors import UsageError
from lib.pages.page import is_page
from lib.pages.svg import COLUMNS, STYLES
from lib.report.content import ReportLimits, compose_page
from lib.report.run_data import find_axis, read_runs

_LARGEST = 2_000_000  # bytes of a page
# A page that is too large gets smaller limits.
_LIMITS = (
    ReportLimits(samples=16, charts=80, rows=80),
    ReportLimits(samples=4, charts=40, rows=80),
    ReportLimits(samples=0, charts=24, rows=80),
    ReportLimits(samples=0, charts=12, rows=20),
    ReportLimits(samples=0, charts=3, rows=5),
)
_MANY = 4  # with more runs than this, the curves have fewer columns


def main(argv: list[str]) -> None:
    """Write the page. Raises UsageError for a directory without a run, or too many runs."""
    parser = options.Parser(__doc__, "NAME|DIR [NAME|DIR …] [options]")
    parser.add_argument(
        "runs", nargs="+", metavar="NAME|DIR", help="names of runs, or their directories"
    )
    parser.add_argument(
        "--out",
        type=partial(output_file.parse_output_file, is_own=is_page),
        metavar="FILE",
        help="file to write (default: report.html of the first run)",
    )
    opts = parser.parse(argv)
    named = [paths.existing_experiment(text) for text in opts.runs]
    by_place = {experiment.root.resolve(): experiment for experiment in reversed(named)}
    experiments = [e for e in named if by_place[e.root.resolve()] is e]  # each run once
    if missing := [e.root for e in experiments if not (e.config.exists() or e.metrics.exists())]:
        raise UsageError(f"there is no run {missing[0]}", expected="outputs/<exp> of stage 04")
    if len(experiments) > STYLES:
        raise UsageError(
            f"{len(experiments)} runs are too many for one page", expected=f"at most {STYLES}"
        )
    axis, end = find_axis(experiments)
    columns = COLUMNS if len(experiments) <= _MANY else COLUMNS // 2
    runs = read_runs(experiments, axis, end, columns)
    pages = (compose_page(runs, axis, end, limits) for limits in _LIMITS)
    text = next(text for text in pages if len(text.encode()) <= _LARGEST)
    path = opts.out or experiments[0].report
    write = output_file.write_output if opts.out else manifest.write_text
    write(path, text)
    log.info(f"report: {path}")


if __name__ == "__main__":
    sys.argv[0] = "lib.report"
    stage.run_main(main, only_shows=True)
