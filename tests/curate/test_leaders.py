# covers: lib/curate/near/leaders.py
"""A document is dropped only against a kept one; the caps bound comparisons and are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lib.curate.disk_array import DiskArray
from lib.curate.near.leaders import Limits, SetStore, Walk


def walk_matches(
    directory: Path, sets: Sequence[Sequence[int]], bands: Sequence[Sequence[int]], limits: Limits
) -> tuple[dict[int, tuple[int, float]], Walk]:
    """Return the leader of each dropped document.

    sets: the set of each document. bands: for each band, the key of each document; each key of a
    band becomes a group.
    """
    np.concatenate([np.array(elements, np.uint64) for elements in sets]).tofile(directory / "sets")
    np.arange(len(sets)).tofile(directory / "documents")
    np.cumsum([len(elements) for elements in sets]).tofile(directory / "ends")
    members = []
    for number, keys in enumerate(bands):
        starts = {key: keys.index(key) for key in keys}
        order = sorted(starts, key=starts.get)
        offsets = dict(zip(order, np.cumsum([0, *map(keys.count, order)]), strict=False))
        pairs = np.array([(document, offsets[key]) for document, key in enumerate(keys)], np.uint64)
        pairs.tofile(directory / f"members.{number}")
        members.append(DiskArray(directory / f"members.{number}", np.uint64, width=2))
    size = len(sets) * len(bands)
    with (directory / "sets").open("rb") as file:
        store = SetStore(
            file,
            DiskArray(directory / "documents", np.int64),
            DiskArray(directory / "ends", np.int64),
        )
        one = Walk(
            members,
            DiskArray(directory / "remembered", np.int64, (size,)),
            DiskArray(directory / "counts", np.int32, (size,)),
            store,
            limits,
        )
        leaders = {}
        for document, groups in one.list_steps(0, len(sets)):
            if leader := one.find_leader(document, groups):
                leaders[document] = leader
            one.release()
    return leaders, one


def test_a_chain_ends_after_one_step(tmp_path):
    """Each set has Jaccard similarity 9/11 to the next, and 8/12 to the one after it."""
    sets = [range(i, i + 10) for i in range(10)]
    leaders, _ = walk_matches(tmp_path, sets, [[7] * 10], Limits(0.8, 32, 1000))
    assert leaders == {i: (i - 1, 9 / 11) for i in (1, 3, 5, 7, 9)}


def test_the_similarity_must_reach_the_threshold_exactly(tmp_path):
    sets = [range(5), range(4), [*range(3), 9]]  # 4/5, then 3/6 and 3/5
    leaders, _ = walk_matches(tmp_path, sets, [[1, 1, 1]], Limits(0.8, 32, 1000))
    assert leaders == {1: (0, 0.8)}
    leaders, _ = walk_matches(tmp_path, sets, [[1, 1, 1]], Limits(0.81, 32, 1000))
    assert not leaders


def test_leaders_that_share_more_keys_come_first_and_then_earlier_ones(tmp_path):
    sets = [range(10), range(10), range(11)]
    limits = Limits(0.9, 32, 1000, first_new=2)
    assert walk_matches(tmp_path, sets, [[1, 1, 1], [1, 2, 2]], limits)[0] == {2: (1, 10 / 11)}
    assert walk_matches(tmp_path, sets, [[1, 1, 1], [1, 1, 1]], limits)[0] == {2: (0, 10 / 11)}


def test_documents_of_other_corpora_are_leaders_without_a_comparison(tmp_path):
    sets = [range(10)] * 4
    leaders, one = walk_matches(tmp_path, sets, [[1] * 4], Limits(0.8, 32, 1000, first_new=2))
    assert leaders == {2: (0, 1.0), 3: (0, 1.0)} and one.counts.compared == 2


def test_the_caps_are_counted(tmp_path):
    sets = [[i, 100 + i, 200 + i] for i in range(20)] + [[17, 117, 217], [3, 103, 203]]
    leaders, one = walk_matches(tmp_path, sets, [[1] * 22], Limits(0.8, 5, 10))
    # The leader 17 is not remembered, because the key has ten already.
    assert leaders == {21: (3, 1.0)}
    assert one.counts.documents == 22
    assert one.counts.members_reached == 11  # 10 to 19, and 20
    assert one.counts.candidates_reached == 16  # from the seventh document on
