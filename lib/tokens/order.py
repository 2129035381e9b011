"""Order the samples of a run: one endless stream, independent of the number of ranks.

Position g of the stream is sample `permutation(seed, g // n)(g % n)` of the n samples. The
permutation is a keyed 4-round Feistel network with cycle walking: a bijection of [0, n) with O(1)
state. So the position in the data is one integer, and a resume neither skips nor repeats samples.
(Luby and Rackoff 1988, "How to construct pseudorandom permutations"; Black and Rogaway 2002,
"Ciphers with arbitrary finite domains", for cycle walking.)

`interleave_corpora` mixes several corpora in exact proportions. It also needs only O(1) state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_ROUNDS = 4
LARGEST_SUM = 3_000_000_000  # its square fits into 64 bits


@dataclass(frozen=True)
class Division:
    """Divides a global batch of micro_batch × accumulation × dp_size samples.

    dp_rank, dp_size: the index of this data-parallel rank, and the number of such ranks.
    """

    micro_batch: int
    accumulation: int
    dp_rank: int
    dp_size: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.dp_size


def sample_numbers(first: int, count: int, n: int, seed: int) -> np.ndarray:
    """Return the indices of the samples at positions [first, first + count) of the stream.

    n: samples in one epoch. Returns int64 [count], each in [0, n). Each epoch has its own order.
    """
    return samples_at(np.arange(first, first + count, dtype=np.int64), n, seed)


def samples_at(positions: np.ndarray, n: int, seed: int, corpus: int = 0) -> np.ndarray:
    """Return the indices of the samples at some positions (int64 [N]) of a corpus's stream."""
    epochs, offsets = np.divmod(positions, n)
    samples = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        samples[is_in_epoch] = permute_positions(offsets[is_in_epoch], n, seed, int(epoch), corpus)
    return samples


def interleave_corpora(
    positions: np.ndarray, weights: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus at each position of a mixed stream, and the position in that corpus.

    positions: int64 [N]. weights: the shares, integers whose sum is at most LARGEST_SUM. The first
    corpus, with weight p of the sum q, gets ⌊g·p/q⌋ of the first g positions. The others share the
    rest in the same way. So in every prefix of the stream, the number of samples from a
    corpus differs from its share by less than the number of corpora.
    """
    corpus = np.full(len(positions), len(weights) - 1, np.int64)
    own_positions = positions.copy()
    unassigned = np.arange(len(positions))  # indices into `positions`
    for i, weight in enumerate(weights[:-1]):
        total = sum(weights[i:])
        before = _scale_numbers(own_positions[unassigned], weight, total)
        taken = _scale_numbers(own_positions[unassigned] + 1, weight, total) > before
        corpus[unassigned[taken]] = i
        own_positions[unassigned[taken]] = before[taken]
        unassigned = unassigned[~taken]
        before = before[~taken]
        own_positions[unassigned] -= before
    return corpus, own_positions


def _scale_numbers(numbers: np.ndarray, weight: int, total: int) -> np.ndarray:
    """Return ⌊number · weight / total⌋, computed within 64 bits."""
    quotients, remainders = np.divmod(numbers, total)
    return quotients * weight + remainders * weight // total


def permute_positions(
    positions: np.ndarray, n: int, seed: int, epoch: int, corpus: int = 0
) -> np.ndarray:
    """Map positions (int64 [N], in [0, n)) through the epoch's permutation of [0, n)."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, corpus)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = values >= n
    while outside.any():  # the network permutes [0, 4^half_bits), at most 4 times as large as n
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= n
    return values.astype(np.int64)


@lru_cache
def _round_keys(seed: int, epoch: int, corpus: int) -> np.ndarray:
    # The first corpus of a mixture has the same order as without the others.
    words = [seed, epoch, corpus] if corpus else [seed, epoch]
    return np.random.SeedSequence(words).generate_state(_ROUNDS, np.uint64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left: np.ndarray = values >> shift
    right: np.ndarray = values & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right ^ key) & mask)
    return (left << shift) | right


def hash_numbers(numbers: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """Return a pseudorandom 64-bit word for each number (int64 [N]), uint64 [N].

    stream: words of different streams are independent.
    """
    key, other = np.random.SeedSequence([seed, stream]).generate_state(2, np.uint64)
    words: np.ndarray = _mix_bits(_mix_bits(numbers.astype(np.uint64) ^ key) + other)
    return words


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
