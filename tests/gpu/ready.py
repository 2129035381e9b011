"""The first item: check that this machine has what the other items need."""

from __future__ import annotations

from tests.gpu import machine
from tests.gpu.place import Place

_MIN_FREE_SHARE = 0.9  # of a GPU's memory; with less, sizes that should fit do not


def ready(place: Place) -> None:
    """The machine has a compiler, a driver and GPUs that no other process uses."""
    problems = [machine.describe_missing_compiler()]
    if place.on_gpu:
        problems += [*_check_gpus(place), _check_compiler()]
    problems = [problem for problem in problems if problem]
    place.note(lacking=problems, in_one_line="; ".join(place.figures.get("gpus", problems)))
    assert not (place.on_gpu and problems), join_problems(problems)


def join_problems(problems: list[str]) -> str:
    """Return one line with the problems and their effect on other items."""
    return "; ".join(problems) + ": items that need it are `not here`, fail, or measure too little"


def _check_gpus(place: Place) -> list[str]:
    """Note the state of the GPUs and return the problems with them."""
    import torch

    if not machine.query_driver():
        return ["nvidia-smi does not answer, so neither the driver nor other processes are known"]
    problems = []
    descriptions = []
    for number, (used, total) in enumerate(machine.query_memory()):
        descriptions.append(
            f"GPU {number}: {(total - used) / 1024:.0f} of {total / 1024:.0f} GiB free"
        )
        if total - used < _MIN_FREE_SHARE * total:
            problems.append(f"{used:,.0f} MiB of GPU {number} are in use already")
    processes = machine.list_gpu_processes()
    if processes:
        problems.append(f"other processes compute on the GPUs: {processes[:3]}")
    place.note(gpus=[f"driver {machine.query_driver()}, torch {torch.__version__}", *descriptions])
    return problems


def _check_compiler() -> str:
    """Compile a small function for the GPU; return the reason if that fails, else ""."""
    import torch

    @torch.compile(dynamic=False)
    def compute(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x) * x).sum()

    try:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        compute(x).backward()
        torch.cuda.synchronize()
    except Exception as error:  # Triton, a C compiler and CUDA raise errors of many types
        cause = getattr(error, "inner_exception", error)
        first_line, *_ = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()
        return f"torch compiles nothing ({first_line[:160]})"
    return ""
