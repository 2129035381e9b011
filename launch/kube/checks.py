"""What is wrong with a job before anything is asked of a cluster: names, sizes, places."""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

from lib.core import units
from lib.core.errors import Problems
from lib.core.options import Options

LONGEST = 63  # of a label, as Kubernetes calls such a name (RFC 1123)
_LONGEST_JOB = 45  # the operators append the role and number of a pod
_LONGEST_OBJECT = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_OBJECT = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_TYPE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_SIMILAR = 0.75


def names(opts: Options, problems: Problems) -> None:
    """Note names that Kubernetes does not take, those of the job among them."""
    job, namespace = opts.job_name, opts.namespace
    if not _LABEL.fullmatch(job) or job[0].isdigit() or len(job) > _LONGEST_JOB:
        problems.add(f"--job-name {job!r} cannot name a job",
                     expected="small letters, digits and hyphens, a letter first, no "
                              f"hyphen at the end, at most {_LONGEST_JOB}")
    objects(opts, problems)
    if opts.kind == "trainjob" and len(namespace) <= LONGEST \
            and len(runtime := f"{namespace}-{job}") > LONGEST:
        problems.add(f"the job's runtime would be named {runtime}, which has {len(runtime)} "
                     "characters", expected=f"at most {LONGEST} in --namespace and --job-name")


def objects(opts: Options, problems: Problems) -> None:
    """Note names that no namespace, claim or secret can have."""
    namespace = opts.namespace
    if not _LABEL.fullmatch(namespace) or len(namespace) > LONGEST:
        problems.add(f"--namespace {namespace!r} cannot name a namespace",
                     expected="small letters, digits and hyphens, a letter or digit at both "
                              f"ends, at most {LONGEST}")
    for option in ("pvc", "image_pull_secret", "token_secret"):
        flag, value = f"--{option.replace('_', '-')}", getattr(opts, option, "")
        if not value and option == "pvc":
            problems.add("--pvc is empty", expected="the claim of a volume that all nodes share")
        elif value and not (_OBJECT.fullmatch(value) and len(value) <= _LONGEST_OBJECT):
            problems.add(f"{flag} {value!r} cannot name an object",
                         expected="small letters, digits, hyphens and dots, a letter or digit at "
                                  f"both ends, at most {_LONGEST_OBJECT}")


def nodes(opts: Options, bare_type: str, known: dict[str, Any], problems: Problems) -> None:
    """Note an instance type that is not known, and what its nodes do not have.

    bare_type: without HyperPod's prefix. known: render.instances().
    """
    has = known.get(bare_type)
    if has is None and opts.gpus_per_node is None:
        unknown_type(bare_type, known, problems)
    elif bare_type and not (_TYPE.fullmatch(bare_type) and len(bare_type) < LONGEST):
        problems.add(f"--instance-type {bare_type!r} cannot be the type of a node")
    for option, key, what in (("gpus_per_node", "gpus", "GPU"), ("efa_per_node", "efa", "EFA")):
        asked = getattr(opts, option)
        if has and asked is not None and asked > has[key]:
            problems.add(f"--{option.replace('_', '-')} {asked}: a node of type {bare_type} has "
                         f"{has[key]} {what}{' adapter' * (what == 'EFA')}"
                         f"{'s' * (has[key] != 1)}")
    if opts.min_nodes and opts.min_nodes > opts.nodes:
        problems.add(f"--min-nodes {opts.min_nodes} is above --nodes {opts.nodes}")
    if opts.min_nodes and opts.kind == "trainjob":
        problems.add("--min-nodes: a TrainJob has a fixed size",
                     expected="--kind pytorchjob or hyperpod")
    for option in ("spares", "slow_below"):
        if getattr(opts, option) and opts.kind != "hyperpod":
            problems.add(f"--{option.replace('_', '-')} is for --kind hyperpod alone")


def fewer_nodes(opts: Options, train: Options, ranks: int, problems: Problems) -> None:
    """Note that a job which goes on with fewer nodes could not divide its batch among them.

    train: options of stage 04, which all nodes together can share. ranks: of a node.
    """
    from lib.train import plan

    division = plan.divide(train, 0, opts.nodes * ranks)
    batch, per_node = division.global_batch, division.micro_batch * ranks
    unfit = [nodes for nodes in range(opts.min_nodes, opts.nodes) if batch % (nodes * per_node)]
    if unfit:
        least = math.lcm(*(nodes * per_node for nodes in range(opts.min_nodes, opts.nodes + 1)))
        problems.add(f"--min-nodes {opts.min_nodes}: {units.counted(batch, 'sample')} per step "
                     f"cannot be divided among the ranks of {' or '.join(map(str, unfit))} "
                     f"{'nodes' if unfit[-1] > 1 else 'node'}",
                     expected=f"--global-batch-size, a multiple of {least}, or no --min-nodes")


def unknown_type(bare_type: str, known: dict[str, Any], problems: Problems) -> None:
    """Note an instance type, or none, whose nodes are not known."""
    near = difflib.get_close_matches(bare_type.lower(), known, n=1, cutoff=_SIMILAR)
    said = f"--instance-type {bare_type} is not in the table" if bare_type else \
        "--instance-type is missing"
    problems.add(said + (f"; the nearest is {near[0]}" if near else ""),
                 expected="one of " + ", ".join(known) + "; or --gpus-per-node (and "
                 "--efa-per-node) for any other")


def places(opts: Options, problems: Problems) -> None:
    """Note an image or a directory that no pod can have."""
    if not opts.image:
        problems.add("--image is missing", expected="the image that launch/build_image.py made")
    elif not re.fullmatch(r"[A-Za-z0-9][^\s]*", opts.image):
        problems.add(f"--image {opts.image!r} cannot name an image",
                     expected="REGISTRY/NAME:TAG, without spaces")
    for option in ("mount_path", "code_dir", "project_dir"):
        if (value := getattr(opts, option)) is not None \
                and not re.fullmatch(r"/[^:\s]*", value):
            problems.add(f"--{option.replace('_', '-')} {value!r} is not a path in a pod",
                         expected="one that begins with / and holds neither `:` nor spaces")
