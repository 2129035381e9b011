"""Loaded by every Python process of a test: notes each connection beyond this machine."""

import os
import sys


def _hook(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = str(arguments[1][0])
        report = os.environ.get("NETWORK_GUARD_REPORT")  # a forked process has another one
        if report and not host.startswith(("127.", "::1", "::ffff:127.", "localhost")):
            with open(report, "a") as file:  # noqa: PTH123 (pathlib would be imported by all)
                file.write(f"pid {os.getpid()} {sys.argv[:1]} → {arguments[1]}\n")


if "NETWORK_GUARD_REPORT" in os.environ:
    sys.addaudithook(_hook)
