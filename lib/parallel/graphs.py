"""Limit the graphs that torch.compile makes: one for documents of any length, not one for each.

torch keeps a graph for each combination of shapes and constants that a function was called with.
All decoder blocks share their code, and so the limit. Beyond it, torch runs calls uncompiled.
"""

from __future__ import annotations

import logging

import torch
import torch._dynamo

from lib.core import log

# Enough for 64 layers that all differ, with and without gradients. The default of torch is 8.
_GRAPH_LIMIT = 128
# The arguments of a block that contain the length of the longest document. Only the attention
# kernel reads these numbers, so the graphs for all of them would be the same.
_LENGTHS = r".*max_length_[qk].*"
_REACHED = "hit config."  # in the warning of torch (2.11 to 2.13) about its limit


class _LimitReport(logging.Filter):
    """Replaces torch's many warnings about its limit of graphs by one."""

    is_done = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether torch itself prints a record."""
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


def prepare_graphs() -> None:
    """Raise torch's limit of graphs, and let one graph serve documents of any length.

    When a function reaches the limit, one warning is logged in this process.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(_GRAPH_LIMIT, config.recompile_limit)
    compiler = torch.compiler.config
    if _LENGTHS not in compiler.dynamic_sources.split(","):
        compiler.dynamic_sources = ",".join(filter(None, (compiler.dynamic_sources, _LENGTHS)))
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_report)  # later calls add nothing
