"""Finds the network interface of this machine that reaches the other nodes.

Left alone, gloo takes the address of the machine's own name, which on many is 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
from contextlib import suppress
from pathlib import Path

_UP = 1  # flag of a route


def environment(head: str, interface: str) -> dict[str, str]:
    """Return the variables that gloo and NCCL take their interface from.

    interface: as a person named it, for both. Without it, gloo gets the one on the way to the head,
    and NCCL, which knows several and faster ones, chooses itself. What is set already stays.
    """
    if interface:
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    found = "" if "GLOO_SOCKET_IFNAME" in os.environ else towards(head)
    return {"GLOO_SOCKET_IFNAME": found} if found else {}


def towards(host: str) -> str:
    """Return the interface whose route leads to a host, itself included; empty when none does."""
    address = _address(host)
    if address is None or address.is_loopback:  # the head's own name, on the head
        address = ipaddress.IPv4Address("0.0.0.0")  # which only a default route leads to
    best = (-1, 0)
    interface = ""
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, target, _, flags, _, _, metric, mask, *_ = line.split()
            network = ipaddress.IPv4Network((_of_route(target), str(_of_route(mask))))
            quality = network.prefixlen, -int(metric)
            if int(flags, 16) & _UP and address in network and quality > best:
                best = quality
                interface = name
    return interface


def _of_route(digits: str) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(bytes.fromhex(digits)[::-1])


def _address(host: str) -> ipaddress.IPv4Address | None:
    with suppress(ValueError):
        return ipaddress.IPv4Address(host)
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        found = subprocess.run(
            ["getent", "ahostsv4", host], capture_output=True, text=True, timeout=20, check=True
        )
        return ipaddress.IPv4Address(found.stdout.split()[0])
    return None
