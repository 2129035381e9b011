"""Declares the options of a job on Kubernetes, and tells what no cluster takes."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launch.kube.kinds import ELASTIC, HYPERPOD_PREFIX, KINDS, ON_HYPERPOD
from lib.core import aliases, commands, config_file, options, units
from lib.core.declared import flag, option
from lib.core.errors import Problems

TEMPLATES = Path(__file__).resolve().parent / "templates"
LONGEST = 63  # of a label, as Kubernetes calls such a name (RFC 1123)
_LONGEST_JOB = 45  # the operators append the role and number of a pod
_LONGEST_OBJECT = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_OBJECT = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_TYPE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
Asked = TypeVar("Asked", bound="JobNeeds")


@dataclass(frozen=True)
class JobNeeds:
    """Says what a job needs of its cluster."""

    kind: str = option(
        "pytorchjob",
        group="the job",
        choices=tuple(KINDS),
        help=", ".join(kind.title for kind in KINDS.values()),
    )
    namespace: str = option("default", metavar="NS", help="namespace of the job")
    context: str = option(
        "", metavar="NAME", help="context of the kubeconfig (default: the current one)"
    )
    nodes: int = option(
        1, group="the nodes", parse=options.positive_int, help="nodes that the job asks for"
    )
    instance_type: str = option(
        "", metavar="T", help="for example p5.48xlarge; HyperPod's ml. is added (default: any node)"
    )
    gpus_per_node: int | None = option(
        None,
        parse=options.count,
        help="GPUs to ask for, 0 to train on the CPU (default: by instance type)",
    )
    efa_per_node: int | None = option(
        None, parse=options.count, help="EFA adapters to ask for (default: by instance type)"
    )
    image: str = option(
        "",
        group="the pods",
        metavar="URI",
        help="image with the code (default: the last that launch/build_image.py built here)",
    )
    image_pull_secret: str = option(
        "", metavar="NAME", help="secret with the registry's credentials (default: none)"
    )
    pvc: str = option(
        "fsx-claim",
        metavar="NAME",
        help="claim of the volume that all nodes share, with data and experiments",
    )
    bucket_pvc: str = option(
        "", metavar="NAME", help="claim of a bucket, which pods read under /bucket (default: none)"
    )
    service_account: str = option(
        "", metavar="NAME", help="account of the pods, for rights on AWS (default: the namespace's)"
    )

    @property
    def bare_type(self) -> str:
        """Return the instance type without HyperPod's prefix, as instances.yaml names it."""
        return self.instance_type.removeprefix(HYPERPOD_PREFIX)

    @property
    def node(self) -> dict[str, Any]:
        """Return what instances.yaml says of a node: gpus, efa, env; empty for another type."""
        return instances().get(self.bare_type, {})

    def settled(self: Asked) -> Asked:
        """Return it with the instance type as nodes bear it, and with what a node is asked for."""
        has = self.node
        gpus = self.gpus_per_node
        efa = self.efa_per_node
        has_prefix = KINDS[self.kind].on_hyperpod and self.bare_type
        return replace(
            self,
            instance_type=HYPERPOD_PREFIX + self.bare_type if has_prefix else self.instance_type,
            gpus_per_node=has.get("gpus", 1) if gpus is None else gpus,
            efa_per_node=has.get("efa", 0) if efa is None else efa,
        )

    def check_names(self, problems: Problems) -> None:
        """Note names that no namespace, claim or secret can have."""
        if not _LABEL.fullmatch(self.namespace) or len(self.namespace) > LONGEST:
            problems.add(
                f"--namespace {self.namespace!r} cannot name a namespace",
                expected="small letters, digits and hyphens, a letter or digit at both "
                f"ends, at most {LONGEST}",
            )
        if not self.pvc:
            problems.add("--pvc is empty", expected="the claim of a volume that all nodes share")
        for name in ("pvc", "bucket_pvc", "service_account", "image_pull_secret", "token_secret"):
            value = getattr(self, name, "")
            if value and not (_OBJECT.fullmatch(value) and len(value) <= _LONGEST_OBJECT):
                problems.add(
                    f"{flag(name)} {value!r} cannot name an object",
                    expected="small letters, digits, hyphens and dots, a letter or digit "
                    f"at both ends, at most {_LONGEST_OBJECT}",
                )

    def check_type(self, problems: Problems) -> None:
        """Note an instance type, or none, whose nodes are not known."""
        kind = self.bare_type
        known = instances()
        if kind not in known and self.gpus_per_node is None:
            near = difflib.get_close_matches(kind.lower(), known, n=1, cutoff=aliases.SIMILAR)
            said = (
                f"--instance-type {kind} is not in the table"
                if kind
                else "--instance-type is missing"
            )
            problems.add(
                said + (f"; the nearest is {near[0]}" if near else ""),
                expected="one of " + ", ".join(known) + "; or --gpus-per-node (and "
                "--efa-per-node) for any other",
            )
        elif kind and not (_TYPE.fullmatch(kind) and len(kind) < LONGEST):
            problems.add(f"--instance-type {kind!r} cannot be the type of a node")


@dataclass(frozen=True)
class JobOptions(JobNeeds):
    """Holds all that a person can say of a job, but for the options of stage 04."""

    job_name: str = option(group="the job", metavar="J", help="name of the job")
    min_nodes: int = option(
        0,
        group="the nodes",
        parse=options.positive_int,
        help="go on with so many when others are lost (default: all are needed)",
    )
    spares: int = option(
        0, parse=options.count, help=f"nodes kept ready for those that fail ({ON_HYPERPOD})"
    )
    code_dir: str = option(
        "/opt/pipeline",
        group="the pods",
        metavar="DIR",
        help="where 04_train_fsdp.py lies in the image",
    )
    mount_path: str = option("/data", metavar="DIR", help="where the volume is mounted")
    project_dir: str = option(
        "",
        metavar="DIR",
        help="directory with hf_datasets, .cache and outputs there (default: the mount path)",
    )
    token_secret: str = option(
        "",
        metavar="NAME",
        help="secret whose key `token` becomes HF_TOKEN (default: none; "
        "deploy makes one when HF_TOKEN is set)",
    )
    max_restarts: int = option(
        5,
        group="the run",
        parse=options.count,
        metavar="M",
        help="restarts without progress before the job fails",
    )
    slow_below: int = option(
        0,
        parse=options.count,
        metavar="TOK_S",
        help=f"call the job slow below so many tokens per second ({ON_HYPERPOD})",
    )

    @property
    def runtime(self) -> str:
        """Return the name of the job's runtime, which belongs to the whole cluster."""
        return f"{self.namespace}-{self.job_name}"

    @property
    def selector(self) -> str:
        """Return the label selector of the job's pods."""
        return f"app.kubernetes.io/name=llm-training,app.kubernetes.io/instance={self.job_name}"

    @property
    def resource(self) -> str:
        """Return the job's type as kubectl names it."""
        return KINDS[self.kind].resource

    def check_names(self, problems: Problems) -> None:
        """Note names that Kubernetes does not take, those of the job among them."""
        job = self.job_name
        if not _LABEL.fullmatch(job) or job[0].isdigit() or len(job) > _LONGEST_JOB:
            problems.add(
                f"--job-name {job!r} cannot name a job",
                expected="small letters, digits and hyphens, a letter first, no "
                f"hyphen at the end, at most {_LONGEST_JOB}",
            )
        super().check_names(problems)
        if (
            KINDS[self.kind].runtime
            and len(self.namespace) <= LONGEST
            and (length := len(self.runtime)) > LONGEST
        ):
            problems.add(
                f"the job's runtime would be named {self.runtime}, which has {length} characters",
                expected=f"at most {LONGEST} in --namespace and --job-name",
            )

    def check(self, problems: Problems) -> None:
        """Note all that no cluster takes: names, sizes, places."""
        self.check_names(problems)
        self.check_type(problems)
        for name, key, what in (
            ("gpus_per_node", "gpus", "GPU"),
            ("efa_per_node", "efa", "EFA adapter"),
        ):
            asked = getattr(self, name)
            has = self.node.get(key)
            if has is not None and asked is not None and asked > has:
                problems.add(
                    f"{flag(name)} {asked}: a node of type {self.bare_type} has "
                    f"{units.counted(has, what)}"
                )
        if self.min_nodes > self.nodes:
            problems.add(f"--min-nodes {self.min_nodes} is above --nodes {self.nodes}")
        if self.min_nodes and not KINDS[self.kind].is_elastic:
            problems.add(
                f"--min-nodes: a {self.kind} has a fixed size", expected=f"--kind {ELASTIC}"
            )
        for name in ("spares", "slow_below"):
            if getattr(self, name) and not KINDS[self.kind].on_hyperpod:
                problems.add(f"{flag(name)} is for --kind {ON_HYPERPOD} alone")
        self._check_places(problems)

    def _check_places(self, problems: Problems) -> None:
        """Note an image or a directory that no pod can have."""
        if not self.image:
            problems.add(
                "--image is missing, and no image was built in this directory",
                expected="an image that the nodes can fetch",
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
                    expected="one that begins with / and holds neither `:` nor spaces",
                )


@functools.cache
def instances() -> dict[str, Any]:
    """Return what a node of each instance type has."""
    return config_file.read_yaml(TEMPLATES / "instances.yaml")
