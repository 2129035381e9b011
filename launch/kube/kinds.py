"""The kinds of job on Kubernetes: a row of KINDS for each; how they differ stands nowhere else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """What differs between the kinds of job.

    template: below launch/kubernetes/, written in `version` of `resource`, the type as kubectl
    names it. operator: how the names of the deployments begin that act on it; install: what to do
    without one. container, port: as the operator names and numbers them. agent: the words that
    start the ranks in a pod, where the operator brings its own; else the launchers here do.
    runtime: type of the object that is made for each job and belongs to the whole cluster, if any.
    pod_restart: restartPolicy of the pods, empty for the operator's. is_elastic: whether it goes on
    with fewer nodes. on_hyperpod: instance types have a prefix, and there are spare nodes and rules
    about the log.
    """

    template: str
    resource: str
    version: str
    operator: str
    install: str
    container: str
    port: tuple[str, int]
    agent: tuple[str, ...] = ()
    runtime: str = ""
    pod_restart: str = ""
    is_elastic: bool = True
    on_hyperpod: bool = False


KINDS = {
    "pytorchjob": JobKind(
        "pytorchjob.yaml", "pytorchjobs.kubeflow.org", "v1", "training-operator",
        "install the Kubeflow training operator, release 1.9", "pytorch",
        ("pytorchjob-port", 23456)),
    "trainjob": JobKind(
        "trainjob.yaml", "trainjobs.trainer.kubeflow.org", "v1alpha1", "kubeflow-trainer",
        "install the Kubeflow trainer, release 2.3, with its runtimes", "node", ("torch", 29500),
        runtime="clustertrainingruntimes.trainer.kubeflow.org", pod_restart="Never",
        is_elastic=False),
    "hyperpod": JobKind(
        "hyperpod.yaml", "hyperpodpytorchjobs.sagemaker.amazonaws.com", "v1",
        "hp-training-operator",
        "install the EKS add-on amazon-sagemaker-hyperpod-training-operator", "pytorch",
        ("agent", 8080), on_hyperpod=True,
        agent=("hyperpodrun", "--rdzv-backend", "hyperpod", "--shutdown-signal", "SIGTERM",
               "--shutdown-timeout", "240")),
}
ELASTIC = " or ".join(name for name, kind in KINDS.items() if kind.is_elastic)
HYPERPOD_PREFIX = "ml."
