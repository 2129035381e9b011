"""Items that run whole stages on one GPU: what a run does, keeps and says."""

from __future__ import annotations

import json
import re
import signal
import statistics
import sys
from typing import Any

from tests.gpu import hooks
from tests.gpu.place import ROOT, Place, Stage

SAME = 1e-4  # relative; float32 on one device, in another order


def shape(place: Place, *options: object) -> tuple[object, ...]:
    """Return the options that all small runs have; compiled only where that is the question."""
    return ("-s", place.size(1024, 64), "-b", place.size(4, 2), "--lr", 1e-3, "--compile", "off",
            *options)


def a_run(place: Place) -> None:
    """A run as it stands: the loss falls, and the same command again does nothing."""
    options = shape(place, "--max-steps", place.size(40, 6), "--compile", place.size("auto", "off"))
    run = place.train("plain", *options)
    said = ("attention", "sharded", "loss", "peak for MFU", "  memory")
    place.note(first_loss=run.losses[0], last_loss=run.losses[-1], **speed(run),
               said=[line for line in run.printed.splitlines() if line.startswith(said)])
    assert run.losses[-1] < run.losses[0]
    assert "already done" in place.train("plain", *options).printed


def speed(run: Stage) -> dict[str, float]:
    """Return the medians of a run's figures after its first steps."""
    rows = run.rows[len(run.rows) // 3:]
    return {key: statistics.median(row[key] for row in rows) for key in (
        "perf/tokens_per_sec", "time/total", "time/update", "memory/peak_gib")}


def resume(place: Place) -> None:
    """With --deterministic on, a run that SIGTERM stopped goes on bit for bit."""
    for packing in ("concat", "documents"):
        options = shape(place, "--max-steps", place.size(24, 8), "--packing", packing,
                        "--deterministic", "on", "--compile", place.size("on", "off"))
        whole = place.train(f"{packing}-whole", *options)
        stopped = place.begin(f"{packing}-stopped", *options, hook="slow_steps")
        stopped.wait_for(3)
        stopped.signal(signal.SIGTERM).ended(75)
        at = stopped.rows[-1]["step"]
        again = place.train(f"{packing}-stopped", *options)
        place.note(**{f"{packing}, stopped after step": at,
                      f"{packing}, ms per step": speed(whole)["time/total"]})
        assert at < whole.rows[-1]["step"], "it was over before it was stopped"
        assert _figures(again) == _figures(whole), "the losses differ after a resume"
        assert digests(again) == digests(whole), "weights or moments differ after a resume"
    if place.on_gpu:
        plain = place.train("not-deterministic", *shape(place, "--max-steps", 24, "--compile",
                                                        "on"), hook="save_nothing")
        place.note(not_deterministic_ms_per_step=speed(plain)["time/total"])


def _figures(run: Stage) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in run.rows}


def digests(run: Stage) -> dict[str, str]:
    """Return the digests of the tensors in a run's last checkpoint."""
    last = max((run.experiment / "checkpoints").glob("step_*"))
    return {entry["path"]: entry["digest"] for entry in
            json.loads((last / "manifest.json").read_text())["files"]
            if entry["path"].endswith(".distcp")}


def saves(place: Place) -> None:
    """What is saved beside training is, byte for byte, what is saved before the next step."""
    found = []
    for asynchronous in ("on", "off"):
        options = shape(place, "--max-steps", 9, "--ckpt-freq", 2, "--ckpt-keep", 0, "--ckpt-async",
                        asynchronous, "--deterministic", "on")
        run = place.train(f"async-{asynchronous}", *options)
        checkpoints = sorted((run.experiment / "checkpoints").glob("step_*"))
        assert len(checkpoints) == 5
        found.append([[(entry["path"], entry["digest"]) for entry in json.loads(
            (path / "manifest.json").read_text())["files"] if entry["path"].endswith(".distcp")]
            for path in checkpoints])
    assert found[0] == found[1] and all(found[0])
    place.note(checkpoints=len(found[0]))


def host_syncs(place: Place) -> None:
    """The host does not wait for the GPU between two log steps, with windows and documents."""
    for packing in ("concat", "documents"):
        for compiled in place.size(("on", "off"), ("off",)):
            run = place.train(f"{packing}-{compiled}", *shape(
                place, "--max-steps", 9, "--log-freq", 9, "--packing", packing, "--compile",
                compiled), hook="forbid_host_syncs")
            assert hooks.NO_SYNC in run.printed
    place.note(steps=3, waits=0)


def graphs(place: Place) -> None:
    """Blocks run one graph of fixed sizes, in evaluation one more, and the output layer one."""
    for packing in place.size(("concat", "documents"), ("concat",)):
        run = place.train(packing, *shape(place, "--max-steps", 6, "--eval-freq", 3, "--packing",
                                          packing, "--compile", "on"), hook="tell_graphs")
        symbolic = [int(n) for n in re.findall(rf"{hooks.GRAPH} (\d+)", run.printed)]
        place.note(**{f"graphs, {packing}": len(symbolic), f"symbolic, {packing}": sum(symbolic),
                      f"first step, {packing}, ms": run.rows[0]["time/total"]})
        assert 1 <= len(symbolic) <= 3, f"{len(symbolic)} graphs"
        assert not any(symbolic), f"symbolic sizes by graph: {symbolic}"


def recomputation(place: Place) -> None:
    """Every kind of activation checkpointing, compiled or not, gives the same losses."""
    settings = [("none", "off"), ("selective", "off"), ("full", "off"),
                *place.size([("selective", "on"), ("full", "on")], [])]
    expected: list[float] = []
    for kind, compiled in settings:
        run = place.train(f"{kind}-{compiled}", *shape(
            place, "--max-steps", 4, "--precision", "fp32", "--activation-checkpointing", kind,
            "--compile", compiled), hook="save_nothing")
        expected = expected or run.losses
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        place.note(**{f"{kind}, compile {compiled}": worst})
        assert worst < SAME, (kind, compiled, run.losses, expected)


def memory(place: Place) -> None:
    """The estimate of a run's memory is within 10 % of the measured peak."""
    model = place.model("1b", **place.size({}, {"vocab_size": 65_536, "hidden_size": 512,
                                               "num_hidden_layers": 6}))
    worst = 0.0
    for kind, compiled, batch in place.size(
            (("none", "off", 2), ("selective", "off", 2), ("full", "off", 4), ("none", "on", 2)),
            (("none", "off", 4),)):
        run = place.train(f"{kind}-{compiled}", "-s", place.size(4096, 128), "-b", batch,
                          "--max-steps", 4, "--activation-checkpointing", kind, "--compile",
                          compiled, model=model, hook="save_nothing")
        error = compare_memory(place, run, f"{kind}, compile {compiled}")
        if compiled == "off":
            worst = max(worst, error)
    # On a CPU the allocator and libraries count too, and weigh more in a small model.
    assert worst < place.size(0.1, 0.5), f"off by {100 * worst:.0f} %"


def compare_memory(place: Place, run: Stage, name: str) -> float:
    """Note the peak of a run beside its estimate, and return by what share that is off."""
    told = re.search(r"memory +peak .*?; ([\d.,]+ [GM])iB without.*?; ([\d.,]+ [GM])iB were "
                     "estimated", run.printed)
    assert told, "nothing was estimated:\n" + run.printed[-1500:]
    measured, estimated = map(_gib, told.groups())
    place.note(**{name: {"measured_gib": measured, "estimated_gib": estimated}})
    return abs(estimated / measured - 1)


def adapters(place: Place) -> None:
    """Adapters of an 8B model learn, recomputed or not alike, and take what was estimated."""
    model = place.with_weights("8b-wide", **place.size(
        {"num_hidden_layers": 32}, {"vocab_size": 65_536, "hidden_size": 512,
                                    "num_hidden_layers": 6}))
    found, worst = {}, 0.0
    for kind in ("none", "full"):
        run = place.train(kind, "-s", place.size(2048, 128), "-b", place.size(1, 4), "--max-steps",
                          6, "--lora-rank", 16, "--activation-checkpointing", kind, "--compile",
                          "off", "--warmup-steps", 1, model=model, scratch=False,
                          hook="save_nothing")
        worst = max(worst, compare_memory(place, run, f"memory, {kind}"))
        found[kind] = run.losses
        assert "frozen weights in" in run.printed and run.losses[-1] < run.losses[0]
    apart = max(abs(a / b - 1) for a, b in zip(*found.values(), strict=True))
    place.note(losses=found, losses_differ_by=apart, estimate_off_by=worst)
    assert apart < 1e-2 and worst < place.size(0.1, 0.5), (apart, worst)


def _gib(told: str) -> float:
    """Return a size such as `1,234.5 M` in GiB."""
    return float(told[:-2].replace(",", "")) / (1 if told.endswith("G") else 1024)


def out_of_memory(place: Place) -> None:
    """A GPU that is full ends the run in words, with what to turn first."""
    run = place.train("full", *shape(place, "-b", place.size(256, 2), "--max-steps", 4),
                      hook="fill_memory", expect=2)
    assert "error: out of memory" in run.printed and "in this order: " in run.printed
    assert "Traceback" not in run.printed
    place.note(said=[line for line in run.printed.splitlines() if "of memory" in line][:3])


def export(place: Place) -> None:
    """What stage 05 writes loads with from_pretrained and has the loss that the run told."""
    run = place.train("exported", *shape(place, "--max-steps", place.size(30, 6)))
    told = run.rows[-1]["eval/loss"]
    target = place.work / "exported"
    place.launch("05_export_checkpoint.py", "-e", "exported", "--save-dir", place.work / "outputs",
                 "--out", target, "--dtype", "float32").ended()

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(place.device)
    tokens = _validation(place, *place.size((4, 1024), (2, 64))).to(place.device)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    place.note(told=told, of_the_export=loss)
    assert abs(loss / told - 1) < place.size(0.01, 1e-3)


def _validation(place: Place, rows: int, length: int) -> Any:
    """Return the first windows of the validation split, int64 [rows, length + 1]."""
    import numpy as np
    import torch

    from lib.tokens import store
    from lib.tokens.samples import Windows

    path = next(path for path in (place.kit / ".cache/tokens").glob("data-*")
                if ".packs-" not in path.name)
    found = store.open_store(path)
    windows = Windows(found.splits["validation"].tokens, length)
    return torch.from_numpy(windows.take(np.arange(rows)).astype(np.int64))


def documents_in_fp32(place: Place) -> None:
    """Packed documents in float32, for which there is no kernel, train by a mask and say so."""
    run = place.train("fp32", *shape(place, "--packing", "documents", "--precision", "fp32",
                                     "--max-steps", 3))
    assert not place.on_gpu or "sdpa with a mask" in run.printed
    place.note(said=[line for line in run.printed.splitlines() if "with a mask" in line])


def offload(place: Place) -> None:
    """With --cpu-offload on under torchrun all cores take the optimizer's steps."""
    runs = [place.train(f"offload-{state}", *shape(place, "--max-steps", 5, "--cpu-offload", state),
                        hook="save_nothing", ranks=place.size(1, 0)) for state in ("off", "on")]
    worst = max(abs(a / b - 1) for a, b in zip(*(run.losses for run in runs), strict=True))
    place.note(update_ms=[speed(run)["time/update"] for run in runs], losses_differ_by=worst)
    assert worst < 1e-2


def launcher(place: Place) -> None:
    """launch/single_node.sh starts a run, and SIGTERM to it saves and ends with 75."""
    run = place.begin("launched", *shape(place, "--max-steps", 100_000),
                      command=[ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
                      env={"PYTHON": sys.executable})
    run.wait_for(3)
    run.signal(signal.SIGTERM).ended(75)
    assert list((run.experiment / "checkpoints").glob("step_*"))
    place.note(stopped_after=run.rows[-1]["step"])


def watchdog(place: Place) -> None:
    """A step that hangs ends the run, with the stacks of all threads in logs/."""
    run = place.train("hung", *shape(place, "--max-steps", 9, "--watchdog-minutes",
                                     place.size(0.2, 0.05)), hook="hang", expect=1)
    logs = run.experiment / "logs"
    place.note(files=sorted(path.name for path in logs.iterdir()))
    assert "watchdog: the step has not ended" in run.printed
    assert "in wait" in (logs / "rank_00000.stacks.txt").read_text()


def half_precision(place: Place) -> None:
    """fp16 learns as bf16 does: its small gradients do not vanish."""
    place.need(place.on_gpu, "a CPU emulates these dtypes")
    last = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = place.train(precision, *shape(place, "--max-steps", 30, "--precision", precision),
                          hook="save_nothing")
        last[precision] = statistics.mean(run.losses[-5:])
    place.note(**last)
    assert max(last.values()) / min(last.values()) < 1.02, last
