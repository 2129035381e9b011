"""Items that run whole stages on one GPU."""

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

FP32_TOLERANCE = 1e-4  # relative; for float32 sums in another order on the same device
_CPU_TOLERANCE = (
    1e-3  # AdamW's first steps are large even where gradients are mostly rounding errors
)
_MAX_SYMBOLIC_SIZES = 3  # the number of boundaries, and the longest document of queries and of keys


def small_run_options(place: Place, *options: object) -> tuple[object, ...]:
    """Return the options of all small runs; `options` come last, so they win."""
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
    """In a run with default options the loss falls, and the same command again does nothing."""
    options = small_run_options(
        place, "--max-steps", place.size(40, 6), "--compile", place.size("auto", "off")
    )
    run = place.train("plain", *options)
    prefixes = ("attention", "sharded", "loss", "peak for MFU", "  memory")
    place.note(
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        **median_figures(run),
        said=[line for line in run.log_lines if line.startswith(prefixes)],
    )
    assert run.losses[-1] < run.losses[0]
    assert "already done" in place.train("plain", *options).printed


def median_figures(run: Stage) -> dict[str, float]:
    """Return the medians of a run's figures, without the first third of its rows."""
    rows = run.rows[len(run.rows) // 3 :]
    return {
        key: statistics.median(row[key] for row in rows)
        for key in ("perf/tokens_per_sec", "time/total", "time/update", "memory/peak_gib")
    }


def resume(place: Place) -> None:
    """With --deterministic on, a run resumes after SIGTERM to the same bits."""
    for packing in ("concat", "documents"):
        options = small_run_options(
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
        uninterrupted = place.train(f"{packing}-whole", *options)
        stopped = place.begin(f"{packing}-stopped", *options, hook="slow_steps")
        stopped.wait_for(3)
        stopped.signal(signal.SIGTERM).wait_for_end(75)
        last_step = stopped.rows[-1]["step"]
        resumed = place.train(f"{packing}-stopped", *options)
        place.note(
            **{
                f"{packing}, stopped after step": last_step,
                f"{packing}, ms per step": median_figures(uninterrupted)["time/total"],
            }
        )
        assert last_step < uninterrupted.rows[-1]["step"], "the run ended before it was stopped"
        assert index_losses(resumed) == index_losses(uninterrupted), (
            "the losses differ after a resume"
        )
        assert read_digests(resumed) == read_digests(uninterrupted), (
            "weights or moments differ after a resume"
        )
    if place.on_gpu:
        not_deterministic = place.train(
            "not-deterministic",
            *small_run_options(place, "--max-steps", 24, "--compile", "on"),
            hook="skip_saves",
        )
        place.note(not_deterministic_ms_per_step=median_figures(not_deterministic)["time/total"])


def index_losses(run: Stage) -> dict[int, tuple[float, float]]:
    """Return (loss, gradient norm) by step."""
    return {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in run.rows}


def read_digests(run: Stage) -> dict[str, str]:
    """Return the digests of the tensor files in a run's last checkpoint, by name."""
    return read_tensor_digests(max((run.experiment / "checkpoints").glob("step_*")))


def read_tensor_digests(checkpoint: Path) -> dict[str, str]:
    """Return the digests of the tensor files in a checkpoint, by name."""
    return {
        entry["path"]: entry["digest"]
        for entry in json.loads((checkpoint / "manifest.json").read_text())["files"]
        if entry["path"].endswith(".distcp")
    }


def saves(place: Place) -> None:
    """Asynchronous saves write the same bytes as synchronous ones."""
    digests = []
    for asynchronous in ("on", "off"):
        options = small_run_options(
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
        digests.append([read_tensor_digests(path) for path in checkpoints])
    assert digests[0] == digests[1] and all(digests[0])
    place.note(checkpoints=len(digests[0]))


def save_under_load(place: Place) -> None:
    """A save of 8 GB contains the bytes of its step, though the next step begins at once."""
    model = place.model("1b", num_hidden_layers=place.size(6, 4))
    digests = []
    for asynchronous in ("on", "off"):
        run = place.train(
            f"async-{asynchronous}",
            *small_run_options(
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
        digests.append(
            {
                path.name: read_tensor_digests(path)
                for path in (run.experiment / "checkpoints").glob("step_*")
            }
        )
        place.note(**{f"async {asynchronous}": re.findall(r"(step \d+: sav.*)", run.printed)})
        shutil.rmtree(run.experiment / "checkpoints")  # the disk has room for two checkpoints
    assert digests[0] == digests[1] and len(digests[0]) == 2 and all(digests[0].values()), digests
    place.note(checkpoints=sorted(digests[0]))


def host_syncs(place: Place) -> None:
    """The host does not wait for the GPU between two log rows, with windows or documents."""
    for packing in ("concat", "documents"):
        for compiled in place.size(("on", "off"), ("off",)):
            run = place.train(
                f"{packing}-{compiled}",
                *small_run_options(
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
            assert hooks.NO_SYNC_LINE in run.printed
    place.note(steps=3, waits=0)


def graphs(place: Place) -> None:
    """Three graphs are enough: blocks in training, blocks in evaluation, the output layer.

    Their sizes are fixed, but with packed documents the number of boundaries and the longest
    document may be symbolic.
    """
    for packing in place.size(("concat", "documents"), ("concat",)):
        run = place.train(
            packing,
            *small_run_options(
                place, "--max-steps", 6, "--eval-freq", 3, "--packing", packing, "--compile", "on"
            ),
            hook="print_graphs",
        )
        symbolic = [int(n) for n in re.findall(rf"{hooks.GRAPH_LINE} (\d+)", run.printed)]
        place.note(
            **{
                f"graphs, {packing}": len(symbolic),
                f"symbolic, {packing}": sum(symbolic),
                f"first step, {packing}, ms": run.rows[0]["time/total"],
            }
        )
        assert 1 <= len(symbolic) <= 3, f"{len(symbolic)} graphs"
        limit = {"concat": 0, "documents": _MAX_SYMBOLIC_SIZES}[packing]
        assert max(symbolic) <= limit, f"symbolic sizes by graph: {symbolic}"


def graphs_gemma(place: Place) -> None:
    """Blocks that alternate sliding and full attention compile without reaching Dynamo's limit."""
    for packing in place.size(("concat", "documents"), ("concat",)):
        run = place.train(
            packing,
            *small_run_options(
                place, "--max-steps", 4, "--eval-freq", 2, "--packing", packing, "--compile", "on"
            ),
            model="gemma",
            hook="print_graphs",
        )
        count = len(re.findall(hooks.GRAPH_LINE, run.printed))
        place.note(**{f"graphs, {packing}": count})
        # One for each of two kinds of blocks in training and in evaluation, and the output layer.
        assert 1 <= count <= 5, f"{count} graphs"


def recomputation(place: Place) -> None:
    """All kinds of activation checkpointing, compiled or not, give the same losses."""
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
            *small_run_options(
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
            hook="skip_saves",
        )
        expected = expected or run.losses
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        place.note(**{f"{kind}, compile {compiled}": worst})
        assert worst < FP32_TOLERANCE, (kind, compiled, run.losses, expected)


def export(place: Place) -> None:
    """An exported model loads with from_pretrained and has the loss that the run reported."""
    run = place.train("exported", *small_run_options(place, "--max-steps", place.size(30, 6)))
    reported_loss = run.rows[-1]["eval/loss"]
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
    ).wait_for_end()

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(place.device)
    tokens = _read_validation(place, *place.size((4, 1024), (2, 64))).to(place.device)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    place.note(told=reported_loss, of_the_export=loss)
    assert abs(loss / reported_loss - 1) < place.size(0.01, 1e-3)


def _read_validation(place: Place, rows: int, length: int) -> Any:
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
    token_store = store.open_store(path)
    windows = Windows(token_store.splits["validation"].tokens, length)
    return torch.from_numpy(windows.read_windows(np.arange(rows)).astype(np.int64))


def chat(place: Place) -> None:
    """Conversations with trained answers give the losses that a CPU gives."""
    options = ("-s", 256, "-b", 2, "--max-steps", 5, "--lr", 1e-3, "--compile", "off")
    launch_options = {"data": "data-chat", "hook": "skip_saves"}
    expected = place.train(
        "cpu", *options, "--device", "cpu", "--precision", "fp32", **launch_options
    ).losses
    for precision, tolerance in {"fp32": _CPU_TOLERANCE, **place.size({"bf16": 0.02}, {})}.items():
        run = place.train(precision, *options, "--precision", precision, **launch_options)
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        labels, tokens = (
            run.rows[-1][f"perf/{kind}_per_sec"] for kind in ("label_tokens", "tokens")
        )
        place.note(**{precision: {"losses differ by": worst, "trained share": labels / tokens}})
        assert worst < tolerance, (precision, run.losses, expected)
        assert labels < 0.8 * tokens, "all tokens are trained, not only the answers"


def documents_in_fp32(place: Place) -> None:
    """Packed documents in float32, which no kernel supports, train with a mask; the log says so."""
    run = place.train(
        "fp32",
        *small_run_options(
            place, "--packing", "documents", "--precision", "fp32", "--max-steps", 3
        ),
    )
    lines = [line for line in run.log_lines if "with a mask" in line]
    assert not place.on_gpu or any("sdpa with a mask" in line for line in lines)
    place.note(said=lines)


def offload(place: Place) -> None:
    """--cpu-offload on gives the same losses; notes the time of the update on the CPU."""
    runs = [
        place.train(
            f"offload-{state}",
            *small_run_options(place, "--max-steps", 5, "--cpu-offload", state),
            hook="skip_saves",
            ranks=place.size(1, 0),
        )
        for state in ("off", "on")
    ]
    worst = max(abs(a / b - 1) for a, b in zip(*(run.losses for run in runs), strict=True))
    place.note(
        update_ms=[median_figures(run)["time/update"] for run in runs], losses_differ_by=worst
    )
    assert worst < 1e-2


def launcher(place: Place) -> None:
    """launch/single_node.sh starts a run; after SIGTERM it saves and exits with 75."""
    run = place.begin(
        "launched",
        *small_run_options(place, "--max-steps", 100_000),
        command=[ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
        env={"PYTHON": sys.executable},
    )
    run.wait_for(3)
    run.signal(signal.SIGTERM).wait_for_end(75)
    assert list((run.experiment / "checkpoints").glob("step_*"))
    place.note(stopped_after=run.rows[-1]["step"])


def watchdog(place: Place) -> None:
    """If a step hangs, the run ends and writes the stacks of all threads to logs/."""
    run = place.train(
        "hung",
        *small_run_options(place, "--max-steps", 9, "--watchdog-minutes", place.size(0.2, 0.05)),
        hook="hang_last_rank",
        expect=1,
    )
    logs = run.experiment / "logs"
    place.note(files=sorted(path.name for path in logs.iterdir()))
    assert "watchdog: the step has not ended" in run.printed
    assert "in wait" in (logs / "rank_00000.stacks.txt").read_text()


def half_precision(place: Place) -> None:
    """The losses in fp16 are those in bf16: small gradients do not vanish."""
    place.need(place.on_gpu, "a CPU emulates these dtypes")
    final_losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = place.train(
            precision,
            *small_run_options(place, "--max-steps", 30, "--precision", precision),
            hook="skip_saves",
        )
        final_losses[precision] = statistics.mean(run.losses[-5:])
    place.note(**final_losses)
    assert max(final_losses.values()) / min(final_losses.values()) < 1.02, final_losses
