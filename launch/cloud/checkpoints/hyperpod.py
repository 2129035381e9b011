"""Store the second tier in the memory of a HyperPod cluster (managed tiered checkpointing).

    <namespace>/<rank>/<step>     shards and random states of a rank, as safetensors
    <namespace>/<ranks>/<step>    COMMIT, written last: its own digest, then the size and digest of
                                  each rank's part, the train state, and the fields of a COMMIT.json

The service keeps one value per rank and step; COMMIT is the value of an additional rank. A
checkpoint exists if it has a COMMIT. It is valid if every rank's part matches its digest in COMMIT.
No part is a pickle.

The client connects only to the cluster's own service, or to the address in --ckpt-local-dir, and
ignores any proxy. It is part of the package `amzn-sagemaker-checkpointing`. That package's DCP
reader (1.1.3) unpickles whatever the service returns, without an allowlist, and accepts truncated
parts. So this module does without that reader and uses the package's client.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as tensors_in

from lib.checkpoints import tier
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord, select_facts
from lib.checkpoints.place import SavedRun
from lib.checkpoints.snapshot import Snapshot, require_same_specs
from lib.core import commands, hashing, log, paths, records
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.identity import find_differences
from lib.models.tensor_file import encode_tensors
from lib.parallel.layout import gather, on_all_ranks, on_rank_0

if TYPE_CHECKING:  # optional: only this tier needs it
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
        InMemoryCheckpointClient,
    )

CLUSTER = "auto"  # as an address: the service of the run's own cluster
_KEEP = 2  # when a third arrives, the service drops the oldest, which leaves a complete one
_LISTED = 100  # steps; more than ever exist
_TIMEOUT_S = 10.0  # for small requests
_PART_TIMEOUT_S = 60.0
_MAX_ERROR_LENGTH = 160  # characters; an error may be logged at each save
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] [\w ]+")
_NAME_SEPARATOR = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class _HyperPodCheckpoint(Checkpoint):
    """A checkpoint of this tier. content: what COMMIT contains. part: this rank's verified part."""

    content: dict[str, Any] = field(repr=False)
    part: bytes = field(repr=False)

    def commit(self) -> dict[str, Any]:
        return self.content

    def record(self) -> TrainRecord:
        return self.content["train_state"]


class HyperPodTier(tier.Tier):
    """Checkpoints of one run in the memory of the cluster.

    Each run has its own namespace. Errors of the service are logged, and the run falls back to the
    shared checkpoints. Raises UsageError if the package is not installed.
    """

    where = "the cluster's memory"

    def __init__(self, run: SavedRun, address: str, every: int) -> None:
        """address: URL of the service, or CLUSTER."""
        super().__init__(run, every)
        self._control = run.layout.control
        self._saving = run.layout.saving
        self._rank = run.layout.rank
        self._ranks = run.layout.ranks
        self._namespace = f"{_NAME_SEPARATOR.sub('-', run.name)[:40]}-{run.id}"
        self._client = _make_client(address, self._namespace, self._rank, self._ranks)

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Write and commit a checkpoint; if a rank fails, all ranks raise."""
        snapshot.ready()
        try:
            self._run_on_all_ranks(self._make_namespace)
            parts = self._run_on_all_ranks(lambda: self._write_part(snapshot))
            self._run_on_all_ranks(lambda: self._commit(snapshot, parts))
        except BaseException:
            with suppress(Exception):  # or the incomplete one would displace a complete one
                self._delete_newer(snapshot.step - 1)
            raise
        return Checkpoint(self._path(snapshot.step), snapshot.step)

    def find_newest(self, before: int | None = None, after: int = 0) -> Checkpoint | None:
        """Return the newest checkpoint that all ranks have read back and verified."""

        def reject(step: int, why: str) -> None:
            log.warn(f"{self._path(step)} is not used: {why}")
            self.note_damaged(step, f"in {self.where}: {why}")

        def is_wanted(step: int) -> bool:
            return after < step and (before is None or step <= before)

        for step, content in on_rank_0(
            lambda: self._list_committed(is_wanted, reject), self._control
        ):
            if content["world_size"] != self._ranks or find_differences(
                content["identity"], self.run.identity
            ):
                continue
            part, problem = self._read_part(step, content["parts"][self._rank])
            problems = list(filter(None, gather(problem, self._control)))
            if not problems:
                return _HyperPodCheckpoint(self._path(step), step, content, part)
            if self._rank == 0:
                reject(step, problems[0])
        return None

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to this tier."""
        return isinstance(checkpoint, _HyperPodCheckpoint)

    def clear(self, step: int) -> None:
        """Delete all checkpoints of the tier, because the run is complete at this step."""
        if self._rank != 0:
            return
        try:
            if self._client.get_namespace_config():
                steps = self._steps()
                self._client.delete_namespace()
                self.note_deleted(step, steps, "the run is complete")
        except Exception as error:
            log.warn(
                f"the checkpoints in {self.where}, {self._namespace}, could not be deleted: "
                f"{_summarize_error(error)}"
            )

    def drop_newer(self, step: int, why: str) -> None:
        """Delete the checkpoints after a step, because the run continues from that step.

        Raises ArtifactError if that fails, because a later launch would resume from one of them.
        """
        try:
            self.note_deleted(step, self._delete_newer(step), why)
        except Exception as error:
            raise ArtifactError(
                f"cannot delete the checkpoints after step {step} in {self.where}, although {why}",
                found=_summarize_error(error),
                run=commands.as_typed(),
                hint="run without --ckpt-local-dir, or when the service answers again:",
            ) from error

    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        assert isinstance(checkpoint, _HyperPodCheckpoint)  # see `holds`
        saved = tensors_in(checkpoint.part)
        require_same_specs(
            tensors,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()},
            checkpoint.path,
        )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])

    def _path(self, step: int) -> Path:
        """Return a path for messages; no such file exists."""
        return Path("hyperpod", self._namespace, paths.step_name(step))

    def _run_on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of an action on all ranks; if a rank fails, all ranks raise."""

        def run() -> Any:
            try:
                return action()
            except Exception as error:
                raise StageError(_summarize_error(error)) from error

        return on_all_ranks(run, self._saving)

    def _make_namespace(self) -> None:
        """Create the run's namespace, on rank 0.

        A namespace for another number of ranks is deleted first.
        """
        if self._rank != 0:
            return
        if not self._is_for_these_ranks():
            # Another number of ranks has resumed the run from a shared checkpoint.
            steps = self._steps()
            self._client.delete_namespace()
            self.note_deleted(0, steps, "another number of ranks wrote them")
        self._client.get_or_create_namespace()

    def _is_for_these_ranks(self) -> bool:
        """Return whether the namespace is for this number of ranks, or does not exist yet."""
        config = self._client.get_namespace_config()
        return not config or config["num_ranks"] == self._ranks + 1

    def _write_part(self, snapshot: Snapshot) -> dict[str, Any]:
        """Delete obsolete later steps and write this rank's part; return its size and digest."""
        # After a rollback, later steps would make the service drop this one as the oldest.
        self.note_deleted(
            snapshot.step,
            self._delete_newer(snapshot.step - 1),
            "the run continues from an earlier step",
        )
        data = encode_tensors(tier.get_local_tensors(snapshot))
        self._client.put_checkpoint(snapshot.step, data, rank=self._rank, timeout=_PART_TIMEOUT_S)
        return {"bytes": len(data), "digest": hashing.bytes_digest(data)}

    def _commit(self, snapshot: Snapshot, parts: list[dict[str, Any]]) -> None:
        """Write COMMIT, on rank 0."""
        if self._rank != 0:
            return
        content = select_facts(snapshot.record) | {
            "step": snapshot.step,
            "world_size": self._ranks,
            "identity": snapshot.identity,
            "run": self._namespace,
            "train_state": snapshot.record,
            "parts": parts,
        }
        text = json.dumps(content).encode()
        digest = hashing.bytes_digest(text, "sha256").encode()
        self._client.put_checkpoint(snapshot.step, digest + b"\n" + text, rank=self._ranks)

    def _list_committed(
        self, is_wanted: Callable[[int], bool], reject: Callable[[int, str], None]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return (step, content of COMMIT) of the wanted steps, newest first. Runs on rank 0."""
        try:
            steps = self._steps() if self._is_for_these_ranks() else []
        except Exception as error:
            log.warn(f"the checkpoints in {self.where} cannot be used: {_summarize_error(error)}")
            return []
        commits = []
        for step in filter(is_wanted, steps):
            try:
                data = self._client.get_checkpoint(step, rank=self._ranks)
                if data is not None:  # None: the save was interrupted
                    commits.append((step, _parse_commit(data, step, self._namespace)))
            except Exception as error:
                reject(step, f"its COMMIT cannot be read ({_summarize_error(error)})")
        return commits

    def _read_part(self, step: int, entry: dict[str, Any]) -> tuple[bytes, str]:
        """Return this rank's part of a checkpoint, and its problem or ""."""
        try:
            data = self._client.get_checkpoint(step, rank=self._rank, timeout=_PART_TIMEOUT_S)
        except Exception as error:
            return b"", f"rank {self._rank}'s part cannot be read ({_summarize_error(error)})"
        if data is None:
            return b"", f"rank {self._rank}'s part is missing"
        algorithm = entry["digest"].partition(":")[0]
        if hashing.bytes_digest(data, algorithm) != entry["digest"]:
            return b"", f"rank {self._rank}'s part does not match its digest"
        return data, ""

    def _steps(self) -> list[int]:
        """Return the steps that the service has, newest first."""
        # `get_latest_checkpoints` (1.1.3) would turn an error into an empty list.
        answer = self._client._make_request(
            "GET",
            self._client.LATEST_CHECKPOINTS_PATH.format(namespace=self._namespace),
            params={"limit": _LISTED},
            allow_404=True,
        )
        return [] if answer.status_code == 404 else sorted(map(int, answer.json()), reverse=True)

    def _delete_newer(self, step: int) -> list[int]:
        """Delete this rank's parts of later steps, and return these steps.

        Rank 0 deletes the COMMIT of each step first.
        """
        from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import (
            InMemoryResourceNotFoundError,
        )

        newer = [later for later in self._steps() if later > step]
        for later in newer:
            for slot in [self._ranks, 0] if self._rank == 0 else [self._rank]:
                with suppress(InMemoryResourceNotFoundError):
                    self._client.delete_checkpoint(later, rank=slot)
        return newer


def _make_client(address: str, namespace: str, rank: int, ranks: int) -> InMemoryCheckpointClient:
    try:
        from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
        from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
            InMemoryCheckpointClient,
        )
    except ImportError as error:
        raise UsageError(
            "--ckpt-local-dir hyperpod:… needs a package that is not installed, "
            "amzn-sagemaker-checkpointing",
            found=str(error),
            run=commands.pip_install_optional("amzn-sagemaker-checkpointing"),
        ) from error
    config = InMemoryClientConfig(request_timeout=_TIMEOUT_S)
    if address != CLUSTER:
        config.base_url = address.rstrip("/")
    logger = logging.getLogger(__name__)
    logger.disabled = True  # the client raises whatever it logs
    client = InMemoryCheckpointClient(
        namespace, str(rank), str(ranks), config, steps_retained=_KEEP, logger=logger
    )
    # Proxies and redirections could lead out of the cluster.
    client._session.trust_env = False
    client._session.max_redirects = 0
    return client


def _parse_commit(data: bytes, step: int, namespace: str) -> dict[str, Any]:
    """Return the content of a COMMIT; raise ValueError if it is damaged or of another run."""
    digest, _, text = data.partition(b"\n")
    if hashing.bytes_digest(text, "sha256").encode() != digest:
        raise ValueError("it does not match its digest")
    content = records.parse_json(text)
    if (content["step"], content["run"]) != (step, namespace):
        raise ValueError(f"it belongs to step {content['step']} of {content['run']}")
    return content


def _summarize_error(error: Exception) -> str:
    """Return an error as one short line, with the root cause that the client hides."""
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    # The network libraries wrap the message of the system several times.
    system_errors = _SYSTEM_ERROR.findall(str(innermost))
    reason = system_errors[-1] if system_errors else str(innermost).partition("\n")[0]
    reason = reason.rpartition("Caused by ")[2]
    return f"{type(error).__name__}: {reason}"[:_MAX_ERROR_LENGTH]
