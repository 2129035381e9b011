#!/usr/bin/env python3
"""Train on this pod's node: the command of every pod that launch/kubernetes.py asks for.

  python launch/pod.py --kind trainjob --nnodes 4 --nproc-per-node 8 -- -e exp -d corpus
  python launch/pod.py --kind pytorchjob --nnodes 4 --min-nodes 2 --nproc-per-node 8 -- -e exp -d c

The number of the node and the head's address come from what the operator put into the environment.
A job of fixed size runs launch/multi_node.sh, one with --min-nodes torchrun, which goes on with the
nodes there are, one of HyperPod its hyperpodrun. Exit code: the run's, but 143 instead of 75: to
Kubernetes, codes from 128 are worth another try and those below are final. 130: a second SIGINT
killed the ranks before they had saved. It is tried again too: a signal ends a pod, and only who
deletes the job ends the job.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.kube.kinds import KINDS  # noqa: E402
from launch.supervision import network  # noqa: E402
from launch.supervision.outcome import EXIT_INTERRUPTED  # noqa: E402
from lib.core import commands, options, stage  # noqa: E402
from lib.core.errors import EXIT_PREEMPTED, StageError, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402
from lib.core.retry import poll  # noqa: E402
from lib.train import command_line  # noqa: E402

_STAGE = str(ROOT / "04_train_fsdp.py")
_TRY_AGAIN = 128 + signal.SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOOK_EVERY_S = 2.0


def parse(argv: list[str]) -> Options:
    parser = options.Parser(
        __doc__, "--kind KIND --nnodes N --nproc-per-node K [options] -- TRAINING OPTIONS"
    )
    parser.add_argument(
        "--kind", choices=tuple(KINDS), required=True, help="what the pod belongs to"
    )
    parser.add_argument(
        "--nnodes", type=options.positive_int, required=True, metavar="N", help="pods of the job"
    )
    parser.add_argument(
        "--min-nodes",
        type=options.positive_int,
        metavar="N",
        help="go on with so many pods when others are lost (default: all)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=options.positive_int,
        required=True,
        metavar="K",
        help="ranks in this pod",
    )
    parser.add_argument(
        "--max-restarts", type=options.count, default=3, metavar="M", help="restarts of the ranks"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and start nothing"
    )
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Print the command, run it, and exit with its code as Kubernetes should see it."""
    own, train = command_line.split_at_dashes(argv)
    opts = parse(own)
    if not train:
        raise command_line.missing_dashes_error("-e exp -d corpus")
    if opts.min_nodes and opts.min_nodes > opts.nnodes:
        raise UsageError(f"--min-nodes {opts.min_nodes} is above --nnodes {opts.nnodes}")
    operators = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")
    }  # torchrun would take them for its own options
    command = command_of(opts, train, operators)
    print(f"pod {platform.node()}, in {Path.cwd()}:\n  {commands.shell(*command)}", flush=True)
    if opts.dry_run:
        return
    if KINDS[opts.kind].agent:
        os.execvp(command[0], command)  # which wants to be told itself to end
    for number in _SIGNALS:  # the first process of a container ignores what it does not handle
        signal.signal(number, lambda number, frame: sys.exit(_TRY_AGAIN))
    if opts.nnodes > 1:
        wait_for(head_of(operators))
    sys.exit(follow(command))


def command_of(opts: Options, train: list[str], operators: dict[str, str]) -> list[str]:
    """Return what trains on this pod. operators: PET_ variables."""
    workers = [
        "--nproc-per-node",
        str(opts.nproc_per_node),
        "--max-restarts",
        str(opts.max_restarts),
    ]
    size = str(opts.nnodes) if not opts.min_nodes else f"{opts.min_nodes}:{opts.nnodes}"
    if KINDS[opts.kind].agent:
        program, *more = KINDS[opts.kind].agent
        return [program, "--nnodes", size, *workers, *more, _STAGE, *train]
    if opts.nnodes == 1:
        return ["bash", str(ROOT / "launch" / "single_node.sh"), *workers, "--", *train]
    head = head_of(operators)
    if not opts.min_nodes:
        return [
            "bash",
            str(ROOT / "launch" / "multi_node.sh"),
            "--nnodes",
            size,
            "--node-rank",
            str(rank_of(operators, opts.nnodes)),
            "--head",
            head,
            *workers,
            "--",
            *train,
        ]
    # Up to torch 2.13, a pod that comes back can only join when the ranks have a store of their
    # own, beside that of the rendezvous.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(network.environment(head, ""))
    is_host = int(head.split(".")[0] in ("localhost", platform.node().split(".")[0]))
    return [
        sys.executable,
        str(ROOT / "launch" / "torchrun.py"),
        "--nnodes",
        size,
        *workers,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        operators.get("PET_RDZV_ENDPOINT", head),
        "--rdzv-id",
        "train",
        "--rdzv-conf",
        f"is_host={is_host}",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        "--shutdown-timeout",
        "240",
        _STAGE,
        *train,
    ]


def rank_of(operators: dict[str, str], nodes: int) -> int:
    """Return the number of this node: the operator's, or that at the end of the pod's name."""
    for name, variables in (("PET_NODE_RANK", operators), ("JOB_COMPLETION_INDEX", os.environ)):
        if given := variables.get(name):
            rank = int(given) if given.isascii() and given.isdecimal() else nodes
            if rank >= nodes:
                raise UsageError(
                    f"{name} in the environment is {given!r}, which is no node of {nodes}",
                    expected=f"0 to {nodes - 1}, another number in each pod",
                )
            return rank
    ending = re.search(r"-(\d+)$", platform.node())
    if not ending:
        raise UsageError(
            f"the number of this node cannot be told from its name {platform.node()}",
            expected="PET_NODE_RANK or JOB_COMPLETION_INDEX in the environment",
        )
    return int(ending[1])


def head_of(operators: dict[str, str]) -> str:
    head = (
        operators.get("PET_MASTER_ADDR")
        or operators.get("PET_RDZV_ENDPOINT", "").rpartition(":")[0]
    )
    if not head:
        raise UsageError(
            "the operator has not said where the head is",
            expected="PET_MASTER_ADDR or PET_RDZV_ENDPOINT in the environment",
        )
    return head


def wait_seconds() -> float:
    """Return how long to wait for the pod of node 0; UsageError when the environment is wrong."""
    given = os.environ.get("WAIT_SECONDS", "900")
    try:
        return options.positive(given)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"WAIT_SECONDS in the environment: {error}") from None


def wait_for(head: str) -> None:
    """Wait until the head's name has an address, which it gets when its pod runs."""
    patience = wait_seconds()
    if has_address(head):
        return
    print(f"waiting for {head}: it has no address yet", flush=True)
    if not poll(lambda: has_address(head), _LOOK_EVERY_S, patience):
        raise StageError(
            f"{head} has no address after {patience:.0f} s",
            expected="the pod of node 0 to run; `kubectl get pods` shows it",
        )


def has_address(host: str) -> bool:
    """Return whether a name resolves, also one of a service that has just appeared."""
    return not subprocess.run(["getent", "hosts", host], stdout=subprocess.DEVNULL).returncode


def follow(command: list[str]) -> int:
    """Run a command, hand signals on to it, and return the exit code for Kubernetes."""
    signalled: list[int] = []
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        signalled.append(number)
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, hand_on)
    # In a session of its own: Ctrl-C in a terminal would come to it twice, and give up the save.
    child = subprocess.Popen(command, start_new_session=True)
    for missed in early:
        child.send_signal(missed)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    if code and code != EXIT_PREEMPTED and signalled.count(signal.SIGINT) > 1:
        return EXIT_INTERRUPTED
    # torchrun returns 1 whatever ended it: a run that was told to end is worth another try.
    return _TRY_AGAIN if code == EXIT_PREEMPTED or (code and signalled) else code


if __name__ == "__main__":
    stage.run(main)
