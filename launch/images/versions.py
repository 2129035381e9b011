"""Whether torch, the CUDA in its wheel, and the nodes' driver agree (torch_cuda.yaml)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "launch" / "images" / "torch_cuda.yaml"


@dataclass(frozen=True)
class Torch:
    """A version of torch. version: `2.13.0`. cuda: `13.0`, or empty for a build without."""

    version: str
    cuda: str

    @property
    def local(self) -> str:
        """Return the local version of the wheel: `+cu130`, `+cpu`."""
        return f"+cu{self.cuda.replace('.', '')}" if self.cuda else "+cpu"


def table() -> dict[str, Any]:
    """Return torch_cuda.yaml."""
    import yaml
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def torch_pin(requirements: Path = ROOT / "requirements.txt", cuda: str = "") -> Torch:
    """Return the torch that requirements.txt names.

    cuda: another build than the default one. Raises UsageError when the file pins no torch, or the
    table does not know it.
    """
    text = requirements.read_text(encoding="utf-8")
    match = re.search(r"^torch==(\d+\.\d+)(\.\d+)(?:\+(\w+))?", text, re.MULTILINE)
    if not match:
        raise UsageError(f"{requirements} pins no torch", expected="a line `torch==X.Y.Z`")
    minor, patch, local = match.groups()
    known = table()["torch"].get(minor)
    if known is None:
        raise UsageError(f"{TABLE.name} does not know torch {minor}",
                         found=f"torch {', '.join(table()['torch'])}",
                         hint=f"add a line for it to {TABLE}")
    wanted = cuda or (_cuda_of(local) if local else known["default"])
    if wanted and wanted != "none" and wanted not in known["builds"]:
        raise UsageError(f"torch {minor} is not built for CUDA {wanted}",
                         expected=f"one of {', '.join(known['builds'])}, or none")
    return Torch(minor + patch, "" if wanted == "none" else wanted)


def _cuda_of(local: str) -> str:
    digits = local.removeprefix("cu")
    return f"{digits[:-1]}.{digits[-1]}" if local.startswith("cu") else "none"


def oldest_driver(cuda: str) -> str:
    """Return the oldest driver that a CUDA version works with; UsageError when unknown."""
    major = cuda.partition(".")[0]
    try:
        return table()["driver"][major]
    except KeyError:
        raise UsageError(f"{TABLE.name} names no driver for CUDA {major}",
                         hint=f"add a line for it to {TABLE}") from None


def driver_problem(torch: Torch, driver: str) -> str:
    """Return in a sentence why a driver does not do for this torch; empty when it does."""
    if not torch.cuda or _parts(driver) >= _parts(needed := oldest_driver(torch.cuda)):
        return ""
    return (f"driver {driver} is too old for torch {torch.version}, whose CUDA {torch.cuda} wants "
            f"{needed} or newer")


def build_for(torch: Torch, driver: str) -> Torch | None:
    """Return the same torch with the newest CUDA that a driver does for, None without any."""
    minor = torch.version.rpartition(".")[0]
    for cuda in reversed(table()["torch"][minor]["builds"]):
        older = Torch(torch.version, cuda)
        if not driver_problem(older, driver):
            return older
    return None


def base_problem(torch: Torch, base_image: str) -> str:
    """Return why a base image with a CUDA of its own does not do; empty when it has none.

    A second CUDA of another major version shadows the libraries that the wheel brings along.
    """
    match = re.search(r"cuda[:-]?v?(\d+)\.(\d+)", base_image)
    if not match or not torch.cuda or match[1] == torch.cuda.partition(".")[0]:
        return ""
    return (f"{base_image} brings CUDA {match[1]}.{match[2]}, torch {torch.version} CUDA "
            f"{torch.cuda}")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
