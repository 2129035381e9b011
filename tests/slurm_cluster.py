"""A real Slurm on this machine: munge, a controller, and a slurmd per node, all of them private.

Each node is a PID namespace: killing its first process ends all that runs there, as a power cut
does. All addresses are loopback.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "unshare", "setpriv")
_SETTLES_S = 3.0
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_AS_NODE = (*_WITH_PARENT, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# `low` is what `high` preempts: with time to save, or with Slurm's KillWait alone.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=5
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait=30
OverTimeLimit=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=low_at_once Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL PriorityTier=10
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


def missing() -> str:
    """Return why there can be no cluster here, or an empty string."""
    absent = [tool for tool in _TOOLS if not shutil.which(tool)]
    if absent:
        return f"needs Slurm and munge (Debian: slurm-wlm, munge); absent: {', '.join(absent)}"
    if os.geteuid() or subprocess.run([*_AS_NODE, "true"], capture_output=True).returncode:
        return "needs root and the right to make namespaces"
    return ""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    """Return once the condition holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


class SlurmCluster:
    """Nodes n1, n2, … of two cores each. slurmd_timeout: seconds until a silent node is down."""

    def __init__(self, root: Path, nodes: int, slurmd_timeout: int = 15) -> None:
        self._root = root
        names = [f"n{number}" for number in range(1, nodes + 1)]
        ports = _free_ports(1 + nodes)
        host = socket.gethostname()
        configuration = _CONFIGURATION.format(
            root=root, host=host, port=ports[0], slurmd_timeout=slurmd_timeout
        )
        for name, port in zip(names, ports[1:], strict=True):
            configuration += _NODE.format(name=name, host=host, port=port)
        (root / "slurm.conf").write_text(configuration)
        (root / "state").mkdir()
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "-1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._stack = ExitStack()
        self._nodes: dict[str, subprocess.Popen] = {}
        self._pending: dict[tuple[str, str], float] = {}
        try:
            self._start_munge()
            self._start(*_WITH_PARENT, "slurmctld", "-D", log="slurmctld")
            for name in names:
                self.start_node(name)
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def _start_munge(self) -> None:
        key = self._root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        self._start(
            *_WITH_PARENT,
            "munged",
            "--foreground",
            "--force",
            *(f"--{option}={self._root / name}" for option, name in files.items()),
            log="munged",
        )
        wait_until((self._root / "munge.socket").exists, "munged listens")

    def _start(self, *command: str, log: str) -> subprocess.Popen:
        with (self._root / f"{log}.out").open("ab") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def start_node(self, name: str) -> None:
        """Start a node. Its first process is a shell, which also buries what others leave."""
        self._nodes[name] = self._start(
            *_AS_NODE, "bash", "-c", 'slurmd -D -N "$0" & wait "$!"', name, log=name
        )

    def kill_node(self, name: str) -> None:
        """End all processes of a node at once."""
        self._nodes[name].kill()
        self._nodes[name].wait()

    def stop(self) -> None:
        """End everything."""
        self._stack.close()

    def run(self, *command: object, cwd: Path | None = None, **environment: str) -> str:
        """Return what a command of Slurm's printed; it must succeed."""
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: object, cwd: Path, **environment: str) -> str:
        """Return the number of a job submitted by sbatch from a directory."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment)

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm knows about a job: JobState, ExitCode, Restarts, PreemptTime …"""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def hurry(self, job: str) -> dict[str, str]:
        """Return the facts; a job that is queued again need not wait its two minutes.

        But a few seconds: the end of its first start would else be taken for that of the second.
        """
        facts = self.facts(job)
        if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
            since = self._pending.setdefault((job, facts["Restarts"]), time.monotonic())
            if time.monotonic() - since > _SETTLES_S:
                subprocess.run(
                    ["scontrol", "update", f"jobid={job}", "StartTime=now"],
                    env=self.environment,
                    capture_output=True,
                )
        return facts

    def ended(self, job: str) -> dict[str, str]:
        """Return the facts of a job that has ended for good, however often it is queued again."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        wait_until(lambda: self.hurry(job)["JobState"] in final, f"job {job} ends", 600)
        return self.facts(job)

    def cancel_all(self) -> None:
        """End the jobs that are there, and wait for nodes that were started again."""
        self.run("scancel", "--user=root")
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        idle = str(len(self._nodes))
        wait_until(
            lambda: idle in self.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D"),
            "all nodes are idle",
        )


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def cluster(nodes: int, **how: int) -> Iterator[SlurmCluster]:
    """Yield a cluster whose files lie where paths are short, as sockets want them."""
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as root:
        running = SlurmCluster(Path(root), nodes, **how)
        try:
            yield running
        finally:
            running.stop()
