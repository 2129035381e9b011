"""The items, by command and in order of weight, each with the seconds that it may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.gpu import kernels, runs, several, speed
from tests.gpu.place import Place


class Item(NamedTuple):
    """run: raises AssertionError where something is wrong, NotHere where something is missing.

    seconds: after which it is killed. gpus: that it needs.
    """

    name: str
    run: Callable[[Place], None]
    seconds: int
    gpus: int = 1


def _named(run: Callable[[Place], None], seconds: int, gpus: int = 1) -> Item:
    return Item(run.__name__, run, seconds, gpus)


def _mfu(model: str, length: int, batch: int, compiled: str) -> Item:
    return Item(f"{model}_{batch}x{length}_compile_{compiled}",
                speed.mfu(model, length, batch, compiled), 120)


COMMANDS: dict[str, list[Item]] = {
    "correctness": [
        _named(runs.a_run, 90), _named(kernels.loss_head, 60), _named(kernels.varlen, 60),
        _named(kernels.peaks, 60), _named(runs.resume, 150), _named(kernels.staging, 60),
        _named(runs.saves, 90),
        _named(runs.host_syncs, 120), _named(runs.graphs, 120), _named(kernels.bad_steps, 60),
        _named(kernels.gradient_scale, 60), _named(runs.memory, 150), _named(runs.export, 90),
        _named(runs.out_of_memory, 60), _named(runs.recomputation, 120),
        _named(runs.documents_in_fp32, 60), _named(runs.watchdog, 90), _named(runs.launcher, 90),
        _named(runs.half_precision, 90), _named(runs.offload, 90),
        _named(runs.adapters, 180),
        _named(several.collectives, 150, 2), _named(several.saving_threads, 120, 2),
        _named(several.late_rank, 120, 2)],
    "mfu": [
        _mfu("8b-wide", 8192, 2, "on"), _mfu("1b", 8192, 2, "on"), _mfu("8b-wide", 8192, 4, "on"),
        _mfu("8b-wide", 8192, 2, "off"), _named(speed.whole_run, 180), _named(speed.profile, 120),
        _mfu("8b-wide", 4096, 4, "on"), _mfu("1b", 4096, 4, "on"), _mfu("1b", 8192, 2, "off"),
        _mfu("1b", 8192, 4, "on"), _mfu("8b-wide", 4096, 4, "off"), _mfu("1b", 4096, 4, "off")],
    "rest": [
        _named(speed.save_stall, 150), _named(speed.fp8, 150), _named(speed.optimizers, 90),
        _named(speed.attention, 60), _named(speed.eight_ranks, 120), _named(speed.first_step, 150),
        _named(speed.batch_auto, 120), _named(speed.packed, 90), _named(speed.adapter_speed, 180),
        _named(speed.fp8_loss, 180)],
}
