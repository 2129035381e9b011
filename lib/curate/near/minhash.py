"""Compute MinHash band keys, which near-duplicate texts share.

A signature is a list of minima of a text's shingles, each under another order of the shingles. Two
texts with Jaccard similarity s share a minimum with probability s. A band is a group of consecutive
minima, hashed to one key, and two texts are candidates if they share a key: with b bands of r
minima, that happens with probability 1 − (1 − sʳ)ᵇ.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from lib.curate import words
from lib.curate.shingles import Shingles

if TYPE_CHECKING:
    import numpy as np

VERSION = 1  # version of the keys; keys of different versions cannot be compared
NO_KEY = 0  # the key of a text that is not compared
CURVE = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)


class Bands(NamedTuple):
    """Describes the signatures: `number` bands of `size` minima each."""

    number: int
    size: int

    def find_probability(self, similarity: float) -> float:
        """Return the probability that two texts of a Jaccard similarity are candidates."""
        return 1 - (1 - similarity**self.size) ** self.number


def compute_keys(texts: Shingles, bands: Bands) -> np.ndarray:
    """Return the band keys of texts, uint64 [texts, bands]; NO_KEY for a text without words."""
    import numpy as np

    keys = np.full((len(texts.ends), bands.number), NO_KEY, np.uint64)
    counts = np.diff(texts.ends, prepend=0)
    has_words = counts > 0
    if not has_words.any():
        return keys
    starts = (texts.ends - counts)[has_words]
    hashes = (texts.hashes >> np.uint64(32)).astype(np.uint32)
    product = np.empty_like(hashes)
    minima = np.empty((bands.number * bands.size, len(starts)), np.uint32)
    # NOTE: multiplying by an odd number modulo 2³² permutes the hashes.
    orders, factors = _draw_numbers(bands)
    for order, minimum in zip(orders, minima, strict=True):
        np.multiply(hashes, order, out=product)
        np.minimum.reduceat(product, starts, out=minimum)
    by_band = minima.reshape(bands.number, bands.size, -1)
    sums = (by_band.astype(np.uint64) * factors[:, :, None]).sum(axis=1, dtype=np.uint64)
    keys[has_words] = np.maximum(words.mix_bits(sums), np.uint64(NO_KEY + 1)).T
    return keys


@cache
def _draw_numbers(bands: Bands) -> tuple[np.ndarray, np.ndarray]:
    """Return the multipliers that order the shingles, and those that combine minima to a key."""
    import numpy as np

    count = bands.number * bands.size
    orders = (words.draw_odd_numbers(count, 3) >> np.uint64(31)).astype(np.uint32)
    factors = words.draw_odd_numbers(count, 4).reshape(bands)
    return orders | np.uint32(1), factors
