"""Items that run whole stages on one GPU: what a run does, keeps and prints."""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.gpu import hooks
from tests.gpu.place import ROOT, Place, Stage

SAME = 1e-4  # relative; float32 on one device, in another order
_OTHER_DEVICE = 1e-3  # AdamW's first steps are large even if gradients are mostly rounding
_OPEN_SIZES = 3  # the number of boundaries, and the longest document of queries and of keys


def shape(place: Place, *options: object) -> tuple[object, ...]:
    """Return the options that all small runs have; compiled only where that is the question."""
    return (
        "-s",
        place.size(1024, 64),
        "-b",
        place.size(4, 2),
        "--lr",
        1e-3,
        "--compile",
        "off",
        *options,
    )


def a_run(place: Place) -> None:
    """A run as it stands: the loss falls, and the same command again does nothing."""
    options = shape(place, "--max-steps", place.size(40, 6), "--compile", place.size("auto", "off"))
    run = place.train("plain", *options)
    said = ("attention", "sharded", "loss", "peak for MFU", "  memory")
    place.note(
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        **speed(run),
        said=[line for line in run.printed.splitlines() if line.startswith(said)],
    )
    assert run.losses[-1] < run.losses[0]
    assert "already done" in place.train("plain", *options).printed


def speed(run: Stage) -> dict[str, float]:
    """Return the medians of a run's figures after its first steps."""
    rows = run.rows[len(run.rows) // 3 :]
    return {
        key: statistics.median(row[key] for row in rows)
        for key in ("perf/tokens_per_sec", "time/total", "time/update", "memory/peak_gib")
    }


def resume(place: Place) -> None:
    """With --deterministic on, a run that SIGTERM stopped goes on bit for bit."""
    for packing in ("concat", "documents"):
        options = shape(
            place,
            "--max-steps",
            place.size(24, 8),
            "--packing",
            packing,
            "--deterministic",
            "on",
            "--compile",
            place.size("on", "off"),
        )
        whole = place.train(f"{packing}-whole", *options)
        stopped = place.begin(f"{packing}-stopped", *options, hook="slow_steps")
        stopped.wait_for(3)
        stopped.signal(signal.SIGTERM).ended(75)
        at = stopped.rows[-1]["step"]
        again = place.train(f"{packing}-stopped", *options)
        place.note(
            **{
                f"{packing}, stopped after step": at,
                f"{packing}, ms per step": speed(whole)["time/total"],
            }
        )
        assert at < whole.rows[-1]["step"], "it was over before it was stopped"
        assert losses_by_step(again) == losses_by_step(whole), "the losses differ after a resume"
        assert digests(again) == digests(whole), "weights or moments differ after a resume"
    if place.on_gpu:
        plain = place.train(
            "not-deterministic",
            *shape(place, "--max-steps", 24, "--compile", "on"),
            hook="save_nothing",
        )
        place.note(not_deterministic_ms_per_step=speed(plain)["time/total"])


def losses_by_step(run: Stage) -> dict[int, tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in run.rows}


def digests(run: Stage) -> dict[str, str]:
    """Return the digests of the tensors in a run's last checkpoint."""
    return tensor_digests(max((run.experiment / "checkpoints").glob("step_*")))


def tensor_digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the files with tensors in a checkpoint, by name."""
    return {
        entry["path"]: entry["digest"]
        for entry in json.loads((checkpoint / "manifest.json").read_text())["files"]
        if entry["path"].endswith(".distcp")
    }


def saves(place: Place) -> None:
    """What is saved beside training is, byte for byte, what is saved before the next step."""
    found = []
    for asynchronous in ("on", "off"):
        options = shape(
            place,
            "--max-steps",
            9,
            "--ckpt-freq",
            2,
            "--ckpt-keep",
            0,
            "--ckpt-async",
            asynchronous,
            "--deterministic",
            "on",
        )
        run = place.train(f"async-{asynchronous}", *options)
        checkpoints = sorted((run.experiment / "checkpoints").glob("step_*"))
        assert len(checkpoints) == 5
        found.append([tensor_digests(path) for path in checkpoints])
    assert found[0] == found[1] and all(found[0])
    place.note(checkpoints=len(found[0]))


def save_under_load(place: Place) -> None:
    """A save of 8 GB holds the bytes of its step, though the next step begins at once."""
    model = place.model("1b", num_hidden_layers=place.size(6, 4))
    found = []
    for asynchronous in ("on", "off"):
        run = place.train(
            f"async-{asynchronous}",
            *shape(
                place,
                "-b",
                1,
                "--max-steps",
                6,
                "--ckpt-freq",
                2,
                "--ckpt-keep",
                2,
                "--ckpt-async",
                asynchronous,
                "--deterministic",
                "on",
            ),
            model=model,
        )
        found.append(
            {
                path.name: tensor_digests(path)
                for path in (run.experiment / "checkpoints").glob("step_*")
            }
        )
        place.note(**{f"async {asynchronous}": re.findall(r"(step \d+: sav.*)", run.printed)})
        shutil.rmtree(run.experiment / "checkpoints")  # the disk has room for two of them
    assert found[0] == found[1] and len(found[0]) == 2 and all(found[0].values()), found
    place.note(checkpoints=sorted(found[0]))


def host_syncs(place: Place) -> None:
    """The host does not wait for the GPU between two log steps, with windows and documents."""
    for packing in ("concat", "documents"):
        for compiled in place.size(("on", "off"), ("off",)):
            run = place.train(
                f"{packing}-{compiled}",
                *shape(
                    place,
                    "--max-steps",
                    9,
                    "--log-freq",
                    9,
                    "--packing",
                    packing,
                    "--compile",
                    compiled,
                ),
                hook="forbid_host_syncs",
            )
            assert hooks.NO_SYNC in run.printed
    place.note(steps=3, waits=0)


def graphs(place: Place) -> None:
    """Blocks run one graph of fixed sizes, in evaluation one more, and the output layer one.

    With packed documents the number of their boundaries and the longest document may be symbolic.
    """
    for packing in place.size(("concat", "documents"), ("concat",)):
        run = place.train(
            packing,
            *shape(
                place, "--max-steps", 6, "--eval-freq", 3, "--packing", packing, "--compile", "on"
            ),
            hook="tell_graphs",
        )
        symbolic = [int(n) for n in re.findall(rf"{hooks.GRAPH} (\d+)", run.printed)]
        place.note(
            **{
                f"graphs, {packing}": len(symbolic),
                f"symbolic, {packing}": sum(symbolic),
                f"first step, {packing}, ms": run.rows[0]["time/total"],
            }
        )
        assert 1 <= len(symbolic) <= 3, f"{len(symbolic)} graphs"
        most = {"concat": 0, "documents": _OPEN_SIZES}[packing]
        assert max(symbolic) <= most, f"symbolic sizes by graph: {symbolic}"


def graphs_gemma(place: Place) -> None:
    """Blocks that alternate sliding and full attention compile without reaching Dynamo's limit."""
    for packing in place.size(("concat", "documents"), ("concat",)):
        run = place.train(
            packing,
            *shape(
                place, "--max-steps", 4, "--eval-freq", 2, "--packing", packing, "--compile", "on"
            ),
            model="gemma",
            hook="tell_graphs",
        )
        found = len(re.findall(hooks.GRAPH, run.printed))
        place.note(**{f"graphs, {packing}": found})
        # Two kinds of blocks, each in training and evaluation, and the output layer.
        assert 1 <= found <= 5, f"{found} graphs"


def recomputation(place: Place) -> None:
    """Every kind of activation checkpointing, compiled or not, gives the same losses."""
    settings = [
        ("none", "off"),
        ("selective", "off"),
        ("full", "off"),
        *place.size([("selective", "on"), ("full", "on")], []),
    ]
    expected: list[float] = []
    for kind, compiled in settings:
        run = place.train(
            f"{kind}-{compiled}",
            *shape(
                place,
                "--max-steps",
                4,
                "--precision",
                "fp32",
                "--activation-checkpointing",
                kind,
                "--compile",
                compiled,
            ),
            hook="save_nothing",
        )
        expected = expected or run.losses
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        place.note(**{f"{kind}, compile {compiled}": worst})
        assert worst < SAME, (kind, compiled, run.losses, expected)


def export(place: Place) -> None:
    """What stage 05 writes loads with from_pretrained and has the loss that the run reported."""
    run = place.train("exported", *shape(place, "--max-steps", place.size(30, 6)))
    told = run.rows[-1]["eval/loss"]
    target = place.work / "exported"
    place.launch(
        "05_export_checkpoint.py",
        "-e",
        "exported",
        "--save-dir",
        place.work / "outputs",
        "--out",
        target,
        "--dtype",
        "float32",
    ).ended()

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

    path = next(
        path
        for path in (place.kit / ".cache/tokens").glob("data-*")
        if ".packs-" not in path.name and "chat" not in path.name
    )
    found = store.open_store(path)
    windows = Windows(found.splits["validation"].tokens, length)
    return torch.from_numpy(windows.read_windows(np.arange(rows)).astype(np.int64))


def chat(place: Place) -> None:
    """Conversations, of which the answers alone are trained, give the losses that a CPU gives."""
    options = ("-s", 256, "-b", 2, "--max-steps", 5, "--lr", 1e-3, "--compile", "off")
    how = {
        "data": "data-chat",
        "hook": "save_nothing",
        "scratch": False,
        "model": place.with_weights("small"),
    }  # a GPU draws other weights from a seed
    expected = place.train("cpu", *options, "--device", "cpu", "--precision", "fp32", **how).losses
    for precision, most in {"fp32": _OTHER_DEVICE, **place.size({"bf16": 0.02}, {})}.items():
        run = place.train(precision, *options, "--precision", precision, **how)
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        labels, tokens = (
            run.rows[-1][f"perf/{kind}_per_sec"] for kind in ("label_tokens", "tokens")
        )
        place.note(**{precision: {"losses differ by": worst, "trained share": labels / tokens}})
        assert worst < most, (precision, run.losses, expected)
        assert labels < 0.8 * tokens, "all tokens are trained, not the answers alone"


def documents_in_fp32(place: Place) -> None:
    """Packed documents in float32, for which there is no kernel, train by a mask and say so."""
    run = place.train(
        "fp32", *shape(place, "--packing", "documents", "--precision", "fp32", "--max-steps", 3)
    )
    assert not place.on_gpu or "sdpa with a mask" in run.printed
    place.note(said=[line for line in run.printed.splitlines() if "with a mask" in line])


def offload(place: Place) -> None:
    """With --cpu-offload on under torchrun all cores take the optimizer's steps."""
    runs = [
        place.train(
            f"offload-{state}",
            *shape(place, "--max-steps", 5, "--cpu-offload", state),
            hook="save_nothing",
            ranks=place.size(1, 0),
        )
        for state in ("off", "on")
    ]
    worst = max(abs(a / b - 1) for a, b in zip(*(run.losses for run in runs), strict=True))
    place.note(update_ms=[speed(run)["time/update"] for run in runs], losses_differ_by=worst)
    assert worst < 1e-2


def launcher(place: Place) -> None:
    """launch/single_node.sh starts a run, and SIGTERM to it saves and ends with 75."""
    run = place.begin(
        "launched",
        *shape(place, "--max-steps", 100_000),
        command=[ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
        env={"PYTHON": sys.executable},
    )
    run.wait_for(3)
    run.signal(signal.SIGTERM).ended(75)
    assert list((run.experiment / "checkpoints").glob("step_*"))
    place.note(stopped_after=run.rows[-1]["step"])


def watchdog(place: Place) -> None:
    """A step that hangs ends the run, with the stacks of all threads in logs/."""
    run = place.train(
        "hung",
        *shape(place, "--max-steps", 9, "--watchdog-minutes", place.size(0.2, 0.05)),
        hook="hang",
        expect=1,
    )
    logs = run.experiment / "logs"
    place.note(files=sorted(path.name for path in logs.iterdir()))
    assert "watchdog: the step has not ended" in run.printed
    assert "in wait" in (logs / "rank_00000.stacks.txt").read_text()


def half_precision(place: Place) -> None:
    """fp16 learns as bf16 does: its small gradients do not vanish."""
    place.need(place.on_gpu, "a CPU emulates these dtypes")
    last = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = place.train(
            precision,
            *shape(place, "--max-steps", 30, "--precision", precision),
            hook="save_nothing",
        )
        last[precision] = statistics.mean(run.losses[-5:])
    place.note(**last)
    assert max(last.values()) / min(last.values()) < 1.02, last
