"""Let ranks exchange values over a store, which works before any collective does."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lib.core.errors import UsageError
from lib.parallel import gpus

_PINGS = 5
_GLOO_ATTEMPTS = 5  # gloo waits five times its timeout for a connection (torch 2.13)


class AllRanks:
    """All ranks of a launch, and the store that they share.

    rank, local_rank, world_size: as torchrun sets them. node: the rank of this node. ranks_of: the
    ranks of each node. host_of: the host name of each node.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.node = int(os.environ.get("GROUP_RANK", "0"))
        self.timeout_s = timeout_s
        self.store = self._connect()
        self.on_gpu = torch.cuda.is_available() and gpus.find_unusable() is None
        if self.on_gpu:
            if self.local_rank >= torch.cuda.device_count():
                raise UsageError(
                    "more ranks than GPUs on a node",
                    found=f"local rank {self.local_rank}, "
                    f"{torch.cuda.device_count()} GPUs on {platform.node()}",
                    hint="start it with a smaller --nproc-per-node",
                )
            torch.cuda.set_device(self.local_rank)
        self.device = torch.device("cuda", self.local_rank) if self.on_gpu else torch.device("cpu")
        self.ranks_of: dict[int, list[int]] = {}
        self.host_of: dict[int, str] = {}
        self._meet()

    @property
    def leads_node(self) -> bool:
        """Return whether this rank reports for its node."""
        return self.local_rank == 0

    def leader(self, node: int) -> int:
        return self.ranks_of[node][0]

    def name(self, node: int) -> str:
        """Return the name of a node in messages."""
        return f"node {node} ({self.host_of[node]})"

    def share(self, topic: str, value: Any) -> None:
        """Publish a JSON value of this rank under a topic."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))

    def gather(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Return the values that ranks have shared under a topic; late ranks are missing."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=self.timeout_s))
        except dist.DistError:
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if not keys:
            return {}
        values = self.store.multi_get(list(keys.values()))
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called this; all ranks must call it.

        Raises UsageError if one is missing after twice `timeout_s`.
        """
        if self.store.add(f"{name}/arrived", 1) == self.world_size:
            self.store.set(f"{name}/all", "1")
        try:
            self.store.wait([f"{name}/all"], timedelta(seconds=2 * self.timeout_s))
        except dist.DistError:
            raise UsageError(
                "some ranks did not get this far",
                expected=f"{self.world_size} ranks at `{name}` within {2 * self.timeout_s:.0f} s",
                found=f"{self.store.add(f'{name}/arrived', 0)}",
            ) from None

    def leave(self) -> None:
        """Say that this rank no longer needs the store; all ranks must call this, as the last call.

        Rank 0 may host the store, so it alone waits for the others: a barrier would let it end
        while the others still read that the barrier is complete. Raises UsageError on rank 0 if a
        rank is missing after `timeout_s`.
        """
        self.share("left", True)
        if self.rank == 0:
            missing = set(range(self.world_size)) - set(self.gather("left", range(self.world_size)))
            if missing:
                raise UsageError(
                    "some ranks did not get the result",
                    expected=f"{self.world_size} ranks within {self.timeout_s:.0f} s",
                    found=f"no answer from ranks {', '.join(map(str, sorted(missing)[:8]))}",
                )

    def decide(self, name: str, value: Any = None) -> Any:
        """Return the value of rank 0 on all ranks; all ranks must call this."""
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
            return value
        self.store.wait([name], timedelta(seconds=2 * self.timeout_s))
        return json.loads(self.store.get(name))

    def _connect(self) -> dist.Store:
        timeout = timedelta(seconds=self.timeout_s)
        if self.world_size == 1:
            return dist.HashStore()  # no port
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
        except (dist.DistError, RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UsageError(
                f"{platform.node()} cannot reach the launch's store at {address}",
                found=str(error).splitlines()[0],
                hint="check name resolution, firewall and --head",
            ) from None
        # torchrun may start the ranks twice, and its store keeps the keys of the first attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"check/{attempt}", store)

    def _meet(self) -> None:
        self.share("place", [self.node, platform.node()])
        places = self.gather("place", range(self.world_size))
        if missing := sorted(set(range(self.world_size)) - set(places)):
            raise UsageError(
                f"{len(missing)} of {self.world_size} ranks did not appear",
                found=f"nothing from ranks {missing[:20]}",
                hint="look at the launcher's output on their nodes",
            )
        for rank in sorted(places):
            node, host = places[rank]
            self.ranks_of.setdefault(node, []).append(rank)
            self.host_of[node] = host


@contextmanager
def make_process_group(
    launch: AllRanks, name: str, ranks: list[int], timeout_s: float
) -> Iterator[None]:
    """Make some ranks the default process group for a while; all of them must call this.

    Raises RuntimeError or DistError if they cannot connect within timeout_s.
    """
    if launch.on_gpu:  # a collective that hangs then raises an error instead of ending the process
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    # Failed attempts stay counted, and the count is part of the keys through which ranks meet.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "nccl" if launch.on_gpu else "gloo",
        store=dist.PrefixStore(name, launch.store),
        rank=ranks.index(launch.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=timeout_s if launch.on_gpu else timeout_s / _GLOO_ATTEMPTS),
        device_id=launch.device if launch.on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_clock_offset(launch: AllRanks) -> dict[str, float]:
    """Return how many seconds this node's clock is ahead of rank 0's, and the uncertainty.

    As in NTP, the quickest of a few round trips counts. The leaders of all nodes must call
    this; rank 0 answers one node after the other.
    """
    if launch.rank == 0:
        for node in launch.ranks_of:
            for ping in range(_PINGS) if node != launch.node else ():
                launch.store.wait([f"clock/{node}/{ping}/ask"], timedelta(seconds=30))
                launch.store.set(f"clock/{node}/{ping}/answer", repr(time.time()))
        return {"offset_s": 0.0, "uncertainty_s": 0.0}
    quickest = (float("inf"), 0.0)
    for ping in range(_PINGS):
        key = f"clock/{launch.node}/{ping}"
        requested_at = time.time()
        launch.store.set(f"{key}/ask", "1")
        time_of_rank_0 = float(launch.store.get(f"{key}/answer"))
        answered_at = time.time()
        # The first round trip includes the wait for rank 0, so it does not count.
        if ping:
            quickest = min(
                quickest,
                (answered_at - requested_at, (requested_at + answered_at) / 2 - time_of_rank_0),
            )
    return {"offset_s": quickest[1], "uncertainty_s": quickest[0] / 2}
