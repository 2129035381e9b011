# covers: launch/check.py, launch/checks/*.py
"""Test launch/check.py under torchrun on CPU ranks, with namespaces as nodes, and its findings."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.checks import findings, machine, node_findings
from launch.checks.findings import Finding
from tests.conftest import ROOT, free_port, run_stage

SCRIPT = ROOT / "launch" / "check.py"
PATIENT = ("--timeout", "120")


def read_report(file: Path) -> tuple[list[Finding], dict[str, Any]]:
    """Return the findings of a JSON report, and the whole report."""
    content = json.loads(file.read_text())
    return [Finding(**fields) for fields in content["findings"]], content


def join_findings(all_findings: list[Finding], check: str) -> list[str]:
    """Return the texts of a check's errors and warnings."""
    return [f.text for f in all_findings if f.check == check and f.severity != "info"]


def test_two_ranks_of_a_node_are_checked(tmp_path: Path):
    result = run_stage(
        "launch/check.py",
        "network",
        "--json",
        "a report.json",
        *PATIENT,
        cwd=tmp_path,
        ranks=2,
    )
    all_findings, content = read_report(tmp_path / "a report.json")
    assert (
        not join_findings(all_findings, "network") and content["speed"]["world"]["all_reduce"] > 0
    )
    assert len(content["nodes"]["0"]["compute"]) == 2
    assert "2 ranks on 1 node" in result.stdout and "is ready" in result.stdout
    assert {f.check for f in all_findings if "not checked" in f.text} >= {"EFA"}
    assert [path.name for path in tmp_path.iterdir()] == ["a report.json"]  # no probe is left


LEAVE_SLOWLY = """
import os
import time

from launch.checks.ranks import AllRanks


class SlowStore:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, *arguments):
        time.sleep(1)
        self.store.wait(*arguments)


launch = AllRanks(60)
if launch.rank:
    launch.store = SlowStore(launch.store)
launch.leave()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_host_of_the_store_leaves_last(ranks: int):
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE_SLOWLY],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(ranks)
    ]
    assert [process.wait(100) for process in processes] == [0] * ranks


def test_one_machine_dry_run_and_bad_usage(tmp_path: Path):
    result = run_stage("launch/check.py", "machine", "--dry-run", cwd=tmp_path)
    assert "nvidia-smi" in result.stdout and not list(tmp_path.iterdir())
    result = run_stage("launch/check.py", "machine", "--min-bandwith", "3", cwd=tmp_path, expect=2)
    assert "--min-bandwidth" in result.stderr and "launch/check.py machine --help" in result.stderr
    result = run_stage("launch/check.py", "network", cwd=tmp_path, expect=2)
    assert "torchrun has not started" in result.stderr and "check.py machine" in result.stderr
    result = run_stage("launch/check.py", "netwrk", cwd=tmp_path, expect=2)
    assert "'machine', 'network', 'framework', 'setup', 'slurm'" in result.stderr
    result = run_stage(
        "launch/check.py",
        "machine",
        "--save-dir",
        "/proc/self",
        *PATIENT,
        cwd=tmp_path,
        expect=findings.EXIT_ERROR,
    )
    assert "disk: node 0" in result.stdout and "not ready: 1 error" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_a_network_below_the_minimum_bandwidth_fails(tmp_path: Path):
    result = run_stage(
        "launch/check.py",
        "network",
        "--min-bandwidth",
        "1e6",
        *PATIENT,
        cwd=tmp_path,
        ranks=2,
        expect=1,
        fresh=True,
    )  # torchrun returns 1 for any failure
    assert "expected 1e+06" in result.stdout and "exitcode  : 6" in result.stderr


def start_agents(
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    *arguments: str,
    address: str,
    script: Path = SCRIPT,
) -> list[subprocess.Popen]:
    """Start torchrun once per node, each with its `prefix`, `cwd` and `env`; output to a file."""
    port = free_port()
    started = []
    for rank, node in enumerate(nodes):
        command = [
            *node.get("prefix", ()),
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(nodes)}",
            f"--node-rank={rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
            "--nproc-per-node=1",
            str(script),
            "network",
            *arguments,
        ]
        with (tmp_path / f"out-{rank}").open("w") as out:
            started.append(
                subprocess.Popen(
                    command,
                    cwd=node["cwd"],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "CUDA_VISIBLE_DEVICES": "-1",
                        "OMP_NUM_THREADS": "1",
                        **node.get("env", {}),
                    },
                )
            )
    return started


def wait_for_agents(started: list[subprocess.Popen], tmp_path: Path, expect: int) -> str:
    """Wait for all agents, and return the output of the agent of rank 0."""
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    outputs = [(tmp_path / f"out-{rank}").read_text() for rank in range(len(started))]
    assert codes == [expect] * len(started), "\n".join(outputs)
    return outputs[0]


SHIFTED = """
import os, runpy, time
real = time.time
time.time = lambda: real() + float(os.environ.get("SHIFT_S", "0"))
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""


@pytest.mark.long
def test_differences_between_nodes_are_named(tmp_path: Path):
    """Two nodes have different artifacts, settings and clocks, and no shared directory."""
    (tmp_path / "shifted.py").write_text(SHIFTED)
    nodes = []
    for node in (0, 1):
        data = tmp_path / f"node {node}" / "hf_datasets" / "corpus"
        data.mkdir(parents=True)
        entry = {"path": "data.arrow", "bytes": 3, "digest": f"sha256:{node}"}
        (data / "data.arrow").write_text("abc")
        (data / "manifest.json").write_text(
            json.dumps({"kind": "dataset/1", "summary": {}, "identity": {}, "files": [entry]})
        )
        nodes.append(
            {
                "cwd": tmp_path / f"node {node}",
                "env": {
                    "SCRIPT": str(SCRIPT),
                    "SHIFT_S": str(90 * node),
                    "NCCL_ALGO": f"Ring{node}",
                    "GLOO_SOCKET_IFNAME": "lo",
                },
            }
        )
    (nodes[1]["cwd"] / "hf_datasets" / "corpus" / "data.arrow").write_text("a")
    report = tmp_path / "report.json"
    started = start_agents(
        nodes,
        tmp_path,
        "--json",
        str(report),
        *PATIENT,
        address="127.0.0.1",
        script=tmp_path / "shifted.py",
    )
    out = wait_for_agents(started, tmp_path, expect=1)
    all_findings, content = read_report(report)
    [clock] = join_findings(all_findings, "clock")
    assert "node 1" in clock and "+90" in clock
    assert any("1 bytes instead of 3" in text for text in join_findings(all_findings, "artifacts"))
    assert join_findings(all_findings, "artifact hf_datasets/corpus") and join_findings(
        all_findings, "shared directory"
    )
    [setting] = join_findings(all_findings, "setting NCCL_ALGO")
    assert "Ring0 on node 0" in setting and "Ring1 on node 1" in setting
    assert content["speed"]["pairs"]["0-1"]["all_reduce"] > 0
    assert "all-reduce above the diagonal" in out and "← " in out
    assert (
        "exitcode  : 6" in (tmp_path / "out-1").read_text()
    )  # every node fails with the same error


def run_command(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Return three nodes: network namespaces, each with an address and a host name."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        pytest.skip("needs root, iproute2 and util-linux, for network namespaces as nodes")
    mark = f"pf{os.getpid()}"
    names = [f"{mark}-{i}" for i in (1, 2, 3)]
    inside = {name: ("nsenter", f"--net=/run/netns/{name}") for name in (f"{mark}-hub", *names)}
    namespaces = []
    try:
        for name in inside:
            try:
                run_command("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            namespaces.append(name)
        hub = inside[f"{mark}-hub"]
        run_command(*hub, "ip", "link", "add", "br0", "type", "bridge")
        run_command(*hub, "ip", "link", "set", "br0", "up")
        for i, name in enumerate(names, 1):
            run_command(
                *inside[name],
                "ip",
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"v{i}",
                "netns",
                f"/run/netns/{mark}-hub",
            )
            run_command(*inside[name], "ip", "link", "set", "lo", "up")
            run_command(*inside[name], "ip", "address", "add", f"10.77.0.{i}/24", "dev", "eth0")
            run_command(*inside[name], "ip", "link", "set", "eth0", "up")
            run_command(*hub, "ip", "link", "set", f"v{i}", "master", "br0", "up")
        yield [
            {
                "cwd": tmp_path,
                "env": {"GLOO_SOCKET_IFNAME": "eth0"},
                "inside": inside[name],
                "hub": hub,
                "prefix": (
                    *inside[name],
                    "unshare",
                    "--uts",
                    "sh",
                    "-c",
                    f'hostname box-{i}; exec "$@"',
                    "sh",
                ),
            }
            for i, name in enumerate(names, 1)
        ]
    finally:
        for name in namespaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                run_command("ip", "netns", "delete", name)


@pytest.mark.long
def test_a_node_with_a_slow_link_is_named(boxes: list[dict[str, Any]], tmp_path: Path):
    for where, device in ((boxes[2]["inside"], "eth0"), (boxes[2]["hub"], "v3")):
        run_command(
            *where,
            "tc",
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            "100mbit",
            "burst",
            "64kb",
            "latency",
            "50ms",
        )
    report = tmp_path / "report.json"
    out = wait_for_agents(
        start_agents(boxes, tmp_path, "--json", str(report), *PATIENT, address="10.77.0.1"),
        tmp_path,
        expect=1,
    )
    all_findings, content = read_report(report)
    named = join_findings(all_findings, "network")
    assert any(text.startswith("node 2 (box-3): all-reduce") for text in named), named
    assert not [text for text in named if text.startswith(("node 0", "node 1"))]
    pairs = content["speed"]["pairs"]
    assert pairs["0-2"]["all_reduce"] < 0.5 * pairs["0-1"]["all_reduce"]
    [row] = [line for line in out.splitlines() if "box-3" in line and "←" in line]
    assert "network" in row


@pytest.mark.long
def test_two_nodes_that_cannot_reach_each_other_are_named(
    boxes: list[dict[str, Any]], tmp_path: Path
):
    run_command(*boxes[1]["inside"], "ip", "route", "add", "blackhole", "10.77.0.3/32")
    report = tmp_path / "report.json"
    started = start_agents(
        boxes,
        tmp_path,
        "--json",
        str(report),
        "--timeout",
        "60",
        "--seconds",
        "90",
        address="10.77.0.1",
    )
    wait_for_agents(started, tmp_path, expect=1)
    all_findings, content = read_report(report)
    assert "error" in content["speed"]["pairs"]["1-2"]
    assert "all_reduce" in content["speed"]["pairs"]["0-1"]
    assert "all_reduce" in content["speed"]["pairs"]["0-2"]
    assert any(
        "node 1 (box-2) and node 2" in text for text in join_findings(all_findings, "network")
    )


# --- findings from a node's tools

SMI = r"""#!/bin/sh
# Answers as an H100 node's tool does; lines of $SMI take the place of the healthy ones.
case "$*" in
*query-gpu=*clocks_throttle*) cat "$SMI/throttle";;
*query-gpu=*ecc*) cat "$SMI/ecc";;
*query-gpu=*) cat "$SMI/identity";;
*query-remapped-rows*) [ -f "$SMI/remap" ] && cat "$SMI/remap" || {
  echo 'Field "remapped_rows.pending" is not a valid field to query.' >&2; exit 2; };;
"nvlink --status") cat "$SMI/nvlink";;
*) exit 1;;
esac
"""
LINKS = "".join(f"\t Link {i}: 26.562 GB/s\n" for i in range(18))
HEALTHY = {
    "identity": "".join(
        f"{i}, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 1980, 31\n" for i in (0, 1)
    ),
    "throttle": "0, 0x0000000000000001\n1, 0x0000000000000000\n",
    "ecc": "0, 0\n1, 0\n",
    "remap": "00000000:53:00.0, No, No\n00000000:64:00.0, No, No\n",
    "nvlink": "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n{LINKS}" for i in (0, 1)),
}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for nvidia-smi on the PATH, and return the directory of its answers."""
    answers = tmp_path / "answers"
    tools = tmp_path / "tools"
    answers.mkdir()
    tools.mkdir()
    for name, text in HEALTHY.items():
        (answers / name).write_text(text)
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("SMI", str(answers))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return answers


def make_node_facts(**changes: Any) -> dict[str, Any]:
    """Return the facts of a healthy node."""
    return {
        "gpu": machine.query_gpus(),
        "efa": {"devices": [], "not_checked": {}},
        "shm": {"total": 64 << 30},
        "disk": {"directory": "/fsx", "free": 10**13, "write": 2e9, "read": 2e9},
        "versions": {"torch": "2.13.0"},
        "settings": {},
        "locked_memory": -1,
        "artifacts": {},
        "ranks": 2,
        "shared": True,
        "clock": {"offset_s": 0.0, "uncertainty_s": 0.001},
        "compute": {"0": 700.0, "1": 705.0},
        "throttled": {},
        **changes,
    }


def make_speeds(nodes: int, slow: tuple[int, ...] = (), by: float = 0.4) -> dict[str, Any]:
    """Return the bandwidths of nodes that are equal except for slow ones."""
    pairs = {
        f"{a}-{b}": {
            kind: 300.0 * (by if {a, b} & set(slow) else 1)
            for kind in ("all_reduce", "all_gather", "latency_us")
        }
        for a, b in itertools.combinations(range(nodes), 2)
    }
    return {
        "world": {"all_reduce": 290.0, "all_gather": 280.0, "latency_us": 20.0},
        "nodes": {},
        "pairs": pairs,
        "rounds_left_out": 0,
    }


def judge_nodes(
    facts: list[dict[str, Any]], speed: dict[str, Any] | None = None, **options: Any
) -> list[Finding]:
    """Return the errors and warnings about nodes 0, 1, …."""
    all_findings = node_findings.find_problems(
        dict(enumerate(facts)),
        speed or make_speeds(len(facts)),
        lambda node: f"node {node} (h{node})",
        options.get("least"),
    )
    assert all(f.remedy or f.run for f in all_findings if f.severity != "info")
    return [f for f in all_findings if f.severity != "info"]


def test_healthy_gpus_give_no_finding(smi: Path):
    join_findings = machine.query_gpus()
    assert join_findings["not_checked"] == {} and len(join_findings["gpus"]) == 2
    assert (
        join_findings["gpus"][0]["nvlinks"] == 18
        and join_findings["gpus"][0]["driver"] == "580.65.06"
    )
    assert not judge_nodes([make_node_facts(), make_node_facts(), make_node_facts()])


@pytest.mark.parametrize(
    ("answer", "text", "check", "severity"),
    [
        ("ecc", "0, 0\n1, 3\n", "GPU ECC", "error"),
        ("remap", "a, No, No\nb, Yes, No\n", "GPU memory rows", "warning"),
        ("remap", "a, No, No\nb, No, Yes\n", "GPU memory rows", "error"),
        ("throttle", "0, 0x0\n1, 0x0000000000000048\n", "GPU clocks", "warning"),
        ("nvlink", HEALTHY["nvlink"][:-19] + "\t Link 17: <inactive>\n", "NVLink", "error"),
        (
            "identity",
            HEALTHY["identity"].replace(
                "1, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4",
                "1, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 9000",
            ),
            "GPU memory",
            "warning",
        ),
        ("identity", HEALTHY["identity"][:-3] + "91\n", "GPU temperature", "warning"),
    ],
)
def test_a_faulty_gpu_is_named(smi: Path, answer: str, text: str, check: str, severity: str):
    (smi / answer).write_text(text)
    of_check = [f for f in judge_nodes([make_node_facts()]) if f.check == check]
    assert [f.severity for f in of_check] == [severity]
    assert "node 0 (h0), GPU 1" in of_check[0].text


def test_facts_that_a_tool_does_not_report_are_not_checked(smi: Path):
    (smi / "remap").unlink()
    (smi / "ecc").write_text("0, [N/A]\n1, [N/A]\n")
    (smi / "nvlink").write_text("")
    join_findings = machine.query_gpus()
    assert set(join_findings["not_checked"]) == {"GPU memory rows", "GPU ECC", "NVLink"}
    assert "not a valid field" in join_findings["not_checked"]["GPU memory rows"]
    (smi / "identity").write_text("Unable to determine the device handle for GPU0: GPU is lost\n")
    assert machine.query_gpus()["not_checked"].keys() == {"GPUs"}


def test_a_faulty_gpu_fails_the_command(smi: Path, tmp_path: Path):
    (smi / "ecc").write_text("0, 12\n1, 0\n")
    result = run_stage(
        "launch/check.py", "machine", *PATIENT, cwd=tmp_path, expect=findings.EXIT_ERROR
    )
    assert "12 uncorrected errors" in result.stdout and "nvidia-smi --gpu-reset" in result.stdout


def test_a_node_that_lost_a_gpu_is_named(smi: Path):
    healthy = make_node_facts()
    (smi / "identity").write_text(HEALTHY["identity"].splitlines()[0] + "\n")
    all_findings = judge_nodes([healthy, make_node_facts(), healthy])
    [lost] = [f for f in all_findings if f.check == "number of GPUs"]
    assert lost.severity == "error" and lost.text == "1 on node 1 (h1); 2 on the other 2"


def test_different_versions_and_drivers_and_slow_gpus_are_found(smi: Path):
    slow_node = make_node_facts(versions={"torch": "2.12.1"}, compute={"0": 500.0, "1": 700.0})
    slow_node["gpu"]["gpus"][0]["driver"] = "570.1"
    by_check = {f.check: f for f in judge_nodes([make_node_facts(), make_node_facts(), slow_node])}
    assert by_check["version of torch"].text == "2.12.1 on node 2 (h2); 2.13.0 on the other 2"
    assert by_check["driver"].severity == "warning" and "node 2" in by_check["driver"].text
    assert by_check["compute"].severity == "warning" and "(71%)" in by_check["compute"].text
    [tie] = judge_nodes([make_node_facts(), make_node_facts(versions={"torch": "2.12.1"})])
    assert "2.13.0 on node 0 (h0); 2.12.1 on node 1 (h1)" in tie.text


def test_any_other_file_of_the_code_counts(tmp_path: Path):
    (tmp_path / "lib/pages/__pycache__").mkdir(parents=True)
    seen = set()
    for name in ("04_train.py", "lib/a.py", "lib/pages/page.html.j2", "lib/pages/style.css"):
        (tmp_path / name).write_text("{{ x }}")
        seen.add(machine.list_versions(tmp_path)["code"])
    (tmp_path / "lib/pages/__pycache__/a.cpython-311.pyc").write_text("compiled")
    (tmp_path / "notes.txt").write_text("mine")
    assert len(seen) == 4 and machine.list_versions(tmp_path)["code"] in seen


def test_network_problems_are_found(smi: Path):
    four = [make_node_facts()] * 4
    [finding] = judge_nodes(four, make_speeds(4, slow=(2,)))
    assert finding.severity == "error" and finding.text.startswith(
        "node 2 (h2): all-reduce 120 GB/s"
    )
    [finding] = judge_nodes(four, make_speeds(4, slow=(2,), by=0.7))
    assert finding.severity == "warning"
    one_link = make_speeds(4)
    one_link["pairs"]["1-3"]["all_reduce"] = 90.0
    [finding] = judge_nodes(four, one_link)
    assert finding.text.startswith("node 1 (h1) to node 3 (h3)")
    [finding] = judge_nodes(four, least=300)
    assert "290 GB/s, expected 300" in finding.text
    inner = {**make_speeds(2), "nodes": {0: {"all_reduce": 400.0}, 1: {"all_reduce": 100.0}}}
    assert any(
        "within the node" in f.text and "node 1" in f.text
        for f in judge_nodes([make_node_facts()] * 2, inner)
    )


def test_shm_disk_and_shared_directory_are_checked(smi: Path):
    all_findings = judge_nodes(
        [
            make_node_facts(shm={"total": 64 << 20}),
            make_node_facts(shared=False),
            make_node_facts(disk={"error": "Read-only file system: /fsx"}),
        ]
    )
    assert {(f.check, f.severity) for f in all_findings} == {
        ("/dev/shm", "error"),
        ("shared directory", "error"),
        ("disk", "error"),
    }


def test_a_full_shared_disk_is_reported_once(smi: Path):
    full = {"directory": "/fsx", "free": 10**9, "write": 1e9, "read": 1e9}
    assert len(judge_nodes([make_node_facts(disk=full)] * 3)) == 1
    of_disk = [
        f for f in judge_nodes([make_node_facts(disk=full, shared=False)] * 3) if f.check == "disk"
    ]
    assert len(of_disk) == 3


def test_efa_devices_are_checked(tmp_path: Path, smi: Path):
    for number, (vendor, state) in enumerate([("0x1d0f", "4: ACTIVE"), ("0x1d0f", "1: DOWN")]):
        device = tmp_path / "ib" / f"rdmap{number}"
        (device / "ports" / "1").mkdir(parents=True)
        (device / "device").mkdir()
        (device / "device" / "vendor").write_text(vendor + "\n")
        (device / "ports" / "1" / "state").write_text(state + "\n")
    join_findings = machine.query_rdma(tmp_path / "ib")
    assert [device["active"] for device in join_findings["devices"]] == [True, False]
    all_findings = judge_nodes(
        [make_node_facts(efa={**join_findings, "libfabric": False}, locked_memory=8 << 20)]
    )
    assert {f.check for f in all_findings} == {"EFA", "locked memory"}
    assert any("no active port" in f.text for f in all_findings)
    assert machine.query_rdma(tmp_path / "none")["not_checked"]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_rounds_contain_each_pair_once_and_each_node_at_most_once(nodes: int):
    from launch.checks.bandwidth import pair_rounds

    rounds = pair_rounds(list(range(nodes)))
    pairs = [pair for turn in rounds for pair in turn]
    assert sorted(pairs) == list(itertools.combinations(range(nodes), 2))
    assert all(len({n for pair in turn for n in pair}) == 2 * len(turn) for turn in rounds)


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [
        ("error", "error", 6),
        ("error", "warning", 6),
        ("warning", "warning", 5),
        ("warning", "error", 0),
        ("info", "warning", 0),
    ],
)
def test_exit_codes(severity: str, fail_on: str, code: int):
    all_findings = [Finding(severity, "a", "b"), Finding("info", "c", "d")]
    try:
        findings.require_ready(all_findings, fail_on, "it")
        got = 0
    except findings.NotReady as error:
        got = error.code
    assert got == code
