"""Start the child process that extracts text, and replace it when it dies."""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lib.core import units
from lib.core.workers import imports_as_here
from lib.corpus.extract import child
from lib.corpus.extract.extracted import CRASH, TIMEOUT, TOO_LARGE, Extracted, Refusal

_TRIES = 2  # the kernel may have ended the child for the memory of another process
# A child that has used more memory than this is replaced, so that its next result does not depend
# on the files that it extracted before.
_MOST_KEPT_BYTES = child.LARGE_BYTES // 2


class Extraction:
    """Extracts the text of files in a child process, which is replaced when it has died.

    One object serves all files of a worker process; starting a child takes 0.1 s.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # In KiB: the peak memory of this process, which its child counts as its own.
        self._inherited = 0
        self._connection: Connection | None = None
        atexit.register(self.close)

    def extract(self, kind: str, data: bytes, fallback: str, seconds: int) -> Extracted:
        """Return the text of a file; raises Refusal if it yields none.

        seconds: processor time that the file may take. A file that makes the child crash is tried
        once more.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                header, text = self._ask(json.dumps([kind, fallback, seconds]).encode(), data)
                break
            except (EOFError, OSError):
                refusal = self._describe_end(seconds)
                if not tries_left or refusal.kind != CRASH:
                    raise refusal from None
        if header["peak"] > _MOST_KEPT_BYTES:
            self.close()
        if header["kind"]:
            raise Refusal(header["kind"], header["message"])
        return Extracted(text.decode(), header["replaced"], header["lost"])

    def _ask(self, request: bytes, data: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the answer of a child process; raises EOFError or OSError if it has died."""
        connection = self._connection or self._start()
        connection.send_bytes(request)
        connection.send_bytes(data)
        header = json.loads(connection.recv_bytes())
        return header, connection.recv_bytes()

    def close(self) -> None:
        """End the child process. A second call does nothing."""
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> Connection:
        """Start a child process and return the connection to it."""
        ours, theirs = Pipe()
        self._inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with theirs, imports_as_here():
            self._process = subprocess.Popen(
                [sys.executable, "-m", child.__name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libraries print errors that errors.jsonl lists too
                pass_fds=[theirs.fileno()],
            )
        self._connection = ours
        return ours

    def _describe_end(self, seconds: int) -> Refusal:
        """Collect the exit status of a dead child, and return the reason of its death."""
        assert self._process is not None
        _, status, usage = os.wait4(self._process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._process = None
        self.close()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            # Which of the two limits is reached first depends on the load, so both read alike.
            return Refusal(
                TIMEOUT,
                f"extracting its text takes more than {seconds} s of processor time, or "
                f"{units.duration(child.WAITING * seconds)} in all",
            )
        if usage.ru_maxrss > max(child.LARGE_BYTES >> 10, self._inherited):
            return Refusal(TOO_LARGE, child.describe_memory())
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Refusal(CRASH, f"the process that extracts its text crashed twice ({cause})")


@cache
def share_extraction() -> Extraction:
    """Return the object that all files of this worker process share."""
    return Extraction()
