"""The first item: whether this machine has what all the others need."""

from __future__ import annotations

from tests.gpu import machine
from tests.gpu.place import Place

_FREE = 0.9  # of a GPU's memory must be free; with less, sizes that should fit would not


def ready(place: Place) -> None:
    """Find what would make many items fail: no compiler, no driver, another process on the GPU."""
    lacking = [machine.lacks_compiler()]
    if place.on_gpu:
        lacking += [*_of_gpus(place), _compiles()]
    lacking = [each for each in lacking if each]
    place.note(lacking=lacking, in_one_line="; ".join(place.figures.get("gpus", lacking)))
    assert not (place.on_gpu and lacking), one_line(lacking)


def one_line(lacking: list[str]) -> str:
    """Return one line: what is missing, and which items cannot run without it."""
    return "; ".join(lacking) + ": items that need it are `not here`, fail, or measure too little"


def _of_gpus(place: Place) -> list[str]:
    """Note the state of the GPUs and return what is wrong with them."""
    import torch

    if not machine.driver():
        return ["nvidia-smi does not answer, so neither the driver nor other processes are known"]
    found = []
    told = []
    for number, (used, total) in enumerate(machine.memory_mib()):
        told.append(f"GPU {number}: {(total - used) / 1024:.0f} of {total / 1024:.0f} GiB free")
        if total - used < _FREE * total:
            found.append(f"{used:,.0f} MiB of GPU {number} are in use already")
    others = machine.contexts()
    if others:
        found.append(f"other processes compute on the GPUs: {others[:3]}")
    place.note(gpus=[f"driver {machine.driver()}, torch {torch.__version__}", *told])
    return found


def _compiles() -> str:
    """Compile a product and its backward pass on the GPU; return the reason if that fails."""
    import torch

    @torch.compile(dynamic=False)
    def work(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x) * x).sum()

    try:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        work(x).backward()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton, a C compiler or CUDA raises
        cause = getattr(error, "inner_exception", error)
        first, *_ = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()
        return f"torch compiles nothing ({first[:160]})"
    return ""
