"""Decides the job that prepares data, model and tokens on the volume of the training jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launch.kube.job import Document, Job, filled, keep_dollars, train_options
from launch.kube.job_options import JobOptions
from launch.kube.raw_text import RawText
from lib.core.errors import Problems

_BUCKET = "/bucket"


@dataclass(frozen=True)
class Preparation(Job):
    """Holds a job of one pod without a GPU. raw_text: options of launch/prepare.py."""

    raw_text: tuple[str, ...] = field(kw_only=True)

    @property
    def resource(self) -> str:
        return "jobs.batch"

    def manifests(self) -> list[Document]:
        settings = {**self._settings(), "RAW_TEXT": list(self.raw_text)}
        return keep_dollars(filled("prepare.yaml", settings))


def planned(asked: JobOptions, raw: RawText, given: Sequence[str], launched_as: str) -> Preparation:
    """Return the job that prepares what `deploy` trains with the same options.

    given: options of stage 04. UsageError tells all that is wrong with it.
    """
    problems = Problems()
    one_pod = replace(
        asked,
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
    train = problems.collect(lambda: train_options(one_pod, given))
    if raw.data.startswith(_BUCKET) and not asked.bucket_pvc:
        problems.add(
            f"--data {raw.data} lies in a bucket that the pod does not have",
            expected="--bucket-pvc NAME; launch/kube/templates/bucket.yaml makes such a claim",
        )
    problems.raise_if_any()
    return Preparation(
        **vars(replace(one_pod, job_name=f"{asked.job_name}-prepare")),
        train=tuple(train or ()),
        launched_as=launched_as,
        raw_text=tuple(raw.words()),
    )
