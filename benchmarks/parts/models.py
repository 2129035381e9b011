"""Make, load, export and serve models in child processes, for benchmarks/models.py."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers.models.llama.modeling_llama  # noqa: F401 (its import is not loading)
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.parts import processes
from benchmarks.parts.processes import ROOT
from lib.checkpoints import contents
from lib.checkpoints.snapshot import capture_snapshot, write_snapshot
from lib.core.paths import Experiment
from lib.models import architecture, weights
from lib.optim import registry
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout


def main() -> None:
    """Run the role that --role names, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=tuple(_ROLES))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype")
    arguments = parser.parse_args()
    _ROLES[arguments.role](arguments)


def make_model(arguments: argparse.Namespace) -> None:
    """Save a Llama with random bfloat16 weights, and a tokenizer."""
    from tests.training import save_tokenizer, write_corpus

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(arguments.model, max_shard_size="500MB")
    write_corpus(arguments.model / "texts", 4)
    save_tokenizer(arguments.model, arguments.model / "texts")
    shutil.rmtree(arguments.model / "texts")


def load_model(arguments: argparse.Namespace) -> None:
    """Load the model on all ranks by the method of --role, and return the cost."""
    layout = ParallelLayout.start()
    torch.set_num_threads(1)
    dist.barrier()
    before = _peak_memory()
    read = _read_bytes()
    began = time.perf_counter()
    if arguments.role == "ours":
        _ours(arguments.model, layout)
    elif arguments.role == "from_pretrained":
        parallelize.shard(_from_pretrained(arguments.model), layout.fsdp, "fp32")
    else:
        _load_and_broadcast(arguments.model, layout)
    dist.barrier()
    seconds = time.perf_counter() - began
    mine = {"memory": _peak_memory() - before, "read": _read_bytes() - read}
    costs: list[Any] = [None] * layout.ranks
    dist.all_gather_object(costs, mine)
    processes.end_process(
        {
            "seconds": seconds,
            "memory": [cost["memory"] for cost in costs],
            "read": sum(cost["read"] for cost in costs),
        }
        if layout.rank == 0
        else None
    )


def _ours(path: Path, layout: ParallelLayout) -> Any:
    model = architecture.build_on_meta(path)
    parallelize.shard(model, layout.fsdp, "fp32")
    model.to_empty(device="cpu")
    weights.load_pretrained(model, path)
    return model


def _from_pretrained(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _load_and_broadcast(path: Path, layout: ParallelLayout) -> None:
    """Load on rank 0 and broadcast, as accelerate does with `cpu_ram_efficient_loading`.

    This calls the functions that accelerate's `prepare_model` calls.
    """
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    full = _from_pretrained(path).state_dict() if layout.rank == 0 else {}
    model = architecture.build_on_meta(path)
    parallelize.shard(model, layout.fsdp, "fp32")

    class Accelerator:
        is_main_process = layout.rank == 0
        device = layout.device

    if layout.rank != 0:
        full = {name: tensor for name, tensor in model.state_dict().items()}
    fsdp2_load_full_state_dict(Accelerator(), model, full)


def export(arguments: argparse.Namespace) -> None:
    """Run stage 05 in this process, after its imports."""
    import lib.export.full_model  # noqa: F401

    spec = importlib.util.spec_from_file_location("stage", ROOT / "05_export_checkpoint.py")
    stage = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stage  # dataclasses look the module up while they are defined
    spec.loader.exec_module(stage)
    root = arguments.model.with_name(f"{arguments.model.name}-run")
    _measure_action(
        lambda: stage.main(
            [
                "-e",
                root.name,
                "--save-dir",
                str(root.parent),
                "--out",
                str(arguments.out),
                "--dtype",
                arguments.dtype,
                "--no-progress",
            ]
        )
    )


def merge(arguments: argparse.Namespace) -> None:
    """Run accelerate's merge of a sharded state dict in this process, after its imports."""
    from accelerate.utils import merge_fsdp_weights

    root = arguments.model.with_name(f"{arguments.model.name}-run")
    _measure_action(lambda: merge_fsdp_weights(str(root / "merge"), str(arguments.out)))


def checkpoint(arguments: argparse.Namespace) -> None:
    """Write a run with a checkpoint of the model, and accelerate's checkpoint of its weights."""
    layout = ParallelLayout.start()
    model = _ours(arguments.model, layout)
    run = Experiment(arguments.model.parent, f"{arguments.model.name}-run")
    run.model.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(arguments.model / "config.json", run.model / "config.json")
    dcp.save({"model": model.state_dict()}, checkpoint_id=run.root / "merge")
    adamw = registry.build_optimizer("adamw", model, 1e-3)
    tensors = contents.name_tensors(model, registry.named_states(model, adamw))
    write_snapshot(
        run.checkpoints,
        capture_snapshot(
            tensors,
            {"step": 1, "tokens": 1, "loss": 1.0},
            {"options": {}, "inputs": {}},
            layout.device,
        ),
        layout.saving,
    )
    processes.end_process()


def serve_model(arguments: argparse.Namespace) -> None:
    """Serve the model as the Hub does until terminated; digests are computed once at the start."""
    from tests.hub_server import HubServer, Repo

    class Known(Repo):
        def info(self, name: str) -> dict:
            return info

    class Quick(HubServer):
        def _send_file(self, http: Any, request: Any, repo: Repo, file: str) -> None:
            start, stop = self._begin_file(http, request, repo, len(repo.files[file]), file)
            if request.method == "GET":
                http.wfile.write(memoryview(repo.files[file])[start:stop])
            http.close_connection = True

    files = {path.name: path.read_bytes() for path in arguments.model.iterdir()}
    info = Repo(files).info("org/model")
    with Quick() as server:
        server.repos["org/model"] = Known(files)
        print(server.url, flush=True)
        while True:
            time.sleep(3600)


def _measure_action(action: Callable[[], Any]) -> None:
    before = _peak_memory()
    began = time.perf_counter()
    action()
    processes.end_process(
        {"seconds": time.perf_counter() - began, "memory": _peak_memory() - before}
    )


def _peak_memory() -> int:
    """Return the peak resident bytes of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _read_bytes() -> int:
    """Return the bytes that this process has read by system calls, without mapped files."""
    return int(Path("/proc/self/io").read_text().split()[1])


_ROLES = {
    "make": make_model,
    "ours": load_model,
    "from_pretrained": load_model,
    "broadcast": load_model,
    "checkpoint": checkpoint,
    "export": export,
    "merge": merge,
    "serve": serve_model,
}


if __name__ == "__main__":
    main()
