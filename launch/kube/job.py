"""A training job as it was asked for, and the manifests that say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.common import stage_04
from launch.kube import checks, render
from lib.core.errors import Problems, UsageError
from lib.core.options import Options

HYPERPOD_PREFIX = "ml."
# What is not the node network: loopback, containers, and the interfaces that EKS gives to pods.
NOT_THE_NETWORK = "^lo,docker,veth,eni,pod-id-link0"


@dataclass(frozen=True)
class Kind:
    """What differs between the kinds of job. resource: as kubectl names it."""

    template: str
    resource: str
    container: str
    port: tuple[str, int]


# What a line about a step looks like, by stage 04's --log-style.
_STEP_PATTERNS = {"dict": ".*'global_step': \\d+", "line": ".*step +[0-9,]+/[0-9,]+ +loss"}
KINDS = {
    "pytorchjob": Kind("pytorchjob.yaml", "pytorchjobs.kubeflow.org", "pytorch",
                       ("pytorchjob-port", 23456)),
    "trainjob": Kind("trainjob.yaml", "trainjobs.trainer.kubeflow.org", "node", ("torch", 29500)),
    "hyperpod": Kind("hyperpod.yaml", "hyperpodpytorchjobs.sagemaker.amazonaws.com", "pytorch",
                     ("agent", 8080)),
}
RUNTIMES = "clustertrainingruntimes.trainer.kubeflow.org"


@dataclass(frozen=True)
class Job:
    """A job with everything decided. gpus, efa: per node. train: options of stage 04.

    min_nodes: 0 for a job of fixed size. slow_below: tokens per second, 0 for no limit.
    interfaces: for NCCL_SOCKET_IFNAME, empty to let NCCL choose. launched_as: the command that a
    person typed, for the messages of the run.
    """

    kind: str
    name: str
    namespace: str
    nodes: int
    min_nodes: int
    spares: int
    instance_type: str
    gpus: int
    efa: int
    image: str
    pvc: str
    mount_path: str
    project_dir: str
    code_dir: str
    max_restarts: int
    slow_below: int
    token_secret: str
    pull_secret: str
    train: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    huge_pages: bool = True
    interfaces: str = NOT_THE_NETWORK
    launched_as: str = ""

    @property
    def resource(self) -> str:
        """Return the job's type as kubectl names it."""
        return KINDS[self.kind].resource

    @property
    def runtime(self) -> str:
        """Return the name of a TrainJob's runtime."""
        return runtime_name(self.namespace, self.name)

    @property
    def selector(self) -> str:
        """Return the label selector of the job's pods."""
        return selector(self.name)

    def manifests(self) -> list[render.Document]:
        """Return the job as Kubernetes takes it."""
        return render.documents(KINDS[self.kind].template, self._settings())

    def _settings(self) -> dict[str, Any]:
        kind, asked = KINDS[self.kind], stage_04.parse(self.train)
        port_name, port = kind.port
        is_hyperpod = self.kind == "hyperpod" or self.instance_type.startswith(HYPERPOD_PREFIX)
        return {
            "KIND": self.kind, "JOB_NAME": self.name, "NAMESPACE": self.namespace,
            "RUNTIME": self.runtime, "CONTAINER": kind.container,
            "PORT_NAME": port_name, "PORT": port,
            "NUM_NODES": self.nodes, "MIN_NODES": self.min_nodes, "SPARES": self.spares,
            "LEAST_NODES": self.min_nodes or self.nodes,
            "INSTANCE_TYPE": self.instance_type, "HEALTH": is_hyperpod,
            "GPU_PER_NODE": self.gpus, "PROC_PER_NODE": max(self.gpus, 1),
            "EFA_PER_NODE": self.efa, "HUGE_PAGES": self.huge_pages and self.efa,
            "IMAGE_URI": self.image, "PVC": self.pvc, "MOUNT_PATH": self.mount_path,
            "PROJECT_DIR": self.project_dir, "CODE_DIR": self.code_dir,
            "MAX_RESTARTS": self.max_restarts, "POD_RESTARTS": self.max_restarts * self.nodes,
            "POD_RESTART": "Never" if self.kind == "trainjob" else "",
            "SLOW_BELOW": self.slow_below,
            "STEP_PATTERN": _STEP_PATTERNS[asked.log_style],
            # Pods that come back tell by it that they have overwritten the run already.
            "LAUNCH_MARK": f"{self.name} {time.time_ns():x}"
                           if asked.overwrite or asked.resume == "never" else "",
            "INTERFACES": self.interfaces, "LAUNCHED_AS": self.launched_as,
            "TOKEN_SECRET": self.token_secret, "PULL_SECRET": self.pull_secret,
            "MORE_ENV": [{"name": key, "value": value} for key, value in self.env.items()],
            "TRAIN": list(self.train),
        }


def runtime_name(namespace: str, name: str) -> str:
    """Return the name of a TrainJob's runtime, which belongs to the whole cluster."""
    return f"{namespace}-{name}"


def selector(name: str) -> str:
    """Return the label selector of a job's pods."""
    return f"app.kubernetes.io/name=llm-training,app.kubernetes.io/instance={name}"


def of_options(opts: Options, given: Sequence[str]) -> Job:
    """Return the job that options ask for; UsageError tells all that is wrong with them.

    given: options of stage 04.
    """
    bare_type = opts.instance_type.removeprefix(HYPERPOD_PREFIX)
    known = render.instances()
    problems = Problems()
    checks.names(opts, problems)
    checks.nodes(opts, bare_type, known, problems)
    checks.places(opts, problems)
    has = known.get(bare_type, {})
    gpus = has.get("gpus") if opts.gpus_per_node is None else opts.gpus_per_node
    train = problems.collect(lambda: train_options(opts.job_name, given, opts.slow_below))
    if train and gpus is not None:
        ranks = opts.nodes * max(gpus, 1)
        parsed = stage_04.parse(train)
        if problems.collect(lambda: stage_04.check_ranks(parsed, ranks) or True) and opts.min_nodes:
            checks.fewer_nodes(opts, parsed, max(gpus, 1), problems)
    problems.raise_if_any()
    is_hyperpod = opts.kind == "hyperpod" and bare_type
    return Job(
        kind=opts.kind, name=opts.job_name, namespace=opts.namespace, nodes=opts.nodes,
        min_nodes=opts.min_nodes or 0, spares=opts.spares,
        instance_type=HYPERPOD_PREFIX + bare_type if is_hyperpod else opts.instance_type,
        gpus=gpus,
        efa=has.get("efa", 0) if opts.efa_per_node is None else opts.efa_per_node,
        image=opts.image, pvc=opts.pvc, mount_path=opts.mount_path,
        project_dir=opts.project_dir or opts.mount_path, code_dir=opts.code_dir,
        max_restarts=opts.max_restarts, slow_below=opts.slow_below,
        token_secret=opts.token_secret, pull_secret=opts.image_pull_secret, train=tuple(train),
        env={str(key): str(value) for key, value in has.get("env", {}).items()})


def train_options(name: str, given: Sequence[str], slow_below: int = 0) -> list[str]:
    """Return the options of stage 04 as the pods get them; UsageError when it would not take them.

    What --config holds stands among them: pods do not have the file. The job's name becomes the
    experiment's when there is none, and a rule for slow jobs has the log style that it reads.
    """
    words = stage_04.expanded(given)
    if slow_below:
        words.insert(0, "--log-style=dict")
    asked = stage_04.parse(words)
    if slow_below and asked.log_style != "dict":
        raise UsageError("--slow-below reads the speed from --log-style dict",
                         found=f"--log-style {asked.log_style}",
                         expected="no --log-style, or dict")
    if not asked.dataset_name:
        raise UsageError("no dataset is named", expected="-d NAME behind `--`")
    return words if asked.experiment_name else [f"--experiment-name={name}", *words]
