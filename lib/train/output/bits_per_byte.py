"""Measure the bits per byte of a validation split, in total and by source.

Bits per byte = Σ nats of the labels ÷ (ln 2 × Σ bytes of the text that they stand for). Special
tokens count neither way, so the figure compares models with different tokenizers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

KEY = "eval/bits_per_byte"
_OF_SOURCE = re.compile(r"eval/(.+)/bits_per_byte")
_MOST_SHOWN = 6  # sources that a line of the console shows


class TextLoss(NamedTuple):
    """Contains the loss of some text: nats, summed over labels, and bytes of the labels' text."""

    nats: float
    bytes: float


class SourceLosses:
    """Sums nats and bytes by source; the nats stay on the device until the end."""

    def __init__(self, sources: int, device: torch.device) -> None:
        self._nats = torch.zeros(sources, dtype=torch.float64, device=device)
        self._bytes = np.zeros(sources, np.int64)

    def add(self, token_losses: list[Tensor], sources: np.ndarray, sizes: np.ndarray) -> None:
        """Add a micro-batch.

        token_losses: losses in nats, float32, B·T values in all, in the order of the rows. sources,
        sizes: source and bytes of each label, int64 [B, T]; a label with source -1 is not counted.
        """
        losses = torch.cat(token_losses)
        source_of = torch.from_numpy(sources.ravel()).to(losses.device)
        for source in np.unique(sources[sources >= 0]).tolist():
            # index_add_ would sum in an order that varies on a GPU.
            chosen = torch.where(source_of == source, losses, 0.0)
            self._nats[source] += chosen.sum(dtype=torch.float64)
            self._bytes[source] += sizes[sources == source].sum()

    def sums(self) -> list[float]:
        """Return the nats of each source, then the bytes of each source."""
        return [*self._nats.tolist(), *self._bytes.tolist()]


def compute_figures(parts: Mapping[str, TextLoss], is_complete: bool = True) -> dict[str, float]:
    """Return bits per byte as figures of a row: the total, and each part if there are several.

    parts: loss by source or dataset. is_complete: whether the parts are the whole validation split;
    if not, there is no total.
    """
    losses = {name: part for name, part in parts.items() if part.bytes}
    if not losses:
        return {}
    total = TextLoss(*map(sum, zip(*losses.values(), strict=True)))
    figures = {KEY: _compute_bits(total)} if is_complete else {}
    if len(parts) > 1 or not is_complete:
        figures |= {
            f"eval/{name}/bits_per_byte": _compute_bits(part) for name, part in losses.items()
        }
    return figures


def describe_figures(figures: Mapping[str, float]) -> str:
    """Return bits per byte as a text for the console, "" if the figures contain none."""
    matches = {_OF_SOURCE.fullmatch(key): value for key, value in figures.items()}
    by_source = {match[1]: value for match, value in matches.items() if match}
    shown = sorted(by_source, key=lambda name: -by_source[name])[:_MOST_SHOWN]
    texts = [f"{name} {by_source[name]:.3f}" for name in shown]
    if len(by_source) > len(shown):
        texts.append(f"{len(by_source) - len(shown)} more below")
    listed = ", ".join(texts)
    if KEY in figures:
        return f"{figures[KEY]:.4f} bits per byte" + (f" ({listed})" if listed else "")
    return f"bits per byte: {listed}" if listed else ""


def _compute_bits(loss: TextLoss) -> float:
    return loss.nats / (math.log(2) * loss.bytes)
