"""Items that compare the speed of stage 04 with that of other trainers.

Each trains the same model on tokens of the same store, with the same batch, in a process of its
own. The kit contains the wheels of packages that an image may lack. A trainer that cannot run does
not fail an item: its reason is noted beside the ratios of the others.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.parts import processes
from tests.gpu.place import Place
from tests.gpu.speed import MEASURED_STEPS, WARMUP_STEPS, measure_or_reuse

_LIMIT_S = 200.0  # of one trainer
_TITAN_STEP = re.compile(r"step:\s*(\d+) .*memory:\s*(-?[\d.]+)GiB.*tps:\s*([\d,]+)")
_REASON = re.compile(r"^(\w+\.)*\w*(Error|Exception|Unsupported)\b.*", re.MULTILINE)


class Peer(NamedTuple):
    """A trainer: its script in benchmarks/parts, and the script's options."""

    script: str
    options: tuple[tuple[str, object], ...] = ()


PEERS = {
    "Trainer, compiled": Peer("trainer.py", (("form", "compiled"),)),
    "Trainer with Liger, eager": Peer("trainer.py", (("form", "liger"),)),
    "Trainer, eager": Peer("trainer.py", (("form", "eager"),)),
    "torchtitan, compiled": Peer("torchtitan_trainer.py"),
}


class Setting(NamedTuple):
    """What all trainers do. known: the item and the figures in it that measure our speed.

    lora: rank of adapters, 0 for full training. packed: whether documents are packed.
    """

    model: str
    batch: int
    length: int
    known: tuple[str, str]
    lora: int = 0
    packed: bool = False


SETTINGS = {
    "8b-wide": Setting("8b-wide", 2, 8192, ("8b-wide_2x8192_compile_on", "run")),
    "1b": Setting("1b", 2, 8192, ("1b_2x8192_compile_on", "run")),
    "adapters": Setting("8b-wide", 2, 8192, ("adapter_speed", "adapters"), lora=16),
    "experts": Setting("moe", 4, 4096, ("experts_speed", "run")),
    "packed": Setting("8b-wide", 2, 8192, ("packed", "8b-wide-documents"), packed=True),
}


_FAST = ("Trainer with Liger, eager", "torchtitan, compiled")


def peers(place: Place) -> None:
    """Compare with other trainers: the 8B-wide model."""
    compare(place, {"8b-wide": ("Trainer, compiled", *_FAST)})


def peers_1b(place: Place) -> None:
    """Compare with other trainers: the 1B."""
    compare(place, {"1b": _FAST})


def peers_adapters(place: Place) -> None:
    """Compare with other trainers: LoRA of the 8B-wide model."""
    compare(place, {"adapters": _FAST})


def peers_experts(place: Place) -> None:
    """Compare with other trainers: 128 experts."""
    compare(place, {"experts": ("Trainer, compiled",)})


def peers_packed(place: Place) -> None:
    """Compare with other trainers: packed documents, the 8B-wide model."""
    compare(place, {"packed": _FAST})


def peers_slow(place: Place) -> None:
    """Compare with the forms of other trainers that are slower, or were not measured before."""
    compare(
        place,
        {
            "1b": ("Trainer, compiled",),
            "adapters": ("Trainer, compiled",),
            "experts": ("Trainer, eager", "torchtitan, compiled"),
            "packed": ("Trainer, compiled",),
        },
    )


def compare(place: Place, chosen: dict[str, tuple[str, ...]]) -> None:
    """Measure stage 04 and the chosen trainers in each setting; note the ratios of tokens/s.

    If an earlier item of this invocation has measured stage 04, its figures are used.
    """
    packages = unpack_wheels(place)
    lines = []
    for name, trainers in chosen.items():
        setting = SETTINGS[name]
        rates = {"stage 04": _measure_ours(place, name, setting)}
        missing = {}
        for trainer in trainers:
            try:
                rates[trainer] = run_peer(place, name, setting, trainer, packages)
            except RuntimeError as error:
                missing[trainer] = str(error)
        ratios = {other: rates["stage 04"] / rate for other, rate in [*rates.items()][1:]}
        place.note(**{name: {"tokens/s": rates, "stage 04 ÷": ratios, "could not run": missing}})
        lines.append(describe_ratios(name, ratios, missing))
    place.note(in_one_line="; ".join(lines))
    place.need(any("÷" in line for line in lines), f"another trainer that can run: {lines}")


def describe_ratios(name: str, ratios: dict[str, float], missing: dict[str, str]) -> str:
    """Return the ratios of a setting in one line, and which trainers could not run."""
    parts = [f"stage 04 ÷ {trainer} {ratio:.2f}" for trainer, ratio in ratios.items()]
    parts += [f"{trainer} could not run: {reason[:80]}" for trainer, reason in missing.items()]
    return f"{name}: {', '.join(parts)}"


def _measure_ours(place: Place, name: str, setting: Setting) -> float:
    figures = measure_or_reuse(
        place,
        setting.known,
        f"{name}, stage 04",
        place.with_weights(setting.model) if setting.lora else setting.model,
        setting.length,
        setting.batch,
        "--compile",
        place.size("on", "off"),
        *(("--lora-rank", setting.lora) if setting.lora else ()),
        *(("--packing", "documents") if setting.packed else ()),
        scratch=not setting.lora,
        data="data-chat" if setting.packed else "data",
    )
    return figures["perf/tokens_per_sec_per_device"]


def run_peer(place: Place, name: str, setting: Setting, trainer: str, packages: Path) -> float:
    """Return the tokens per second of a trainer. Raises RuntimeError with the reason if it fails.

    packages: a directory with packages that this Python may lack.
    """
    peer = PEERS[trainer]
    length, batch, steps = place.size(
        (setting.length, setting.batch, MEASURED_STEPS), (64, 2, 2 * WARMUP_STEPS)
    )
    directory = place.work / re.sub(r"\W+", "-", f"{name}-{trainer}")
    directory.mkdir()
    if setting.lora and peer.script != "trainer.py":
        raise RuntimeError("it has no adapters")
    options = dict(peer.options) | ({"lora": setting.lora} if setting.lora else {})
    if "form" in options:  # a CPU has no Triton for Liger, and compiles for minutes
        options["form"] = place.size(options["form"], "eager")
    command = processes.script_command(
        peer.script,
        model=place.model(setting.model),
        tokens=_find_store(place.kit, "data-chat" if setting.packed else "data"),
        out=directory / "result.json",
        batch=batch,
        length=length,
        steps=steps,
        packed=int(setting.packed),
        **options,
    )
    log = directory.with_suffix(".log")
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command,
                cwd=directory,
                env=_add_packages(packages),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {_LIMIT_S:.0f} s") from None
    text = log.read_text(errors="replace")
    if code:
        raise RuntimeError(find_reason(text) or f"exit code {code}")
    read = read_titan_rate if peer.script == "torchtitan_trainer.py" else read_trainer_rate
    figures = read(directory, text, batch * length)
    place.note(**{f"{name}, {trainer}": figures})
    return figures["tokens/s"]


def find_reason(log: str) -> str:
    """Return the last line of a log that names an error, "" if there is none."""
    return ([match[0] for match in _REASON.finditer(log)] or [""])[-1][:300]


def read_trainer_rate(directory: Path, log: str, tokens: int) -> dict[str, Any]:
    """Return the speed of the Trainer: the median of windows of steps after the warm-up.

    tokens: of a step.
    """
    result = json.loads((directory / "result.json").read_text())
    seconds = result["seconds"]
    windows = [
        sum(seconds[first : first + WARMUP_STEPS])
        for first in range(WARMUP_STEPS, len(seconds), WARMUP_STEPS)
    ]
    rate = WARMUP_STEPS * tokens / statistics.median(windows)
    return {"tokens/s": rate, "peak_gib": result["memory_mb"] / 1024}


def read_titan_rate(directory: Path, log: str, tokens: int) -> dict[str, Any]:
    """Return the speed that torchtitan logs, the median after the warm-up, and its peak memory."""
    rows = [
        (int(step), float(memory), float(rate.replace(",", "")))
        for step, memory, rate in _TITAN_STEP.findall(log)
    ]
    rates = [rate for step, _, rate in rows if step > WARMUP_STEPS]
    return {
        "tokens/s": statistics.median(rates),
        "peak_gib": max(memory for _, memory, _ in rows),
    }


def unpack_wheels(place: Place) -> Path:
    """Unpack the kit's wheels of other trainers into a directory, and return it.

    They contain only Python code, so this needs no pip.
    """
    target = place.work / "packages"
    for wheel in sorted((place.kit / ".cache/peers").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def _add_packages(packages: Path) -> dict[str, str]:
    """Return the environment of a trainer: with the packages of the kit, without a network."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(packages))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def _find_store(kit: Path, data: str) -> Path:
    """Return a token store of a dataset of the kit."""
    pattern = re.compile(rf"{data}-[0-9a-f]+")
    return next(
        path for path in sorted((kit / ".cache/tokens").iterdir()) if pattern.fullmatch(path.name)
    )
