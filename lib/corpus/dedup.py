"""Find duplicate documents by 128-bit digests of their text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

DIGEST_BYTES = 16
_FULL = 0.8
_GROWTH = 1.25
_FIRST_SLOTS = 1 << 16


class DigestSet:
    """Store digests in a numpy hash table with open addressing: 20 to 25 bytes per digest.

    The digests are cryptographic, so their first half serves as the hash.
    file: the digests so far, from which a resumed run fills its table.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        self.count = 0
        self._table = np.zeros((_FIRST_SLOTS, 2), np.uint64)
        self.file = path.open("ab+")
        self.file.seek(0)
        while digests := self.file.read(DIGEST_BYTES << 20):
            self._add(np.frombuffer(digests, np.uint64).reshape(-1, 2))

    def add(self, *sidecars: np.ndarray) -> np.ndarray:
        """Add digests and return which are new (bool [n]); of equal digests, only the first is new.

        sidecars: the digests, uint8 [n, 16].
        """
        import numpy as np

        (digests,) = sidecars
        keys = digests.view(np.uint64)
        new = self._add(keys)
        self.file.write(keys[new].tobytes())
        return new

    def _add(self, keys: np.ndarray) -> np.ndarray:
        import numpy as np

        keys = keys.copy()
        keys[~keys.any(axis=1), 1] = 1  # a slot of zeros is free
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys keep their order
        first = np.ones(len(keys), bool)
        first[order[1:]] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        candidates = np.flatnonzero(first)
        self._make_room(len(candidates))
        first[candidates] = self._insert(keys[candidates])
        self.count += int(first.sum())
        return first

    def _insert(self, keys: np.ndarray) -> np.ndarray:
        """Insert distinct keys into the table and return which were not in it (bool [n])."""
        import numpy as np

        new = np.zeros(len(keys), bool)
        slots = (keys[:, 0] % np.uint64(len(self._table))).astype(np.int64)
        pending = np.arange(len(keys))
        while len(pending):
            positions = slots[pending]
            candidates = keys[pending]
            free = ~self._table[positions].any(axis=1)
            # If keys share a slot, the last one gets it.
            self._table[positions[free]] = candidates[free]
            placed = (self._table[positions] == candidates).all(axis=1)
            new[pending[placed & free]] = True
            pending = pending[~placed]
            slots[pending] = (slots[pending] + 1) % len(self._table)
        return new

    def _make_room(self, added: int) -> None:
        import numpy as np

        needed = (self.count + added) / _FULL
        if needed <= len(self._table):
            return
        old = self._table
        self._table = np.zeros((int(max(needed, len(old) * _GROWTH)), 2), np.uint64)
        self._insert(old[old.any(axis=1)])
