"""Read the members of a zip archive within limits on number, size and ratio."""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib

from lib.corpus.extract.extracted import DAMAGED, ENCRYPTED, TOO_LARGE, Refusal

MOST_MEMBERS = 20_000
MOST_BYTES = 256_000_000  # the most unpacked bytes of all members that are read
MOST_RATIO = 250  # unpacked ÷ packed bytes of a member; XML of documents has 5 to 50
SMALL_BYTES = 4_000_000  # a member of this size may have any ratio
_IS_ENCRYPTED = 0x1  # the flag of an encrypted member
_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


class Archive:
    """Reads the members of a zip archive by name.

    Raises Refusal for a damaged archive, and beyond the limits. Only the members that a caller
    reads count towards the limits on bytes, so the images of a document cost nothing.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._file = zipfile.ZipFile(io.BytesIO(data))
        except (*_ERRORS, NotImplementedError) as error:
            raise Refusal(DAMAGED, f"the zip archive is damaged: {error}") from None
        members = self._file.infolist()
        if len(members) > MOST_MEMBERS:
            raise Refusal(
                TOO_LARGE,
                f"the zip archive has {len(members):,} members; the limit is {MOST_MEMBERS:,}",
            )
        self._members = {member.filename: member for member in members}
        self._room = MOST_BYTES

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> bytes:
        """Return the content of a member.

        Raises Refusal if the member is missing, encrypted, damaged or too large.
        """
        member = self._members.get(name)
        if member is None:
            raise Refusal(DAMAGED, f"the zip archive has no member {name!r}")
        if member.flag_bits & _IS_ENCRYPTED:
            raise Refusal(ENCRYPTED, f"the member {name!r} is encrypted")
        size = member.file_size
        if size > SMALL_BYTES and size > MOST_RATIO * member.compress_size:
            raise Refusal(
                TOO_LARGE,
                f"the member {name!r} unpacks to {size:,} bytes, more than {MOST_RATIO} times its "
                "size",
            )
        if size > self._room:
            raise Refusal(
                TOO_LARGE,
                f"the members with text unpack to more than {MOST_BYTES:,} bytes",
            )
        self._room -= size
        try:
            # `read` stops after `file_size` bytes, also if the packed data contain more.
            return self._file.read(member)
        except (*_ERRORS, NotImplementedError, RuntimeError) as error:
            raise Refusal(DAMAGED, f"the member {name!r} is damaged: {error}") from None
