"""Define the kinds of job on Kubernetes: a row of KINDS for each.

The template of a kind is launch/cloud/kube/templates/<kind>.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobKind:
    """A kind of job.

    title: the operator's name. release: the operator's version, empty for that of the EKS add-on.
    resource: the job's type as kubectl names it. version: the API version of the template.
    operator: prefix of the names of the operator's deployments. install: the commands that install
    a missing operator, in this order; {context}, {cluster} and {region} stand for options that
    choose the cluster. container, port: the container's name, and the port's name
    and number, as the operator expects them. agent: the command that starts the ranks in a pod, if
    the operator has its own launcher. runtime: type of an object that is created for each job and
    belongs to the whole cluster, if any. pod_restart: restartPolicy of the pods, empty for the
    operator's default. is_elastic: whether a job continues with fewer nodes. on_hyperpod: whether
    jobs run on HyperPod, which prefixes instance types, keeps spare nodes and watches the log.
    """

    title: str
    release: str
    resource: str
    version: str
    operator: str
    install: tuple[str, ...]
    container: str
    port: tuple[str, int]
    agent: tuple[str, ...] = ()
    runtime: str = ""
    pod_restart: str = ""
    is_elastic: bool = True
    on_hyperpod: bool = False

    @property
    def product(self) -> str:
        """Return the operator with its version, as the documentation names it."""
        return f"{self.title} {self.release}".strip()

    def install_commands(self, cluster: str = "", region: str = "", context: str = "") -> list[str]:
        """Return the commands that install the operator, to be typed as they stand.

        cluster, region: name and region of the EKS cluster, if they are known. context: the kubectl
        context, empty for the current one.
        """
        return [
            command.format(
                release=self.release,
                context=f" --context {context}" if context else "",
                cluster=cluster or "CLUSTER",
                region=f" --region {region}" if region else "",
            )
            for command in self.install
        ]


KINDS = {
    "pytorchjob": JobKind(
        title="Kubeflow training operator",
        release="1.9.3",
        resource="pytorchjobs.kubeflow.org",
        version="v1",
        operator="training-operator",
        install=(
            "kubectl{context} apply --server-side -k 'https://github.com/kubeflow/trainer.git/"
            "manifests/overlays/standalone?ref=v{release}'",
        ),
        container="pytorch",
        port=("pytorchjob-port", 23456),
    ),
    "trainjob": JobKind(
        title="Kubeflow trainer",
        release="2.3.0",
        resource="trainjobs.trainer.kubeflow.org",
        version="v1alpha1",
        operator="kubeflow-trainer",
        install=(
            "kubectl{context} apply --server-side -k 'https://github.com/kubeflow/trainer.git/"
            "manifests/overlays/manager?ref=v{release}'",
        ),
        container="node",
        port=("torch", 29500),
        pod_restart="Never",
        is_elastic=False,
        runtime="clustertrainingruntimes.trainer.kubeflow.org",
    ),
    "hyperpod": JobKind(
        title="SageMaker HyperPod training operator",
        release="",
        resource="hyperpodpytorchjobs.sagemaker.amazonaws.com",
        version="v1",
        operator="hp-training-operator",
        install=(
            "aws eks create-addon --cluster-name {cluster} --addon-name cert-manager{region}",
            "eksctl create podidentityassociation --cluster {cluster}{region} "
            "--namespace aws-hyperpod "
            "--service-account-name hp-training-operator-controller-manager "
            "--permission-policy-arns "
            "arn:aws:iam::aws:policy/AmazonSageMakerHyperPodTrainingOperatorAccess",
            "aws eks create-addon --cluster-name {cluster} "
            "--addon-name amazon-sagemaker-hyperpod-training-operator "
            "--resolve-conflicts OVERWRITE{region}",
        ),
        container="pytorch",
        port=("agent", 8080),
        on_hyperpod=True,
        agent=(
            "hyperpodrun",
            "--rdzv-backend",
            "hyperpod",
            "--shutdown-signal",
            "SIGTERM",
        ),
    ),
}
ELASTIC = " or ".join(name for name, kind in KINDS.items() if kind.is_elastic)
ON_HYPERPOD = " or ".join(name for name, kind in KINDS.items() if kind.on_hyperpod)
HYPERPOD_PREFIX = "ml."
