# covers: launch/cloud/kube/job.py, launch/cloud/kube/job_options.py
# covers: launch/cloud/kube/kinds.py, launch/cloud/kube/nodes.py
"""Test the manifests of launch/kubernetes.py: clusters accept them, and options reach them."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch.cloud import kubernetes
from launch.cloud.kube import job
from launch.cloud.kube.job import Job
from launch.cloud.kube.job_options import TEMPLATES, JobOptions
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.preparation import Preparation
from lib.core import declared
from lib.core.errors import UsageError
from lib.train import command_line
from lib.train.output import console
from tests.cloud import kube_schemas
from tests.cloud.kube_cluster import JOB_OPTIONS, ROOT, SCRIPT, TRAIN_OPTIONS, run_launcher
from tests.test_design import blocks

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SHAPES = {
    "plain": (),
    "no EFA": ("--instance-type", "g5.2xlarge", "--nodes", "1"),
    "its own network": ("--instance-type", "g5.48xlarge"),
    "any node, on the CPU": ("--instance-type", "", "--gpus-per-node", "0"),
    "secrets": ("--token-secret", "hub", "--image-pull-secret", "registry"),
    "elastic": ("--min-nodes", "1"),
    "HyperPod": ("--spares", "1", "--slow-below", "20000", "--min-nodes", "1"),
}
TEMPLATE_OF = {
    "PyTorchJob": "spec.pytorchReplicaSpecs.Worker.template",
    "ClusterTrainingRuntime": "spec.template.spec.replicatedJobs.0.template.spec.template",
    "HyperPodPyTorchJob": "spec.replicaSpecs.0.template",
}


def asked(*arguments: object) -> Job:
    """Return the job of a command line."""
    opts, train = kubernetes.parse([str(argument) for argument in arguments])
    return job.plan_job(declared.read_options(JobOptions, opts), train)


def manifests(*arguments: object) -> list[dict[str, Any]]:
    """Return the manifests of a job, read back from their YAML."""
    return list(yaml.safe_load_all(job.render_manifests(asked(*arguments).manifests(), "test")))


def at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part) if part.isdecimal() else part]
    return value


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template of a job."""
    [pod] = [
        at(item, TEMPLATE_OF[item["kind"]]) for item in documents if item["kind"] in TEMPLATE_OF
    ]
    return pod


def problems(documents: list[dict[str, Any]]) -> list[str]:
    """Validate manifests against the schemas of resources and pods; return the problems."""
    problem_list = [problem for item in documents for problem in kube_schemas.find_problems(item)]
    template = pod_of(documents)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": template["spec"],
        "metadata": {"name": "pod", **template["metadata"]},
    }
    try:
        kubernetes_validate.validate(pod, "1.34", strict=True)
    except kubernetes_validate.ValidationError as error:
        problem_list.append(f"pod: {error.message}")
    return problem_list


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (kind, shape)
        for kind, shape in product(KINDS, SHAPES)
        if (kind, shape)
        not in {("trainjob", "elastic"), ("trainjob", "HyperPod"), ("pytorchjob", "HyperPod")}
    ],
)
def test_a_cluster_accepts_every_shape_of_job(kind: str, shape: str) -> None:
    assert not problems(
        manifests("render", "--kind", kind, *JOB_OPTIONS, *SHAPES[shape], *TRAIN_OPTIONS)
    )


def test_pods_without_gpus_train_on_the_cpu_even_if_the_node_has_gpus() -> None:
    on_cpu = asked("render", *JOB_OPTIONS, *SHAPES["any node, on the CPU"], *TRAIN_OPTIONS).train
    assert command_line.parse_options(on_cpu).device == "cpu"
    assert (
        command_line.parse_options(asked("render", *JOB_OPTIONS, *TRAIN_OPTIONS).train).device
        == "auto"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_cluster_accepts_every_recipe(kind: str, recipe: Path) -> None:
    documents = manifests(
        "render", "--kind", kind, *JOB_OPTIONS, "--", "--config", recipe, "-d", "c4"
    )
    assert not problems(documents)


# Words that kubectl's YAML reads as another type, or as syntax.
WORDS = (
    "2e-5",
    "1e3",
    "3e-4",
    "1E+2",
    ".5",
    "+1",
    "0x1F",
    "0o17",
    "0b1",
    "0777",
    "1_000",
    "1:30",
    "NaN",
    ".nan",
    "-.inf",
    "y",
    "on",
    "No",
    "TRUE",
    "null",
    "~",
    "",
    "2026-11-23",
    "<<",
    "=",
    "- a",
    "a: b",
    "#x",
    "@x",
    "`x`",
    "%x",
    "!x",
    "&x",
    "*x",
    "?",
    "|",
    ">",
    "{",
    "[a]",
    "'",
    '"',
    "\\",
    " a ",
    "a\nb",
    "\t",
    "\x85",
    "\u2028",
    "\x1b[2J",
    "é",
    "$(HF_TOKEN)",
    "$$",
    "$",
)


def as_kubectl_reads(manifest: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the documents of a manifest as kubectl's own parser reads them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    read_documents = []
    for number, document in enumerate(manifest.split("\n---\n")):
        (path := tmp_path / f"{number}.yaml").write_text(document)
        result = subprocess.run(
            ["kubectl", "annotate", "--local", "-f", path, "-o", "json", "test="],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        read_documents.append(json.loads(result.stdout))
        del read_documents[-1]["metadata"]["annotations"]["test"]
        if not read_documents[-1]["metadata"]["annotations"]:
            del read_documents[-1]["metadata"]["annotations"]
    return read_documents


def expanded(word: str, variables: dict[str, str]) -> str:
    """Return a word of a container as Kubernetes expands it."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda match: "$" if match[1] == "$" else variables.get(match[2], match[0]),
        word,
    )


@pytest.mark.parametrize("kind", [*KINDS, "prepare"])
def test_kubectl_reads_every_word_exactly_as_typed(kind: str, tmp_path: Path) -> None:
    train = [*TRAIN_OPTIONS[1:], "--lr", "2e-5", "--max_lr=3e-4", "-e", "1e3"]
    train += [word for name in WORDS if not name.startswith("-") for word in ("-d", name)]
    options = dict(
        job_name="exp",
        namespace="1e3",
        nodes=2,
        instance_type="p5.48xlarge",
        image="1e3",
        token_secret="0b1",
        image_pull_secret="2e5",
        service_account="123",
        pvc="1e9",
        bucket_pvc="0x1",
        project_dir="/data/$(A)",
    )
    asked_of = JobOptions(kind=kind if kind in KINDS else "pytorchjob", **options)
    odd_job = (
        Job(
            **vars(asked_of.with_defaults()),
            train=tuple(train),
            launched_as="run $(HF_TOKEN) $$",
            env={"A": "1e3", "B": "$(HF_TOKEN)"},
        )
        if kind in KINDS
        else Preparation(
            **vars(asked_of.with_defaults()), train=tuple(train), launched_as="", raw_text=WORDS
        )
    )
    documents = odd_job.manifests()
    text = job.render_manifests(documents, "made by: a\x85b\x07\x1b[31m\x00")
    assert as_kubectl_reads(text, tmp_path) == documents == list(yaml.safe_load_all(text))
    spec = (at(documents[0], "spec.template") if kind == "prepare" else pod_of(documents))["spec"]
    [container] = spec["containers"]
    secret = {"HF_TOKEN": "hf_secret", "A": "b"}
    assert [expanded(word, secret) for word in container["args"]] == train
    values = {v["name"]: expanded(v["value"], secret) for v in container["env"] if "value" in v}
    if kind != "prepare":
        assert values["LAUNCHED_AS"] == "run $(HF_TOKEN) $$" and values["B"] == "$(HF_TOKEN)"
    assert spec["serviceAccountName"] == "123"


@pytest.mark.parametrize(
    ("words", "follows"),
    [
        ("prepare --job-name prepare -- -d c", "deploy --job-name prepare -- -d c"),
        ("--job-name x prepare", "--job-name x deploy"),
        ("--job-name prepare prepare -- -d prepare", "--job-name prepare deploy -- -d prepare"),
        ("--job-name x prepare -e prepare", "--job-name x deploy -e prepare"),
    ],
)
def test_deploy_follows_prepare_wherever_the_command_stands(words: str, follows: str) -> None:
    assert kubernetes.make_deploy_words(words.split()) == follows.split()


@pytest.mark.parametrize("output", [(), ("--out", "job.yaml")])
def test_a_word_that_is_not_utf_8_is_refused(tmp_path: Path, output: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        SCRIPT,
        "render",
        *JOB_OPTIONS,
        *output,
        *TRAIN_OPTIONS,
        "--cache-dir",
        b"a\xff",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert result.returncode == 2 and b"Traceback" not in result.stderr, result.stderr
    assert b"UTF-8" in result.stderr and not result.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.stem)
def test_kubectl_reads_the_files_that_are_applied_by_hand(path: Path, tmp_path: Path) -> None:
    if "${" in (text := path.read_text()) or path.stem in ("instances", "prices"):
        pytest.skip("a template")
    values = {
        "NUM_NODES": "2",
        "GPU_PER_NODE": "8",
        "EFA_PER_NODE": "32",
        "IMAGE_URI": "r/i:1",
        "INSTANCE_TYPE": "p5.48xlarge",
    }
    text = re.sub(r"\$(\w+)", lambda match: values[match[1]], text)
    documents = list(yaml.safe_load_all(text))
    assert as_kubectl_reads(text, tmp_path) == documents


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key in a manifest that a schema names."""
    if isinstance(value, dict):
        for key, item in value.items():
            # Keys with free names: labels, resources, selectors, and kinds of replicas.
            if path[-1:] not in (
                ("labels",),
                ("nodeSelector",),
                ("requests",),
                ("limits",),
                ("pytorchReplicaSpecs",),
            ):
                yield (*path, key)
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


@pytest.mark.parametrize("kind", KINDS)
def test_a_typo_in_any_field_is_found(kind: str) -> None:
    more = ("--spares", "1", "--min-nodes", "1") if kind == "hyperpod" else ()
    documents = manifests(
        "render", "--kind", kind, *JOB_OPTIONS, "--token-secret", "hub", *more, *TRAIN_OPTIONS
    )
    number = 0
    for document in documents:
        validator = jsonschema.Draft202012Validator(kube_schemas.load_schema(document["kind"]))
        for path in places(document):
            broken = copy.deepcopy(document)
            holder = broken
            for part in path[:-1]:
                holder = holder[part]
            holder[f"{path[-1]}x"] = holder.pop(path[-1])
            assert not validator.is_valid(broken), f"nobody notices {path[-1]}x in {path}"
            number += 1
    assert number > 60


def test_a_typo_in_a_template_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TEMPLATES, tmp_path / "templates")
    pod = tmp_path / "templates" / "pod.yaml"
    monkeypatch.setattr(job, "TEMPLATES", pod.parent)
    uninterrupted = pod.read_text()
    pod.write_text(uninterrupted.replace("mountPath: /dev/shm", "mountpath: /dev/shm"))
    assert problems(manifests("render", *JOB_OPTIONS, *TRAIN_OPTIONS))
    pod.write_text(uninterrupted.replace("${IMAGE_URI}", "${IMAGE_URL}"))
    with pytest.raises(UsageError, match="IMAGE_URL"):
        manifests("render", *JOB_OPTIONS, *TRAIN_OPTIONS)


def test_gpus_and_efa_come_from_the_instance_type() -> None:
    def resources(*options: object) -> dict[str, Any]:
        documents = manifests("render", *JOB_OPTIONS, *options, *TRAIN_OPTIONS)
        container = pod_of(documents)["spec"]["containers"][0]
        assert (
            container["resources"]["requests"].items() >= container["resources"]["limits"].items()
        )
        return container["resources"]["limits"]

    assert resources() == {
        "nvidia.com/gpu": 8,
        "vpc.amazonaws.com/efa": 32,
        "hugepages-2Mi": "5120Mi",
    }
    assert resources("--instance-type", "p4d.24xlarge")["vpc.amazonaws.com/efa"] == 4
    assert resources("--instance-type", "g5.2xlarge") == {"nvidia.com/gpu": 1}
    assert resources("--gpus-per-node", 4, "--efa-per-node", 0) == {"nvidia.com/gpu": 4}
    assert resources("--instance-type", "own.type", "--gpus-per-node", 2) == {"nvidia.com/gpu": 2}


def test_a_pod_has_devices_volumes_and_variables() -> None:
    spec = pod_of(manifests("render", *JOB_OPTIONS, "--pvc", "vol", *TRAIN_OPTIONS))["spec"]
    [container] = spec["containers"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "vol"}} in spec["volumes"]
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert container["args"] == ["--experiment-name=exp", *TRAIN_OPTIONS[1:]]
    save = next(v["value"] for v in container["env"] if v["name"] == "SAVE_SECONDS")
    assert spec["terminationGracePeriodSeconds"] > int(save)
    assert "affinity" not in spec


def test_only_a_job_that_overwrites_is_marked() -> None:
    """By the mark, restarted pods know that they have begun the run already."""

    def mark(*train: str) -> list[str]:
        env = pod_of(manifests("render", *JOB_OPTIONS, *TRAIN_OPTIONS, *train))["spec"][
            "containers"
        ][0]["env"]
        return [variable["value"] for variable in env if variable["name"] == "LAUNCH_MARK"]

    assert mark() == [] and len({*mark("--overwrite"), *mark("--overwrite")}) == 2


def test_the_token_is_never_a_value() -> None:
    words = ("render", *JOB_OPTIONS, "--token-secret", "hub", *TRAIN_OPTIONS)
    token = {"HF_TOKEN": "hf_secret"}
    assert "HF_TOKEN" not in run_launcher(*words, env=token).stdout
    result = run_launcher(*words, "--streaming", "--online", env=token)
    assert "hf_secret" not in result.stdout
    container = pod_of(list(yaml.safe_load_all(result.stdout)))["spec"]["containers"][0]
    assert {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    } in container["env"]


def test_the_command_in_a_manifest_can_be_typed_again() -> None:
    typed = [
        "render",
        *JOB_OPTIONS,
        "--token-secret",
        "hub",
        "--image-pull-secret=registry",
        *TRAIN_OPTIONS,
    ]
    first = run_launcher(*typed).stdout
    [line] = [line for line in first.splitlines() if line.startswith("# made by: ")]
    words = shlex.split(line.removeprefix("# made by: "))[2:]
    assert words == [str(word) for word in typed] and run_launcher(*words).stdout == first


def test_hyperpod_uses_its_names_and_policies() -> None:
    [document] = manifests(
        "render",
        "--kind",
        "hyperpod",
        *JOB_OPTIONS,
        "--spares",
        1,
        "--min-nodes",
        1,
        "--slow-below",
        20000,
        *TRAIN_OPTIONS,
    )
    [replicas] = document["spec"]["replicaSpecs"]
    assert (replicas["replicas"], replicas["spares"], replicas["maxReplicas"]) == (2, 1, 2)
    spec = replicas["template"]["spec"]
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    assert "sagemaker.amazonaws.com/node-health-status" in json.dumps(spec["affinity"])
    assert document["spec"]["elasticPolicy"]["minReplicas"] == 1
    assert [
        rule["name"] for rule in document["spec"]["runPolicy"]["logMonitoringConfiguration"]
    ] == [
        "hang",
        "slow",
    ]


def test_log_rules_match_the_lines_of_a_run() -> None:
    row = {
        "step": 1500,
        "train/loss_mean": 1.72,
        "train/learning_rate": 2.9e-4,
        "perf/tokens_per_sec": 6404.4,
        "perf/mfu": 0.38,
        "perf/slowest_ratio": 1.0,
        "memory/max_peak_gib": 61.2,
        "time/data": 7.9,
    }

    def rules(*options: object) -> dict[str, dict[str, str]]:
        [document] = manifests("render", "--kind", "hyperpod", *JOB_OPTIONS, *options)
        assert pod_of([document])["spec"]["containers"][0]["args"]
        return {
            rule["name"]: rule
            for rule in document["spec"]["runPolicy"]["logMonitoringConfiguration"]
        }

    log_lines = {
        "line": f"16:29:56 {console.ConsoleLines(20_000).format_row(row)}",
        "dict": f"16:29:56 {console.format_record(row, 0)}",
    }
    assert re.match(rules(*TRAIN_OPTIONS)["hang"]["logPattern"], log_lines["line"])
    for options in (
        (*TRAIN_OPTIONS, "--log-style", "dict"),
        ("--slow-below", 20000, *TRAIN_OPTIONS),
    ):
        hang = rules(*options)["hang"]
        assert re.match(hang["logPattern"], log_lines["dict"])
        assert not re.match(hang["logPattern"], log_lines["line"])
    assert (
        re.match(
            rules("--slow-below", 20000, *TRAIN_OPTIONS)["slow"]["logPattern"], log_lines["dict"]
        )[1]
        == "6404"
    )
    for before in ("", "16:29:56 [rank=0] "):
        assert re.match(hang["stopPattern"], f"{before}done: 1,000 steps, 8,192,000 tokens")
    for other in (
        "16:29:56 [rank=0] step 3/9: abandoned: x",
        "already done: outputs/x",
        "16:29:56 [rank=0] split_01 is done: 3 files",
        "[rank=1] done: x",
    ):
        assert not re.match(hang["stopPattern"], other)
    assert 'f"done: ' in (ROOT / "lib/train/output/report.py").read_text()


def test_a_trainjob_comes_with_its_runtime() -> None:
    runtime, train = manifests(
        "render", "--kind", "trainjob", *JOB_OPTIONS, "--namespace", "ml", *TRAIN_OPTIONS
    )
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "ml-exp"
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    assert replicated["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    pod = replicated["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "node" and pod["restartPolicy"] == "Never"
    assert not [v for v in pod["containers"][0]["env"] if v["name"].startswith("PET_")]


def test_the_options_of_a_config_file_are_in_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "own values.yaml"
    file.write_text("dataset_name: [a, b]\nbatch-size: 2\ncompile: true\nfrom-scratch: true\n")
    plain = asked("render", *JOB_OPTIONS, "--", "--config", file)
    opts = command_line.parse_options(plain.train)
    assert (opts.dataset_name, opts.batch_size, opts.compile, opts.from_scratch) == (
        ["a", "b"],
        2,
        True,
        True,
    )
    assert opts.config is None and opts.experiment_name == "exp"
    job_of_file = asked(
        "render",
        *JOB_OPTIONS,
        "--",
        f"--config={file}",
        "-d",
        "c",
        "--batch-size",
        "4",
        "--compile",
        "off",
        "-e",
        "other",
    )
    opts = command_line.parse_options(job_of_file.train)
    assert (opts.dataset_name, opts.batch_size, opts.compile) == (["c"], 4, False)
    assert opts.config is None and opts.experiment_name == "other"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("render", *JOB_OPTIONS, "--nodess", "2", *TRAIN_OPTIONS), "the nearest is --nodes"),
        (
            ("render", *JOB_OPTIONS, "--image_urii", "i", *TRAIN_OPTIONS),
            "the nearest is --image-uri",
        ),
        (
            ("render", *JOB_OPTIONS, "--", "-d", "c4", "--max-step", "2"),
            "the nearest is --max-steps",
        ),
        (("render", *JOB_OPTIONS, "--", "-m", "org/model"), "no dataset is given"),
        (("render", *JOB_OPTIONS, "--instance-type", "p9", *TRAIN_OPTIONS), "--gpus-per-node"),
        (("render", *JOB_OPTIONS, "--job-name", "A b", *TRAIN_OPTIONS), "cannot name a job"),
        (("render", *JOB_OPTIONS, "--min-nodes", "4", *TRAIN_OPTIONS), "--min-nodes 4 is above"),
        (
            ("render", *JOB_OPTIONS, "--kind", "trainjob", "--min-nodes", "1", *TRAIN_OPTIONS),
            "fixed size",
        ),
        (
            ("render", *JOB_OPTIONS, "--spares", "1", *TRAIN_OPTIONS),
            "--spares needs --kind hyperpod",
        ),
        (
            (
                "render",
                "--kind",
                "hyperpod",
                *JOB_OPTIONS,
                "--slow-below",
                "9",
                *TRAIN_OPTIONS,
                "--log-style",
                "line",
            ),
            "--slow-below reads the speed from --log-style dict",
        ),
        (("render", *JOB_OPTIONS, "--", "--config", "lama.yaml"), "no such file: lama.yaml"),
        (("render", *JOB_OPTIONS, "--image", "", *TRAIN_OPTIONS), "--image is missing"),
    ],
)
def test_bad_options_are_refused(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_launcher(*arguments, expect=2)
    assert says in result.stderr and "Traceback" not in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (("--instance-type", "p5.48xlrge"), "nearest is p5.48xlarge"),
        (("--instance-type", ""), "--instance-type is missing"),
        (("--gpus-per-node", "16"), "p5.48xlarge has 8 GPUs"),
        (("--efa-per-node", "33"), "has 32 EFA adapters"),
        (("--instance-type", "p5.4xlarge", "--gpus-per-node", "2"), "has 1 GPU"),
        (("--instance-type", "my type", "--gpus-per-node", "2"), "an instance type"),
        (("--job-name", "9exp"), "cannot name a job"),
        (("--job-name", "exp-"), "cannot name a job"),
        (("--job-name", "e" * 46), "at most 45"),
        (("--namespace", "Team_A"), "cannot name a namespace"),
        (("--namespace", "n" * 64), "at most 63"),
        (("--kind", "trainjob", "--namespace", "n" * 60, "--job-name", "exp"), "has 64 characters"),
        (("--pvc", ""), "--pvc is empty"),
        (("--pvc", "FSx"), "--pvc 'FSx' cannot"),
        (("--image-pull-secret", "a b"), "--image-pull-secret 'a b'"),
        (("--token-secret", "-t"), "--token-secret '-t' cannot name"),
        (("--image", "a image"), "cannot name an image"),
        (("--mount-path", "data"), "--mount-path 'data'"),
        (("--project-dir", "/data:x"), "--project-dir '/data:x'"),
    ],
)
def test_impossible_names_and_sizes_are_refused(changed: tuple, says: str) -> None:
    changed = tuple(f"{changed[i]}={changed[i + 1]}" for i in range(0, len(changed), 2))
    with pytest.raises(UsageError) as caught:
        asked("render", *JOB_OPTIONS, *changed, *TRAIN_OPTIONS)
    assert says in caught.value.render() and not caught.value.several


def test_an_indivisible_batch_is_refused_with_all_other_problems() -> None:
    batch = ("--global-batch-size", "256", "--shard-size", "5")
    with pytest.raises(UsageError) as caught:
        asked(
            "render",
            *JOB_OPTIONS,
            "--nodes",
            "3",
            "--pvc",
            "",
            "--namespace",
            "A",
            *TRAIN_OPTIONS,
            *batch,
        )
    assert len(caught.value.several) == 4
    assert "a multiple of 24" in caught.value.render()
    assert "--shard-size 5 does not" in caught.value.render()
    asked("render", *JOB_OPTIONS, "--nodes", "4", *TRAIN_OPTIONS, *batch[:2])
    elastic = ("render", *JOB_OPTIONS, "--nodes", "4", "--min-nodes")
    asked(*elastic, 4, *TRAIN_OPTIONS, *batch[:2])
    with pytest.raises(UsageError, match=r"256 samples .* 3 nodes") as caught:
        asked(*elastic, 2, *TRAIN_OPTIONS, *batch[:2])
    assert "multiple of 96" in caught.value.expected
    asked(*elastic, 2, *TRAIN_OPTIONS, "--global-batch-size", 96)
    with pytest.raises(UsageError, match=r"32 samples .* 3 nodes"):
        asked(*elastic, 1, *TRAIN_OPTIONS)  # one sample per rank, so the run keeps its batch


def test_printed_calls_of_kubectl_name_the_cluster_and_keep_its_words(tmp_path: Path) -> None:
    words = (*JOB_OPTIONS, "--context", "my prod", "--namespace", "ml")
    other = ["kubectl", "--context", "my prod", "--namespace", "ml"]
    file = tmp_path / "job.yaml"
    rendered = run_launcher("render", *words, "--out", file, *TRAIN_OPTIONS).stdout
    assert shlex.split(rendered.partition("next: ")[2]) == [*other, "apply", "-f", str(file)]
    job = ("--kind", "trainjob", "--job-name", "exp", "--context", "my prod", "--namespace", "ml")
    deletions = run_launcher("stop", *job, "--dry-run").stdout.splitlines()
    assert [shlex.split(line)[:8] for line in deletions] == [
        [*other, "delete", KINDS["trainjob"].resource, "exp"],
        [*other, "delete", KINDS["trainjob"].runtime, "ml-exp"],
    ]


@pytest.mark.parametrize("verb", ["status", "stop", "logs"])
def test_a_missing_cluster_is_an_error_without_a_traceback(verb: str, tmp_path: Path) -> None:
    nowhere = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    result = run_launcher(
        verb, "--job-name", "exp", env={**nowhere, "PATH": str(tmp_path)}, expect=2
    )
    assert "kubectl is not installed" in result.stderr and "Traceback" not in result.stderr
    if shutil.which("kubectl"):
        result = run_launcher(verb, "--job-name", "exp", env=nowhere, expect=2)
        error = result.stderr.partition("error: ")[2]  # `logs` names the cluster there before
        assert "no cluster is configured" in error and len(error.splitlines()) == 3
        assert error.splitlines()[-1].endswith("launch/kubernetes.py setup")
        result = run_launcher(
            verb, "--job-name", "exp", "--context", "there", env=nowhere, expect=2
        )
        assert "no context there" in result.stderr


def test_an_unknown_key_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("seq-lengh: 3\n")
    result = run_launcher(
        "render", *JOB_OPTIONS, "--", "--config", file, *TRAIN_OPTIONS[1:], expect=2
    )
    assert "the nearest is --seq-length" in result.stderr and str(file) in result.stderr


def test_render_writes_a_file_from_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "render", *JOB_OPTIONS]
    result = subprocess.run(
        [*command, "--out", "my job.yaml", *TRAIN_OPTIONS],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=True,
    )
    text = (tmp_path / "my job.yaml").read_text()
    assert not problems(list(yaml.safe_load_all(text)))
    assert text.startswith("# made by: python launch/kubernetes.py render")
    [job] = yaml.safe_load_all(text)
    pod = at(job, TEMPLATE_OF[job["kind"]])["spec"]["containers"][0]
    typed = next(item["value"] for item in pod["env"] if item["name"] == "LAUNCHED_AS")
    assert shlex.split(typed)[:3] == ["python", "launch/kubernetes.py", "render"]
    assert "--out 'my job.yaml' -- -d" in typed  # messages of the run name this command
    assert "next:" in result.stdout
    subprocess.run(
        [*command, "--out", "other.yaml", "--dry-run", *TRAIN_OPTIONS],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert not (tmp_path / "other.yaml").exists()


def test_another_kind_of_job_is_a_row_and_a_template(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "launch", tmp_path / "launch", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "lib").symlink_to(ROOT / "lib")
    kinds = tmp_path / "launch/cloud/kube/kinds.py"
    templates = tmp_path / "launch/cloud/kube/templates"
    (row,) = blocks("How to add a kind of job on Kubernetes")
    kinds.write_text(kinds.read_text().replace("\nKINDS = {\n", "\nKINDS = {\n" + row, 1))
    (templates / "other.yaml").write_text(
        (templates / "pytorchjob.yaml").read_text().replace("PyTorchJob", "OtherJob")
    )

    def run_script(script: str, *arguments: object) -> str:
        return subprocess.run(
            [sys.executable, tmp_path / "launch" / script, *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    [document] = yaml.safe_load_all(
        run_script("kubernetes.py", "render", "--kind", "other", *JOB_OPTIONS, *TRAIN_OPTIONS)
    )
    container = at(document, TEMPLATE_OF["PyTorchJob"])["spec"]["containers"][0]
    assert document["kind"] == "OtherJob" and container["name"] == "main"
    assert "single_node.sh" in run_script(
        "cloud/pod.py",
        *container["command"][2:-1],
        "--nnodes",
        1,
        "--dry-run",
        "--",
        *container["args"],
    )
    assert "otherjobs.example.com exp" in run_script(
        "kubernetes.py", "stop", "--kind", "other", "--job-name", "exp", "--dry-run"
    )
    assert "claim fsx-claim" in run_script(
        "kubernetes.py", "cluster", "--kind", "other", "--dry-run"
    )


@pytest.mark.parametrize(
    ("instance", "nodes", "gpus", "efa"),
    [
        ("p5.48xlarge", "2", "8", "32"),
        ("g4dn.12xlarge", "2", "4", "0"),
        ("p3.16xlarge", "1", "8", None),
        ("own.type", "3", "2", None),
    ],
)
def test_the_template_for_envsubst_is_the_same_job(
    instance: str, nodes: str, gpus: str, efa: str | None
) -> None:
    if shutil.which("envsubst") is None:
        pytest.skip("envsubst is not installed (Debian: gettext-base)")
    settings = {
        "IMAGE_URI": "registry/train:1",
        "INSTANCE_TYPE": instance,
        "NUM_NODES": nodes,
        "GPU_PER_NODE": gpus,
        "FI_PROVIDER": "efa",
        "HF_TOKEN": "hf_secret",
    }
    if efa is not None:
        settings["EFA_PER_NODE"] = efa
    text = (TEMPLATES / "pytorchjob.envsubst.yaml").read_text()
    environment = {key: value for key, value in os.environ.items() if key != "EFA_PER_NODE"}
    filled = subprocess.run(
        ["envsubst"],
        input=text,
        env={**environment, **settings},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert "$" not in filled and "hf_secret" not in filled
    document = yaml.safe_load(filled)
    assert not problems([document])
    for resources in pod_of([document])["spec"]["containers"][0]["resources"].values():
        assert set(resources) == {"nvidia.com/gpu", "vpc.amazonaws.com/efa"}
        assert int(resources.pop("vpc.amazonaws.com/efa")) == int(efa or 0)
    same = asked(
        "render",
        *JOB_OPTIONS,
        "--job-name",
        "train",
        "--instance-type",
        instance,
        "--nodes",
        nodes,
        "--gpus-per-node",
        gpus,
        "--efa-per-node",
        efa or 0,
        "--",
        "--dataset-name=c4",
        "--model-name=meta-llama/Llama-3.1-8B",
    )
    [expected] = dataclasses.replace(same, huge_pages=False, env={}).manifests()
    pod = pod_of([expected])["spec"]["containers"][0]
    pod["resources"] = {kind: {"nvidia.com/gpu": int(gpus)} for kind in ("requests", "limits")}
    if not int(efa or 0):
        pod["env"].append({"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"})
    assert document == expected


def test_pods_use_the_account_and_the_bucket_of_the_templates() -> None:
    """A cluster accepts the templates to be applied by hand, and the options use their names."""
    [account] = yaml.safe_load_all((TEMPLATES / "service-account.yaml").read_text())
    volume, claim = yaml.safe_load_all((TEMPLATES / "bucket.yaml").read_text())
    for item in (account, volume, claim):
        kubernetes_validate.validate(item, "1.34", strict=True)
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {
        key: claim["metadata"][key] for key in ("namespace", "name")
    }
    documents = manifests(
        "render",
        *JOB_OPTIONS,
        "--bucket-pvc",
        claim["metadata"]["name"],
        "--service-account",
        account["metadata"]["name"],
        *TRAIN_OPTIONS,
    )
    spec = pod_of(documents)["spec"]
    assert not problems(documents) and spec["serviceAccountName"] == "training"
    assert {
        "name": "bucket",
        "persistentVolumeClaim": {"claimName": "training-data", "readOnly": True},
    } in spec["volumes"]
    assert {"name": "bucket", "mountPath": "/bucket", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]


def test_the_policies_allow_exactly_the_calls_and_are_documented() -> None:
    def statements(name: str) -> list[dict[str, Any]]:
        policy = json.loads((TEMPLATES / "iam" / name).read_text())
        assert policy["Version"] == "2012-10-17"
        return policy["Statement"]

    def actions(name: str) -> set[str]:
        return {
            action
            for statement in statements(name)
            for action in (
                [statement["Action"]]
                if isinstance(statement["Action"], str)
                else statement["Action"]
            )
        }

    text = "".join(path.read_text() for path in (ROOT / "launch/cloud").rglob("*.py"))
    calls = set(re.findall(r"(?:query_json|run_aws)\(\s*\"(\w+)\", \"([\w-]+)\"", text))
    for part in re.split(r"query_\w+ = partial\(query_json, ", text)[1:]:
        calls |= {
            (re.match(r'"(\w+)"', part)[1], verb)
            for verb in re.findall(
                r'query_(?:eks|sagemaker)\(\s*"([\w-]+)"', part.split("\ndef ")[0]
            )
        }
    assert len(calls) > 8
    renamed = {
        "eks:UpdateKubeconfig": "eks:DescribeCluster",
        "ecr:GetLoginPassword": "ecr:GetAuthorizationToken",
    }
    called = {
        f"{service}:{''.join(map(str.capitalize, verb.split('-')))}" for service, verb in calls
    }
    pushing = {
        f"ecr:{name}"
        for name in (
            "BatchCheckLayerAvailability",
            "InitiateLayerUpload",
            "UploadLayerPart",
            "CompleteLayerUpload",
            "PutImage",
        )
    }
    assert {renamed.get(name, name) for name in called} | pushing == actions("launcher.json")
    assert actions("pods.json") == {"s3:ListBucket", "s3:GetObject"}
    explained = (ROOT / "docs" / "cloud" / "kubernetes.md").read_text()
    for name in ("launcher.json", "pods.json", "pods-trust.json"):
        assert f"`{name}`" in explained
        assert not [s["Sid"] for s in statements(name) if f"`{s['Sid']}`" not in explained]
