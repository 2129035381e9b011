#!/usr/bin/env python3
"""How fast models come in and go out, and in how much memory, against what others do.

  python benchmarks/models.py                    # needs about 20 GB of disk, 8 GB of memory
  python benchmarks/models.py --only load,export --layers 8

A Llama of --layers layers (bfloat16, about 1 GB by default) and one of a quarter of it are made
with random weights. Loading: on two gloo ranks, this repository's sharded loading, from_pretrained
on every rank, and rank 0 loading while the other gets its shards by broadcast (accelerate's
recipe). Export: stage 05, accelerate's merge, and `cp` with fsync of the same files. Download:
stage 03 and curl from a server on this machine. The page cache is warm throughout; each figure is
the best of --repeat runs, taken in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RANKS, VOCABULARY, WIDTH = 2, 32_000, 1024
LOADERS = ("ours", "from_pretrained", "broadcast")
MB = 1e6


def main() -> None:
    """Measure what --only names and print it; with --role, be one rank of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=34, help="layers of the larger model")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each")
    parser.add_argument("--only", default="load,export,download", help="parts, with commas")
    parser.add_argument("--work", type=Path, help="where to put the files (default: a temporary "
                                                  "directory)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="",
                      OMP_NUM_THREADS="1")
    if arguments.role:
        _ROLES[arguments.role](arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        models = {"1×": work / "quarter", "4×": work / "whole"}  # in layers
        for path, layers in zip(models.values(), (arguments.layers // 4, arguments.layers),
                                strict=True):
            _call("make", path, layers=layers)
        print(f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}, model "
              f"{_bytes(models['4×']) / MB:,.0f} MB in safetensors, best of {arguments.repeat}\n")
        for part in arguments.only.split(","):
            {"load": load, "export": export, "download": download}[part](
                models, arguments.repeat)


# ------------------------------------------------------------------ loading

def load(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory per rank of three ways to fill two ranks."""
    print("| loading, 2 ranks | layers | seconds | memory per rank over imports | "
          "read by all ranks |\n|---|---|---|---|---|")
    for size, path in models.items():
        results = _in_turns({how: lambda how=how, path=path: _call(how, path, RANKS)
                             for how in LOADERS}, repeat, lambda r: r["seconds"])
        for how, best in results.items():
            memory = " and ".join(f"{m / MB:,.0f} MB" for m in best["memory"])
            ratio = best["seconds"] / results["ours"]["seconds"]
            read = best["read"] / _bytes(path)
            read = f"{read:.2f} × model" if read > 0.5 else "mapped, not counted"
            print(f"| {how} | {size} ({_bytes(path) / MB:,.0f} MB) | {best['seconds']:.2f} "
                  f"({ratio:.2f} of ours) | {memory} | {read} |")
    print()


def role_load(how: str) -> Callable[[argparse.Namespace], None]:
    """Return the role of a rank that loads in one way and prints what it took."""
    def run(arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        import transformers.models.llama.modeling_llama  # noqa: F401 (its import is not loading)

        from lib.models import architecture, weights
        from lib.parallel import parallelize
        from lib.parallel.layout import ParallelLayout

        layout = ParallelLayout.start()
        torch.set_num_threads(1)
        dist.barrier()
        before, read, began = _peak_memory(), _read_bytes(), time.perf_counter()
        if how == "ours":
            model = architecture.build_on_meta(arguments.model)
            parallelize.shard(model, layout.fsdp, "fp32")
            model.to_empty(device="cpu")
            weights.load_pretrained(model, arguments.model)
        elif how == "from_pretrained":
            model = _from_pretrained(arguments.model)
            parallelize.shard(model, layout.fsdp, "fp32")
        else:
            model = _broadcast(arguments.model, layout)
        dist.barrier()
        seconds = time.perf_counter() - began
        mine = {"memory": _peak_memory() - before, "read": _read_bytes() - read}
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, mine)
        if layout.rank == 0:
            print("RESULT", json.dumps({"seconds": seconds, "memory": [f["memory"] for f in found],
                                        "read": sum(f["read"] for f in found)}))
        sys.stdout.flush()
        os._exit(0)
    return run


def _from_pretrained(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _broadcast(path: Path, layout: Any) -> Any:
    """Fill the ranks as accelerate does with `cpu_ram_efficient_loading`.

    The real thing: its own functions, called as `prepare_model` calls them.
    """
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    from lib.models import architecture
    from lib.parallel import parallelize

    full = _from_pretrained(path).state_dict() if layout.rank == 0 else {}
    model = architecture.build_on_meta(path)
    parallelize.shard(model, layout.fsdp, "fp32")

    class Accelerator:
        is_main_process = layout.rank == 0
        device = layout.device

    if layout.rank != 0:
        full = {name: tensor for name, tensor in model.state_dict().items()}
    fsdp2_load_full_state_dict(Accelerator(), model, full)
    return model


# ------------------------------------------------------------------ export

def export(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory of stage 05, of accelerate's merge and of `cp` with fsync."""
    print("| export | layers | to | seconds | of cp + fsync | memory over imports |\n"
          "|---|---|---|---|---|---|")
    for size, path in models.items():
        _call("checkpoint", path, RANKS)
        for dtype in ("bfloat16", "float32"):
            results = _in_turns(_ways_to_export(path, dtype), repeat, lambda r: r["seconds"])
            base = results["cp + fsync of what stage 05 wrote"]["seconds"]
            for name, best in results.items():
                memory = f"{best['memory'] / MB:,.0f} MB" if "memory" in best else ""
                print(f"| {name} | {size} | {dtype} | {best['seconds']:.2f} | "
                      f"{best['seconds'] / base:.2f} | {memory} |")
        for left in ("out", "copied", "merged", f"{path.name}-run"):
            shutil.rmtree(path.parent / left)
    print(f"\nLargest tensor, float32: {VOCABULARY * WIDTH * 4 / MB:,.0f} MB.\n")


def _ways_to_export(model: Path, dtype: str) -> dict[str, Callable[[], dict[str, Any]]]:
    root, (out, merged, copied) = model.with_name(f"{model.name}-run"), (
        model.parent / name for name in ("out", "merged", "copied"))
    command = [sys.executable, str(ROOT / "05_export_checkpoint.py"), "-e", root.name,
               "--save-dir", str(root.parent), "--out", str(out), "--dtype", dtype,
               "--no-progress"]
    return {"stage 05": lambda: _fresh("export", model, out, dtype=dtype),
            "stage 05, whole command": lambda: _child(command, out),
            "accelerate merge-weights (always float32)": lambda: _fresh("merge", model, merged),
            "cp + fsync of what stage 05 wrote": lambda: _copy(out, copied)}


def role_export(arguments: argparse.Namespace) -> None:
    """Run stage 05 in a process that has imported what it needs."""
    import importlib.util

    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from lib.checkpoints import export  # noqa: F401
    spec = importlib.util.spec_from_file_location("stage", ROOT / "05_export_checkpoint.py")
    stage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stage)
    root = arguments.model.with_name(f"{arguments.model.name}-run")
    _measured(lambda: stage.main(["-e", root.name, "--save-dir", str(root.parent), "--out",
                                  str(arguments.out), "--dtype", arguments.dtype,
                                  "--no-progress"]))


def role_merge(arguments: argparse.Namespace) -> None:
    """Run accelerate's merge of a sharded state dict, in a process that has imported it."""
    from accelerate.utils import merge_fsdp_weights
    root = arguments.model.with_name(f"{arguments.model.name}-run")
    _measured(lambda: merge_fsdp_weights(str(root / "merge"), str(arguments.out)))


def role_checkpoint(arguments: argparse.Namespace) -> None:
    """Write the checkpoint that a run of the model leaves, and accelerate's of the same weights."""
    import torch.distributed.checkpoint as dcp

    from lib.checkpoints import contents
    from lib.checkpoints.snapshot import capture, write
    from lib.core.paths import Experiment
    from lib.models import architecture, weights
    from lib.optim import registry
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    layout = ParallelLayout.start()
    model = architecture.build_on_meta(arguments.model)
    parallelize.shard(model, layout.fsdp, "fp32")
    model.to_empty(device="cpu")
    weights.load_pretrained(model, arguments.model)
    run = Experiment(arguments.model.parent, f"{arguments.model.name}-run")
    run.model.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(arguments.model / "config.json", run.model / "config.json")
    dcp.save({"model": model.state_dict()}, checkpoint_id=run.root / "merge")
    adamw = registry.build("adamw", model, 1e-3, (0.9, 0.95), 0.0)
    tensors = contents.name_tensors(model, registry.named_states(model, adamw))
    write(run.checkpoints, capture(tensors, {"step": 1, "tokens": 1, "loss": 1.0},
                                   {"options": {}, "inputs": {}}, layout.device), layout.saving)
    sys.stdout.flush()
    os._exit(0)


def _copy(source: Path, target: Path) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began}


# ------------------------------------------------------------------ download

def download(models: dict[str, Path], repeat: int) -> None:
    """Print the rate of stage 03 and of curl from the same server on this machine."""
    path = models["4×"]
    work = path.parent
    server = subprocess.Popen(_role("serve", path), stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        command = [sys.executable, str(ROOT / "03_download_model.py"), "--model-name", "org/model",
                   "--cache-dir", str(work / "cache"), "--no-progress"]
        fetched = [f"{url}/org/model/resolve/main/{p.name}" for p in sorted(path.iterdir())]
        curl = ["curl", "--silent", "--show-error", "--fail", "--location", "--parallel",
                "--remote-name-all", "--create-dirs", "--output-dir", str(work / "curl"), *fetched]
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(work / "hf")}
        results = _in_turns({"curl --parallel": lambda: _child(curl, work / "curl"),
                             "stage 03, whole command": lambda: _child(command, work / "cache",
                                                                       environment)},
                            repeat, lambda r: r["seconds"])
    finally:
        server.terminate()
        server.wait()
    print("| download | seconds | MB/s | of curl's rate |\n|---|---|---|---|")
    base = results["curl --parallel"]["seconds"]
    rate = re.search(r"([\d.]+) ([kMG])B/s\)", results["stage 03, whole command"]["said"])
    own = _bytes(path) / (float(rate[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[rate[2]])
    for name, best in {"stage 03, receiving": {"seconds": own}, **results}.items():
        print(f"| {name} | {best['seconds']:.2f} | {_bytes(path) / MB / best['seconds']:,.0f} | "
              f"{base / best['seconds']:.2f} |")
    print()


def role_serve(arguments: argparse.Namespace) -> None:
    """Serve the model as the Hub does until terminated; the digests are made once, before."""
    from tests.hub_server import HubServer, Repo

    class Known(Repo):
        def info(self, name: str) -> dict:
            return info

    class Quick(HubServer):
        def _send_file(self, http: Any, request: Any, repo: Repo, file: str) -> None:
            start, stop = self._begin_file(http, request, repo, len(repo.files[file]), file)
            http.wfile.write(memoryview(repo.files[file])[start:stop])
            http.close_connection = True

    files = {path.name: path.read_bytes() for path in arguments.model.iterdir()}
    info = Repo(files).info("org/model")
    with Quick() as server:
        server.repos["org/model"] = Known(files)
        print(server.url, flush=True)
        while True:
            time.sleep(3600)


# ------------------------------------------------------------------ common

def role_make(arguments: argparse.Namespace) -> None:
    """Save a Llama with random weights, bfloat16, with a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.training import save_tokenizer, write_corpus
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH,
                         intermediate_size=WIDTH * 11 // 4, num_hidden_layers=arguments.layers,
                         num_attention_heads=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(arguments.model, max_shard_size="500MB")
    write_corpus(arguments.model / "texts", 4)
    save_tokenizer(arguments.model, arguments.model / "texts")
    shutil.rmtree(arguments.model / "texts")


def _measured(action: Callable[[], Any]) -> None:
    before, began = _peak_memory(), time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    print("RESULT", json.dumps({"seconds": seconds, "memory": _peak_memory() - before}))
    sys.stdout.flush()
    os._exit(0)


def _in_turns(ways: dict[str, Callable[[], dict[str, Any]]], repeat: int,
              cost: Callable[[dict[str, Any]], float]) -> dict[str, dict[str, Any]]:
    """Return the best run of each way; all of them once, then all again."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            runs[name].append(way())
    return {name: min(found, key=cost) for name, found in runs.items()}


def _role(role: str, model: Path, ranks: int = 0, **options: Any) -> list[str]:
    """Return the command of a role in a process of its own, or on ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    extra = [item for name, value in options.items() for item in (f"--{name}", str(value))]
    return [sys.executable, *(torchrun if ranks else []), str(Path(__file__).resolve()),
            "--role", role, "--model", str(model), *extra]


def _call(role: str, model: Path, ranks: int = 0, **options: Any) -> dict[str, Any]:
    """Run a role and return what it measured."""
    said = _run(_role(role, model, ranks, **options))
    found = [line for line in said.splitlines() if line.startswith("RESULT")]
    return json.loads(found[-1].partition(" ")[2]) if found else {}


def _fresh(role: str, model: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Run a role that writes `out`, which is deleted before."""
    shutil.rmtree(out, ignore_errors=True)
    return _call(role, model, out=out, **options)


def _child(command: list[str], out: Path, environment: dict[str, str] | None = None,
           ) -> dict[str, Any]:
    """Time a command that writes `out`, which is deleted before."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    said = _run(command, environment)
    return {"seconds": time.perf_counter() - began, "said": said}


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True,
                          env={**os.environ, **(environment or {})})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def _peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _read_bytes() -> int:
    """Return the bytes that this process has read through system calls, mapped files left out."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


_ROLES = {"make": role_make, "checkpoint": role_checkpoint, "export": role_export,
          "merge": role_merge, "serve": role_serve,
          **{how: role_load(how) for how in LOADERS}}


if __name__ == "__main__":
    main()
