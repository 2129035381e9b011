"""Read the members of a zip archive within limits on number, size and ratio."""

from __future__ import annotations

import io
import lzma
import re
import unicodedata
import zipfile
import zlib
from xml.etree import ElementTree

from lib.corpus.extract.extracted import DAMAGED, ENCRYPTED, TOO_LARGE, Refusal

MOST_MEMBERS = 20_000
MOST_BYTES = 256_000_000  # the most unpacked bytes of all members that are read
MOST_RATIO = 250  # unpacked ÷ packed bytes of a member; XML of documents has 5 to 50
SMALL_BYTES = 4_000_000  # a member of this size may have any ratio
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")
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

        self._names = {_fold_name(name): name for name in reversed(self._members)}

    def find(self, name: str) -> str:
        """Return the name of a member as the archive spells it, "" if there is none.

        name: as another member spells it, perhaps with other case, Unicode form or escapes.
        """
        for spelling in (name, _unquote(name)):
            if spelling in self._members:
                return spelling
        return self._names.get(_fold_name(name), "")

    def parse(self, name: str) -> ElementTree.Element:
        """Return the root element of a member in XML; raises Refusal as `read` does.

        No external entity is read, and expat limits how much text the others become.
        """
        try:
            return ElementTree.fromstring(self.read(name))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            raise Refusal(DAMAGED, f"{name} is not well-formed XML: {error}") from None

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


def strip_namespace(name: str) -> str:
    """Return the name of an element or attribute without its namespace."""
    return name.rpartition("}")[2]


def _fold_name(name: str) -> str:
    """Return a spelling that names of a member have in common."""
    return unicodedata.normalize("NFC", _unquote(name)).casefold()


def _unquote(name: str) -> str:
    """Return a name with `%20` and other escapes replaced by their characters."""
    data = _ESCAPE.sub(
        lambda match: bytes.fromhex(match[1].decode()), name.encode("utf-8", "replace")
    )
    return data.decode("utf-8", "replace")
