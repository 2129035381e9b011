"""Declare the options of a job on Kubernetes, and refuse those that no cluster accepts."""

from __future__ import annotations

import difflib
import functools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launch.cloud.kube.kinds import ELASTIC, HYPERPOD_PREFIX, KINDS, ON_HYPERPOD
from lib.core import commands, config_file, options, units, unknown_options
from lib.core.declared import flag, option
from lib.core.errors import Problems, UsageError

TEMPLATES = Path(__file__).resolve().parent / "templates"
_COLUMNS = {"gpus", "efa", "gpu", "gbps", "price", "ml_price", "env"}  # of instances.yaml
MAX_LABEL = 63  # characters of a label (RFC 1123)
_MAX_JOB_NAME = 45  # since the operators append the role and number of a pod
_MAX_OBJECT_NAME = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_OBJECT = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_INSTANCE_TYPE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
Needs = TypeVar("Needs", bound="JobNeeds")


@dataclass(frozen=True)
class ClusterChoice:
    """The cluster of a command by its name, instead of its context (--context)."""

    cluster_name: str = option(
        "",
        metavar="NAME",
        help="EKS cluster; its context is fetched if the kubeconfig does not contain it "
        "(default: the cluster of --context)",
    )


@dataclass(frozen=True)
class JobNeeds:
    """The options that a cluster is checked for."""

    kind: str = option(
        "pytorchjob",
        group="the job",
        choices=tuple(KINDS),
        help="operator that runs the job: " + ", ".join(kind.title for kind in KINDS.values()),
    )
    namespace: str = option("default", metavar="NS", help="namespace of the job")
    context: str = option(
        "", metavar="NAME", help="context of the kubeconfig (default: the current one)"
    )
    region: str = option(
        "",
        metavar="NAME",
        help="AWS region (default: that of the context, or of the AWS settings)",
    )
    nodes: int = option(
        1,
        aliases=("num_nodes", "node_count"),
        group="the nodes",
        parse=options.positive_int,
        help="nodes of the job",
    )
    instance_type: str = option(
        "",
        metavar="T",
        help="for example p5.48xlarge; for HyperPod, ml. is added (default: any node; for a job "
        "that trains on GPUs, the type of the cluster's nodes with GPUs)",
    )
    gpus_per_node: int | None = option(
        None,
        aliases=("gpu_per_node", "tasks_per_node", "accelerators"),
        parse=options.count,
        help="GPUs to request, 0 to train on the CPU (default: by instance type)",
    )
    efa_per_node: int | None = option(
        None,
        aliases=("efa_interfaces",),
        parse=options.count,
        help="EFA adapters to request (default: by instance type)",
    )
    image: str = option(
        "",
        aliases=("image_uri",),
        group="the pods",
        metavar="URI",
        help="image with the code (default: the last one that launch/build_image.py built here)",
    )
    image_pull_secret: str = option(
        "", metavar="NAME", help="secret with the registry's credentials (default: none)"
    )
    pvc: str = option(
        "fsx-claim",
        metavar="NAME",
        help="claim of the shared volume with data and runs",
    )
    bucket_pvc: str = option(
        "", metavar="NAME", help="claim of a bucket, mounted read-only at /bucket (default: none)"
    )
    service_account: str = option(
        "",
        aliases=("service_account_name",),
        metavar="NAME",
        help="account of the pods, for AWS permissions (default: that of the namespace)",
    )

    @property
    def bare_type(self) -> str:
        """Return the instance type without HyperPod's prefix, as in instances.yaml."""
        return self.instance_type.removeprefix(HYPERPOD_PREFIX)

    @property
    def node(self) -> dict[str, Any]:
        """Return the row of instances.yaml (gpus, efa, env …); empty for other types."""
        return read_instances().get(self.bare_type, {})

    @property
    def price(self) -> float:
        """Return the price of a node in USD per hour, 0 if instances.yaml contains none.

        Raises UsageError if a user has written something else than a number there.
        """
        is_prefixed = KINDS[self.kind].on_hyperpod or self.instance_type != self.bare_type
        price = self.node.get("ml_price" if is_prefixed else "price", 0)
        return require_price("instances.yaml", self.bare_type, price)

    def with_defaults(self: Needs) -> Needs:
        """Return the options with a node's devices, and with HyperPod's prefix where needed."""
        devices = self.node
        gpus = self.gpus_per_node
        efa = self.efa_per_node
        has_prefix = KINDS[self.kind].on_hyperpod and self.bare_type
        return replace(
            self,
            instance_type=HYPERPOD_PREFIX + self.bare_type if has_prefix else self.instance_type,
            gpus_per_node=devices.get("gpus", 1) if gpus is None else gpus,
            efa_per_node=devices.get("efa", 0) if efa is None else efa,
        )

    def check_names(self, problems: Problems) -> None:
        """Add a problem for each name that a namespace, claim or secret cannot have."""
        if not _LABEL.fullmatch(self.namespace) or len(self.namespace) > MAX_LABEL:
            problems.add(
                f"--namespace {self.namespace!r} cannot name a namespace",
                expected="small letters, digits and hyphens, a letter or digit at both "
                f"ends, at most {MAX_LABEL} characters",
            )
        if not self.pvc:
            problems.add("--pvc is empty", expected="the claim of a volume that all nodes share")
        for name in ("pvc", "bucket_pvc", "service_account", "image_pull_secret", "token_secret"):
            value = getattr(self, name, "")
            if value and not (_OBJECT.fullmatch(value) and len(value) <= _MAX_OBJECT_NAME):
                problems.add(
                    f"{flag(name)} {value!r} cannot name an object",
                    expected="small letters, digits, hyphens and dots, a letter or digit "
                    f"at both ends, at most {_MAX_OBJECT_NAME} characters",
                )

    def check_type(self, problems: Problems) -> None:
        """Add a problem if the devices of the nodes are unknown."""
        kind = self.bare_type
        known = read_instances()
        if kind not in known and self.gpus_per_node is None:
            similar = difflib.get_close_matches(
                kind.lower(), known, n=1, cutoff=unknown_options.SIMILAR
            )
            problem = (
                f"--instance-type {kind} is not in the table"
                if kind
                else "--instance-type is missing"
            )
            problems.add(
                problem + (f"; the nearest is {similar[0]}" if similar else ""),
                expected="one of " + ", ".join(known) + "; or --gpus-per-node (and "
                "--efa-per-node) for any other",
            )
        elif kind and not (_INSTANCE_TYPE.fullmatch(kind) and len(kind) < MAX_LABEL):
            problems.add(f"--instance-type {kind!r} cannot be an instance type")


@dataclass(frozen=True)
class JobOptions(JobNeeds):
    """All options of a job, apart from those of stage 04."""

    job_name: str = option(group="the job", metavar="J", help="name of the job")
    min_nodes: int = option(
        0,
        group="the nodes",
        parse=options.positive_int,
        help="smallest number of nodes with which the job continues (default: all)",
    )
    spares: int = option(
        0, parse=options.count, help=f"spare nodes that replace failed ones ({ON_HYPERPOD})"
    )
    code_dir: str = option(
        "/opt/pipeline",
        group="the pods",
        metavar="DIR",
        help="directory of 04_train_fsdp.py in the image",
    )
    mount_path: str = option("/data", metavar="DIR", help="directory where the volume is mounted")
    project_dir: str = option(
        "",
        metavar="DIR",
        help="directory with hf_datasets, .cache and outputs (default: the mount path)",
    )
    token_secret: str = option(
        "",
        metavar="NAME",
        help="secret whose key `token` becomes HF_TOKEN in pods that read from the Hub; those of "
        "a run do so only with --streaming --online (default: none; prepare and deploy create one "
        "if HF_TOKEN is set)",
    )
    max_restarts: int = option(
        5,
        aliases=("max_retry",),
        group="the run",
        parse=options.count,
        metavar="M",
        help="maximum number of restarts without progress; also the operator's own limit, which "
        "does not know checkpoints",
    )
    slow_below: int = option(
        0,
        parse=options.count,
        metavar="TOK_S",
        help=f"tokens per second below which the job counts as slow ({ON_HYPERPOD})",
    )

    @property
    def runtime(self) -> str:
        """Return the name of the job's runtime, an object that belongs to the whole cluster."""
        return f"{self.namespace}-{self.job_name}"

    @property
    def selector(self) -> str:
        """Return the label selector of the job's pods."""
        return f"app.kubernetes.io/name=llm-training,app.kubernetes.io/instance={self.job_name}"

    @property
    def resource(self) -> str:
        """Return the type of the job as kubectl names it."""
        return KINDS[self.kind].resource

    def check_names(self, problems: Problems) -> None:
        """Add a problem for each name that Kubernetes refuses, including the job's."""
        job = self.job_name
        if not _LABEL.fullmatch(job) or job[0].isdigit() or len(job) > _MAX_JOB_NAME:
            problems.add(
                f"--job-name {job!r} cannot name a job",
                expected="small letters, digits and hyphens, a letter first, no "
                f"hyphen at the end, at most {_MAX_JOB_NAME} characters",
            )
        super().check_names(problems)
        if (
            KINDS[self.kind].runtime
            and len(self.namespace) <= MAX_LABEL
            and (length := len(self.runtime)) > MAX_LABEL
        ):
            problems.add(
                f"the job's runtime would be named {self.runtime}, which has {length} characters",
                expected=f"at most {MAX_LABEL} in --namespace and --job-name together",
            )

    def check(self, problems: Problems) -> None:
        """Add a problem for each name, size or path that no cluster accepts."""
        self.check_names(problems)
        self.check_type(problems)
        for name, key, device in (
            ("gpus_per_node", "gpus", "GPU"),
            ("efa_per_node", "efa", "EFA adapter"),
        ):
            requested = getattr(self, name)
            available = self.node.get(key)
            if available is not None and requested is not None and requested > available:
                problems.add(
                    f"{flag(name)} {requested}: a node of type {self.bare_type} has "
                    f"{units.counted(available, device)}"
                )
        if self.min_nodes > self.nodes:
            problems.add(f"--min-nodes {self.min_nodes} is above --nodes {self.nodes}")
        if self.min_nodes and not KINDS[self.kind].is_elastic:
            problems.add(
                f"--min-nodes: a {self.kind} has a fixed size", expected=f"--kind {ELASTIC}"
            )
        for name in ("spares", "slow_below"):
            if getattr(self, name) and not KINDS[self.kind].on_hyperpod:
                problems.add(f"{flag(name)} needs --kind {ON_HYPERPOD}")
        self._check_places(problems)

    def _check_places(self, problems: Problems) -> None:
        """Add a problem for a missing or invalid image, and for invalid paths in a pod."""
        if not self.image:
            problems.add(
                "--image is missing, and no image was built in this directory",
                expected="an image that the nodes can pull",
                run=commands.script("launch/build_image.py", "--push", "REGISTRY/llm-training"),
            )
        elif not re.fullmatch(r"[A-Za-z0-9][^\s]*", self.image):
            problems.add(
                f"--image {self.image!r} cannot name an image",
                expected="REGISTRY/NAME:TAG, without spaces",
            )
        for name in ("mount_path", "code_dir", "project_dir"):
            value = getattr(self, name)
            if not re.fullmatch(r"/[^:\s]*", value) and (value or name != "project_dir"):
                problems.add(
                    f"{flag(name)} {value!r} is not a path in a pod",
                    expected="a path that begins with / and contains neither `:` nor spaces",
                )


@functools.cache
def read_instances() -> dict[str, Any]:
    """Return the devices of a node of each instance type.

    Raises UsageError for an unknown entry in a row: YAML reads `price: 2,4` as the price 2 and an
    entry 4.
    """
    file = TEMPLATES / "instances.yaml"
    rows = config_file.read_yaml(file)
    for name, row in rows.items():
        unknown = [key for key in row if key not in _COLUMNS] if isinstance(row, dict) else [row]
        if unknown:
            raise UsageError(
                f"{file}: {name} has the unknown entry {unknown[0]}",
                expected=f"{', '.join(sorted(_COLUMNS))}; numbers with a decimal point",
            )
    return rows


def require_price(file: str, name: str, value: Any) -> float:
    """Return a price in USD. Raises UsageError if the value is something else.

    file: the template that contains the price. name: the item that has the price, such as
    g5.8xlarge.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise UsageError(
            f"{TEMPLATES / file}: the price of {name} is {value!r}",
            expected="USD, such as 2.448",
        )
    return value
