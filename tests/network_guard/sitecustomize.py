"""Loaded by every Python process of a test: notes each connection beyond this machine."""

import os
import sys

_report = os.environ.get("NETWORK_GUARD_REPORT")


def _hook(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = str(arguments[1][0])
        if not host.startswith(("127.", "::1", "::ffff:127.", "localhost")):
            with open(_report, "a") as file:  # noqa: PTH123 (pathlib would be imported by all)
                file.write(f"pid {os.getpid()} {sys.argv[:1]} → {arguments[1]}\n")


if _report:
    sys.addaudithook(_hook)
