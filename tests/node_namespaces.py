"""Simulate machines with network namespaces: each has an address, a host name and a link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_ENTER_SCRIPT = """
hostname "$1"; mount --bind "$2" /etc/hosts; mount --bind "$3" /etc/nsswitch.conf
shift 3; exec "$@"
"""


class Machine:
    """A simulated machine; its processes are those in its network namespace."""

    def __init__(self, name: str, address: str, link: str, bridge: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.link = link
        self._bridge = bridge
        self._folder = folder
        self._namespace = Path("/run/netns") / link

    def start(self, *command: object, output: Path, **options: object) -> subprocess.Popen:
        """Start a command on the machine, and append its output to a file."""
        prefix = [
            "nsenter",
            f"--net={self._namespace}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            _ENTER_SCRIPT,
            "sh",
            self.name,
            self._folder / f"hosts-{self.name}",
            self._folder / "nsswitch.conf",
        ]
        with output.open("ab") as file:
            return subprocess.Popen(
                [*map(str, prefix), *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                **options,
            )

    def processes(self) -> dict[int, str]:
        """Return the command lines of the running processes, by pid."""
        namespace = self._namespace.stat().st_ino
        commands = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if (entry / "ns" / "net").stat().st_ino == namespace and state not in "ZX":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    commands[int(entry.name)] = command.decode(errors="replace")
        return commands

    def ranks(self) -> list[int]:
        """Return the pids of the ranks on the machine."""
        return [pid for pid in self.processes() if b"\0LOCAL_RANK=" in _read_environment(pid)]

    def cut(self) -> None:
        """Take the link down: packets are lost without an error."""
        _ip("-n", self._bridge, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _ip("-n", self._bridge, "link", "set", self.link, "up")

    def die(self) -> None:
        """Cut the link and kill all processes, like a power cut."""
        self.cut()
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _read_environment(pid: int) -> bytes:
    with suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def skip_without_namespaces() -> None:
    """Skip the test if this machine cannot make network namespaces."""
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    probe = f"probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")


@contextmanager
def make_machines(number: int, folder: Path) -> Iterator[list[Machine]]:
    """Yield machines on one bridge, with addresses from 10.77.0.1 on; remove them at the end."""
    skip_without_namespaces()
    mark = f"{os.getpid() % 100_000}"
    bridge = f"br{mark}"
    machines = []
    for index in range(
        number
    ):  # a host's own name is a loopback address, as with Debian's installer
        (folder / f"hosts-node-{index}").write_text(
            "127.0.0.1 localhost\n"
            + "".join(
                f"{'127.0.1.1' if i == index else f'10.77.0.{i + 1}'} node-{i}\n"
                for i in range(number)
            )
        )
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    try:
        _ip("netns", "add", bridge)  # the bridge has its own namespace, too
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for i in range(number):
            link = f"n{i}-{mark}"
            _ip("netns", "add", link)
            machines.append(Machine(f"node-{i}", f"10.77.0.{i + 1}", link, bridge, folder))
            _ip(
                "link",
                "add",
                link,
                "netns",
                bridge,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                link,
            )
            _ip("-n", bridge, "link", "set", link, "master", "br0", "up")
            _ip("-n", link, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            _ip("-n", link, "link", "set", "eth0", "up")
            _ip("-n", link, "link", "set", "lo", "up")
        yield machines
    finally:
        for machine in machines:
            with suppress(subprocess.CalledProcessError):
                machine.die()
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", machine.link)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", bridge)
