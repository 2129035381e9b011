"""Report the result of `--bench`: a table for people, and a line of JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import torch

from lib.checkpoints.checkpointer import Checkpointer
from lib.checkpoints.contents import RunState
from lib.core import code_version, log, manifest, units
from lib.core.errors import Preempted
from lib.core.paths import Experiment
from lib.parallel import compiling
from lib.planning.memory import MemoryEstimate
from lib.runs.journal import Journal
from lib.tokens.batches import DataStream
from lib.train import overview, plan
from lib.train.inputs import Inputs
from lib.train.output import kinds
from lib.train.output.communication import CommunicationProfiler
from lib.train.output.meters import Meters
from lib.train.output.report import Report
from lib.train.state import TrainState

_ESTIMATE_S = 60.0  # the longest wait for the memory estimate, which would slow measured steps down
_GIB = 1 << 30
_PHASES = ("data", "forward", "backward", "update")
# Prefixes of the figures that the result contains.
_FIGURES = ("train/loss", "perf/", "time/", "memory/")
_LAUNCH_FIGURES = ("perf/run_tokens_per_sec", "perf/eta_sec")  # they include the warm-up
_OPTIONS = (
    "precision",
    "activation_checkpointing",
    "activation_offload",
    "attention",
    "packing",
    "optimizer",
    "lora_rank",
    "shard_size",
    "keep_gathered",
    "cpu_offload",
)


class NoCheckpoints(Checkpointer):
    """Replaces the checkpointer of a bench: saves nothing, and finds nothing."""

    def __init__(self) -> None:
        pass

    def find_newest(self, before: int | None = None) -> None:
        """Return None."""

    def is_due(self, step: int) -> bool:
        """Return False."""
        return False

    def poll(self, state: RunState) -> None:
        """Do nothing."""

    def save(self, state: RunState, *_: Any) -> None:
        """Do nothing."""

    def clear(self, step: int) -> None:
        """Do nothing."""

    def start(self, step: int) -> None:
        """Do nothing."""

    def stop(self, *_: Any) -> None:
        """Do nothing."""


class BenchReport(Report):
    """Reports a row after the warm-up and one after the measured steps, and then the result."""

    keeps_files = False
    rollback_after = kinds.STEPS + 1  # never: a bench has no checkpoints

    def __init__(
        self,
        experiment: Experiment,
        journal: Journal,
        state: TrainState,
        stream: DataStream,
        meters: Meters,
        estimate: MemoryEstimate,
        inputs: Inputs,
    ) -> None:
        super().__init__(experiment, journal, state, stream, meters, estimate)
        self._model_name = overview.describe_model(self._plan.config, inputs)
        self._data = str(inputs.source)
        self._losses: list[float] = []
        self._row: dict[str, Any] = {}
        self._communication = CommunicationProfiler(kinds.LAST_MEASURED, kinds.STEPS, self._layout)
        meters.profiler = self._communication

    def __enter__(self) -> BenchReport:
        super().__enter__()
        self._estimate.report(_ESTIMATE_S)
        return self

    def is_due(self, step: int) -> bool:
        """Return whether a step is the last one of the warm-up or of the measured steps."""
        return step in (kinds.WARMUP_STEPS, kinds.LAST_MEASURED)

    def note_stop(self, reason: str) -> None:
        """Raise Preempted if steps remain."""
        if self._state.step < self._plan.total_steps:
            raise Preempted(
                f"stopped by {reason} after step {self._state.step} of {self._plan.total_steps}; "
                "a bench saves nothing, and the same command begins again"
            )

    def finish(self) -> None:
        """Log the result, and print it as one line of JSON on standard output."""
        self._bar.close()
        if self._layout.rank == 0:
            log.info(
                f"bench: {kinds.MEASURED_STEPS} steps, measured after {kinds.WARMUP_STEPS} "
                "steps of warm-up"
            )
            log.table(self._describe_result())
            print(json.dumps(self._collect_result()), flush=True)

    def _write_row(self, row: dict[str, Any], ended: float) -> None:
        super()._write_row(row, ended)
        self._losses.append(row["train/loss"])
        self._row = row

    def _describe_result(self) -> dict[str, str]:
        """Return the result as table rows."""
        row = self._row
        config = self._plan.config
        kind = "GPU" if self._layout.device.type == "cuda" else "rank"
        total = row["time/total"]
        phases = {phase: row[f"time/{phase}"] for phase in _PHASES}
        phases["other"] = max(0.0, total - sum(phases.values()))
        ranks = self._layout.ranks
        memory = units.memory(row["memory/max_peak_gib"] * _GIB)
        room = units.memory(row["memory/total_gib"] * _GIB)
        return {
            "model": f"{self._model_name}, {units.count(self._state.model.num_parameters())} "
            "parameters",
            "hardware": f"{ranks} × {self._name_device()} on "
            f"{units.counted(self._count_nodes(), 'node')}",
            "step": plan.describe_batch(
                self._plan.division, config.seq_length, config.context_parallel
            ),
            "options": f"{config.precision}, {'compiled' if self._is_compiled() else 'eager'}, "
            f"activation checkpointing {config.activation_checkpointing}, {config.optimizer}",
            "tokens/s": f"{row['perf/tokens_per_sec']:,.0f}; "
            f"{row['perf/tokens_per_sec_per_device']:,.0f} per {kind}",
            **self._describe_mfu(),
            "time of a step": f"{total:,.1f} ms",
            **{
                f"  {phase}": f"{ms:,.1f} ms, {100 * ms / total:.1f} %"
                for phase, ms in phases.items()
            },
            "communication": self._describe_communication(),
            "memory": f"{memory} of {room} at the peak, on rank {row['memory/max_peak_rank']}",
            "slowest rank": f"rank {row['perf/slowest_rank']}, {row['perf/slowest_ratio']:.2f} "
            "times the median rank for data and optimizer",
            "loss": f"{self._losses[0]:.3f} after {kinds.WARMUP_STEPS} steps, "
            f"{self._losses[-1]:.3f} after {kinds.LAST_MEASURED}",
        }

    def _describe_mfu(self) -> dict[str, str]:
        """Return the row about MFU; {} on a CPU."""
        if self._meters.peak is None:
            return {}
        row = self._row
        return {
            "MFU": f"{100 * row['perf/mfu']:.1f} %: {row['perf/tflops']:.4g} of "
            f"{self._meters.peak / 1e12:.4g} TFLOP/s per GPU"
        }

    def _describe_communication(self) -> str:
        if (measured := self._communication.result) is None:
            return f"not measured: {self._communication.problem}"
        return (
            f"{100 * measured.total:.1f} % of a step, {100 * measured.exposed:.1f} % not "
            f"overlapped by computation ({self._communication.source})"
        )

    def _collect_result(self) -> dict[str, Any]:
        """Return the result for programs. Keys with a slash come from metrics.jsonl."""
        config = self._plan.config
        division = self._plan.division
        measured = self._communication.result
        return {
            "model": self._model_name,
            "parameters": self._state.model.num_parameters(),
            "data": self._data,
            "host": platform.node(),
            "device": self._name_device(),
            "ranks": self._layout.ranks,
            "nodes": self._count_nodes(),
            "seq_length": config.seq_length,
            "batch_size": division.micro_batch,
            "grad_accum_steps": division.accumulation,
            "global_batch_size": division.global_batch,
            "compile": self._is_compiled(),
            **{name: getattr(config, name) for name in _OPTIONS},
            "warmup_steps": kinds.WARMUP_STEPS,
            "measured_steps": kinds.MEASURED_STEPS,
            **({"peak_tflops": self._meters.peak / 1e12} if self._meters.peak else {}),
            **{
                key: value
                for key, value in self._row.items()
                if key.startswith(_FIGURES) and key not in _LAUNCH_FIGURES
            },
            "communication/total": measured and measured.total,
            "communication/exposed": measured and measured.exposed,
            "versions": manifest.package_versions(),
            "git_commit": code_version.find_git_commit(),
        }

    def _is_compiled(self) -> bool:
        return compiling.is_compile_on(self._plan.config.compile, self._layout.device)

    def _name_device(self) -> str:
        device = self._layout.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"CPU rank with {units.counted(torch.get_num_threads(), 'thread')}"

    def _count_nodes(self) -> int:
        """Return the number of nodes, which have equal numbers of ranks."""
        return self._layout.ranks // int(os.environ.get("LOCAL_WORLD_SIZE", self._layout.ranks))
