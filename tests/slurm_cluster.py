"""Run a private Slurm cluster on this machine: munge, a controller, and a slurmd per node.

Each node is a PID namespace: killing its first process ends all processes in it, like a power cut.
All addresses are loopback.
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

from tests.conftest import free_port

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "unshare", "setpriv")
_SETTLE_S = 3.0
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_AS_NODE = (*_WITH_PARENT, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# `high` preempts jobs in `low`, with time to save, and in `low_at_once`, with KillWait alone.
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
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2{gres}\n"


def find_missing_tools() -> str:
    """Return why this machine cannot run a cluster, "" if it can."""
    absent = [tool for tool in _TOOLS if not shutil.which(tool)]
    if absent:
        return f"needs Slurm and munge (Debian: slurm-wlm, munge); missing: {', '.join(absent)}"
    if os.geteuid() or subprocess.run([*_AS_NODE, "true"], capture_output=True).returncode:
        return "needs root and the right to make namespaces"
    return ""


def wait_until(condition: Callable[[], object], description: str, seconds: float = 180) -> None:
    """Wait for a condition. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {description}"
        time.sleep(0.05)


class SlurmCluster:
    """Nodes n1, n2, … with two cores each. slurmd_timeout: seconds until a silent node is down.

    gpus: GPUs per node that Slurm reports; their devices are empty files.
    """

    def __init__(self, root: Path, nodes: int, slurmd_timeout: int = 15, gpus: int = 0) -> None:
        self._root = root
        names = [f"n{number}" for number in range(1, nodes + 1)]
        ports = [free_port() for _ in range(1 + nodes)]
        host = socket.gethostname()
        configuration = _CONFIGURATION.format(
            root=root, host=host, port=ports[0], slurmd_timeout=slurmd_timeout
        )
        if gpus:
            configuration += "GresTypes=gpu\n"
            (root / "gres.conf").write_text(f"Name=gpu Type=tiny File={root}/gpu[1-{gpus}]\n")
            for number in range(1, gpus + 1):
                (root / f"gpu{number}").touch()
        gres = f" Gres=gpu:tiny:{gpus}" if gpus else ""
        for name, port in zip(names, ports[1:], strict=True):
            configuration += _NODE.format(name=name, host=host, port=port, gres=gres)
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
        """Start a node. Its first process is a shell, which also reaps orphaned processes."""
        self._nodes[name] = self._start(
            *_AS_NODE, "bash", "-c", 'slurmd -D -N "$0" & wait "$!"', name, log=name
        )

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once."""
        self._nodes[name].kill()
        self._nodes[name].wait()

    def stop(self) -> None:
        """Stop all nodes and servers."""
        self._stack.close()

    def run(self, *command: object, cwd: Path | None = None, **environment: str) -> str:
        """Run a command of Slurm, which must succeed, and return its output."""
        result = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            timeout=60,
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout.strip()

    def submit(self, *arguments: object, cwd: Path, **environment: str) -> str:
        """Submit a job with sbatch from a directory, and return its ID."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment)

    def facts(self, job: str) -> dict[str, str]:
        """Return Slurm's facts about a job: JobState, ExitCode, Restarts, PreemptTime …"""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def hurry(self, job: str) -> dict[str, str]:
        """Return the facts of a job, and shorten the two minutes that a requeued job waits.

        It still waits a few seconds; otherwise Slurm takes the end of its first start for that of
        the second.
        """
        facts = self.facts(job)
        if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
            since = self._pending.setdefault((job, facts["Restarts"]), time.monotonic())
            if time.monotonic() - since > _SETTLE_S:
                subprocess.run(
                    ["scontrol", "update", f"jobid={job}", "StartTime=now"],
                    env=self.environment,
                    capture_output=True,
                )
        return facts

    def wait_for_end(self, job: str) -> dict[str, str]:
        """Wait until a job has ended for good, also if it is requeued, and return its facts."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        wait_until(lambda: self.hurry(job)["JobState"] in final, f"job {job} ends", 600)
        return self.facts(job)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until all nodes are idle, also restarted ones."""
        self.run("scancel", "--user=root")
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        idle = str(len(self._nodes))
        wait_until(
            lambda: idle in self.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D"),
            "all nodes are idle",
        )


@contextmanager
def run_cluster(nodes: int, **options: int) -> Iterator[SlurmCluster]:
    """Yield a running cluster; its directory has a short path, since it contains sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as root:
        slurm_cluster = SlurmCluster(Path(root), nodes, **options)
        try:
            yield slurm_cluster
        finally:
            slurm_cluster.stop()
