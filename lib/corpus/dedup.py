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
    """Stores digests in a numpy hash table with open addressing: 25 to 31 bytes per digest.

    The digests are cryptographic, so their first half serves as the hash. The table stores each
    digest with its number in the order of arrival. file: the digests so far, from which a resumed
    run fills its table.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        self.count = 0
        self._table = np.zeros((_FIRST_SLOTS, 2), np.uint64)
        self._numbers = np.zeros(_FIRST_SLOTS, np.uint32)
        self.file = path.open("ab+")
        self.file.seek(0)
        while digests := self.file.read(DIGEST_BYTES << 20):
            self._add(np.frombuffer(digests, np.uint64).reshape(-1, 2))

    def add(self, digests: np.ndarray) -> np.ndarray:
        """Add digests and return which of them are new (bool [n]). A repeated digest is not new.

        digests: uint8 [n, 16].
        """
        import numpy as np

        keys = digests.view(np.uint64)
        new = self._add(keys)
        self.file.write(keys[new].tobytes())
        return new

    def find_numbers(self, digests: np.ndarray) -> np.ndarray:
        """Return the numbers of known digests (uint8 [n, 16]), from 0 (int64 [n]).

        The number of a digest is the number of different digests before it.
        """
        import numpy as np

        keys = _avoid_zeros(digests.view(np.uint64))
        slots = self._hash(keys)
        pending = np.arange(len(keys))
        while len(pending):
            is_found = (self._table[slots[pending]] == keys[pending]).all(axis=1)
            pending = pending[~is_found]
            slots[pending] = (slots[pending] + 1) % len(self._table)
        return self._numbers[slots].astype(np.int64)

    def _add(self, keys: np.ndarray) -> np.ndarray:
        import numpy as np

        keys = _avoid_zeros(keys)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys keep their order
        first = np.ones(len(keys), bool)
        first[order[1:]] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        candidates = np.flatnonzero(first)
        self._make_room(len(candidates))
        slots, is_new = self._insert(keys[candidates])
        first[candidates] = is_new
        added = int(is_new.sum())
        self._numbers[slots[is_new]] = np.arange(self.count, self.count + added)
        self.count += added
        return first

    def _hash(self, keys: np.ndarray) -> np.ndarray:
        """Return the slot at which the search for each key begins (int64 [n])."""
        import numpy as np

        return (keys[:, 0] % np.uint64(len(self._table))).astype(np.int64)

    def _insert(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Insert distinct keys; return their slots (int64), and which were not in the table."""
        import numpy as np

        new = np.zeros(len(keys), bool)
        slots = self._hash(keys)
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
        return slots, new

    def _make_room(self, added: int) -> None:
        import numpy as np

        needed = (self.count + added) / _FULL
        if needed <= len(self._table):
            return
        is_used = self._table.any(axis=1)
        keys = self._table[is_used]
        numbers = self._numbers[is_used]
        slots = int(max(needed, len(self._table) * _GROWTH))
        self._table = np.zeros((slots, 2), np.uint64)
        self._numbers = np.zeros(slots, np.uint32 if slots < 1 << 32 else np.uint64)
        self._numbers[self._insert(keys)[0]] = numbers


def _avoid_zeros(keys: np.ndarray) -> np.ndarray:
    """Return the keys with zero replaced, because a slot of zeros is free."""
    keys = keys.copy()
    keys[~keys.any(axis=1), 1] = 1
    return keys
