"""Check a Slurm cluster before you submit a run, from its login node.

  python launch/check.py slurm --nodes 4 -- --partition=gpu --gpus-per-node=8
  python launch/check.py slurm --nodes 4 --dry-run -- --partition=gpu    # print the commands

The options after `--` are sbatch's options for the run. Options in launch/slurm.sbatch and in
sbatch's variables count as well. The check asks the controller for the partition, its nodes and
their GPUs, and for the time at which a job of launch/slurm.sbatch could start. Then one short job
runs `launch/check.py network` on the nodes: GPUs, versions, bandwidth, the shared directories. It
changes nothing else. Exit codes: 0 ready, 5 a warning (with --fail-on warning), 6 an error, 2
without Slurm.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.checks import findings
from launch.checks.findings import ERROR, INFO, WARNING, Finding
from launch.supervision import network
from lib.core import commands, log, options, units
from lib.core.errors import UsageError
from lib.core.nvidia import ToolError, run_tool
from lib.core.options import Options

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ("scontrol", "sbatch", "srun")
_READY = {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"}
# States of nodes that can still get a job; Slurm starts cloud nodes when a job needs them.
_HARMLESS = {"CLOUD", "POWERED_DOWN", "POWERING_UP", "POWERED_UP", "COMPLETING", "PLANNED"}
_GPUS = re.compile(r"gpu(?::([\w.-]+))?:(\d+)(?![\w.:-])")
_BUSY = re.compile(r"Requested nodes are busy|Unable to allocate resources|Immediate execution")
_ONLY_SBATCH = {"--requeue", "--no-requeue", "--parsable", "--wait", "-W", "--test-only"}
# Options that decide on which nodes a job runs.
_PLACING = re.compile(
    r"--(partition|account|qos|gres|gpus-per-node|constraint|reservation|nodelist|exclude)\b"
    "|-[pACwx]"
)
_ON_CPUS = re.compile(r"ranks? on \d+ nodes?, CPUs")
_JOB_MINUTES = "15"
# The arguments are a file that the node must see ($0), and the command.
_ON_NODE = '[[ -e $0 ]] || { echo "error: $(hostname) does not see $0" >&2; exit 6; }; exec "$@"'
_SHARED = (
    "put the project and its data on a file system that all nodes mount, and start the check there"
)


@dataclass(frozen=True)
class SlurmNode:
    """A node as the controller reports it. gpus: number by type ("" if GRES names no type)."""

    name: str
    states: frozenset[str]
    reason: str
    partitions: frozenset[str]
    gpus: dict[str, int]

    @property
    def is_usable(self) -> bool:
        """Return whether the node can get a job, now or after the current one."""
        return bool(self.states & _READY) and self.states <= _READY | _HARMLESS


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__, "[options] -- OPTIONS OF SBATCH")
    parser.prog = "check.py slurm"
    parser.add_argument(
        "--nodes", type=options.positive_int, default=1, metavar="N", help="nodes of the run"
    )
    parser.add_argument(
        "--wait-minutes",
        type=options.positive,
        default=5.0,
        metavar="MIN",
        help="minutes that the short job may wait for its nodes",
    )
    parser.add_argument(
        "--save-dir",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="parent directory of the runs, which all nodes must share",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="directory of prepared models and token stores",
    )
    findings.add_options(parser)
    options.add_config(parser, "print the commands and run none")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Check the cluster for a run. argv: the options, then `--` and sbatch's options."""
    at = argv.index("--") if "--" in argv else len(argv)
    opts = parse(argv[:at])
    job = [*read_placement(ROOT / "launch" / "slurm.sbatch"), *argv[at + 1 :]]
    if opts.dry_run:
        for command in (_list_partitions(), _list_nodes(), format_test_command(job, opts.nodes)):
            print(commands.shell(*command))
        print(commands.shell(*format_step_command(job, opts, "FILE")))
        return
    results = check_controller(job, opts.nodes)
    if not any(finding.severity == ERROR for finding in results):
        results += check_on_nodes(job, opts)
    findings.report_findings(results, opts, "this Slurm cluster")


def read_placement(script: Path) -> list[str]:
    """Return the options that decide on which nodes the job of a batch script runs.

    They come from its `#SBATCH` lines and from sbatch's variables, which srun ignores.
    """
    words: list[str] = []
    for line in script.read_text(encoding="utf-8").splitlines():
        if line.startswith("#SBATCH "):
            directive = shlex.split(line, comments=False)[1:]
            words += directive if _PLACING.match(directive[0]) else []
    variables = [
        f"--{name.removeprefix('SBATCH_').lower().replace('_', '-')}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("SBATCH_")
    ]
    return [*words, *(word for word in variables if _PLACING.match(word))]


def check_controller(job: Sequence[str], nodes: int) -> list[Finding]:
    """Return findings about the partition of a job and its nodes, as the controller reports them.

    Raises UsageError without Slurm on this machine.
    """
    try:
        partitions = [*map(_parse_fields, _list_lines(_list_partitions(), "PartitionName"))]
        cluster_nodes = [*map(_parse_node, _list_lines(_list_nodes(), "NodeName"))]
    except ToolError as error:
        if not all(map(shutil.which, _TOOLS)):
            raise UsageError(
                f"this machine cannot query Slurm: {error}", expected="a login node of the cluster"
            ) from None
        return [Finding(ERROR, "controller", str(error), "scontrol ping")]
    results, name = _check_partition(partitions, job, nodes)
    if name:
        members = [node for node in cluster_nodes if name in node.partitions]
        results += _check_nodes(members, name, nodes)
        results += _check_gpus([node for node in members if node.is_usable], job, nodes)
    return [*results, _check_submission(job, nodes)]


def _list_partitions() -> list[str]:
    return ["scontrol", "show", "partition", "--oneliner"]


def _list_nodes() -> list[str]:
    return ["scontrol", "show", "node", "--oneliner"]


def _list_lines(command: list[str], key: str) -> list[str]:
    """Return the lines with a key that scontrol prints; none for `No nodes in the system`."""
    return [line for line in run_tool(*command).splitlines() if f"{key}=" in line]


def _parse_fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _parse_node(line: str) -> SlurmNode:
    fields = _parse_fields(line)
    states = fields.get("State", "UNKNOWN")
    reason = re.search(r"\bReason=(.*?)(?: \[|$)", line)
    return SlurmNode(
        name=fields["NodeName"],
        # A star means that the node does not answer.
        states=frozenset(states.replace("*", "+NOT_RESPONDING").split("+")),
        reason=reason[1].strip() if reason else "",
        partitions=frozenset(fields.get("Partitions", "").split(",")),
        gpus={kind: int(count) for kind, count in _GPUS.findall(fields.get("Gres", ""))},
    )


def _find_option(job: Sequence[str], *names: str) -> str:
    """Return the value of an option of sbatch; empty if it is not given."""
    value = ""
    for word, following in itertools.pairwise([*job, ""]):
        for name in names:
            if word == name:
                value = following
            elif word.startswith(name + "=" if name.startswith("--") else name):
                value = word.removeprefix(name).removeprefix("=")
    return value


def _check_partition(
    partitions: list[dict[str, str]], job: Sequence[str], nodes: int
) -> tuple[list[Finding], str]:
    """Return findings about the partition of a job, and its name; empty if there is none."""
    by_name = {fields["PartitionName"]: fields for fields in partitions}
    typed = _find_option(job, "--partition", "-p").split(",")[0]
    name = typed or next((n for n, f in by_name.items() if f.get("Default") == "YES"), "")
    names = ", ".join(by_name) or "none"
    if name not in by_name:
        text = f"there is no partition {name}" if name else "no partition is the default"
        return [
            Finding(ERROR, "partition", f"{text}; the cluster has: {names}", "--partition=NAME")
        ], ""
    fields = by_name[name]
    if fields.get("State") != "UP":
        text = f"{name} is {fields.get('State', 'in an unknown state')}"
        remedy = f"scontrol update partitionname={name} state=up (as an administrator)"
        return [Finding(ERROR, "partition", text, remedy)], name
    most = fields.get("MaxNodes", "UNLIMITED")
    if most.isdecimal() and int(most) < nodes:
        text = f"{name} allows {most} nodes per job, and the run needs {nodes}"
        return [Finding(ERROR, "partition", text, f"another of: {names}")], name
    limit = fields.get("MaxTime", "UNLIMITED")
    return [Finding(INFO, "partition", f"{name} is up, with a time limit of {limit}")], name


def _check_nodes(members: list[SlurmNode], partition: str, nodes: int) -> list[Finding]:
    results = [
        Finding(
            WARNING,
            "nodes",
            f"{node.name} is {'+'.join(sorted(node.states))}"
            + (f": {node.reason}" if node.reason else ""),
            f"scontrol update nodename={node.name} state=resume (as an administrator)",
        )
        for node in members
        if not node.is_usable
    ]
    usable = [node for node in members if node.is_usable]
    idle = sum("IDLE" in node.states for node in usable)
    text = (
        f"{len(usable)} of {units.counted(len(members), 'node')} of {partition} can be used, "
        f"{idle} of them now"
    )
    if len(usable) < nodes:
        results.append(Finding(ERROR, "nodes", f"{text}; the run needs {nodes}", "fewer --nodes"))
    else:
        waits = "; the run waits for others to end" if idle < nodes else ""
        results.append(Finding(INFO, "nodes", text + waits))
    return results


def _find_gpus(job: Sequence[str]) -> str:
    """Return the GPUs per node that a job requests, as `type:number` or a number; "" if none."""
    gres = _find_option(job, "--gres")
    match = _GPUS.search(gres)
    from_gres = ":".join(filter(None, match.groups())) if match else ""
    return (
        _find_option(job, "--gpus-per-node", "--gpus-per-task")
        or from_gres
        or ("1" if "gpu" in gres.split(",") else "")
    )


def _check_gpus(usable: list[SlurmNode], job: Sequence[str], nodes: int) -> list[Finding]:
    requested = _find_gpus(job)
    most = max((sum(node.gpus.values()) for node in usable), default=0)
    if most and not requested and not _find_option(job, "--gpus", "-G"):
        text = (
            f"the nodes have {units.counted(most, 'GPU')}, but the job requests none; a cluster "
            "that gives jobs only the devices they request hides the GPUs"
        )
        return [Finding(WARNING, "GPUs", text, f"--gpus-per-node={most}")]
    kind, _, count = requested.rpartition(":")
    if count.isdecimal() and int(count):
        fitting = [
            node
            for node in usable
            if (node.gpus.get(kind, 0) if kind else sum(node.gpus.values())) >= int(count)
        ]
        if len(fitting) < nodes:
            text = (
                f"{len(fitting)} of {units.counted(len(usable), 'node')} have {requested} GPUs in "
                f"GRES; the run needs {nodes}"
            )
            return [Finding(ERROR, "GPUs", text, "sinfo --Node --format '%N %G'")]
        usable = fitting
    kinds = {tuple(sorted(node.gpus.items())) for node in usable}
    shown = "; ".join(
        ", ".join(f"{number} {name or 'GPUs'}" for name, number in group) or "no GPUs"
        for group in sorted(kinds)
    )
    if len(kinds) > 1:
        remedy = "--constraint or --nodelist for nodes of one kind"
        return [Finding(WARNING, "GPUs", f"the nodes differ: {shown}", remedy)]
    if not any(kinds):
        return [Finding(INFO, "GPUs", "Slurm lists no GPUs for these nodes (GRES)")]
    return [Finding(INFO, "GPUs", f"{shown} per node")]


def format_test_command(job: Sequence[str], nodes: int) -> list[str]:
    """Return the command that prints when a job of launch/slurm.sbatch could start."""
    script = [str(ROOT / "launch" / "slurm.sbatch"), "-e", "check", "-d", "check"]
    return ["sbatch", f"--nodes={nodes}", *job, "--test-only", *script]


def _check_submission(job: Sequence[str], nodes: int) -> Finding:
    command = format_test_command(job, nodes)
    process = subprocess.run(command, capture_output=True, text=True)
    text = (process.stderr.strip() or process.stdout.strip() or "no answer").splitlines()[-1]
    text = re.sub(r"^(sbatch: |allocation failure: |error: )*", "", text)
    if process.returncode:
        return Finding(ERROR, "submission", text, commands.shell(*command))
    return Finding(INFO, "submission", text)


def format_step_command(job: Sequence[str], opts: Options, probe: str) -> list[str]:
    """Return the srun command that checks the nodes. probe: a file that they must see."""
    container = []
    python = sys.executable
    if image := os.environ.get("CONTAINER_IMAGE"):
        more = os.environ.get("CONTAINER_MOUNTS", "")
        mounts = [f"{ROOT}:{ROOT}", f"{Path.cwd()}:{Path.cwd()}", *([more] if more else [])]
        container = [
            f"--container-image={image}",
            f"--container-workdir={Path.cwd()}",
            f"--container-mounts={','.join(mounts)}",
        ]
        python = os.environ.get("PYTHON", "python3")
    return [
        *("srun", f"--nodes={opts.nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0"),
        *(word for word in job if word not in _ONLY_SBATCH),
        *(
            "--job-name=check",
            f"--time={_JOB_MINUTES}",
            f"--immediate={60 * opts.wait_minutes:.0f}",
        ),
        *("--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=60", *container),
        *("bash", "-c", _ON_NODE, probe, python, str(ROOT / "launch" / "check.py"), "slurm-node"),
        *("--save-dir", str(opts.save_dir), "--cache-dir", str(opts.cache_dir)),
        *("--fail-on", opts.fail_on),
    ]


def check_on_nodes(job: Sequence[str], opts: Options) -> list[Finding]:
    """Run the check of the network on the nodes, and return its result as findings."""
    probe = Path(f".check-{time.time_ns()}").absolute()
    probe.touch()
    step = format_step_command(job, opts, str(probe))
    log.info(f"on {units.counted(opts.nodes, 'node')}: {commands.shell(*step[:5])} …")
    output = ""
    process = subprocess.Popen(
        step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            output += line
            log.info(f"  | {line.rstrip()}")
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)  # srun ends its job
        process.wait()
        raise
    finally:
        probe.unlink(missing_ok=True)
    if not code and _find_gpus(job) and _ON_CPUS.search(output):
        text = f"the job requests {_find_gpus(job)} GPUs per node, but its processes find none"
        return [Finding(ERROR, "job on the nodes", text, "run `nvidia-smi` there with srun")]
    if not code:
        return [Finding(INFO, "job on the nodes", "found no error")]
    if _BUSY.search(output):
        text = f"not checked: the nodes were not free within {opts.wait_minutes:g} minutes"
        return [Finding(WARNING, "job on the nodes", text, "--wait-minutes, or try again later")]
    if "does not see" in output:
        return [
            Finding(ERROR, "shared directory", "a node does not see the current directory", _SHARED)
        ]
    text = f"failed with exit code {code}; its findings are above"
    return [Finding(ERROR, "job on the nodes", text, commands.shell(*step[:-7], "…"))]


def check_node(argv: list[str]) -> None:
    """Start the ranks of `check.py network` on a node of a Slurm step, as a run would."""
    names = run_tool("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
    first = names.split()[0]
    address = _parse_fields(run_tool("scontrol", "show", "node", "--oneliner", first))["NodeAddr"]
    os.environ.update(network.interface_variables(address, ""))
    command = [
        *(sys.executable, str(ROOT / "launch" / "torchrun.py")),
        *("--nnodes", os.environ["SLURM_JOB_NUM_NODES"], "--node-rank", os.environ["SLURM_NODEID"]),
        *("--nproc-per-node", str(_count_ranks()), "--master-addr", address),
        *("--master-port", str(20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000)),
        *(str(ROOT / "launch" / "check.py"), "network", *argv),
    ]
    os.execv(command[0], command)


def _count_ranks() -> int:
    """Return the number of GPUs that this process may use, or 1 on the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([word for word in visible.split(",") if word]))
    try:
        return max(1, run_tool("nvidia-smi", "--list-gpus").count("GPU "))
    except ToolError:
        return 1
