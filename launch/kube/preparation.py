"""Plan the job that prepares data, model and tokens on the volume of the training jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launch.kube.job import Document, Job, escape_dollars, expand_train_options, fill_template
from launch.kube.job_options import JobOptions
from launch.kube.raw_text import RawText
from lib.core.errors import Problems

_BUCKET = "/bucket"


@dataclass(frozen=True)
class Preparation(Job):
    """A job of one pod without a GPU. raw_text: options of launch/prepare.py."""

    raw_text: tuple[str, ...] = field(kw_only=True)

    @property
    def resource(self) -> str:
        return "jobs.batch"

    def manifests(self) -> list[Document]:
        settings = {**self._settings(), "RAW_TEXT": list(self.raw_text)}
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
    if raw.data.startswith(_BUCKET) and not job_options.bucket_pvc:
        problems.add(
            f"--data {raw.data} is in a bucket that the pod does not mount",
            expected="--bucket-pvc NAME; launch/kube/templates/bucket.yaml creates such a claim",
        )
    problems.raise_if_any()
    return Preparation(
        **vars(replace(one_pod, job_name=f"{job_options.job_name}-prepare")),
        train=tuple(train or ()),
        launched_as=launched_as,
        raw_text=tuple(raw.words()),
    )
