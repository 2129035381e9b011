"""Write and read checkpoints by several methods on each rank, for benchmarks/checkpoints.py."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.parts import processes
from lib.checkpoints import contents, search, snapshot
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.snapshot import capture_snapshot, write_snapshot
from lib.core import hashing
from lib.optim import registry
from lib.optim.optimizers import AdamWOptions
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout

_PIECE = 4 << 20  # bytes of a raw write or read
Ways = Mapping[str, Callable[[], Any]]
_new_hasher = hashing.new_hasher


def main() -> None:
    """Run one measurement on all ranks; rank 0 prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("save", "load", "async"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int)
    bench = Bench(args := parser.parse_args())
    figures = {"save": bench.save, "load": bench.load, "async": bench.background}[args.part]()
    bench.meet()
    processes.end_process(figures | {"bytes": bench.bytes} if bench.layout.rank == 0 else None)


class Bench:
    """A sharded model with its optimizer, and ways to save and load it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.layout = ParallelLayout.start()
        self.work = args.work
        self.rounds = args.rounds
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=args.layers,
            num_attention_heads=16,
        )
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        parallelize.shard(self.model, self.layout.fsdp, "fp32")
        parallelize.materialise_model(self.model, torch.device("cpu"), offload=False)
        for parameter in self.model.parameters():
            parameter.to_local().detach().normal_(std=0.02)
        self.optimizer = registry.build_optimizer(
            "adamw", self.model, 1e-5, AdamWOptions(weight_decay=0.0)
        )
        self.identity: dict[str, Any] = {"options": {}, "inputs": {}}
        self.tensors = self.capture().tensors
        self.locals = {name: tensor.to_local().detach() for name, tensor in self.tensors.items()}
        for moment in list(self.locals.values())[len(self.locals) // 3 :]:
            moment.normal_().abs_()  # zeros would be easier to write
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def capture(self, copies: Any = None) -> Any:
        """Return a snapshot of the state, as the trainer captures it."""
        tensors = contents.name_tensors(
            self.model, registry.named_states(self.model, self.optimizer)
        )
        return capture_snapshot(
            tensors, {"step": 1, "tokens": 1, "seed": 0}, self.identity, self.layout.device, copies
        )

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.layout.control)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the seconds until all ranks have done an action."""
        self.meet()
        began = time.perf_counter()
        action()
        self.meet()
        return time.perf_counter() - began

    def in_turns(self, ways: Ways, after: Callable[[str], Any]) -> dict[str, list[float]]:
        """Return the seconds of each method by round, without the first round."""

        def timed(name: str) -> float:
            seconds = self.seconds(ways[name])
            after(name)
            return seconds

        seconds_by_name = processes.run_in_turns(
            {name: partial(timed, name) for name in ways}, 1 + self.rounds
        )
        return {name: seconds[1:] for name, seconds in seconds_by_name.items()}

    def clear(self) -> None:
        """Delete all written files."""
        self.meet()
        if self.layout.rank == 0:
            for path in self.work.iterdir():
                shutil.rmtree(path)
        self.meet()

    def save(self) -> dict[str, Any]:
        """Measure the seconds that each method needs to write the state to the disk."""
        in_hash: list[float] = []

        def after(name: str) -> None:
            if name == "ours":
                in_hash.append(TimedHasher.seconds)
                TimedHasher.seconds = 0.0
            self.clear()

        seconds = self.in_turns(
            {
                "raw write + fsync": self.write_raw,
                "ours": partial(self.write_ours, TimedHasher),
                "ours, not hashed": partial(self.write_ours, NoHasher),
                "dcp.save": self.write_dcp,
                "torch.save + fsync": self.write_torch,
            },
            after,
        )
        return {"seconds": seconds, "hashing": in_hash[1:]}

    def write_ours(self, hasher: Callable[..., Any] = _new_hasher) -> None:
        """Write and commit a checkpoint of the pipeline."""
        with mock.patch.object(hashing, "new_hasher", hasher):
            write_snapshot(self.work / "ours", self.capture(), self.layout.saving)

    def write_raw(self) -> None:
        """Write the bytes of the tensors, one file for each rank."""
        (self.work / "raw").mkdir(exist_ok=True)
        with (self.work / "raw" / f"{self.layout.rank}").open("wb", buffering=0) as file:
            for tensor in self.locals.values():
                content = memoryview(tensor.numpy()).cast("B")
                while content:
                    content = content[file.write(content[:_PIECE]) :]
            os.fsync(file.fileno())

    def write_torch(self) -> None:
        """Pickle each rank's shards."""
        (self.work / "torch").mkdir(exist_ok=True)
        with (self.work / "torch" / f"{self.layout.rank}").open("wb") as file:
            torch.save(self.locals, file)
            file.flush()
            os.fsync(file.fileno())

    def write_dcp(self) -> None:
        """Write with the defaults of DCP, which syncs the files."""
        dcp.save(self.tensors, checkpoint_id=self.work / "dcp", process_group=self.layout.saving)

    def load(self) -> dict[str, Any]:
        """Measure reading with and without the page cache."""
        for way in (self.write_ours, self.write_torch, self.write_dcp):
            self.seconds(way)
        readers = {
            "raw read": self.read_raw,
            "ours, verified": self.read_ours,
            "dcp.load": self.read_dcp,
            "torch.load": self.read_torch,
        }
        seconds: dict[str, list[float]] = {}
        for cache in ("cold", "warm"):
            (self.drop if cache == "cold" else self.touch)()
            by_reader = self.in_turns(readers, lambda _, cold=cache == "cold": cold and self.drop())
            seconds |= {f"{cache}, {name}": values for name, values in by_reader.items()}
        return {"seconds": seconds}

    def files(self, below: str) -> list[Path]:
        """Return this rank's share of the files of a checkpoint."""
        paths = sorted(path for path in (self.work / below).rglob("*") if path.is_file())
        return sorted(paths, key=lambda path: -path.stat().st_size)[
            self.layout.rank :: self.layout.ranks
        ]

    def drop(self) -> None:
        """Drop the files from the page cache."""
        self.meet()
        for path in self.files("."):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def touch(self) -> None:
        """Read all files into the page cache."""
        for path in self.files("."):
            path.read_bytes()

    def read_raw(self) -> None:
        """Read the files of the pipeline's checkpoint into one buffer."""
        piece = bytearray(_PIECE)
        for path in self.files("ours"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    def read_ours(self) -> None:
        """Find the newest checkpoint, verify every byte, and load it."""
        newest = search.find_newest_valid(self.work / "ours", self.layout.saving, lambda *_: None)
        snapshot.load_snapshot(
            newest, self.tensors, newest.record(), self.layout.device, self.layout.saving
        )

    def read_dcp(self) -> None:
        """Load the checkpoint of DCP, without verification."""
        dcp.load(self.tensors, checkpoint_id=self.work / "dcp", process_group=self.layout.saving)

    def read_torch(self) -> None:
        """Load the pickled shards without verification, and copy them into the tensors."""
        saved = torch.load(self.work / "torch" / f"{self.layout.rank}", weights_only=True)
        for name, tensor in self.locals.items():
            tensor.copy_(saved[name])

    def background(self) -> dict[str, Any]:
        """Measure how long asynchronous saves stall a training loop."""
        copies = TimedCopies(self.optimizer)
        thread = ThreadPoolExecutor(1)

        def sync() -> float:
            seconds = self.seconds(self.write_ours)
            self.clear()
            return seconds

        def ours() -> Any:
            return thread.submit(
                write_snapshot, self.work / "ours", self.capture(copies), self.layout.saving
            )

        def theirs() -> Any:
            return dcp.async_save(
                self.tensors, checkpoint_id=self.work / "dcp", process_group=self.layout.saving
            )

        results = processes.run_in_turns(
            {
                "sync": sync,
                "ours": partial(self.save_while_training, ours, copies),
                "dcp.async_save": partial(self.save_while_training, theirs, copies),
            },
            1 + self.rounds,
        )
        counted: dict[str, Any] = {name: rows[1:] for name, rows in results.items()}
        return {
            "sync": counted.pop("sync"),
            "async": counted,
            "step": [row["step"] for rows in counted.values() for row in rows],
        }

    def save_while_training(
        self, begin: Callable[[], Any], copies: TimedCopies
    ) -> dict[str, float]:
        """Save during training steps; return the seconds of stall, delay, save and usual step.

        The stall is the call itself plus the time that the optimizer waits for copies of tensors
        that it will change.
        """
        usual = statistics.median(self.step() for _ in range(2))
        self.meet()
        copies.waited = 0.0
        began = time.perf_counter()
        pending = begin()
        submitting = time.perf_counter() - began
        longer = 0.0
        count = 0
        while not pending.done() or not count:
            longer = longer + self.step() - usual
            count = count + 1
        pending.result()
        in_all = time.perf_counter() - began
        self.clear()
        return {
            "held": submitting + copies.waited,
            "longer": longer,
            "whole": in_all,
            "step": usual,
        }

    def step(self) -> float:
        """Take a training step and return its seconds."""
        began = time.perf_counter()
        tokens = torch.arange(32)[None]
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began


class TimedCopies(HostCopies):
    """Sums up the seconds that the optimizer waits for copies."""

    waited = 0.0

    def _before_step(self, *_: Any) -> None:
        began = time.perf_counter()
        super()._before_step()
        self.waited += time.perf_counter() - began


class NoHasher:
    """A hasher that takes no time, so its files cannot be verified."""

    def __init__(self, algorithm: str = "") -> None: ...

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0"


class TimedHasher:
    """A hasher that sums up the seconds of all its instances."""

    seconds = 0.0

    def __init__(self, *algorithm: str) -> None:
        self._hasher = _new_hasher(*algorithm)
        self.hexdigest = self._hasher.hexdigest

    def update(self, data: Any) -> None:
        began = time.perf_counter()
        self._hasher.update(data)
        TimedHasher.seconds += time.perf_counter() - began


if __name__ == "__main__":
    main()
