"""Find the network interface of this machine that reaches the other nodes.

By default gloo uses the address of the machine's own name, which is 127.0.1.1 on many machines.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
from contextlib import suppress
from pathlib import Path

_UP = 1  # flag of a route


def interface_variables(head: str, interface: str) -> dict[str, str]:
    """Return the environment variables that choose the interface of gloo and NCCL.

    interface: the value of --interface, used for both. Without it, gloo uses the interface of the
    route to the head, unless GLOO_SOCKET_IFNAME is set already. NCCL makes its own choice, since
    it may know a faster device.
    """
    if interface:
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    route_interface = "" if "GLOO_SOCKET_IFNAME" in os.environ else find_interface(head)
    return {"GLOO_SOCKET_IFNAME": route_interface} if route_interface else {}


def find_interface(host: str) -> str:
    """Return the interface whose route leads to a host (or to itself); empty if there is none."""
    address = _resolve_host(host)
    if address is None or address.is_loopback:  # on the head, its own name
        address = ipaddress.IPv4Address("0.0.0.0")  # only a default route matches
    best = (-1, 0)
    interface = ""
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, target, _, flags, _, _, metric, mask, *_ = line.split()
            network = ipaddress.IPv4Network(
                (_parse_route_address(target), str(_parse_route_address(mask)))
            )
            quality = network.prefixlen, -int(metric)
            if int(flags, 16) & _UP and address in network and quality > best:
                best = quality
                interface = name
    return interface


def _parse_route_address(digits: str) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(bytes.fromhex(digits)[::-1])


def _resolve_host(host: str) -> ipaddress.IPv4Address | None:
    with suppress(ValueError):
        return ipaddress.IPv4Address(host)
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        process = subprocess.run(
            ["getent", "ahostsv4", host], capture_output=True, text=True, timeout=20, check=True
        )
        return ipaddress.IPv4Address(process.stdout.split()[0])
    return None
