# covers: launch/cloud/checkpoints/hyperpod.py, lib/checkpoints/vendor_tiers.py
# covers: lib/checkpoints/snapshot.py, lib/checkpoints/contents.py
"""Checkpoints in the memory of a HyperPod cluster: saved, read back, refused, deleted."""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch.cloud.checkpoints import hyperpod
from launch.cloud.checkpoints.hyperpod import HyperPodTier
from lib.checkpoints import contents
from lib.checkpoints.place import SavedRun, ignore_event
from lib.checkpoints.snapshot import Snapshot, get_random_states
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.optim import registry
from lib.optim.optimizers import MomentOptions
from lib.runs.events import Event
from tests.cloud.hyperpod_service import run_service
from tests.conftest import free_port

pytest.importorskip("amzn_sagemaker_checkpointing", reason="needs amzn-sagemaker-checkpointing")
from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import InMemoryStorageError

CPU = torch.device("cpu")
IDENTITY: dict[str, Any] = {"options": {"seed": 0}, "inputs": {"model": "m"}}
COMMIT = 1  # the slot after that of the only rank
Left = list[tuple[int, str]]


pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of an empty service."""
    with run_service() as url:
        yield url


def tier_at(address: str, run: str = "1a2b") -> HyperPodTier:
    """Return the tier as a launch of the run creates it."""
    group = dist.group.WORLD
    layout = SimpleNamespace(rank=0, ranks=1, device=CPU, control=group, saving=group)
    return HyperPodTier(SavedRun("an experiment", run, IDENTITY, layout), address, every=2)


def state_of(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, with one value in all tensors."""
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = registry.build_optimizer("adamw", model, 1e-3, MomentOptions(weight_decay=0.0))
    with torch.no_grad():
        for tensor in tensors_of(model, optimizer).values():
            tensor.fill_(value)
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return contents.name_tensors(model, registry.named_states(model, optimizer))


def save_steps(tier: HyperPodTier, *steps: int) -> None:
    """Save steps; all values in a checkpoint depend on the number of the step."""
    for step in steps:
        model, optimizer = state_of(step)
        torch.manual_seed(step)
        tier.write(
            Snapshot(
                step,
                tensors_of(model, optimizer),
                get_random_states(CPU),
                {"step": step, "tokens": 10 * step},
                IDENTITY,
            )
        )


def newest(
    tier: HyperPodTier,
    after: int = 0,
    before: int | None = None,
    identity: dict[str, Any] = IDENTITY,
) -> tuple[int, Left]:
    """Load the newest; return its step (0: there is none), and what was left and why.

    Fails where any of what was loaded is not of that step.
    """
    skipped: Left = []

    def note(event: Event, step: int, reason: str) -> None:
        skipped.append((step, reason))

    tier.run = replace(tier.run, identity=identity, note=note)
    usable = tier.find_newest(before, after)
    tier.run = replace(tier.run, note=ignore_event)
    if usable is None:
        return 0, skipped
    assert tier.holds(usable) and usable.commit()["tokens"] == 10 * usable.step
    model, optimizer = state_of(-1)
    tensors = tensors_of(model, optimizer)
    tier.load(usable, tensors, usable.record())
    drawn = torch.rand(3)
    torch.manual_seed(usable.step)
    assert torch.equal(drawn, torch.rand(3))
    assert all((tensor == usable.step).all() for tensor in tensors.values())
    assert usable.record()["step"] == usable.step
    return usable.step, skipped


def test_the_newest_checkpoint_is_read_back(address: str) -> None:
    tier = tier_at(address)
    assert newest(tier) == (0, [])
    save_steps(tier, 2, 4, 6)
    again = tier_at(address)
    assert newest(again) == (6, [])
    assert newest(again, before=5) == (4, [])
    assert newest(again, after=6) == (0, [])
    assert newest(again, before=3) == (0, []), "two are kept"
    assert newest(again, identity=IDENTITY | {"inputs": {"model": "other"}}) == (0, [])
    assert newest(tier_at(address, run="3c4d")) == (0, []), "of another run"
    again.clear(6)
    assert newest(again) == (0, [])
    again.clear(6)  # when there is nothing


def a_bit(client: Any) -> None:
    part = bytearray(client.get_checkpoint(6, rank=0))
    part[-1] ^= 1
    client.put_checkpoint(6, bytes(part), rank=0)


def a_bit_of_the_commit(client: Any) -> None:
    content = client.get_checkpoint(6, rank=COMMIT)
    client.put_checkpoint(6, content.replace(b'"tokens": 60', b'"tokens": 61'), rank=COMMIT)


def all_of_another_step(client: Any) -> None:
    for slot in (0, COMMIT):
        client.put_checkpoint(6, client.get_checkpoint(4, rank=slot), rank=slot)


def a_part_of_another_step(client: Any) -> None:
    client.put_checkpoint(6, client.get_checkpoint(4, rank=0), rank=0)


def a_part_that_ends_early(client: Any) -> None:
    client.put_checkpoint(6, client.get_checkpoint(6, rank=0)[:-5], rank=0)


def a_pickle(client: Any) -> None:
    client.put_checkpoint(6, b"\x80\x04cos\nabort\n)R.", rank=COMMIT)


def a_checksum_of_the_service(client: Any) -> None:
    client._make_request(
        "POST",
        client.CHECKPOINT_PATH.format(namespace=client.namespace, rank=0, step=6),
        data=b"other",
        headers={"Shard-Meta": '{"checksum": "AAAA", "algorithm": "xxh3_128"}'},
    )


def no_checksum(client: Any) -> None:
    client._make_request(
        "POST",
        client.CHECKPOINT_PATH.format(namespace=client.namespace, rank=0, step=6),
        data=client.get_checkpoint(6, rank=0),
    )


def a_lost_part(client: Any) -> None:
    client.delete_checkpoint(6, rank=0)


@pytest.mark.parametrize(
    "harm",
    [
        a_bit,
        a_bit_of_the_commit,
        all_of_another_step,
        a_part_of_another_step,
        a_part_that_ends_early,
        a_pickle,
        a_checksum_of_the_service,
        no_checksum,
        a_lost_part,
    ],
)
def test_a_damaged_part_is_reported_and_not_used(address: str, harm: Callable[[Any], None]) -> None:
    tier = tier_at(address)
    save_steps(tier, 4, 6)
    harm(tier._client)
    step, [(damaged, why)] = newest(tier)
    assert (step, damaged) == (4, 6)
    assert "in the cluster's memory" in why and ("rank 0's part" in why or "COMMIT" in why)
    save_steps(tier, 6)
    assert newest(tier) == (6, []), "saved anew, it counts"


def test_a_save_without_a_commit_does_not_count(address: str) -> None:
    tier = tier_at(address)
    save_steps(tier, 4, 6)
    tier._client.delete_checkpoint(6, rank=COMMIT)
    assert newest(tier) == (4, [])


def test_steps_after_a_rollback_are_not_used_again(address: str) -> None:
    tier = tier_at(address)
    save_steps(tier, 6, 8)
    tier.drop_newer(6, "the run went back")
    assert newest(tier) == (6, [])
    save_steps(tier, 8, 3)  # an older one than all others, which the service would drop first
    assert newest(tier) == (3, [])


def test_a_failed_save_keeps_the_previous_checkpoint(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_at(address)
    save_steps(tier, 2, 4)
    put = tier._client.put_checkpoint

    def full(step: int, data: bytes, rank: int, timeout: float | None = None) -> None:
        if rank == COMMIT:
            raise InMemoryStorageError("full")
        put(step, data, rank=rank, timeout=timeout)

    with monkeypatch.context() as patch:
        patch.setattr(tier._client, "put_checkpoint", full)
        for step in (6, 8, 10):
            with pytest.raises(StageError, match="InMemoryStorageError: full"):
                save_steps(tier, step)
    assert newest(tier) == (4, [])


def test_a_namespace_of_another_number_of_ranks_is_replaced(address: str) -> None:
    tier = tier_at(address)
    of_two = hyperpod._make_client(address, tier._namespace, 0, 2)
    of_two.get_or_create_namespace()
    of_two.put_checkpoint(4, b"a part, where the COMMIT of one rank would be", rank=COMMIT)
    assert newest(tier) == (0, [])
    save_steps(tier, 2)
    assert newest(tier) == (2, [])
    assert tier._steps() == [2]


def test_an_unreachable_service_does_not_end_the_run() -> None:
    port = free_port()
    tier = tier_at(f"http://127.0.0.1:{port}")
    with pytest.raises(StageError, match=r"refused"):
        save_steps(tier, 2)
    assert newest(tier) == (0, [])
    tier.clear(6)
    with pytest.raises(ArtifactError, match="cannot delete"):
        tier.drop_newer(0, "the run goes on from another one")
    with run_service(port):
        save_steps(tier, 4)
        assert newest(tier) == (4, []), "it is used again as soon as it answers"


def test_requests_to_a_hanging_service_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperpod, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = tier_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StageError, match="Timeout"):
            save_steps(tier, 2)
        assert newest(tier) == (0, [])
        tier.clear(6)


def test_redirects_to_another_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.2:1/")
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(StageError, match="redirects"):
        save_steps(tier_at(f"http://127.0.0.1:{server.server_port}"), 2)
    server.shutdown()
    server.server_close()


def test_proxies_are_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "")
    tier = tier_at(address)
    save_steps(tier, 2)
    assert newest(tier) == (2, [])


def test_a_missing_package_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "amzn_sagemaker_checkpointing.config.in_memory_client", None)
    with pytest.raises(UsageError) as caught:
        tier_at(hyperpod.CLUSTER)
    assert "pip install amzn-sagemaker-checkpointing==" in caught.value.render()


def test_a_network_error_is_one_short_line() -> None:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{free_port()}", timeout=5)
    except (urllib.error.URLError, http.client.HTTPException) as error:
        pool = f"HTTPConnectionPool(host='h', port=1): Max retries exceeded {'x' * 300} ({error})"
        wrapped = RuntimeError(f"request failed: {pool} " * 3)
        wrapped.__cause__ = ConnectionError(pool)
    message = hyperpod._summarize_error(wrapped)
    assert message == "RuntimeError: [Errno 111] Connection refused"
    long = hyperpod._summarize_error(ValueError("y" * 1000 + "\nsecond line"))
    assert len(long) <= 160 and "\n" not in long
