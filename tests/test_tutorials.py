# covers: docs/tutorials/*.md
"""Run every `bash` block of docs/tutorials/ as a reader would type it.

A local server stands for the Hub, with a tiny model under the name that a tutorial uses.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.cloud import build_image, kubernetes
from launch.cloud.kube import cluster_files, setup, setup_steps, volume_commands
from launch.cloud.kube.cluster_files import ClusterOptions
from launch.cloud.kube.costs import describe_cost
from launch.cloud.kube.job import plan_job
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.volume_commands import VOLUME_COMMANDS
from lib.core import declared
from lib.train import command_line
from tests.cloud import aws_account
from tests.cloud.kube_node import Node
from tests.cloud.kube_server import Cluster, Object, Server
from tests.conftest import ROOT
from tests.hub_models import USER_VARIABLES, hub_variables, make_model_files
from tests.hub_server import HubServer, Repo
from tests.node_namespaces import Machine, make_machines
from tests.slurm_cluster import SlurmCluster, find_missing_tools, run_cluster
from tests.test_airgap import check_out
from tests.training import list_saved_steps, write_corpus

TUTORIALS = ROOT / "docs" / "tutorials"
AWS = ROOT / "docs" / "cloud" / "aws.md"
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Wheels take minutes to pack and to install; tests/test_airgap.py has bundles with them.
WITHOUT_WHEELS = {"pack --out": "pack --no-wheels --out", " --install": ""}

Runner = Callable[..., str]


def blocks(name: str) -> list[str]:
    """Return the blocks of commands in a tutorial."""
    path = AWS if name == AWS.name else TUTORIALS / name
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def tiny_chat_model(where: Path) -> dict[str, bytes]:
    """Return the files of a small Llama with a chat template."""
    files = make_model_files(where)
    tokenizer = json.loads(files["tokenizer.json"])
    end = {"id": 256, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [end | flags]
    settings = json.loads(files["tokenizer_config.json"])
    settings |= {"eos_token": END, "chat_template": TEMPLATE}
    return files | {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a block in a checkout and returns what it printed."""
    project = check_out(tmp_path / "checkout")
    (project / ".venv").symlink_to(sys.prefix)
    for variable in USER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with HubServer() as hub:
        files = tiny_chat_model(tmp_path / "model")
        for name in ("Llama-3.2-1B", "Llama-3.2-1B-Instruct"):
            hub.repos[f"meta-llama/{name}"] = Repo(files)
        environment = {
            **os.environ,
            **hub_variables(hub, tmp_path / "hf_home"),
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

        def run(block: str, **variables: str) -> str:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=run.directory,  # type: ignore[attr-defined]
                env=environment | variables,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert not done.returncode, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            return done.stdout

        run.project = project  # type: ignore[attr-defined]
        run.directory = project  # type: ignore[attr-defined]
        run.environment = environment  # type: ignore[attr-defined]
        yield run


def losses(text: str) -> list[float]:
    """Return the losses of the console lines of a run."""
    return [float(loss) for loss in re.findall(r"step +\d+/\d+ +loss ([\d.]+)", text)]


def test_all_tutorials_are_run() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == {
        "corpus.md",
        "pretrain.md",
        "chat.md",
        "lora.md",
        "airgap.md",
        "slurm.md",
        "bare-metal.md",
    }


@pytest.mark.slow
def test_mixed_files_become_a_corpus(typed: Runner) -> None:
    *_, tried, built, shown = [typed(block) for block in blocks("corpus.md")]
    assert "ferries question 1 (1.00)" in tried and "nothing was written" in tried
    assert re.search(r"masked +\d+ email", built) and "report.html" in built
    assert '"rule": "near duplicate"' in shown and "<email>" in shown
    assert "lena.berger" not in shown


@pytest.mark.slow
def test_pretraining_on_own_files(typed: Runner) -> None:
    printed = [typed(block) for block in blocks("pretrain.md")]
    first, *_, last = next(values for text in printed if (values := losses(text)))
    assert last < first - 1
    assert "def read(self" in printed[-1]


@pytest.mark.long
def test_conversations_and_then_an_adapter(typed: Runner) -> None:
    printed = [typed(block) for block in blocks("chat.md")]
    assert "'role': 'assistant'" in printed[-1]
    adapted = [typed(block) for block in blocks("lora.md")]
    first, *_, last = next(values for text in adapted if (values := losses(text)))
    assert last < first
    export = typed.project / "outputs/ideas/export"  # type: ignore[attr-defined]
    assert (export / "adapter/adapter_config.json").exists()
    assert (export / "merged/model.safetensors").exists()


@pytest.mark.long
def test_a_cluster_without_a_network(typed: Runner) -> None:
    project: Path = typed.project  # type: ignore[attr-defined]
    write_corpus(project / "raw_text")
    for block in blocks("airgap.md"):
        for ours, instead in WITHOUT_WHEELS.items():
            block = block.replace(ours, instead)
        typed(block)
        if block.startswith("cd project\n"):  # the reader stays there
            typed.directory = project / "project"  # type: ignore[attr-defined]
        elif (project / "project").is_dir() and not (project / "project/.venv").exists():
            (project / "project/.venv").symlink_to(sys.prefix)
    assert (project / "project/outputs/exp/export/final/model.safetensors").exists()
    shutil.rmtree(project)


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    """Yield a Slurm cluster of two nodes without GPUs, or skip."""
    if reason := find_missing_tools():
        pytest.skip(reason)
    with run_cluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.long
def test_a_slurm_cluster(typed: Runner, slurm: SlurmCluster) -> None:
    """The nodes of this cluster have names that no resolver knows."""
    project: Path = typed.project  # type: ignore[attr-defined]
    names = ("SLURM_CONF", "PYTHON", "GLOO_SOCKET_IFNAME")
    variables = {name: slurm.environment[name] for name in names}
    printed = []
    for block in blocks("slurm.md"):
        if "check.py slurm" in block:  # which finds fault with the nodes of a busy machine
            block = f"set +e\n{block}"
        printed.append(typed(block, **variables))
    assert "GB/s between nodes" in printed[1]
    assert '"perf/tokens_per_sec"' in printed[2]
    assert "complete" in printed[4]
    assert list_saved_steps(project, "exp") == [10, 20, 30]
    outputs = sorted(project.glob("slurm-*/node*.log"))
    assert len(outputs) == 5
    assert "resumed from" in outputs[-1].read_text()
    assert (project / "outputs/exp/export/final/model.safetensors").exists()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Yield two machines in network namespaces, or skip."""
    with make_machines(2, tmp_path) as nodes:
        yield nodes


@pytest.mark.long
def test_machines_without_a_scheduler(
    typed: Runner, machines: list[Machine], tmp_path: Path
) -> None:
    project: Path = typed.project  # type: ignore[attr-defined]
    write_corpus(project / "raw_text")

    def type_on_all(block: str) -> list[str]:
        """Run a block on all machines at the same time; return what each one printed."""
        outputs = [tmp_path / f"{machine.name}.txt" for machine in machines]
        variables = {"NNODES": f"{len(machines)}", "MASTER_ADDR": machines[0].address}
        started = [
            machine.start(
                *("bash", "-euo", "pipefail", "-c", block),
                output=output,
                cwd=typed.directory,  # type: ignore[attr-defined]
                env=typed.environment | variables | {"NODE_RANK": f"{rank}"},  # type: ignore[attr-defined]
            )
            for rank, (machine, output) in enumerate(zip(machines, outputs, strict=True))
        ]
        codes = [process.wait(timeout=400) for process in started]
        texts = [output.read_text() for output in outputs]
        for output in outputs:
            output.unlink()
        # The check finds fault with the machines of a busy computer.
        assert not any(codes) or "check.py network" in block, "\n".join(texts)
        return texts

    everywhere = []
    for block in blocks("bare-metal.md"):
        for ours, instead in WITHOUT_WHEELS.items():
            block = block.replace(ours, instead)
        if "NODE_RANK" in block or "multi_node.sh" in block:
            everywhere.append(type_on_all(block))
        else:
            typed(block)
        if (project / "project").is_dir() and typed.directory == project:  # type: ignore[attr-defined]
            (project / "project/.venv").symlink_to(sys.prefix)
            typed.directory = project / "project"  # type: ignore[attr-defined]
    assert "GB/s between nodes" in everywhere[0][0]
    assert '"perf/tokens_per_sec"' in everywhere[1][0]
    assert list_saved_steps(project / "project", "exp") == [10, 20]
    assert (project / "project/outputs/exp/export/final/model.safetensors").exists()


def test_the_launchers_take_the_commands_for_aws() -> None:
    text = AWS.read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)).replace("\\\n", "")
    commands = re.findall(r"^python launch/(\w+)\.py ([^>|\n]*)", lines, re.M)
    assert len(commands) > 15
    for script, words in commands:
        arguments = shlex.split(words)
        if script == "build_image":
            build_image.parse(arguments)
        elif arguments[0] == "setup":
            setup.parse(arguments[1:])
        elif arguments[0] in VOLUME_COMMANDS:
            volume_commands.parse(command_line.split_at_dashes(arguments)[0])
        else:
            command_line.parse_options(kubernetes.parse(arguments)[1])


def test_the_costs_on_aws_follow_from_the_prices() -> None:
    """Each row is minutes × dollars per hour; the rates are those that `setup` prints."""
    text = AWS.read_text(encoding="utf-8")
    costs = setup_steps.list_costs(ClusterOptions(region="us-west-2"))
    rates = {float(costs[name].split("$")[1].split()[0]) for name in ("total", "without GPUs")}
    rows = re.findall(r"^\| [\d, ]+:.*\| (\d+) \| \$([\d.]+) \| \$([\d.]+) \|$", text, re.M)
    assert len(rows) == 6 and {float(rate) for _, rate, _ in rows} == rates
    for minutes, rate, dollars in rows:
        assert float(dollars) == pytest.approx(int(minutes) / 60 * float(rate), abs=0.006)
    prices = cluster_files.read_prices()
    more = {"traffic": 5 * 5 * prices["traffic_gb"], "ECR": 5 / 30 * prices["image_gb_month"]}
    total = sum(float(dollars) for *_, dollars in rows)
    for name, price in more.items():
        dollars = float(re.findall(rf"^\| {name}: .*\$([\d.]+) \|$", text, re.M)[0])
        assert dollars == pytest.approx(price, abs=0.03)
        total += dollars
    minutes = sum(int(minutes) for minutes, *_ in rows)
    assert f"| **total** | **{minutes}** | | **${total:.2f}** |" in text
    hyperpod = setup_steps.list_costs(ClusterOptions(kind="hyperpod", region="us-west-2"))
    assert hyperpod["total"].split()[1] in text
    words = ["--job-name", "j", "--nodes", "4", "--instance-type", "g5.8xlarge", "--image", "i:1"]
    job_options = declared.read_options(JobOptions, kubernetes.parse(["deploy", *words])[0])
    estimate = describe_cost(plan_job(job_options, []))
    assert estimate["step"] in text and estimate["time"] in text
    assert estimate["money"].split(" (")[0] in text


# Instead of the model of the tutorial, this machine trains that of `make test-quick`.
QUICK_RUN = "-d test-quick -m test-quick -s 64 -b 2 --max-steps 4 --log-freq 1"


def adapt_to_cpus(block: str, node: Node) -> str:
    """Return a block of aws.md for the pods of this machine: its paths, a small model, no GPUs."""
    paths = f"--mount-path {node.volume} --code-dir {ROOT}"
    job = f"{paths} --poll-seconds 0.2"
    for words, instead in {
        "prepare --job-name first": f"prepare --quick {job} {QUICK_RUN} --job-name first",
        "deploy --job-name first": f"deploy {job} {QUICK_RUN} --gpus-per-node 0 --job-name first",
        "deploy --job-name bench": f"deploy {job} --gpus-per-node 0 --job-name bench",
        "--model-size 1B -s 2048": "--model-size 1M -s 32",
        "kubernetes.py run": f"kubernetes.py run {paths}",
        "kubernetes.py fetch": f"kubernetes.py fetch {paths}",
        "sleep 30": "sleep 0",
    }.items():
        block = block.replace(words, instead)
    return block if "validate" in block else block.replace("--nodes 4", "--nodes 2")


@pytest.mark.long
def test_an_account_of_aws(
    kube: Cluster, node: Node, kube_server: Server, typed: Runner, tmp_path: Path
) -> None:
    """Programs stand for aws, eksctl and docker; pods are processes of this machine."""
    variables = aws_account.open_account(make_directory(tmp_path / "account"), kube)
    path = variables.pop("PATH")
    variables |= {
        "PATH": f"{path}:{typed.environment['PATH']}",  # type: ignore[attr-defined]
        "KUBECONFIG": str(kube_server.kubeconfig(tmp_path / "eks", aws_account.ARN)),
        "KUBECACHEDIR": os.environ["KUBECACHEDIR"],
    }
    start_job = kube.on_create

    def start_other_jobs(cluster: Cluster, job: Object) -> None:
        if not job["metadata"]["name"].endswith("-owner"):  # nobody may chown here
            start_job(cluster, job)

    kube.on_create = start_other_jobs
    printed = []
    for block in blocks("aws.md"):
        if "scale nodegroup" in block:
            scale_nodes(kube, int(re.findall(r"--nodes (\d)", block)[0]))
        printed.append(typed(adapt_to_cpus(block, node), **variables))
    ready, bench, train, watch = (
        next(text for text in printed if words in text)
        for words in ("is ready", "perf/tokens_per_sec", "has prepared this run", "samples/s")
    )
    assert "4 g5.8xlarge are free" in ready and "nothing is prepared" in bench
    assert "job first is complete" in train and "complete, 2 ranks" in watch
    project: Path = typed.project  # type: ignore[attr-defined]
    assert (project / "first-final" / "model.safetensors").exists()
    assert (project / "hyperpod" / "steps.sh").exists()
    [look] = [
        text
        for block, text in zip(blocks("aws.md"), printed, strict=True)
        if "describe-nat-gateways" in block
    ]
    assert not look
    calls = (tmp_path / "account" / "calls").read_text()
    order = ["create-repository", "create cluster", "--nodes 4", "--nodes 0", "delete-file-system"]
    order += ["delete cluster", "ecr delete-repository", "eks list-clusters --query"]
    places = [calls.index(words) for words in order]
    assert places == sorted(places)


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def scale_nodes(kube: Cluster, count: int) -> None:
    """Add or delete the GPU nodes, as `eksctl scale nodegroup` does."""
    devices = {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "1", "hugepages-2Mi": "5120Mi"}
    for number in range(4):
        kube.objects.pop(("nodes", "", f"gpu-{number}"), None)
    for number in range(count):
        kube.add("nodes", aws_account.make_node(f"gpu-{number}", "g5.8xlarge", **devices))
