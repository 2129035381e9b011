#!/usr/bin/env python3
"""Supervise the run on this node: start torchrun, and restart it until the run is over.

  python launch/supervise.py --nnodes 2 --node-rank 0 --head 10.0.0.1 -- \\
      python launch/torchrun.py … 04_train_fsdp.py -e exp -d hf_datasets/corpus

single_node.sh and multi_node.sh start this script. It runs the command after `--` unchanged. It
restarts after a lost worker, node or head and after a timeout. It does not restart after bad input,
a damaged artifact, a full disk, out of memory, or a bug that occurs twice. The exit code is that of
the run, on every node.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.supervision import network
from launch.supervision.attempt import NodeCommand
from launch.supervision.board import HEAD, NoteBoard
from launch.supervision.end_command import EndCommand
from launch.supervision.head import Head
from launch.supervision.node import Follower, NodeLauncher
from lib.core import commands, launcher, liveness, options, stage, units
from lib.core.errors import Problems, UsageError
from lib.core.options import Options
from lib.core.paths import OUTPUTS, Experiment
from lib.train import command_line
from lib.train.config import Config
from lib.train.output.kinds import choose_kind

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def build_parser() -> options.Parser:
    """Return the parser of the launcher's own options."""
    parser = options.Parser(__doc__, "[options] -- COMMAND …")
    _add_node_options(parser)
    parser.add_argument(
        "--max-restarts",
        type=options.count,
        default=3,
        metavar="M",
        help="maximum number of restarts in a row without a new checkpoint",
    )
    parser.add_argument(
        "--backoff",
        type=options.non_negative,
        default=5.0,
        metavar="S",
        help="seconds before the first restart, doubled each time",
    )
    parser.add_argument(
        "--save-seconds",
        type=options.positive_int,
        default=120,
        metavar="S",
        help="seconds that a save may take when the run is stopped",
    )
    parser.add_argument(
        "--wait-seconds",
        type=options.positive,
        default=900.0,
        metavar="S",
        help="seconds to wait for missing nodes",
    )
    parser.add_argument(
        "--on-end",
        default="",
        metavar="COMMAND",
        help="shell command that runs once when the launch ends, with EXP, STATUS (complete, "
        "preempted, failed or disk_full), STEP, LOSS, EXIT_CODE, REASON and SAVE_DIR in its "
        "environment; it cannot change the exit code (default: none)",
    )
    parser.add_argument(
        "--on-end-seconds",
        type=options.positive,
        default=20.0,
        metavar="S",
        help="seconds after which the command of --on-end is killed",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and start nothing"
    )
    return parser


def _add_node_options(parser: options.Parser) -> None:
    """Add the options that describe the nodes of the run and the network between them."""
    parser.add_argument(
        "--nnodes", type=options.positive_int, default=1, metavar="N", help="nodes of the run"
    )
    parser.add_argument(
        "--node-rank",
        type=options.count,
        default=0,
        metavar="R",
        help="number of this node, from 0, the head",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=options.positive_int,
        default=1,
        metavar="K",
        help="ranks of each node, for the checks (the command starts them)",
    )
    parser.add_argument(
        "--port",
        type=options.port,
        default=29500,
        metavar="P",
        help="port of the head, for the checks",
    )
    parser.add_argument(
        "--head",
        default="",
        metavar="ADDR",
        help="address of the head, which determines this node's network interface "
        "(default: none; required with several nodes)",
    )
    parser.add_argument(
        "--interface",
        default="",
        metavar="IF",
        help="network interface that reaches the other nodes "
        "(default: the one whose route leads to the head)",
    )


def parse(argv: list[str]) -> Options:
    """Return the options of the launcher, without those of the command that it starts.

    Raises UsageError with all contradictions between the options.
    """
    opts = build_parser().parse(argv)
    problems = Problems()
    if opts.node_rank >= opts.nnodes:
        problems.add(
            f"--node-rank {opts.node_rank}: the run has {units.counted(opts.nnodes, 'node')}",
            expected=f"0 to {opts.nnodes - 1}, a different number on every node",
        )
    if opts.nnodes > 1 and not opts.head:
        problems.add(
            "--head is missing: the address of node 0",
            expected="the option, or MASTER_ADDR in the environment of launch/multi_node.sh",
        )
    problems.raise_if_any()
    return opts


def read_stage_options(words: list[str]) -> Config:
    """Return the options of stage 04. Raises UsageError without an experiment or a dataset."""
    opts = command_line.parse_options(words)
    command_line.require_names(opts, hint="options of stage 04 follow `--`")
    return opts


def name_bench(opts: Options) -> str:
    """Return a name for the notes of a bench, the same on all nodes of a launch and on no others.

    Several launches may measure different nodes at the same time, in one directory.
    """
    return re.sub(r"[^\w.-]", "_", f"bench-{opts.head}-{opts.port}")


def find_script(command: list[str]) -> int:
    """Return the index of stage 04's script in a command.

    Raises UsageError if the command does not run stage 04, or gives it no options.
    """
    script = next(
        (i for i, word in enumerate(command) if Path(word).name == command_line.SCRIPT), None
    )
    if script is None:
        raise UsageError(
            f"the command after `--` does not run {command_line.SCRIPT}",
            found=shlex.join(command) or "nothing",
        )
    if script == len(command) - 1:
        raise command_line.missing_dashes_error("-e exp -d hf_datasets/corpus")
    return script


def print_command(opts: Options, command: NodeCommand) -> None:
    """Print the command of this node, with the variables that it sets."""
    words = [
        *(f"{name}={value}" for name, value in command.environment.items()),
        commands.shell(*command.words),
    ]
    node = f"node {opts.node_rank} of {opts.nnodes}, " if opts.nnodes > 1 else ""
    restarts = units.counted(opts.max_restarts, "restart")
    print(
        f"launcher: {node}in {Path.cwd()}, at most {restarts} without a newer checkpoint\n"
        f"  {' '.join(words)}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    """Print the command and, without --dry-run, supervise it; exit with the run's code."""
    problems = Problems()
    (launcher_words, words) = command_line.split_at_dashes(argv)
    opts = problems.collect(lambda: parse(launcher_words))
    script = find_script(words)
    config = problems.collect(lambda: read_stage_options(words[script + 1 :]))
    if opts and config:
        from lib.train import batch_division

        problems.collect(
            lambda: batch_division.require_divisible(config, opts.nnodes * opts.nproc_per_node)
        )
    problems.raise_if_any()
    assert opts and config  # or a problem would have been raised
    environment = {} if opts.nnodes == 1 else network.interface_variables(opts.head, opts.interface)
    command = NodeCommand(words, environment, opts.save_seconds)
    keeps_files = choose_kind(config).keeps_files
    save_dir = command_line.parse_typed(words[script + 1 :]).save_dir or OUTPUTS
    name = config.experiment_name if keeps_files else name_bench(opts)
    experiment = Experiment(save_dir.absolute(), name)
    print_command(opts, command)
    if opts.dry_run:
        print("dry run: nothing was started")
        return
    os.environ.setdefault(launcher.MARK, liveness.process_identity(os.getpid()))
    directory = experiment.root.parent / ".launch" / experiment.root.name
    board = NoteBoard(directory if opts.nnodes > 1 else None, opts.node_rank)
    board.require_writable()
    trains = keeps_files and not (config.prepare_only or config.dry_run)
    node: NodeLauncher = Follower(command, board, opts.wait_seconds)
    if opts.node_rank == HEAD:
        node = Head(
            command,
            board,
            opts.wait_seconds,
            opts.nnodes,
            experiment,
            opts.max_restarts,
            opts.backoff,
            EndCommand(opts.on_end if trains else "", opts.on_end_seconds, experiment),
        )

    def handle_signal(number: int, frame: FrameType | None) -> None:
        node.note_signal(signal.Signals(number).name)

    for number in _SIGNALS:
        signal.signal(number, handle_signal)
    code = node.run()
    if not keeps_files:
        with suppress(OSError):  # there is none, or it contains more than notes of launchers
            OUTPUTS.rmdir()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    stage.run_main(main)
