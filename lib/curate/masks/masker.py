"""Replace matches in texts: scan many texts at once, then search only the lines with candidates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

from lib.curate.masks import accounts, addresses, emails, phones
from lib.curate.masks.choices import CARD, EMAIL, IBAN, IP, PHONE
from lib.curate.masks.finders import SHAPE, Finder
from lib.curate.masks.matches import MaskedMatches

_CHUNK_BYTES = 1 << 20  # scanned at once; it fits in the cache of a core
# A match and the words that decide about it are within this distance of its rare byte.
_BEFORE = 1024
_AFTER = 2048
_FEW = 8  # matches that are replaced in place
_HASH_BYTES = 8
_LETTERS = bytes.maketrans(b"0123456789abcdef", b"abcdefghijklmnop")
_SEPARATORS = re.compile(rb"[^A-Za-z0-9]+")


class Masker:
    """Replaces the matches of some kinds.

    kinds: some of choices.KINDS. countries: the countries whose national telephone numbers are
    replaced. key: the secret for hashes; without it, all matches of a kind become the same
    constant.
    """

    def __init__(self, kinds: Sequence[str], countries: Sequence[str], key: bytes = b"") -> None:
        finders: dict[str, Sequence[Finder]] = {
            EMAIL: emails.FINDERS,
            IP: addresses.FINDERS,
            PHONE: phones.list_finders(countries),
            IBAN: accounts.IBAN_FINDERS,
            CARD: accounts.CARD_FINDERS,
        }
        self._finders = [(kind, finder) for kind in kinds for finder in finders[kind]]
        self._reaches = {finder.reach for _, finder in self._finders}
        self._uses_shape = any(finder.uses_shape for _, finder in self._finders)
        self._key = hashlib.sha256(key).digest() if key else b""

    def mask_text(self, text: str) -> str:
        """Return a text with its matches replaced."""
        (masked,), _ = self.mask_texts([text.encode("utf-8", "surrogatepass")])
        return text if masked is None else masked.decode("utf-8", "surrogatepass")

    def mask_texts(self, texts: Sequence[bytes | None]) -> tuple[list[bytes | None], MaskedMatches]:
        """Return texts with their matches replaced, and the matches by index of the text.

        texts: valid UTF-8. A text without a match is returned as the same object.
        """
        masked = list(texts)
        hits = MaskedMatches()
        for first, stop in _group_texts(texts):
            group = [text or b"" for text in texts[first:stop]]
            joined = group[0] if len(group) == 1 else b"\n".join(group)
            lines = self._find_lines(joined)
            if not lines:
                continue
            start = 0
            done = 0
            for number, text in enumerate(group, first):
                end = start + len(text)
                inside = []
                while done < len(lines) and lines[done][0] < end:
                    inside.append((lines[done][0] - start, lines[done][1] - start))
                    done += 1
                if inside:
                    masked[number] = self._mask_lines(text, inside, number, hits)
                start = end + 1
        return masked, hits

    def may_match(self, text: bytes) -> bool:
        """Return False if a text cannot contain a match. This is faster than masking the text."""
        shape = self._make_shape(text)
        return any(
            finder.anchor.search(shape if finder.uses_shape else text)
            for _, finder in self._finders
        )

    def _mask_lines(
        self, text: bytes, lines: Sequence[tuple[int, int]], row: int, hits: MaskedMatches
    ) -> bytes:
        """Return a text with the matches in some of its lines replaced."""
        pieces = []
        done = 0
        for low, high in lines:
            pieces += [text[done:low], self._mask_line(text[low:high], row, hits)]
            done = high
        return b"".join([*pieces, text[done:]])

    def _mask_line(self, line: bytes, row: int, hits: MaskedMatches) -> bytes:
        """Return a line without matches.

        After a match is replaced, the text beside it may become a match. So the places near it are
        searched again until nothing is found. Searching the whole line again would take days for a
        line of a megabyte in which every search finds one match.
        """
        text = bytearray(line)
        changed = [(0, len(text))]
        while matches := self._find_matches(text, changed):
            new = []
            for start, end, kind in matches:
                match = bytes(text[start:end])
                hits.add(row, kind, match)
                new.append((start, end, self._replace(kind, match)))
            text, changed = _replace_matches(text, new)
        return bytes(text)

    def _find_matches(
        self, line: bytearray, changed: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, str]]:
        """Return start, end and kind of matches that do not overlap, in their order.

        changed: start and end of the parts of the line that have changed since the last search. A
        match that does not depend on them has been found before.
        """
        spans = []
        pieces = {reach: [*self._cut_pieces(line, changed, reach)] for reach in self._reaches}
        for number, (_, finder) in enumerate(self._finders):
            for begin, low, high, piece, shape in pieces[finder.reach]:
                for start, end in _search_part(finder, piece, shape, low, high):
                    spans.append((begin + start, -(begin + end), number))
        matches: list[tuple[int, int, str]] = []
        for start, negative_end, number in sorted(spans):
            if not matches or start >= matches[-1][1]:
                matches.append((start, -negative_end, self._finders[number][0]))
        return matches

    def _cut_pieces(
        self, line: bytearray, changed: Sequence[tuple[int, int]], reach: int
    ) -> Iterator[tuple[int, int, int, bytes, bytes]]:
        """Yield what finders of one reach search: the start of a piece of the line, start and end
        of the places in it, the piece, and its shape.
        """
        for low, high in _widen_parts(changed, reach):
            begin = max(0, low - _BEFORE)
            piece = bytes(line[begin : high + _AFTER])
            yield begin, low - begin, high - begin, piece, self._make_shape(piece)

    def _find_lines(self, text: bytes) -> list[tuple[int, int]]:
        """Return start and end of the lines with a match, in their order."""
        shape = self._make_shape(text)
        lines: set[tuple[int, int]] = set()
        for _, finder in self._finders:
            done = 0
            for place in finder.anchor.finditer(shape if finder.uses_shape else text):
                at = place.start()
                if at >= done and _check_place(finder, text, at):
                    low = text.rfind(b"\n", 0, at) + 1
                    high = text.find(b"\n", at)
                    done = len(text) if high < 0 else high
                    lines.add((low, done))
        return sorted(lines)

    def _make_shape(self, text: bytes) -> bytes:
        return text.translate(SHAPE) if self._uses_shape else b""

    def _replace(self, kind: str, match: bytes) -> bytes:
        if not self._key:
            return f"<{kind}>".encode()
        digest = hashlib.blake2b(
            normalize_match(kind, match),
            digest_size=_HASH_BYTES,
            key=self._key,
            person=kind.encode(),
        )
        # The hash consists of letters, so that it contains no match.
        return f"<{kind}:".encode() + digest.hexdigest().encode().translate(_LETTERS) + b">"


def _group_texts(texts: Sequence[bytes | None]) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 of texts that are scanned together; a long text is alone."""
    first = 0
    size = 0
    for number, text in enumerate(texts):
        length = len(text or b"")
        if size + length > _CHUNK_BYTES and number > first:
            yield first, number
            first = number
            size = 0
        size += length + 1
    if first < len(texts):
        yield first, len(texts)


def _check_place(finder: Finder, text: bytes, at: int) -> tuple[int, int] | None:
    """Return start and end of the match at a place, None if there is none."""
    low = text.rfind(b"\n", max(0, at - _BEFORE), at) + 1 or max(0, at - _BEFORE)
    high = text.find(b"\n", at, at + _AFTER)
    return finder.find(text, at, low, min(len(text), at + _AFTER) if high < 0 else high)


def _search_part(
    finder: Finder, text: bytes, shape: bytes, low: int, high: int
) -> Iterator[tuple[int, int]]:
    """Yield start and end of the matches whose rare byte is in a part of a text."""
    for place in finder.anchor.finditer(shape if finder.uses_shape else text, low):
        if place.start() >= high:
            return
        if span := _check_place(finder, text, place.start()):
            yield span


def _widen_parts(parts: Sequence[tuple[int, int]], margin: int) -> list[tuple[int, int]]:
    """Return parts of a line with a margin on both sides; parts that then overlap are joined."""
    wide: list[tuple[int, int]] = []
    for start, end in parts:
        low = max(0, start - margin)
        if wide and low <= wide[-1][1]:
            low = wide.pop()[0]
        wide.append((low, end + margin))
    return wide


def _replace_matches(
    text: bytearray, new: Sequence[tuple[int, int, bytes]]
) -> tuple[bytearray, list[tuple[int, int]]]:
    """Return a line with its matches replaced, and the start and end of the replacements in it.

    new: start, end and replacement of each match.
    """
    changed = []
    moved = 0
    for start, end, replacement in new:
        changed.append((start + moved, start + moved + len(replacement)))
        moved += len(replacement) - (end - start)
    if len(new) <= _FEW:  # this moves only the bytes after the match
        for start, end, replacement in reversed(new):
            text[start:end] = replacement
        return text, changed
    pieces: list[bytes | bytearray] = []
    done = 0
    for start, end, replacement in new:
        pieces += [text[done:start], replacement]
        done = end
    return bytearray().join([*pieces, text[done:]]), changed


def normalize_match(kind: str, match: bytes) -> bytes:
    """Return the bytes to hash, which are equal for all spellings of one address or number."""
    if kind in (EMAIL, IP):
        return match.decode().lower().encode()
    return _SEPARATORS.sub(b"", match)
