"""How many graphs torch.compile may make of one function, and for what it makes none.

torch keeps a graph per combination of shapes and constants that a function was called with, for all
decoder blocks together since they share their code. Beyond its limit it runs the rest uncompiled.
"""

from __future__ import annotations

import logging

import torch
import torch._dynamo

from lib.core import log

# With gradients and without, that is a graph for each of 64 layers that all differ. torch allows 8.
_MOST = 128
# What the attention kernel is told about the longest document, in any argument of a block. Only the
# kernel reads these numbers, so a graph for each of them would be the same graph.
_LENGTHS = r".*max_length_[qk].*"
_REACHED = "hit config."  # in the warning of torch (2.11 to 2.13) about its limit


class _LimitReport(logging.Filter):
    """Puts one warning of ours in the place of torch's many about its limit of graphs."""

    is_done = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether torch itself should print a record."""
        text = record.getMessage()
        if _REACHED not in text:
            return True
        if not self.is_done:
            self.is_done = True
            limit, function, *_ = [line.strip() for line in text.splitlines()] + [""]
            log.warn(
                "compile: torch reached its limit of graphs for one function, so further "
                f"shapes run uncompiled, which is slower ({limit}, {function})"
            )
        return False


_report = _LimitReport()


def prepare() -> None:
    """Raise torch's limit of graphs, and let one graph serve documents of any length.

    Warns once in this process when a function reaches the limit.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(_MOST, config.recompile_limit)
    compiler = torch.compiler.config
    if _LENGTHS not in compiler.dynamic_sources.split(","):
        compiler.dynamic_sources = ",".join(filter(None, (compiler.dynamic_sources, _LENGTHS)))
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_report)  # once, however often
