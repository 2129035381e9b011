"""Extract the text of files in a child process, which may hang, crash or run out of memory.

The kernel ends the process at a limit of processor time or elapsed time, even in the middle of C
code. `process.py` starts the process and sends it files.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lib.corpus.extract.extracted import DAMAGED, TOO_LARGE, Refusal
from lib.corpus.extract.table import load_extractor

MEMORY_BYTES = 2 << 30  # address space of this process
MOST_TEXT_BYTES = 64_000_000
LARGE_BYTES = MEMORY_BYTES // 2  # a process that fails after using more has probably run out of it
WAITING = 5  # limit of the elapsed time, as a multiple of the limit of the processor time
_OOM_SCORE = "1000"  # if memory runs out, the kernel ends this process rather than its parent


def serve_requests(connection: Connection) -> None:
    """Answer requests until the parent process ends or closes the connection.

    A request consists of two messages: a JSON list of the kind, the fallback encoding and the
    seconds, and then the bytes of the file. An answer consists of two messages as well: a JSON
    object with `kind`, `message`, `replaced`, `lost` and `peak`, and then the text in UTF-8. `kind`
    is "" if the text was extracted. `peak` is the peak memory of this process in bytes.
    """
    with suppress(EOFError, OSError):
        while True:
            kind, fallback, seconds = json.loads(connection.recv_bytes())
            data = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
            header, text = _answer_request(kind, data, fallback)
            header["peak"] = _measure_peak()
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(header).encode())
            connection.send_bytes(text)


def _answer_request(kind: str, data: bytes, fallback: str) -> tuple[dict[str, Any], bytes]:
    """Return the answer to a request."""
    try:
        text, replaced, lost = load_extractor(kind)(data, fallback)
        encoded = text.encode()
        if len(encoded) > MOST_TEXT_BYTES:
            raise Refusal(
                TOO_LARGE,
                f"its text has {len(encoded):,} bytes; the limit is {MOST_TEXT_BYTES:,}",
            )
    except Refusal as refusal:
        return {"kind": refusal.kind, "message": refusal.message}, b""
    except MemoryError:
        return {"kind": TOO_LARGE, "message": describe_memory()}, b""
    except Exception as error:
        if _measure_peak() > LARGE_BYTES:  # libraries have their own errors for lack of memory
            return {"kind": TOO_LARGE, "message": describe_memory()}, b""
        message = f"its text cannot be extracted: {type(error).__name__}: {error}"
        return {"kind": DAMAGED, "message": message}, b""
    return {"kind": "", "message": "", "replaced": replaced, "lost": lost}, encoded


def describe_memory() -> str:
    """Return the error message for a file whose extraction needs too much memory."""
    return f"extracting its text needs more than {MEMORY_BYTES >> 30} GiB of memory"


def _measure_peak() -> int:
    """Return the peak memory of this process in bytes.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _set_up() -> None:
    """Set the limits of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent as well
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    lowest = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")


if __name__ == "__main__":
    _set_up()
    serve_requests(Connection(int(sys.argv[1])))
