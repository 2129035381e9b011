"""Plan the job that prepares data, model and tokens on the volume, and find whether it has run.

Each such job has an annotation with a digest of what it prepares and where, and stays in the
cluster when it has ended. So a finished one with the same digest is the record that a run is
prepared, unless the claim of the volume is newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launch.cloud.kube import cluster_state
from launch.cloud.kube.job import Document, Job, escape_dollars, expand_train_options, fill_template
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from launch.cloud.kube.raw_text import RawText
from lib.core import hashing, log
from lib.core.errors import Problems
from lib.train import command_line
from lib.train.sources.table import choose_source

# Values of --prepare.
CHOICES = AUTO, ALWAYS, NEVER = ("auto", "always", "never")
BUCKET = "/bucket"  # where a pod mounts the claim of --bucket-pvc
_ANNOTATION = "llm-training/prepares"  # as in prepare.yaml
# The options of stage 04 that decide which dataset, model, tokens and packs a run reads.
_INPUTS = (
    "dataset_name",
    "model_name",
    "model_size",
    "vocab_size",
    "tokenizer",
    "cache_dir",
    "streaming",
    "chat_template",
    "train_on",
    "too_long",
    "packing",
    "seq_length",
)


@dataclass(frozen=True)
class Preparation(Job):
    """A job of one pod without a GPU. raw_text: options of launch/cloud/prepare.py."""

    raw_text: tuple[str, ...] = field(kw_only=True)

    @property
    def resource(self) -> str:
        return "jobs.batch"

    @property
    def needs_token(self) -> bool:
        return True

    @property
    def digest(self) -> str:
        """Return a digest of what the job prepares, and of the directory."""
        config = command_line.parse_options(self.train)
        inputs = {name: str(getattr(config, name)) for name in _INPUTS}
        return hashing.fingerprint(
            {**inputs, "claim": self.pvc, "directory": self.project_dir or self.mount_path}
        )

    def manifests(self) -> list[Document]:
        settings = {
            **self._settings(),
            "RAW_TEXT": list(self.raw_text),
            "DIGEST": self.digest,
        }
        return escape_dollars(fill_template("prepare.yaml", settings))


def plan_preparation(
    job_options: JobOptions, raw: RawText, train_words: Sequence[str], launched_as: str
) -> Preparation:
    """Return the job that prepares the run that `deploy` trains with the same options.

    train_words: options of stage 04. Raises UsageError with all problems at once.
    """
    problems = Problems()
    one_pod = replace(
        job_options,
        nodes=1,
        min_nodes=0,
        spares=0,
        slow_below=0,
        kind="pytorchjob",
        instance_type="",
        gpus_per_node=0,
        efa_per_node=0,
    )
    one_pod.check(problems)
    train = problems.collect(lambda: expand_train_options(one_pod, train_words))
    if raw.data.startswith(BUCKET) and not job_options.bucket_pvc:
        problems.add(
            f"--data {raw.data} is in a bucket that the pod does not mount",
            expected="--bucket-pvc NAME; launch/cloud/kube/templates/bucket.yaml creates such a "
            "claim",
        )
    problems.raise_if_any()
    return Preparation(
        **vars(replace(one_pod, job_name=f"{job_options.job_name}-prepare")),
        train=tuple(train or ()),
        launched_as=launched_as,
        raw_text=tuple(raw.words()),
    )


def is_needed(prepare: str, preparation: Preparation, job: Job, kubectl: Kubectl) -> bool:
    """Return whether to prepare a run before its job, and log why.

    prepare: the value of --prepare.
    """
    if prepare == NEVER:
        return False
    if prepare == ALWAYS:
        log.info(f"preparing the run first, in job {preparation.job_name}")
        return True
    existing = kubectl.find(job.resource, job.job_name)
    if existing and cluster_state.read_job_state(existing).state == cluster_state.ACTIVE:
        return False  # deploy follows it
    if reason := explain_omission(job):
        log.info(reason)
        return False
    if record := _find_record(preparation, kubectl):
        log.info(f"job {record} has prepared this run on {job.pvc}; --prepare always repeats it")
        return False
    log.info(
        f"no finished job has prepared this run on {job.pvc}: preparing it first, in job "
        f"{preparation.job_name}, which keeps what exists (with --prepare never, the training job "
        "starts at once)"
    )
    return True


def explain_omission(job: Job) -> str:
    """Return why `--prepare auto` prepares nothing for a job, whatever the cluster has; "" if not.

    job: the training job.
    """
    config = command_line.parse_options(job.train)
    source = choose_source(config)
    if source.is_prepared or not (source.needs_tokenizer or config.makes_model):
        return ""
    return f"with {source.option} nothing is prepared (--prepare always prepares the model)"


def _find_record(preparation: Preparation, kubectl: Kubectl) -> str:
    """Return the finished job that has prepared this run on the present volume; "" if none."""
    try:
        claim = kubectl.find("pvc", preparation.pvc) or {}
        jobs = kubectl.items(
            preparation.resource, "--selector", "app.kubernetes.io/name=llm-training"
        )
    except KubectlError as error:
        if not error.is_forbidden:
            raise
        return ""
    created = claim.get("metadata", {}).get("creationTimestamp", "")
    for job in jobs:
        metadata = job["metadata"]
        if (
            metadata.get("annotations", {}).get(_ANNOTATION) == preparation.digest
            and metadata.get("creationTimestamp", "") >= created
            and cluster_state.read_job_state(job).state == cluster_state.SUCCEEDED
        ):
            return str(metadata["name"])
    return ""
