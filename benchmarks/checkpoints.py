#!/usr/bin/env python3
"""How fast checkpoints are written and read, how long they hold training up.

  python benchmarks/checkpoints.py                 # needs about 6 GB of disk and of memory
  python benchmarks/checkpoints.py --only save,load --rounds 7 --ranks 2
  python benchmarks/checkpoints.py --only save --work /dev/shm    # without a disk

A Llama of --layers layers with its AdamW moments (1.03 GB with 6), sharded over --ranks gloo ranks.
Every round takes every way once, each time beginning with another; ratios are of the same round and
their median is shown. Save: this repository's (hashed, committed) and the same with a hash that
does nothing, raw write + fsync of the same bytes, `torch.save` + fsync, `dcp.save`. Load: verified
and loaded, against a raw read of the same files; cold is with the page cache dropped for these
files. Async: how long a save in the background holds a training loop up. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_PIECE = 4 << 20  # bytes of a raw write or read
Ways = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure what --only names and print it."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="save,load,async", help="parts, with commas")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to put files (default: temporary)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        be_a_rank(args)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, {args.ranks} ranks, load before the "
          f"start {os.getloadavg()[0]:.1f}\n", flush=True)
    for part in args.only.split(","):
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            {"save": save, "load": load, "async": background}[part](measured(part, args, folder))


def measured(part: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run a part on ranks of their own and return what rank 0 found."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *(torchrun if args.ranks > 1 else []), __file__, "--part", part,
               "--work", folder, "--layers", str(args.layers), "--rounds", str(args.rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        sys.exit(f"{part} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[-1].partition(" ")[2])


# --- tables ---------------------------------------------------------------------------------

def save(found: dict[str, Any]) -> None:
    """Print rates of writing and what hashing costs."""
    _rates(found, "save", "raw write + fsync")
    own, plain = found["seconds"]["ours"], found["seconds"]["ours, not hashed"]
    hashed = statistics.median(h / (own - h) for h, own in zip(found["hashing"], own, strict=True))
    paired = statistics.median(_ratios(own, plain)) - 1
    print(f"hashing: {100 * hashed:.1f} % of the rest of a save (time in the hash itself), "
          f"{100 * paired:+.1f} % against saves that are not hashed\n", flush=True)


def load(found: dict[str, Any]) -> None:
    """Print rates of reading from the disk and from the page cache."""
    for cache in ("cold", "warm"):
        part = {"bytes": found["bytes"], "seconds": {
            name.partition(", ")[2]: seconds for name, seconds in found["seconds"].items()
            if name.startswith(cache)}}
        _rates(part, f"load, {cache}", "raw read")


def background(found: dict[str, Any]) -> None:
    """Print what a save in the background costs the training loop."""
    print(f"| save of {found['bytes'] / 1e6:,.0f} MB beside training | held up, s (rounds) | "
          "median | of a sync save | steps longer by, s | whole after, s |\n"
          "|---|---|---|---|---|---|")
    sync = found["sync"]
    for name, rows in found["async"].items():
        held = [row["held"] for row in rows]
        share = statistics.median(_ratios(held, sync))
        print(f"| {name} | {', '.join(f'{x:.3f}' for x in held)} | {statistics.median(held):.3f} | "
              f"{100 * share:.1f} % | {statistics.median(row['longer'] for row in rows):.2f} | "
              f"{statistics.median(row['whole'] for row in rows):.2f} |")
    print(f"\na sync save takes {statistics.median(sync):.2f} s, a step "
          f"{statistics.median(found['step']):.2f} s\n", flush=True)


def _rates(found: dict[str, Any], title: str, base: str) -> None:
    size, rounds = found["bytes"] / 1e6, found["seconds"]
    print(f"| {title} of {size:,.0f} MB | seconds (rounds) | MB/s | of the rate of {base} |\n"
          "|---|---|---|---|")
    for name, seconds in rounds.items():
        middle = statistics.median(seconds)
        rate = statistics.median(_ratios(rounds[base], seconds))
        print(f"| {name} | {', '.join(f'{s:.2f}' for s in seconds)} | {size / middle:,.0f} | "
              f"{rate:.2f} |")
    print(flush=True)


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


# --- on the ranks ---------------------------------------------------------------------------

def be_a_rank(args: argparse.Namespace) -> None:
    """Measure one part together with the other ranks; rank 0 prints it."""
    bench = Bench(args)
    found = {"save": bench.save, "load": bench.load, "async": bench.background}[args.part]()
    if bench.layout.rank == 0:
        print("RESULT", json.dumps(found | {"bytes": bench.bytes}), flush=True)
    bench.meet()
    os._exit(0)


class Bench:
    """A sharded model with its optimizer, and ways to save and load it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        from lib.optim import registry
        from lib.parallel import parallelize
        from lib.parallel.layout import ParallelLayout

        self.layout, self.work, self.rounds = ParallelLayout.start(), args.work, args.rounds
        config = LlamaConfig(vocab_size=4096, hidden_size=1024, intermediate_size=2816,
                             num_hidden_layers=args.layers, num_attention_heads=16)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        parallelize.shard(self.model, self.layout.fsdp, "fp32")
        parallelize.materialise(self.model, torch.device("cpu"), offload=False)
        for parameter in self.model.parameters():
            parameter.to_local().detach().normal_(std=0.02)
        self.optimizer = registry.build("adamw", self.model, 1e-5, (0.9, 0.95), 0.0)
        self.identity: dict[str, Any] = {"options": {}, "inputs": {}}
        self.tensors = self.capture().tensors
        self.locals = {name: tensor.to_local().detach() for name, tensor in self.tensors.items()}
        for moment in list(self.locals.values())[len(self.locals) // 3:]:
            moment.normal_().abs_()  # zeros would be the easier content
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def capture(self, copies: Any = None) -> Any:
        """Return the state to be written, as the trainer takes it."""
        from lib.checkpoints import contents
        from lib.checkpoints.snapshot import capture
        from lib.optim import registry
        tensors = contents.name_tensors(self.model,
                                        registry.named_states(self.model, self.optimizer))
        return capture(tensors, {"step": 1, "tokens": 1, "seed": 0}, self.identity,
                       self.layout.device, copies)

    def meet(self) -> None:
        """Wait for all ranks."""
        import torch.distributed as dist
        dist.barrier(self.layout.control)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return how long all ranks together take."""
        self.meet()
        began = time.perf_counter()
        action()
        self.meet()
        return time.perf_counter() - began

    def in_turns(self, ways: Ways, after: Callable[[str], None]) -> dict[str, list[float]]:
        """Return the seconds of each way in each round; the first round is not counted."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for number in range(1 + self.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = self.seconds(ways[name])
                after(name)
                found[name] += [seconds] if number else []
        return found

    def clear(self) -> None:
        """Delete what was written."""
        self.meet()
        if self.layout.rank == 0:
            for path in self.work.iterdir():
                shutil.rmtree(path)
        self.meet()

    # --- save ---

    def save(self) -> dict[str, Any]:
        """Measure what it takes to make the state durable."""
        hashing: list[float] = []
        clock = HashClock()

        def after(name: str) -> None:
            if name == "ours":
                hashing.append(clock.take())
            self.clear()

        ways: Ways = {
            "raw write + fsync": self.write_raw, "ours": partial(self.write_ours, clock),
            "ours, not hashed": partial(self.write_ours, NoHash), "dcp.save": self.write_dcp,
            "torch.save + fsync": self.write_torch}
        seconds = self.in_turns(ways, after)
        return {"seconds": seconds, "hashing": hashing[1:]}

    def write_ours(self, hasher: Callable[..., Any] | None = None) -> None:
        """Write and commit."""
        from lib.checkpoints.snapshot import write
        from lib.core import hashing
        with mock.patch.object(hashing, "new", hasher or hashing.new):
            write(self.work / "ours", self.capture(), self.layout.saving)

    def write_raw(self) -> None:
        """Write the bytes of the tensors, one file for each rank."""
        (self.work / "raw").mkdir(exist_ok=True)
        with (self.work / "raw" / f"{self.layout.rank}").open("wb", buffering=0) as file:
            for tensor in self.locals.values():
                content = memoryview(tensor.numpy()).cast("B")
                while content:
                    content = content[file.write(content[:_PIECE]):]
            os.fsync(file.fileno())

    def write_torch(self) -> None:
        """Pickle each rank's shards."""
        import torch
        (self.work / "torch").mkdir(exist_ok=True)
        with (self.work / "torch" / f"{self.layout.rank}").open("wb") as file:
            torch.save(self.locals, file)
            file.flush()
            os.fsync(file.fileno())

    def write_dcp(self) -> None:
        """Write as DCP does by default, which syncs the files."""
        import torch.distributed.checkpoint as dcp
        dcp.save(self.tensors, checkpoint_id=self.work / "dcp", process_group=self.layout.saving)

    # --- load ---

    def load(self) -> dict[str, Any]:
        """Measure reading with and without the page cache."""
        for write in (self.write_ours, self.write_torch, self.write_dcp):
            self.seconds(write)
        readers = {"raw read": self.read_raw, "ours, verified": self.read_ours,
                   "dcp.load": self.read_dcp, "torch.load": self.read_torch}
        seconds: dict[str, list[float]] = {}
        for cache in ("cold", "warm"):
            (self.drop if cache == "cold" else self.touch)()
            found = self.in_turns(readers, lambda _, cold=cache == "cold": cold and self.drop())
            seconds |= {f"{cache}, {name}": each for name, each in found.items()}
        return {"seconds": seconds}

    def files(self, below: str) -> list[Path]:
        """Return this rank's share of the files of a checkpoint."""
        found = sorted(path for path in (self.work / below).rglob("*") if path.is_file())
        return sorted(found, key=lambda path: -path.stat().st_size)[
            self.layout.rank::self.layout.ranks]

    def drop(self) -> None:
        """Have the kernel forget what it has read of the files."""
        self.meet()
        for path in self.files("."):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def touch(self) -> None:
        """Have the kernel keep all files in memory."""
        for path in self.files("."):
            path.read_bytes()

    def read_raw(self) -> None:
        """Read the files of our checkpoint into the same piece of memory."""
        piece = bytearray(_PIECE)
        for path in self.files("ours"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    def read_ours(self) -> None:
        """Find the newest checkpoint, verify every byte, and load it."""
        from lib.checkpoints import search, snapshot
        newest = search.newest_valid(self.work / "ours", self.layout.saving, lambda *_: None)
        snapshot.fill(newest, self.tensors, newest.record(), self.layout.device,
                      self.layout.saving)

    def read_dcp(self) -> None:
        """Load unverified."""
        import torch.distributed.checkpoint as dcp
        dcp.load(self.tensors, checkpoint_id=self.work / "dcp", process_group=self.layout.saving)

    def read_torch(self) -> None:
        """Load unverified, and copy into the tensors."""
        import torch
        saved = torch.load(self.work / "torch" / f"{self.layout.rank}", weights_only=True)
        for name, tensor in self.locals.items():
            tensor.copy_(saved[name])

    # --- beside training ---

    def background(self) -> dict[str, Any]:
        """Measure what saves in the background cost a training loop."""
        import torch.distributed.checkpoint as dcp

        from lib.checkpoints.host_copies import HostCopies
        from lib.checkpoints.snapshot import write

        class Timed(HostCopies):
            waited = 0.0

            def _before_step(self, *_: Any) -> None:
                began = time.perf_counter()
                super()._before_step()
                self.waited += time.perf_counter() - began

        copies, thread = Timed(self.optimizer), ThreadPoolExecutor(1)

        def ours() -> Any:
            return thread.submit(write, self.work / "ours", self.capture(copies),
                                 self.layout.saving)

        def theirs() -> Any:
            return dcp.async_save(self.tensors, checkpoint_id=self.work / "dcp",
                                  process_group=self.layout.saving)

        rows: dict[str, list[dict[str, float]]] = {"ours": [], "dcp.async_save": []}
        sync, steps = [], []
        for number in range(1 + self.rounds):
            sync.append(self.seconds(self.write_ours))
            self.clear()
            steps.append(statistics.median(self.step() for _ in range(2)))
            for name, begin in (("ours", ours), ("dcp.async_save", theirs))[::(-1) ** number]:
                rows[name].append(self.beside(begin, copies, steps[-1]))
                self.clear()
        return {"sync": sync[1:], "step": steps[1:],
                "async": {name: each[1:] for name, each in rows.items()}}

    def beside(self, begin: Callable[[], Any], copies: Any, usual: float) -> dict[str, float]:
        """Return the seconds of one save: held up, added to the steps, and until it is whole.

        Held up: the call, and the optimizer's wait for copies of what it is about to change.
        """
        self.meet()
        copies.waited, began = 0.0, time.perf_counter()
        pending = begin()
        called, longer, count = time.perf_counter() - began, 0.0, 0
        while not pending.done() or not count:
            longer, count = longer + self.step() - usual, count + 1
        pending.result()
        return {"held": called + copies.waited, "longer": longer,
                "whole": time.perf_counter() - began}

    def step(self) -> float:
        """Take a training step and return its seconds."""
        import torch
        began = time.perf_counter()
        tokens = torch.arange(32)[None]
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began


class NoHash:
    """Takes no time; what is written with it could never be verified."""

    def __init__(self, algorithm: str = "") -> None: ...

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0"


class HashClock:
    """Makes hashers that add up the time they take."""

    def __init__(self) -> None:
        from lib.core import hashing
        self._new, self._seconds = hashing.new, 0.0

    def __call__(self, *algorithm: str) -> HashClock:
        clock = HashClock.__new__(HashClock)
        clock._hasher, clock._owner = self._new(*algorithm), self
        return clock

    def update(self, data: Any) -> None:
        began = time.perf_counter()
        self._hasher.update(data)
        self._owner._seconds += time.perf_counter() - began

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


if __name__ == "__main__":
    main()
