"""Deals files into splits of equal number and, within that, of even size."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_SWAP_WORK = 3_000_000  # files looked at while exchanging: seconds, whatever the corpus


def deal(sizes: Sequence[int], splits: int) -> list[int]:
    """Return the split of each file: counts differ by at most one, byte sums are even.

    sizes: bytes per file. First the largest files go to the lightest splits that still have room
    in number (longest processing time first), then files are exchanged between splits while that
    lowers the heavier of the two. The same sizes always give the same answer.
    """
    bins = _largest_first(sizes, splits)
    _exchange(bins, sizes)
    split_of = [0] * len(sizes)
    for number, members in enumerate(bins):
        for file in members:
            split_of[file] = number
    return split_of


def _largest_first(sizes: Sequence[int], splits: int) -> list[list[int]]:
    base = len(sizes) // splits
    bins: list[list[int]] = [[] for _ in range(splits)]
    heap = [(0, number) for number in range(splits)]
    full: list[tuple[int, int]] = []  # of these the lightest take one file more, if any is left
    for file in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if not heap:  # every split has `base` files: the lightest take one more
            heap, full = full, []
            heapq.heapify(heap)
        load, number = heapq.heappop(heap)
        bins[number].append(file)
        load += sizes[file]
        if len(bins[number]) < base:
            heapq.heappush(heap, (load, number))
        elif len(bins[number]) == base:
            full.append((load, number))
    return bins


def _exchange(bins: list[list[int]], sizes: Sequence[int]) -> None:
    """Exchange files between the heaviest and lighter splits until it helps no more."""
    loads = [sum(sizes[file] for file in members) for members in bins]
    for members in bins:
        members.sort(key=lambda file: sizes[file])
    open_bins = list(range(len(bins)))
    work = 0
    while len(open_bins) > 1 and work < _SWAP_WORK:
        open_bins.sort(key=lambda number: (loads[number], number))
        heavy = open_bins[-1]
        for light in open_bins[:-1]:
            work += len(bins[heavy]) + len(bins[light])
            if gain := _swap(bins[heavy], bins[light], sizes, loads[heavy] - loads[light]):
                loads[heavy] -= gain
                loads[light] += gain
                break
            if work >= _SWAP_WORK:
                break
        else:
            open_bins.pop()  # as light as it gets: even out the others


def _swap(heavy: list[int], light: list[int], sizes: Sequence[int], gap: int) -> int:
    """Exchange one file each so that the gap between two splits shrinks most.

    heavy, light: files sorted by size. A split that has one file more may also just give one.
    Returns the bytes that moved, 0 when nothing helps.
    """
    best, pair = gap, None  # what remains of the gap
    least = gap % 2  # bytes are whole, and moving some changes the gap by twice as many
    if best == least:
        return 0
    light_sizes = [sizes[file] for file in light]
    if len(heavy) > len(light):
        light_sizes.insert(0, 0)  # giving without taking is taking a file of no size
    for position, file in enumerate(heavy):
        wanted = sizes[file] - gap / 2
        near = bisect_left(light_sizes, wanted)
        for other in (near - 1, near):
            if 0 <= other < len(light_sizes):
                left = abs(gap - 2 * (sizes[file] - light_sizes[other]))
                if left < best:
                    best, pair = left, (position, other)
        if best == least:
            break
    if pair is None:
        return 0
    mine = heavy.pop(pair[0])
    moved = sizes[mine] - light_sizes[pair[1]]
    index = pair[1] - (len(light_sizes) - len(light))
    if index >= 0:
        theirs = light.pop(index)
        heavy.insert(bisect_left(heavy, sizes[theirs], key=lambda f: sizes[f]), theirs)
    light.insert(bisect_left(light, sizes[mine], key=lambda f: sizes[f]), mine)
    return moved
