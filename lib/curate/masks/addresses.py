"""Find public IP addresses, and distinguish IPv4 addresses from versions and section numbers."""

from __future__ import annotations

import ipaddress
import re

from lib.curate.masks.finders import Finder, is_bounded

_CONTEXT_BYTES = 40  # bytes before an address to search for words
_LONGEST_V6 = 45
_FEWEST_GROUPS = 3  # groups of an IPv6 address; with fewer, `x[2001::2]` is a slice
_MOST_OF_A_HEADING = 30
_HEADING = re.compile(rb" {1,8}[A-Z][A-Za-z]")
# Registered arcs of object identifiers (OID): X.500 attributes, extensions, IANA, curves.
_OBJECT_IDENTIFIER = re.compile(rb"2\.5\.(?:4|29)\.|1\.3\.(?:6|14|36|101|132)\.")
_V4 = re.compile(rb"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")
_V6 = re.compile(rb"[0-9a-fA-F]{4}(?::[0-9a-fA-F]{0,4}){2,7}")
_MORE_GROUPS = re.compile(rb":[:0-9a-zA-Z]")
# Words and signs that precede a number with three dots that is no address, as in `pkg==1.2.3.4`.
_OTHER_NUMBER = re.compile(
    rb"(?:(?<!con)version|revision|release|firmware|build|section|chapter|clause|paragraph|article"
    rb"|appendix|annex|figure|spec|oid|identifier|(?:\b|_)(?:v|ver|rev|sec|sect|ch|chap|fig|art))"
    rb"s?(?:[\s.:=_`\"'(#-]|\xc2\xa0){0,6}\Z"
    rb"|\xc2\xa7\s?\Z|[=<>~!]=\Z|[\^~]\Z|[A-Za-z0-9]/\Z|[A-Za-z_]-\Z",
    re.IGNORECASE,
)
# The special-purpose registries of IANA, so that the result does not depend on Python's version.
_SPECIAL = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
    "224.0.0.0/4 240.0.0.0/4"
)
_SPECIAL_V4 = tuple(
    (int(network.network_address), int(network.broadcast_address))
    for network in map(ipaddress.IPv4Network, _SPECIAL.split())
)
_SPECIAL_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))


def find_v4(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the public IPv4 address whose first dot is at an index, or None."""
    start = at
    while start > max(low, at - 4) and text[start - 1 : start].isdigit():
        start -= 1
    match = _V4.match(text, start, high)
    if not match or not is_bounded(text, start, match.end(), low, high):
        return None
    after = text[match.end() : min(high, match.end() + 2)]
    if after[:1] == b"-" and after[1:].isalpha():  # as in 1.2.3.4-beta
        return None
    if _OBJECT_IDENTIFIER.match(match.group()):
        return None
    parts = match.group().split(b".")
    if any(len(part) > 1 and part.startswith(b"0") for part in parts):
        return None
    octets = [*map(int, parts)]
    # No machine has an address that ends in .0.0, but a version often does.
    if not _is_public(octets) or octets[2:] == [0, 0]:
        return None
    before = text[max(low, start - _CONTEXT_BYTES) : start]
    if _OTHER_NUMBER.search(before) or _is_heading(text, octets, start, match.end(), low, high):
        return None
    return start, match.end()


def _is_public(octets: list[int]) -> bool:
    if max(octets) > 255:
        return False
    number = int.from_bytes(bytes(octets), "big")
    return not any(first <= number <= last for first, last in _SPECIAL_V4)


def _is_heading(text: bytes, octets: list[int], start: int, end: int, low: int, high: int) -> bool:
    """Return whether small numbers begin a line before a title, as in `4.3.2.1 Scope`."""
    return (
        max(octets) <= _MOST_OF_A_HEADING
        and not text[low:start].strip()
        and bool(_HEADING.match(text, end, high))
    )


def find_v6(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the public IPv6 address whose first colon is at an index, or None."""
    start = at - 4
    match = _V6.match(text, start, high)
    if start < low or not match:
        return None
    end = match.end()
    while text[end - 1] == ord(":") and text[end - 2] != ord(":"):
        end -= 1  # the colon ends a sentence
    is_longer = _MORE_GROUPS.match(text, end, high) or (start > low and text[start - 1] in b":")
    if end - start > _LONGEST_V6 or is_longer:
        return None
    if not is_bounded(text, start, end, low, high):
        return None
    groups = [group for group in text[start:end].split(b":") if group]
    try:
        address = ipaddress.IPv6Address(text[start:end].decode())
    except ValueError:
        return None
    if len(groups) < _FEWEST_GROUPS or any(address in network for network in _SPECIAL_V6):
        return None
    return start, end


FINDERS = (
    Finder(re.compile(rb"\.(?<=[0-9]\.)(?=[0-9]{1,3}\.[0-9]{1,3}\.[0-9])"), False, find_v4),
    # All allocated unicast addresses begin with 2001 to 2003, 24, 26, 28, 2a or 2c.
    Finder(re.compile(rb":(?<=2[0468acAC][0-9a-fA-F]{2}:)(?=[0-9a-fA-F:])"), False, find_v6),
)
