"""Join the process group, from one process to many nodes, and exchange small values."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lib.core import commands, log, units
from lib.core.errors import Preempted, StageError, UsageError, from_os_error
from lib.parallel import flight_recorder, gpus
from lib.parallel.degrees import Degrees
from lib.parallel.meeting import START_TIMEOUT, Meeting

if TYPE_CHECKING:  # imports transformers, which only divided rows need
    from lib.parallel.context import Context

Result = TypeVar("Result")
_TIMEOUT_MARGIN = timedelta(minutes=5)
_PCI = Path("/sys/bus/pci/devices")
# Segments that can grow avoid fragmentation. Eight threads lock the pages of pinned memory.
_ALLOCATOR = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)


@dataclass(frozen=True)
class ParallelLayout:
    """The place of this process among all processes, for data and for parameters.

    rank, ranks: the index of this process, and the number of processes. dp_rank, dp_size: the same
    among the ranks that read different samples. fsdp: the default mesh of parameters, (shard) or
    (replicate, shard). control, saving: gloo groups for small agreements and for checkpoints. They
    are separate so that collectives of different threads do not mix. timeout: the one of
    collectives, in every group. context: the ranks that share rows with this one; None if each rank
    has whole rows.
    """

    rank: int
    ranks: int
    dp_rank: int
    dp_size: int
    device: torch.device
    fsdp: DeviceMesh
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    timeout: timedelta = START_TIMEOUT
    context: Context | None = None

    @classmethod
    def start(
        cls,
        degrees: Degrees | Callable[[dist.ProcessGroup], Degrees] | None = None,
        meeting: Meeting | None = None,
        patience: float = 0.0,
    ) -> ParallelLayout:
        """Join the process group; all ranks must call this.

        degrees: None for one replica over all ranks. If it is a function, it gets a process group
        and returns degrees that all ranks agree on. meeting: the result of an earlier call of
        `meet_ranks`; None to call it now. patience: seconds after which a watchdog ends the
        process; collectives time out later, so that the watchdog reports first. Raises UsageError
        if the ranks cannot be divided by the degrees.
        """
        configure_torch()
        device = _choose_device(int(os.environ.get("LOCAL_RANK", "0")))
        timeout = max(START_TIMEOUT, timedelta(seconds=patience) + _TIMEOUT_MARGIN)
        _join_group(device, timeout, meeting or meet_ranks())
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        control, saving = (_connected_group(name, timeout) for name in ("control", "saving"))
        degrees = degrees(control) if callable(degrees) else degrees or Degrees()
        fsdp = make_mesh(device.type, ranks, degrees.replicas(ranks))
        context = None
        if degrees.context > 1:
            from lib.parallel.context import start

            context = start(rank, ranks, degrees.context, degrees.method)
        layout = cls(
            rank,
            ranks,
            degrees.dp_rank(rank),
            degrees.dp_size(ranks),
            device,
            fsdp,
            control,
            saving,
            timeout,
            context,
        )
        for group in (*fsdp.get_all_groups(), *([context.group] if context else [])):
            layout.set_timeout(group)
        return layout

    def set_timeout(self, group: dist.ProcessGroup) -> None:
        """Give a process group the timeout of the others; the default of NCCL is ten minutes."""
        dist.distributed_c10d._set_pg_timeout(self.timeout, group)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in float64; all ranks must call this."""
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.control)
        return numbers.tolist()

    def all_true(self, value: bool) -> bool:
        """Return whether a value is true on all ranks; all ranks must call this."""
        return self.sum_over_ranks([float(not value)]) == [0.0]

    def gather_table(self, values: list[float]) -> torch.Tensor:
        """Return the values of every rank, float64 [ranks, values], by one collective.

        All ranks must call this with the same number of values.
        """
        rows = torch.empty(self.ranks, len(values), dtype=torch.float64)
        row = torch.tensor(values, dtype=torch.float64)
        dist.all_gather(list(rows), row, group=self.control)  # into the rows, which are views
        return rows

    def __enter__(self) -> ParallelLayout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Leave the process group, except after an error: other ranks may not have raised it."""
        if error is None or isinstance(error, Preempted):
            self.stop()

    def stop(self) -> None:
        """Leave the process group; all ranks must call this."""
        dist.barrier(self.control)  # gloo aborts if a rank leaves while another one communicates
        dist.destroy_process_group()


def make_mesh(device_type: str, ranks: int, replicas: int) -> DeviceMesh:
    """Return the mesh of parameters, (shard) or (replicate, shard); all ranks must call this."""
    if replicas > 1:
        shape = (replicas, ranks // replicas)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))


def meet_ranks() -> Meeting | None:
    """Announce this rank to the others, before the long preparation of the data.

    Returns None for a process that was started without torchrun.
    """
    return Meeting() if "RANK" in os.environ else None


def configure_torch() -> None:
    """Set the options of torch's allocator and profiler, unless the environment sets them.

    Call this before asking torch for the name or the memory of a GPU, because torch reads
    the options of the allocator when it is asked.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints log lines
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", _ALLOCATOR)


def _join_group(device: torch.device, timeout: timedelta, meeting: Meeting | None) -> None:
    """Join the process group of all ranks, or without a meeting a group of one process."""
    flight_recorder.enable_recorder()
    # Gloo then connects two ranks when they first communicate, not each of 1,024 ranks to all
    # others.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _use_loopback_on_one_machine()
    # NCCL (2.26 and newer) then starts the operations of several communicators in the order in
    # which the host issues them. In different orders, ranks could wait for each other forever.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # Gloo besides NCCL, for clipping offloaded gradients and for agreements without a GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if meeting:
        dist.init_process_group(
            backend,
            store=meeting.join(),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timeout,
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _connected_group(name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group of all ranks, with open connections; all ranks must call this.

    Gloo connects two ranks when they first communicate, and asks the store for the address. The
    store ends with torchrun, but saving must work without it. So every collective that the groups
    use runs once here and opens the sockets of its algorithm: a ring (all_reduce, all_gather),
    trees (broadcast, barrier), and a star to rank 0 (gather).
    """
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    dist.barrier(group)
    dist.all_reduce(torch.zeros(1), group=group)
    gather(None, group)
    on_rank_0(lambda: None, group)
    if name == "saving":  # the random states of all ranks are gathered on rank 0
        ranks = dist.get_world_size(group)
        dist.gather_object(None, [None] * ranks if dist.get_rank(group) == 0 else None, group=group)
    return group


def _use_loopback_on_one_machine() -> None:
    """Let gloo and NCCL listen only on 127.0.0.1 if all ranks are on this machine."""
    flags = Path("/sys/class/net/lo/flags")
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    is_up = flags.is_file() and int(flags.read_text(encoding="ascii"), 16) & 1
    if is_up and local_ranks == os.environ.get("WORLD_SIZE", "1"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def _choose_device(local_rank: int) -> torch.device:
    """Return the device of a process on this machine, and set its threads and cores.

    Raises UsageError if there are more processes than GPUs.
    """
    # torchrun sets OMP_NUM_THREADS=1, but CPU training and the optimizer steps of --cpu-offload
    # use the cores.
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"process {local_rank} of this machine has no GPU of its own",
                expected=f"at most --nproc-per-node {torch.cuda.device_count()}, the "
                "number of GPUs",
                hint="on the CPU instead:",
                run=commands.as_typed("--device", "cpu"),
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        _bind_to_near_cores(device)
        # More threads than cores would wait for each other's time slices in every operation.
        torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))))
        return device
    torch.set_num_threads(threads)
    log.detail(
        ("" if gpus.is_cpu_wanted() else "no GPU: ") + "computing on the CPU, "
        f"{units.counted(threads, 'thread')} per rank ({units.counted(cores, 'core')})"
    )
    return torch.device("cpu")


def _bind_to_near_cores(device: torch.device) -> None:
    """Run only on the cores of the GPU's NUMA node, since copies between NUMA nodes are slower.

    Threads and child processes that start later inherit this. Does nothing if the system does not
    report these cores, or if this process may use none of them.
    """
    with suppress(OSError, ValueError, AttributeError):
        gpu = torch.cuda.get_device_properties(device)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        spans = (_PCI / address / "local_cpulist").read_text(encoding="ascii").strip().split(",")
        ends = [[int(end) for end in span.split("-")] for span in spans]
        near = {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}
        if near := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)


def on_rank_0(action: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Run an action on rank 0, and return its result or raise its error on all ranks.

    All ranks must call this.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [action(), None]
        except OSError as error:
            outcome = [None, from_os_error(error) or error]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value on every rank; all ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(action: Callable[[], Result], group: dist.ProcessGroup) -> list[Result]:
    """Run an action on each rank; return the results of all ranks, or raise the first error.

    All ranks must call this, and all get the same results or the same error.
    """
    try:
        mine: tuple[Any, Any] = (action(), None)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        known = from_os_error(error) if isinstance(error, OSError) else error
        mine = (
            None,
            known
            if isinstance(known, StageError)
            else StageError(f"{type(error).__name__}: {error}"),
        )
    outcomes = gather(mine, group)
    if errors := [error for _, error in outcomes if error is not None]:
        raise errors[0]
    return [result for result, _ in outcomes]
