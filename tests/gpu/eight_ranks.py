"""An item that runs one rank of eight; a fake process group simulates the other seven."""

from __future__ import annotations

import time

from tests.gpu.place import Place


def eight_ranks(place: Place) -> None:
    """One of eight ranks that train a full 8B needs the estimated memory; notes the host's time.

    The collectives of the simulated group move no data, so the computed values mean nothing.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lib.models import architecture
    from lib.optim import registry
    from lib.optim.guard import StepGuard
    from lib.parallel import loss, parallelize
    from lib.planning import trace
    from lib.planning.memory import Estimates
    from lib.tokens.batches import MicroBatch

    directory = place.model("8b-wide", num_hidden_layers=place.size(32, 6))
    step_config = trace.StepConfig(8, 8, *place.size((1, 8192, "bf16"), (1, 64, "fp32")), "full")
    estimated_bytes = (
        Estimates(architecture.build_on_meta(directory, "sdpa")).step(step_config).total
    )
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    device = torch.device(place.device)
    mesh = init_device_mesh(place.device, (8,), mesh_dim_names=("shard",))
    model = architecture.build_on_meta(directory, "sdpa")
    parallelize.parallelize(model, mesh, step_config.precision, step_config.recompute)
    parallelize.materialise_model(model, device, offload=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02)
    head = model.get_output_embeddings()
    head.forward = loss.LossHead(head, loss.CHUNK_LOGITS[place.device])
    adamw = registry.build_optimizer("adamw", model, 1e-5)
    guard = StepGuard("fp32", 0.0, device)
    ids = torch.randint(
        0, model.config.vocab_size, (step_config.batch, step_config.seq_length), device=device
    )
    host_ms = []
    step_ms = []
    for _ in range(place.size(8, 3)):
        began = time.perf_counter()
        loss.token_loss_sum(model, MicroBatch(ids, ids)).backward()
        guard.clip(adamw, 1.0, guard.scale_for(1))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        host_ms.append(1000 * (time.perf_counter() - began))
        if place.on_gpu:
            torch.cuda.synchronize()
        step_ms.append(1000 * (time.perf_counter() - began))
    place.note(estimated_gib=estimated_bytes / 2**30, host_ms=host_ms, step_ms=step_ms)
    if place.on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**30
        place.note(peak_gib=peak)
        assert abs(estimated_bytes / 2**30 / peak - 1) < 0.1, "the estimate is off by over 10 %"
