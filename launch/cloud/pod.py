#!/usr/bin/env python3
"""Train on this pod's node: the command of every pod that launch/kubernetes.py creates.

  python launch/cloud/pod.py --kind trainjob --nnodes 4 --nproc-per-node 8 -- -e exp -d corpus
  python launch/cloud/pod.py --kind pytorchjob --nnodes 4 --min-nodes 2 --nproc-per-node 8 -- -e exp

The operator sets the rank of the node and the head's address in the environment. A job of fixed
size runs launch/multi_node.sh. A job with --min-nodes runs torchrun, which continues with fewer
nodes. A HyperPod job runs hyperpodrun.

The exit code is that of the run, but 143 instead of 75, since Kubernetes retries codes from 128 on
and treats lower codes as final. 130 means that a second SIGINT killed the ranks before they had
saved. Kubernetes retries that as well: a signal ends a pod, and only deleting the job ends the job.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.cloud.kube.kinds import KINDS  # noqa: E402
from launch.supervision import network  # noqa: E402
from launch.supervision.outcome import EXIT_INTERRUPTED  # noqa: E402
from lib.core import commands, options, stage  # noqa: E402
from lib.core.errors import EXIT_BUG, EXIT_PREEMPTED, StageError, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402
from lib.core.retry import poll  # noqa: E402
from lib.train import command_line  # noqa: E402

_STAGE = str(ROOT / "04_train_fsdp.py")
_EXIT_RETRY = 128 + signal.SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_S = 2.0
Seconds = TypeVar("Seconds", int, float)


def parse(argv: list[str]) -> Options:
    parser = options.Parser(
        __doc__, "--kind KIND --nnodes N --nproc-per-node K [options] -- TRAINING OPTIONS"
    )
    parser.add_argument("--kind", choices=tuple(KINDS), required=True, help="kind of the job")
    parser.add_argument(
        "--nnodes", type=options.positive_int, required=True, metavar="N", help="pods of the job"
    )
    parser.add_argument(
        "--min-nodes",
        type=options.positive_int,
        metavar="N",
        help="smallest number of pods with which the job continues (default: all)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=options.positive_int,
        required=True,
        metavar="K",
        help="ranks in this pod",
    )
    parser.add_argument(
        "--max-restarts",
        type=options.count,
        default=3,
        metavar="M",
        help="maximum number of restarts of the ranks",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and start nothing"
    )
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Print the command, run it, and exit with its code as Kubernetes expects it."""
    pod_words, train = command_line.split_at_dashes(argv)
    opts = parse(pod_words)
    if not train:
        raise command_line.missing_dashes_error("-e exp -d corpus")
    if opts.min_nodes and opts.min_nodes > opts.nnodes:
        raise UsageError(f"--min-nodes {opts.min_nodes} is above --nnodes {opts.nnodes}")
    operator_variables = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")
    }  # torchrun would read them as its own options
    command = build_pod_command(opts, train, operator_variables)
    print(f"pod {platform.node()}, in {Path.cwd()}:\n  {commands.shell(*command)}", flush=True)
    if opts.dry_run:
        return
    if KINDS[opts.kind].agent:
        os.execvp(command[0], command)  # its agent must receive the signals itself
    for number in _SIGNALS:  # the first process of a container ignores signals without a handler
        signal.signal(number, lambda number, frame: sys.exit(_EXIT_RETRY))
    if opts.nnodes > 1:
        wait_for_address(find_head_address(operator_variables))
    sys.exit(run_with_signals(command))


def build_pod_command(
    opts: Options, train: list[str], operator_variables: dict[str, str]
) -> list[str]:
    """Return the command that trains on this pod. operator_variables: all variables PET_…."""
    workers = [
        "--nproc-per-node",
        str(opts.nproc_per_node),
        "--max-restarts",
        str(opts.max_restarts),
    ]
    size = str(opts.nnodes) if not opts.min_nodes else f"{opts.min_nodes}:{opts.nnodes}"
    if KINDS[opts.kind].agent:
        program, *agent_options = [*KINDS[opts.kind].agent, *format_save_time()]
        return [program, "--nnodes", size, *workers, *agent_options, _STAGE, *train]
    if opts.nnodes == 1:
        return ["bash", str(ROOT / "launch" / "single_node.sh"), *workers, "--", *train]
    head = find_head_address(operator_variables)
    if not opts.min_nodes:
        return [
            "bash",
            str(ROOT / "launch" / "multi_node.sh"),
            "--nnodes",
            size,
            "--node-rank",
            str(find_node_rank(operator_variables, opts.nnodes)),
            "--head",
            head,
            *workers,
            "--",
            *train,
        ]
    # Up to torch 2.13, a pod that comes back can only join if the ranks use another store than the
    # rendezvous.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(network.interface_variables(head, ""))
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
        operator_variables.get("PET_RDZV_ENDPOINT", head),
        "--rdzv-id",
        "train",
        "--rdzv-conf",
        f"is_host={is_host}",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        *format_save_time(),
        _STAGE,
        *train,
    ]


def find_node_rank(operator_variables: dict[str, str], nodes: int) -> int:
    """Return the rank of this node, from the environment or from the end of the pod's name.

    Raises UsageError if there is none, or if it is out of range.
    """
    for name, variables in (
        ("PET_NODE_RANK", operator_variables),
        ("JOB_COMPLETION_INDEX", os.environ),
    ):
        if value := variables.get(name):
            rank = int(value) if value.isascii() and value.isdecimal() else nodes
            if rank >= nodes:
                raise UsageError(
                    f"{name} in the environment is {value!r}, but the job has {nodes} nodes",
                    expected=f"0 to {nodes - 1}, a different number in each pod",
                )
            return rank
    ending = re.search(r"-(\d+)$", platform.node())
    if not ending:
        raise UsageError(
            f"the pod's name {platform.node()} does not end with the number of the node",
            expected="PET_NODE_RANK or JOB_COMPLETION_INDEX in the environment",
        )
    return int(ending[1])


def find_head_address(operator_variables: dict[str, str]) -> str:
    """Return the address of node 0. Raises UsageError if the operator has not set it."""
    head = (
        operator_variables.get("PET_MASTER_ADDR")
        or operator_variables.get("PET_RDZV_ENDPOINT", "").rpartition(":")[0]
    )
    if not head:
        raise UsageError(
            "the operator has not set the address of node 0",
            expected="PET_MASTER_ADDR or PET_RDZV_ENDPOINT in the environment",
        )
    return head


def format_save_time() -> list[str]:
    """Return torchrun's option for the seconds that the last save may take.

    Raises UsageError for a bad variable.
    """
    seconds = _read_seconds("SAVE_SECONDS", options.positive_int, "240")
    return ["--shutdown-timeout", str(seconds)]


def _read_seconds(name: str, parse_value: Callable[[str], Seconds], default: str) -> Seconds:
    """Return the value of a variable that pod.yaml sets. Raises UsageError if it is invalid."""
    try:
        return parse_value(os.environ.get(name, default))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name} in the environment: {error}") from None


def wait_for_address(head: str) -> None:
    """Wait until the name of the head has an address; it gets one when the head's pod runs.

    Raises StageError if that takes too long.
    """
    patience = _read_seconds("WAIT_SECONDS", options.positive, "900")
    if has_address(head):
        return
    print(f"waiting for {head}: it has no address yet", flush=True)
    if not poll(lambda: has_address(head), _POLL_S, patience):
        raise StageError(
            f"{head} has no address after {patience:.0f} s",
            expected="the pod of node 0 to run; `kubectl get pods` shows it",
        )


def has_address(host: str) -> bool:
    """Return whether a name resolves; getent asks again each time, without a cache."""
    return not subprocess.run(["getent", "hosts", host], stdout=subprocess.DEVNULL).returncode


def run_with_signals(command: list[str]) -> int:
    """Run a command, pass signals on to it, and return the exit code for Kubernetes."""
    received: list[int] = []
    received_early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is None:
            received_early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    # In another session, since otherwise Ctrl-C in a terminal would reach the command twice, and
    # the second SIGINT kills the ranks before they have saved.
    child = subprocess.Popen(command, start_new_session=True)
    for early_signal in received_early:
        child.send_signal(early_signal)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    if code and code != EXIT_PREEMPTED and received.count(signal.SIGINT) > 1:
        return EXIT_INTERRUPTED
    # torchrun returns 1 for any failure, so such a run is worth a retry after a signal; a full disk
    # during the save is not.
    return _EXIT_RETRY if code == EXIT_PREEMPTED or (received and code == EXIT_BUG) else code


if __name__ == "__main__":
    stage.run_main(main)
