"""Define the kinds of job on Kubernetes: a row of KINDS for each.

The template of a kind is launch/kube/templates/<kind>.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """A kind of job.

    title: the operator's name. resource: the job's type as kubectl names it. version: the API
    version of the template. operator: prefix of the names of the operator's deployments. install:
    how to install a missing operator. container, port: the container's name, and the port's name
    and number, as the operator expects them. agent: the command that starts the ranks in a pod, if
    the operator has its own launcher. runtime: type of an object that is created for each job and
    belongs to the whole cluster, if any. pod_restart: restartPolicy of the pods, empty for the
    operator's default. is_elastic: whether a job continues with fewer nodes. on_hyperpod: whether
    jobs run on HyperPod, which prefixes instance types, keeps spare nodes and watches the log.
    """

    title: str
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
        title="Kubeflow training operator",
        resource="pytorchjobs.kubeflow.org",
        version="v1",
        operator="training-operator",
        install="install the Kubeflow training operator, release 1.9",
        container="pytorch",
        port=("pytorchjob-port", 23456),
    ),
    "trainjob": JobKind(
        title="Kubeflow trainer",
        resource="trainjobs.trainer.kubeflow.org",
        version="v1alpha1",
        operator="kubeflow-trainer",
        install="install the Kubeflow trainer, release 2.3, with its runtimes",
        container="node",
        port=("torch", 29500),
        pod_restart="Never",
        is_elastic=False,
        runtime="clustertrainingruntimes.trainer.kubeflow.org",
    ),
    "hyperpod": JobKind(
        title="SageMaker HyperPod",
        resource="hyperpodpytorchjobs.sagemaker.amazonaws.com",
        version="v1",
        operator="hp-training-operator",
        install="install the EKS add-on amazon-sagemaker-hyperpod-training-operator",
        container="pytorch",
        port=("agent", 8080),
        on_hyperpod=True,
        agent=(
            "hyperpodrun",
            "--rdzv-backend",
            "hyperpod",
            "--shutdown-signal",
            "SIGTERM",
            "--shutdown-timeout",
            "240",
        ),
    ),
}
ELASTIC = " or ".join(name for name, kind in KINDS.items() if kind.is_elastic)
ON_HYPERPOD = " or ".join(name for name, kind in KINDS.items() if kind.on_hyperpod)
HYPERPOD_PREFIX = "ml."
