"""A node and the operators for the API server of the tests: pods run as processes of this machine.

The volume is a directory whose path is also that of the mount in the pod, so a job must be given
this path (--mount-path) and the checkout (--code-dir).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.kube_cluster import make_condition
from tests.cloud.kube_exec import Call
from tests.cloud.kube_server import Cluster, Object
from tests.conftest import ROOT

_GRACE_S = 20.0
_VARIABLE = re.compile(r"\$(?:\$|\((\w+)\))")


def list_pods(kube: Cluster) -> list[str]:
    """Return the names of all pods."""
    return [name for plural, _, name in kube.objects if plural == "pods"]


@pytest.fixture
def node(kube: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Yield a node that runs the pods of this test, whose own directory is not the volume."""
    volume = tmp_path / "volume"
    volume.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    node = Node(kube, volume)
    yield node
    node.stop()


class Node:
    """Runs the pods of a cluster. calls: settings of the next calls of `kubectl exec`, in order.

    A setting is a mapping of attributes of `Call`. processes: by the name of the pod.
    """

    def __init__(self, cluster: Cluster, volume: Path) -> None:
        self.volume = volume
        self.calls: list[dict[str, int]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cluster = cluster
        cluster.on_create = self._start_job
        cluster.on_pod = lambda cluster, pod: self._start(pod)
        cluster.on_delete = lambda cluster, pod: self._end(pod["metadata"]["name"])
        cluster.on_exec = self.run_call

    def options(self) -> tuple[str, ...]:
        """Return the options with which pods of a job can run here."""
        return ("--mount-path", str(self.volume), "--code-dir", str(ROOT), "--image", "i:1")

    def stop(self) -> None:
        """Kill the processes of all pods."""
        for process in self.processes.values():
            _kill_group(process)
            process.wait()

    def _start_job(self, cluster: Cluster, job: Object) -> None:
        """Create the pods of a job as its operator would."""
        name = job["metadata"]["name"]
        pods = []
        for rank, (pod_name, template, variables) in enumerate(_list_pods(cluster, job)):
            metadata = {**template.get("metadata", {}), "name": pod_name}
            metadata.setdefault("labels", {})
            pod = cluster.add(
                "pods",
                {"metadata": metadata, "spec": template["spec"]},
                job["metadata"]["namespace"],
            )
            pods.append(pod)
            self._start(pod, {**variables, "HOSTNAME": f"{name}-{rank}"})
        threading.Thread(target=self._watch_job, args=(job, pods), daemon=True).start()

    def _watch_job(self, job: Object, pods: list[Object]) -> None:
        """Set the condition of a job once its pods have ended."""
        ends = ("Succeeded", "Failed")
        while not all(pod["status"].get("phase") in ends for pod in pods):
            time.sleep(0.05)
        good = all(pod["status"]["phase"] == "Succeeded" for pod in pods)
        success = "Succeeded" if job["kind"] == "PyTorchJob" else "Complete"
        condition = success if good else "Failed"
        with self._cluster.lock:
            job.setdefault("status", {})["conditions"] = [make_condition(condition)]

    def _start(self, pod: Object, variables: dict[str, str] | None = None) -> None:
        name = pod["metadata"]["name"]
        [container] = pod["spec"]["containers"]
        [claim] = [v for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts[claim["name"]] == str(self.volume), mounts
        words = [*container["command"], *container.get("args", [])]
        self._cluster.logs[name] = []
        try:
            process = subprocess.Popen(
                [_VARIABLE.sub(_expand_variables, word) for word in words],
                cwd=container["workingDir"],
                env=self._environment(container) | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            end = {"exitCode": 128, "reason": "StartError", "message": f"exec: {error}"}
            _set_state(pod, "Failed", {"terminated": end})
            return
        self.processes[name] = process
        self._cluster.following.add(name)
        _set_state(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        threading.Thread(target=self._watch, args=(pod, process), daemon=True).start()

    def _watch(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        """Collect the output of a pod, and set its state once its process has ended."""
        name = pod["metadata"]["name"]
        assert process.stdout is not None
        for line in process.stdout:
            self._cluster.logs[name].append(line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        end = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Error" if code else "Completed",
        }
        with self._cluster.lock:
            _set_state(pod, "Failed" if code else "Succeeded", {"terminated": end})
            self._cluster.following.discard(name)

    def _end(self, name: str) -> None:
        """End a pod as its kubelet would: SIGTERM to its first process, later SIGKILL to all."""
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        timer = threading.Timer(_GRACE_S, _kill_group, [process])
        timer.daemon = True
        timer.start()

    def run_call(self, cluster: Cluster, pod: Object, call: Call) -> None:
        """Run the command of a `kubectl exec` in a pod, with the next setting of `calls`."""
        for name, value in (self.calls.pop(0) if self.calls else {}).items():
            setattr(call, name, value)
        [container] = pod["spec"]["containers"]
        call.run(Path(container["workingDir"]), self._environment(container))

    def _environment(self, container: Object) -> dict[str, str]:
        variables = {
            variable["name"]: _VARIABLE.sub(_expand_variables, variable["value"])
            for variable in container.get("env", [])
            if "value" in variable
        }
        defaults = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        # The tests' guard against the network is on PYTHONPATH.
        path = ":".join(filter(None, (variables.pop("PYTHONPATH", ""), os.environ["PYTHONPATH"])))
        variables.pop("NCCL_SOCKET_IFNAME", None)
        return {**os.environ, **defaults, **variables, "PYTHONPATH": path}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a pod's first process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _expand_variables(match: re.Match[str]) -> str:
    """Return what Kubernetes makes of `$$` and `$(NAME)`; no variable is known here."""
    return match[0] if match[1] else "$"


def _set_state(pod: Object, phase: str, state: Object) -> None:
    [container] = pod["spec"]["containers"]
    status = {"name": container["name"], "restartCount": 0, "state": state}
    pod["status"] = {
        "phase": phase,
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{**status, "started": "running" in state}],
    }


def _list_pods(cluster: Cluster, job: Object) -> list[tuple[str, Any, dict[str, str]]]:
    """Return name, template and variables of each pod of a job."""
    name = job["metadata"]["name"]
    spec = job["spec"]
    if job["kind"] == "Job":
        return [(f"{name}-x1y2z", spec["template"], {})]
    if job["kind"] == "PyTorchJob":
        worker = spec["pytorchReplicaSpecs"]["Worker"]
        return [
            (
                f"{name}-worker-{rank}",
                worker["template"],
                {"PET_RDZV_ENDPOINT": "127.0.0.1:23456", "PET_NODE_RANK": str(rank)},
            )
            for rank in range(worker["replicas"])
        ]
    assert job["kind"] == "TrainJob"
    runtime = cluster.objects["clustertrainingruntimes", "", spec["runtimeRef"]["name"]]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return [
        (
            f"{name}-node-0-{rank}",
            replicated["template"]["spec"]["template"],
            {"PET_MASTER_ADDR": "127.0.0.1", "JOB_COMPLETION_INDEX": str(rank)},
        )
        for rank in range(spec["trainer"]["numNodes"])
    ]
