#!/usr/bin/env python3
"""Run torchrun with its options but without its banners; the launchers start the ranks with it.

  python launch/torchrun.py --nproc-per-node 8 04_train_fsdp.py -e exp -d hf_datasets/corpus

A rank that fails prints the reason itself. So torchrun's report of 40 lines is left out, and one
line names each rank that a signal ended or that reported no error. Every rank gets its share of the
cores (OMP_NUM_THREADS, unless it is set). On one machine (--standalone) all sockets listen on
127.0.0.1 only. The first stop signal is passed on to the ranks, which have time to save. Further
signals change nothing, except that a second SIGINT kills the ranks. LOGLEVEL=INFO shows torchrun's
log. The exit code is that of the rank that failed first, or 128 plus the number of the signal.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.core import commands, launcher, liveness, stage
from lib.core.errors import EXIT_BUG, StageError, UsageError

LOOPBACK = "127.0.0.1"
_LOOPBACK_TIMEOUT_S = 10.0

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    from argparse import ArgumentParser

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main(argv: list[str]) -> None:
    """Run torchrun, and exit with the code of the rank that failed first."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    if commands.LAUNCHED_AS not in os.environ:  # else a launcher has printed a line
        print("launcher: loading torch, then starting the ranks", file=sys.stderr, flush=True)
        os.environ[commands.LAUNCHED_AS] = shlex.join(commands.typed_words())
    import torch
    from torch import distributed

    keep_to_loopback()
    pass_on_one_signal()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    args = run.parse_args(apply_shutdown_timeout(argv, run.get_args_parser()))
    if args.standalone:
        require_loopback()
        args.local_addr = args.local_addr or LOOPBACK
    try:
        ranks = run.determine_local_world_size(args.nproc_per_node)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise UsageError(
            f"--nproc-per-node {args.nproc_per_node} starts no rank",
            expected="a whole number above 0",
        )
    if ranks > 1:
        share = max(1, torch.get_num_threads() // ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    try:
        run.run(args)
    except ChildFailedError as error:
        sys.exit(report_failures(error.failures))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except (RendezvousError, distributed.DistError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(f"the ranks cannot find each other: {reason}") from None


def require_loopback() -> None:
    """Raise UsageError if processes of this machine cannot connect to each other.

    Some sandboxes and network namespaces leave the loopback interface down, and torchrun would
    retry for minutes.
    """
    import socket

    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        raise UsageError(
            f"processes of this machine cannot reach each other at {LOOPBACK}",
            found=str(error),
            expected="a loopback interface that is up; as root, `ip link set lo up`",
        ) from None


def keep_to_loopback() -> None:
    """Make stores of a single machine listen on 127.0.0.1; call this before importing torchrun.

    torch's own server listens on all addresses, whatever host it is given (torch 2.11 to 2.13).
    """
    import socket

    from torch import distributed

    class Store(distributed.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if is_master and host_name in ("localhost", LOOPBACK):
                with suppress(OSError):  # the port is taken: torch reports it, or shares its server
                    listener = socket.create_server((LOOPBACK, port))
                    host_name, port = listener.getsockname()
                    kwargs["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **kwargs)

    distributed.TCPStore = Store


def pass_on_one_signal() -> None:
    """Ignore all stop signals after the first, since torchrun restarts its shutdown at each one.

    Schedulers send several signals. A second SIGINT kills the ranks, after a line about the loss.
    """
    from torch.distributed.elastic.multiprocessing import api

    received: list[int] = []
    end_ranks = api._terminate_process_handler

    def handle_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            end_ranks(number, frame)  # raises, and torchrun passes the signal on
        elif number == signal.SIGINT and received.count(number) == 2:
            os.write(
                2,
                b"torchrun: a second SIGINT: the ranks are killed without a save; all training "
                b"since the newest checkpoint is lost\n",
            )
            for child in liveness.list_processes():
                if child.parent == os.getpid() and not child.has_ended:
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

    api._terminate_process_handler = handle_signal


def apply_shutdown_timeout(argv: list[str], parser: ArgumentParser) -> list[str]:
    """Return the arguments without --shutdown-timeout if torchrun lacks this option (torch 2.11).

    In torch 2.11 the seconds that ranks get to save and end are the default argument of a method,
    so this function changes that default instead.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    option = "--shutdown-timeout"
    if option not in argv or option in parser._option_string_actions:
        return argv
    position = argv.index(option)
    PContext.close.__defaults__ = (None, int(argv[position + 1]))  # death_sig, timeout
    return argv[:position] + argv[position + 2 :]


def report_failures(failures: dict[int, ProcessFailure]) -> int:
    """Print a line for each rank that ended without reporting an error.

    Returns the exit code of the rank that failed first, or 128 plus the number of its signal. Ranks
    that SIGTERM ended are left out if others failed, since torchrun has mostly ended them itself.
    """
    causes = {
        rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM
    } or failures
    for rank, failure in causes.items():
        if failure.exitcode < 0:
            hint = (
                "; if nobody killed it, memory ran out (`dmesg` shows it)"
                if failure.exitcode == -signal.SIGKILL
                else ""
            )
            text = (
                f"error: rank {rank} (process {failure.pid}) was ended by "
                f"{failure.signal_name()}{hint}"
            )
            print(text, file=sys.stderr, flush=True)
            launcher.record_failure(launcher.KILLED, EXIT_BUG, text, rank)
        elif not isinstance(failure.error_file_data["message"], dict):
            # Such a rank has left by os._exit, or has run a script that writes no error file.
            print(
                f"error: rank {rank} (process {failure.pid}) ended with exit code "
                f"{failure.exitcode} and reported no error",
                file=sys.stderr,
                flush=True,
            )
    code = min(causes.values(), key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    stage.run_main(main)
