"""Start a pod with the volume of the runs, follow its command, and delete it."""

from __future__ import annotations

import itertools
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.cloud.kube import cluster_state, failure_causes
from launch.cloud.kube.deploy import JobFailed, require_objects
from launch.cloud.kube.job import Document, Job, escape_dollars, fill_template, render_manifests
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from lib.core import log, options
from lib.core.declared import option
from lib.core.errors import Problems
from lib.core.retry import poll, retry

ROOT = Path(__file__).resolve().parents[3]
_POLL_S = 1.0
_CHECK_S = 15.0  # between two checks of a pod whose output is being printed
_DELETE_PAUSES_S = (1.0, 2.0, 4.0)
_RECENT_LINES = 10_000
_END_TIMEOUT_S = 60.0  # until the cluster reports the exit code of a command that has ended
_SILENT_CALLS = 20  # failed calls in a row before an error
_ENDED = ("Succeeded", "Failed")
# Files of this project that the image contains too, perhaps as the value of an option.
_OUR_FILE = re.compile(r"(--[\w-]+=)?((?:launch|lib|recipes|chat_templates)/.+|\w+\.py)")


@dataclass(frozen=True)
class PodOptions(JobOptions):
    """The options of a pod with the volume; options of training jobs have no effect."""

    job_name: str = option(
        "volume", group="the job", metavar="J", help="beginning of the pod's name"
    )
    gpus_per_node: int | None = option(0, parse=options.count, metavar="N", help="GPUs of the pod")


@dataclass(frozen=True)
class VolumePod(Job):
    """A pod with the volume. command: its words; the command runs in the directory of the runs."""

    pod_name: str = field(kw_only=True)
    command: tuple[str, ...] = field(kw_only=True)

    def manifests(self) -> list[Document]:
        settings = {
            **self._settings(),
            "COMMAND": list(self.command),
            "WITHOUT_GPUS": not self.gpus_per_node,
        }
        return escape_dollars(fill_template("volume_pod.yaml", settings))


def plan_pod(pod_options: JobOptions, command: Sequence[str]) -> VolumePod:
    """Return a pod that runs a command. Raises UsageError with all problems at once."""
    gpus = pod_options.gpus_per_node or 0
    one_pod = replace(
        pod_options,
        nodes=1,
        min_nodes=0,
        spares=0,
        slow_below=0,
        gpus_per_node=gpus,
        efa_per_node=0,
        instance_type=pod_options.instance_type if gpus else "",
    )
    problems = Problems()
    one_pod.check(problems)
    problems.raise_if_any()
    return VolumePod(
        **{**vars(one_pod), "instance_type": one_pod.with_defaults().instance_type},
        train=(),
        pod_name=f"{one_pod.job_name}-{secrets.token_hex(3)}",
        command=tuple(command),
    )


def find_in_image(word: str, code_dir: str) -> str:
    """Return a word of a command, with the path in the image if it names a file of this project."""
    match = _OUR_FILE.fullmatch(word)
    if not match or not (ROOT / match[2]).is_file():
        return word
    return f"{match[1] or ''}{code_dir}/{match[2]}"


@contextmanager
def start_pod(pod: VolumePod, kubectl: Kubectl, pending_minutes: float) -> Iterator[None]:
    """Create a pod, wait until its command runs (or has ended), and delete it at the end.

    Raises JobFailed if the pod cannot start, or has not started after `pending_minutes`, and
    UsageError if the cluster lacks the volume or another object that the pod needs.
    """
    require_objects(pod, kubectl)  # without an answer there is no pod to delete
    try:
        kubectl.apply(render_manifests(pod.manifests(), "created by launch/kubernetes.py"))
        log.info(f"pod {pod.pod_name} with the volume {pod.pvc}")
        _wait_until_started(pod, kubectl, pending_minutes)
        yield
    finally:
        _delete_pod(pod, kubectl)


def _delete_pod(pod: VolumePod, kubectl: Kubectl) -> None:
    """Delete a pod; if that fails, only warn, so that an earlier error remains the error."""
    delete = ["delete", "pod", pod.pod_name, "--ignore-not-found", "--wait=false"]
    try:
        retry(lambda: kubectl.run(*delete), _DELETE_PAUSES_S, _is_transient)
    except KubectlError as error:
        command = kubectl.format("delete", "pod", pod.pod_name)
        log.warn(f"pod {pod.pod_name} was not deleted ({error.last_line}): {command}")


def _is_transient(error: Exception) -> bool:
    return isinstance(error, KubectlError) and error.is_transient


def run_in_pod(pod: VolumePod, kubectl: Kubectl, pending_minutes: float) -> int:
    """Run the command of a pod, print its output, and return its exit code."""
    with start_pod(pod, kubectl, pending_minutes):
        _LogPrinter(pod, kubectl).print_to_end()
        return _read_exit_code(pod, kubectl)


def _find_pod(pod: VolumePod, kubectl: Kubectl) -> failure_causes.Pod:
    """Return a pod; tolerate a cluster that does not answer for a while."""
    pod_name = retry(
        lambda: kubectl.find("pod", pod.pod_name),
        itertools.repeat(_POLL_S, _SILENT_CALLS),
        _is_transient,
    )
    if pod_name is None:
        raise JobFailed(f"pod {pod.pod_name} no longer exists: it was deleted from outside")
    return pod_name


def _wait_until_started(pod: VolumePod, kubectl: Kubectl, pending_minutes: float) -> None:
    deadline = time.monotonic() + 60 * pending_minutes
    shown = ""

    def has_started() -> bool:
        nonlocal shown
        item = _find_pod(pod, kubectl)
        state = failure_causes.get_container(item).get("state", {})
        if {"running", "terminated"} & state.keys() or item["status"].get("phase") in _ENDED:
            return True
        cause = cluster_state.find_cause(kubectl, pod.pod_name, [item])
        is_late = time.monotonic() > deadline
        if is_late or (cause and cause.is_stuck):
            raise JobFailed(
                f"pod {pod.pod_name} does not start" + (f": {cause.name}" if cause else ""),
                found=cause.evidence if cause else f"waiting for {pending_minutes:g} minutes",
                hint=cause.remedy if cause else "",
            )
        if cause and cause.evidence != shown:
            shown = cause.evidence
            log.info(f"waiting: {cause.name}: {cause.evidence}")
        return False

    poll(has_started, _POLL_S)


class _LogPrinter:
    """Prints each line of a pod's output once, even if connections are lost."""

    def __init__(self, pod: VolumePod, kubectl: Kubectl) -> None:
        self._pod = pod
        self._kubectl = kubectl
        self._recent: deque[bytes] = deque(maxlen=_RECENT_LINES)
        self._last_stamp = ""

    def print_to_end(self) -> None:
        """Print the output until the command has ended. Raises KubectlError if it is forbidden."""
        while not _has_ended(_find_pod(self._pod, self._kubectl)):
            if self._print("--follow"):
                time.sleep(_POLL_S)
        # Print the rest, if a connection was lost just before the end.
        if error := self._print():
            log.warn(f"the end of the output may be missing: {error.last_line}")

    def _print(self, *follow: str) -> KubectlError | None:
        """Print the new lines. Return the error that ended the output early, None without one."""
        # --since-time counts whole seconds, so kubectl repeats the lines of the last second.
        since = ["--since-time", self._last_stamp] if self._last_stamp else []
        process = subprocess.Popen(
            self._kubectl.command("logs", "--timestamps", *follow, *since, self._pod.pod_name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        printer = threading.Thread(target=self._copy, args=(process,), daemon=True)
        printer.start()
        try:
            printer.join(_CHECK_S)
            while printer.is_alive():  # a connection to a lost node may stay open
                is_last = _has_ended(_find_pod(self._pod, self._kubectl))
                printer.join(_CHECK_S)
                if is_last:
                    break
        finally:
            process.terminate()
            printer.join(_CHECK_S)
        text = process.communicate()[1].decode(errors="replace")
        if not process.returncode:
            return None
        error = KubectlError(["logs"], text)
        if error.is_forbidden:
            raise error
        return error

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        printed = {*self._recent}
        for line in process.stdout:
            if line in printed:
                continue
            self._recent.append(line)
            stamp, _, text = line.partition(b" ")
            self._last_stamp = stamp.decode(errors="replace")
            sys.stdout.buffer.write(text)
            sys.stdout.flush()


def _has_ended(item: failure_causes.Pod) -> bool:
    state = failure_causes.get_container(item).get("state", {})
    return "terminated" in state or item["status"].get("phase") in _ENDED


def _read_exit_code(pod: VolumePod, kubectl: Kubectl) -> int:
    """Return the exit code of a pod's command. Raises JobFailed if the pod ended without one."""
    end: dict[str, Any] = {}

    def has_code() -> bool:
        nonlocal end
        end = failure_causes.get_termination(_find_pod(pod, kubectl))
        return bool(end)

    if not poll(has_code, _POLL_S, _END_TIMEOUT_S):
        item = _find_pod(pod, kubectl)
        cause = cluster_state.find_cause(kubectl, pod.pod_name, [item])
        raise JobFailed(
            f"pod {pod.pod_name} ended without an exit code" + (f": {cause.name}" if cause else ""),
            found=cause.evidence if cause else item["status"].get("message", ""),
            hint=cause.remedy if cause else "",
        )
    if (reason := end.get("reason", "")) not in ("", "Completed", "Error"):
        log.warn(f"the container ended early: {reason} {end.get('message', '')}".rstrip())
    return int(end["exitCode"])
