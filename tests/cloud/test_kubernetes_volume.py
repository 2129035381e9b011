# covers: launch/cloud/kube/volume_commands.py, launch/cloud/kube/volume_pod.py
"""Test the commands that work beside the data, in pods that are processes of this machine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from launch.cloud.kube import volume_commands
from launch.cloud.kube.volume_pod import find_in_image
from tests.cloud.kube_cluster import SCRIPT, make_pod, run_launcher
from tests.cloud.kube_node import Node, list_pods
from tests.cloud.kube_server import Cluster, Object
from tests.conftest import ROOT


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_command_runs_beside_the_data_and_returns_its_code(node: Node, kube: Cluster) -> None:
    (node.volume / "outputs").mkdir()
    script = "import json, os, sys; print(json.dumps([os.listdir(), sys.argv[1:]]))"
    odd = ["$HOME $(PATH) $$ *", "--pvc", "a b"]
    result = run_launcher("run", *node.options(), "--", "python", "-c", script, *odd)
    assert json.loads(result.stdout) == [["outputs"], odd] and "pod volume-" in result.stderr
    result = run_launcher(
        "run", *node.options(), "--", "sh", "-c", "echo x >&2; exit 75", expect=75
    )
    assert "exit code 75" in result.stderr and result.stdout == "x\n"
    result = run_launcher("run", *node.options(), "--", "no-such-program", expect=128)
    assert "'no-such-program'" in result.stderr
    assert "`--` is missing" in run_launcher("run", *node.options(), expect=2).stderr
    assert not list_pods(kube)


def test_scripts_of_this_project_are_those_of_the_image(node: Node) -> None:
    words = ("python", "05_export_checkpoint.py", "--config=recipes/llama-2-7b.yaml", "lib/none.py")
    code = "/opt/pipeline"
    assert [find_in_image(word, code) for word in words] == [
        "python",
        f"{code}/05_export_checkpoint.py",
        f"--config={code}/recipes/llama-2-7b.yaml",
        "lib/none.py",
    ]
    result = run_launcher(
        "run", *node.options(), "--", "python", "launch/monitor.py", "outputs/exp", expect=2
    )
    assert "there is no run" in result.stdout  # in the pod, whose streams are one


def test_pods_are_valid_and_request_only_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def render(*words: str) -> Object:
        shown = run_launcher(*words, "--image", "i:1", "--dry-run", "--", "date")
        pod = yaml.safe_load(shown.stdout)
        kubernetes_validate.validate(pod, "1.34", strict=True)
        return pod

    plain = render("run", "--job-name", "exp", "--nodes", "4", "--instance-type", "p5.48xlarge")
    assert "nvidia.com/gpu" not in json.dumps(plain["spec"]["containers"]) and (
        "nodeSelector" not in plain["spec"]
    )
    assert plain["metadata"]["name"].startswith("exp-")
    assert plain["metadata"]["labels"]["app.kubernetes.io/instance"] != "exp"  # not of that job
    [container] = plain["spec"]["containers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    full = render(
        *("run", "--gpus-per-node", "2", "--instance-type", "p5.48xlarge", "--kind", "hyperpod"),
        *("--token-secret", "hub", "--bucket-pvc", "b", "--image-pull-secret", "s"),
    )
    [container] = full["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert full["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    assert "NVIDIA_VISIBLE_DEVICES" not in json.dumps(container["env"])
    assert render("shell")["spec"]["containers"][0]["command"] == [*volume_commands._IDLE]
    late = run_launcher("--job-name", "exp", "run", "--", "date", expect=2)
    assert "the first word" in late.stderr


def test_output_is_printed_once_over_lost_connections(
    node: Node, kube: Cluster, tmp_path: Path
) -> None:
    """The command prints until all connections were cut: on a busy machine that takes long."""
    kube.log_cuts += [3, 0, 8]
    stop = tmp_path / "stop"

    def wait_for_cuts() -> None:
        deadline = time.monotonic() + 60
        while kube.log_cuts and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.touch()

    waiting = threading.Thread(target=wait_for_cuts)
    waiting.start()
    script = f"""
import pathlib, time
i = 0
while i < 20 or not pathlib.Path({str(stop)!r}).exists():
    print("line", i // 2)
    time.sleep(0.2)
    i += 1
print("the end of", i)"""
    result = run_launcher("run", *node.options(), "--", "python", "-u", "-c", script)
    waiting.join()
    *lines, end = result.stdout.splitlines()
    assert lines == [f"line {i // 2}" for i in range(len(lines))] and len(lines) >= 20
    assert end == f"the end of {len(lines)}"
    assert not kube.log_cuts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_deletes_the_pod(node: Node, kube: Cluster, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "run", *node.options(), "--", "sleep", "600"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: node.processes)
    wait_until(lambda: any("/log" in request for request in kube.requests))
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not list_pods(kube)
    [command] = node.processes.values()
    assert command.wait(30) == -signal.SIGTERM


def test_a_pod_that_cannot_start_is_explained_and_deleted(node: Node, kube: Cluster) -> None:
    def refuse(cluster: Cluster, pod: Object) -> None:
        waiting = {"reason": "ErrImagePull", "message": "pull access denied, no such repository"}
        shown = make_pod("x", pod["metadata"]["name"], "Pending", state={"waiting": waiting})
        pod["status"] = shown["status"]

    kube.on_pod = refuse
    result = run_launcher("run", *node.options(), "--", "date", expect=None)
    assert result.returncode and "does not start: image" in result.stderr
    assert not list_pods(kube)
    kube.on_pod = lambda cluster, pod: pod.update(status={"phase": "Pending"})
    result = run_launcher(
        "run", *node.options(), "--pending-minutes", "0.02", "--", "date", expect=1
    )
    assert "does not start" in result.stderr and not list_pods(kube)
    kube.on_pod = lambda cluster, pod: cluster.objects.pop(
        ("pods", "default", pod["metadata"]["name"])
    )
    result = run_launcher("run", *node.options(), "--", "date", expect=1)
    assert "no longer exists" in result.stderr


def test_a_missing_volume_is_reported_before_a_pod_exists(node: Node, kube: Cluster) -> None:
    result = run_launcher(
        "run", *node.options(), "--pvc", "other", "--namespace", "mine", "--", "date", expect=2
    )
    assert "no claim other" in result.stderr and "no namespace mine" in result.stderr
    assert "kubectl --context test create namespace mine" in result.stderr
    assert not [request for request in kube.requests if "pods" in request]


@pytest.mark.slow
def test_a_shell_needs_no_terminal(node: Node, kube: Cluster) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "shell", *node.options()],
        input="touch made; pwd; exit 3\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 3 and result.stdout.strip() == str(node.volume), result.stderr
    assert (node.volume / "made").exists() and not list_pods(kube)
    result = run_launcher(
        "shell", *node.options(), "--", "sh", "-c", "echo $0", "launch/cloud/pod.py"
    )
    assert result.stdout.strip() == f"{ROOT}/launch/cloud/pod.py"


def test_a_shell_connects_the_terminal(node: Node, kube: Cluster) -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, str(SCRIPT), "shell", *node.options()],
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 4096).decode(errors="replace")

    read_until("the pod ends with the shell")
    os.write(terminal, b"tty && echo in-$((40 + 2))\n")
    read_until("in-42")
    assert "/dev/pts/" in shown
    os.write(terminal, b"sleep 600\n")
    time.sleep(0.5)
    os.write(terminal, b"\x03")  # Ctrl-C ends the command, not the shell
    os.write(terminal, b"exit 5\n")
    assert process.wait(60) == 5
    os.close(terminal)
    assert not list_pods(kube)


def test_output_that_may_not_be_read_is_an_error(node: Node, kube: Cluster) -> None:
    kube.forbidden.append("/log")
    result = run_launcher("run", *node.options(), "--", "sleep", "60", expect=1)
    assert "Forbidden" in result.stderr and not list_pods(kube)


def test_a_pod_that_cannot_be_deleted_is_named(node: Node, kube: Cluster) -> None:
    kube.forbidden.append("DELETE")
    result = run_launcher("run", *node.options(), "--", "sh", "-c", "exit 7", expect=7)
    [pod] = list_pods(kube)
    assert f"pod {pod} was not deleted" in result.stderr
    assert f"--namespace default delete pod {pod}" in result.stderr
