"""From a command line, or what stands behind a launcher's `--`, to the options of stage 04."""

from __future__ import annotations

from collections.abc import Sequence

from lib.core import declared, options, paths
from lib.train.config import Config


def add_options(parser: options.Parser) -> None:
    """Add all options of stage 04."""
    declared.add_options(parser, Config)
    speed = next(group for group in parser._action_groups if str(group.title).startswith("speed"))
    speed.add_argument(
        "--use-flash-attn",
        dest="attention",
        action="store_const",
        const="flash",
        help="short for --attention flash",
    )
    parser.add_common(workers="tokenise")


def read_options(parser: options.Parser, argv: Sequence[str]) -> Config:
    """Return what was typed or stands in --config; UsageError tells what is wrong."""
    opts = parser.parse(argv)
    paths.expand_save_dir(opts)
    return declared.read_options(Config, opts)
