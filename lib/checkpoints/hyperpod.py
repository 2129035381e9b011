"""The second tier in the memory of a HyperPod cluster: Amazon's managed tiered checkpointing.

    <namespace>/<rank>/<step>     shards and random states of a rank, as safetensors
    <namespace>/<ranks>/<step>    COMMIT: bytes and digest of each of those, the train state, and
                                  what a COMMIT.json says; behind a digest of itself. Written last

Each slot is what the service keeps per rank and step. A checkpoint exists when it has a COMMIT, and
is whole when every rank reads back the bytes that this names. Nothing of it is a pickle.

The connection is to the cluster's own service, or to the address that --ckpt-hyperpod names, past
any proxy; there is no other one. The package `amzn-sagemaker-checkpointing` brings the client. Its
DCP reader (1.1.3) unpickles whatever the service returns, without an allowlist, and goes on when a
part ends too early, so this stands on the client below it.
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
import torch.distributed as dist
from safetensors.torch import load as tensors_in

from lib.checkpoints import tier
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord, facts
from lib.checkpoints.snapshot import Snapshot, require_described
from lib.core import commands, hashing, log, paths, records
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.identity import differences
from lib.models.tensors import make_header
from lib.parallel.layout import gather, on_rank_0, together

if TYPE_CHECKING:  # optional: only --ckpt-hyperpod needs it
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
        InMemoryCheckpointClient,
    )

CLUSTER = "auto"  # instead of an address: the service of the cluster that the run is in
_KEEP = 2  # the service drops the oldest when a third arrives, which leaves one that is whole
_LISTED = 100  # steps; more than are ever there
# How long the service may be silent, during a small request and during a part of a checkpoint.
_ANSWER_S = 10.0
_PART_S = 60.0
_LONGEST_TEXT = 160  # characters of a service error, which may be logged at each save
_OF_SYSTEM = re.compile(r"\[Errno -?\d+\] [\w ]+")
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class _Stored(Checkpoint):
    """content: of its COMMIT. part: what this rank wrote, verified."""

    content: dict[str, Any] = field(repr=False)
    part: bytes = field(repr=False)

    def commit(self) -> dict[str, Any]:
        return self.content

    def record(self) -> TrainRecord:
        return self.content["train_state"]


class HyperPodTier(tier.Tier):
    """Checkpoints of one run in the memory of the cluster.

    address: URL of the service, or CLUSTER. experiment, run: name and mark of the run, which has a
    namespace of its own. `write` talks over the group `saving`, the rest over `control`. Whatever
    the service does wrong is told, and the shared checkpoints are what the run goes on with.
    Raises UsageError when the package is not installed.
    """

    where = "the cluster's memory"

    def __init__(
        self,
        address: str,
        experiment: str,
        run: str,
        control: dist.ProcessGroup,
        saving: dist.ProcessGroup,
        note: tier.Note = tier.unnoted,
    ) -> None:
        self.note = note
        self._control = control
        self._saving = saving
        self._rank = dist.get_rank(control)
        self._ranks = dist.get_world_size(control)
        self._namespace = f"{_NO_NAME.sub('-', experiment)[:40]}-{run}"
        self._client = _client(address, self._namespace, self._rank, self._ranks)

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit what all ranks captured, or raise on every rank what went wrong on any."""
        snapshot.ready()
        try:
            self._together(self._make_namespace)
            parts = self._together(lambda: self._put(snapshot))
            self._together(lambda: self._commit(snapshot, parts))
        except BaseException:
            with suppress(Exception):  # or it would take the place of one that is whole
                self._discard(snapshot.step - 1)
            raise
        return Checkpoint(self._path(snapshot.step), snapshot.step)

    def newest_valid(
        self,
        identity: dict[str, Any],
        after: int,
        quarantined: Callable[[int, str], None],
        before: int | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint that every rank has read back and verified; see Tier."""

        def leave(step: int, why: str) -> None:
            log.warn(f"{self._path(step)} is left: {why}")
            quarantined(step, f"in {self.where}: {why}")

        def is_wanted(step: int) -> bool:
            return after < step and (before is None or step <= before)

        for step, content in on_rank_0(lambda: self._committed(is_wanted, leave), self._control):
            if content["world_size"] != self._ranks or differences(content["identity"], identity):
                continue
            part, problem = self._get(step, content["parts"][self._rank])
            problems = list(filter(None, gather(problem, self._control)))
            if not problems:
                return _Stored(self._path(step), step, content, part)
            if self._rank == 0:
                leave(step, problems[0])
        return None

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is one of these."""
        return isinstance(checkpoint, _Stored)

    def remove(self, step: int) -> None:
        """Delete them all: the run is complete, at this step."""
        if self._rank != 0:
            return
        try:
            if self._client.get_namespace_config():
                there = self._steps()
                self._client.delete_namespace()
                self.note_deleted(step, there, "the run is complete")
        except Exception as error:
            log.warn(f"checkpoints are left in {self.where}, in {self._namespace}: {_text(error)}")

    def supersede(self, step: int, why: str) -> None:
        """Delete what is newer than the step that the run goes on from.

        Raises ArtifactError when that fails: a later launch would take it for this run's.
        """
        try:
            self.note_deleted(step, self._discard(step), why)
        except Exception as error:
            raise ArtifactError(
                f"checkpoints after step {step} cannot be deleted in {self.where}, though {why}",
                found=_text(error),
                run=commands.as_typed(),
                hint="leave out --ckpt-hyperpod, or when the service answers again:",
            ) from error

    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        assert isinstance(checkpoint, _Stored)  # as `holds` tells
        saved = tensors_in(checkpoint.part)
        require_described(
            tensors,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()},
            checkpoint.path,
        )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])

    def _path(self, step: int) -> Path:
        """Return what a person reads; there is no such file."""
        return Path("hyperpod", self._namespace, paths.step_name(step))

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Return what the action returned on each rank, or raise on all what it raised on any."""

        def plainly() -> Any:
            try:
                return action()
            except Exception as error:
                raise StageError(_text(error)) from error

        return together(plainly, self._saving)

    def _make_namespace(self) -> None:
        if self._rank != 0:
            return
        if not self._is_for_these_ranks():
            # The run has gone on from elsewhere with others.
            there = self._steps()
            self._client.delete_namespace()
            self.note_deleted(0, there, "they are of another number of ranks")
        self._client.get_or_create_namespace()

    def _is_for_these_ranks(self) -> bool:
        """Tell whether the namespace has the slots that these ranks use, or is yet to be made."""
        there = self._client.get_namespace_config()
        return not there or there["num_ranks"] == self._ranks + 1

    def _put(self, snapshot: Snapshot) -> dict[str, Any]:
        # Later steps are of a course that was left; beside them this one would be dropped as old.
        self.note_deleted(
            snapshot.step,
            self._discard(snapshot.step - 1),
            "the run has gone on from an earlier step",
        )
        data = _safetensors(tier.tensors_of(snapshot))
        self._client.put_checkpoint(snapshot.step, data, rank=self._rank, timeout=_PART_S)
        return {"bytes": len(data), "digest": hashing.bytes_digest(data)}

    def _commit(self, snapshot: Snapshot, parts: list[dict[str, Any]]) -> None:
        if self._rank != 0:
            return
        content = facts(snapshot.record) | {
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

    def _committed(
        self, is_wanted: Callable[[int], bool], leave: Callable[[int, str], None]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return the wanted steps that have a COMMIT, with its content, newest first (rank 0)."""
        try:
            steps = self._steps() if self._is_for_these_ranks() else []
        except Exception as error:
            log.warn(f"no checkpoint is taken from {self.where}: {_text(error)}")
            return []
        found = []
        for step in filter(is_wanted, steps):
            try:
                data = self._client.get_checkpoint(step, rank=self._ranks)
                if data is not None:  # else a save that was cut short
                    found.append((step, _verified(data, step, self._namespace)))
            except Exception as error:
                leave(step, f"its COMMIT cannot be read ({_text(error)})")
        return found

    def _get(self, step: int, written: dict[str, Any]) -> tuple[bytes, str]:
        """Return this rank's part of a checkpoint and what is wrong with it."""
        try:
            data = self._client.get_checkpoint(step, rank=self._rank, timeout=_PART_S)
        except Exception as error:
            return b"", f"rank {self._rank}'s part cannot be read ({_text(error)})"
        if data is None:
            return b"", f"rank {self._rank}'s part is missing"
        algorithm = written["digest"].partition(":")[0]
        if hashing.bytes_digest(data, algorithm) != written["digest"]:
            return b"", f"rank {self._rank}'s part has other content than when it was written"
        return data, ""

    def _steps(self) -> list[int]:
        """Return the steps of which anything is there, newest first."""
        # Not `get_latest_checkpoints`: to that (1.1.3) an error is an empty list.
        answer = self._client._make_request(
            "GET",
            self._client.LATEST_CHECKPOINTS_PATH.format(namespace=self._namespace),
            params={"limit": _LISTED},
            allow_404=True,
        )
        return [] if answer.status_code == 404 else sorted(map(int, answer.json()), reverse=True)

    def _discard(self, step: int) -> list[int]:
        """Delete this rank's slots of later steps than this one; rank 0 also the COMMIT, first.

        Returns these steps.
        """
        from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import (
            InMemoryResourceNotFoundError,
        )

        gone = [later for later in self._steps() if later > step]
        for later in gone:
            for slot in [self._ranks, 0] if self._rank == 0 else [self._rank]:
                with suppress(InMemoryResourceNotFoundError):
                    self._client.delete_checkpoint(later, rank=slot)
        return gone


def _client(address: str, namespace: str, rank: int, ranks: int) -> InMemoryCheckpointClient:
    try:
        from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
        from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
            InMemoryCheckpointClient,
        )
    except ImportError as error:
        raise UsageError(
            "--ckpt-hyperpod needs a package that cannot be imported",
            found=str(error),
            run=commands.pip_install_optional("amzn-sagemaker-checkpointing"),
        ) from error
    config = InMemoryClientConfig(request_timeout=_ANSWER_S)
    if address != CLUSTER:
        config.base_url = address.rstrip("/")
    logger = logging.getLogger(__name__)
    logger.disabled = True  # what it says is raised as well
    client = InMemoryCheckpointClient(
        namespace, str(rank), str(ranks), config, steps_retained=_KEEP, logger=logger
    )
    # No proxy and no redirection, which would lead out of the cluster.
    client._session.trust_env = False
    client._session.max_redirects = 0
    return client


def _safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return tensors as the content of a safetensors file, with one copy of it in memory."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = make_header((name, tensor.shape, tensor.dtype) for name, tensor in on_cpu.items())
    return b"".join(
        [header, *(tensor.flatten().view(torch.uint8).numpy() for tensor in on_cpu.values())]
    )


def _verified(data: bytes, step: int, namespace: str) -> dict[str, Any]:
    """Return what a COMMIT says; ValueError when it is not as it was written, or of another run."""
    digest, _, text = data.partition(b"\n")
    if hashing.bytes_digest(text, "sha256").encode() != digest:
        raise ValueError("it has other content than when it was written")
    content = records.parse_json(text)
    if (content["step"], content["run"]) != (step, namespace):
        raise ValueError(f"it is of step {content['step']} of {content['run']}")
    return content


def _text(error: Exception) -> str:
    """Return what happened in one short line, with the reason that the client keeps to itself."""
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    # The libraries of the network wrap the system's words in each other's several times.
    of_system = _OF_SYSTEM.findall(str(innermost))
    said = of_system[-1] if of_system else str(innermost).partition("\n")[0]
    said = said.rpartition("Caused by ")[2]
    return f"{type(error).__name__}: {said}"[:_LONGEST_TEXT]
