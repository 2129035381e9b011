"""Write metrics.prom: the figures of a run for the textfile collector of Prometheus' node_exporter.

The file contains the last row of metrics.jsonl and the status of state.json as gauges. It is
replaced by a rename, so a reader never sees a part of it, and it does not grow.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any, NamedTuple

from lib.core import log
from lib.core.paths import Experiment
from lib.runs.figures import METRICS, STATE, Status, documented_name

PREFIX = "llm_train_"
_SCALES = {"ms per step": 1e-3, "GiB": 1 << 30, "TFLOP/s": 1e12}  # factors to base units
_PART = re.compile(r"eval/(.+)/bits_per_byte")
_LAYER = re.compile(r"/layer_(\d+)/")
_EVERY_S = 1.0  # time between two writes of rows; Prometheus reads less often
_STICKY = "eval/"  # prefix of the figures that stay until they are measured again


class GaugeValue(NamedTuple):
    """Contains a value of a gauge, with its labels besides `exp`."""

    name: str
    help: str
    labels: dict[str, str]
    value: float


class PrometheusFile:
    """Replaces metrics.prom at each change of state.json and after rows, at most once per second.

    Any thread may call it.
    """

    def __init__(self, experiment: Experiment, rank: int, is_kept: bool = True) -> None:
        """Create the file on rank 0. is_kept: False writes none, as for a bench."""
        self._active = rank == 0 and is_kept
        self._path = experiment.prometheus
        self._name = experiment.root.name
        self._lock = Lock()
        self._may_fail = log.WarnOnce(self._path.name)
        self._row: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._written = -_EVERY_S

    def set_row(self, row: Mapping[str, Any], ended: float) -> None:
        """Show a row of metrics.jsonl. ended: end of its step, in seconds since the epoch."""
        with self._lock:
            sticky_values = {
                key: value for key, value in self._row.items() if key.startswith(_STICKY)
            }
            self._row = {**sticky_values, **row, "time": ended}
            if time.monotonic() - self._written >= _EVERY_S:
                self._write()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Show the values of state.json; call this at each change of it."""
        with self._lock:
            self._state = {**state, "updated": time.time()}
            self._row["step"] = state.get("step", self._row.get("step"))
            self._write()

    def _write(self) -> None:
        if not self._active:
            return
        self._written = time.monotonic()
        samples = [*_read_state(self._state), *_read_row(self._row)]
        # node_exporter reads names that end in .prom. A crash of the machine may leave an empty
        # file; the next row replaces it.
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        with self._may_fail:
            temporary.write_text(format_samples(samples, self._name), encoding="utf-8")
            temporary.replace(self._path)


def _read_row(row: Mapping[str, Any]) -> Iterator[GaugeValue]:
    """Yield the samples of a row, in the order of METRICS."""
    order = {key: number for number, key in enumerate(METRICS)}
    documented = [(documented_name(key), key, value) for key, value in row.items()]
    for name, key, value in sorted(documented, key=lambda item: order.get(item[0], -1)):
        if name not in METRICS or not isinstance(value, (int, float)):
            continue
        unit, meaning, gauge = METRICS[name]
        labels = {}
        if layer := _LAYER.search(key):
            labels = {"layer": str(int(layer[1]))}
        elif part := _PART.fullmatch(key):
            labels = {"part": part[1]}
        elif name.startswith("eval/TASK/"):
            labels = {"task": key.split("/")[1]}
        elif name != key:
            labels = {"dataset": key.removeprefix("eval/loss/")}
        yield GaugeValue(gauge, meaning, labels, value * _SCALES.get(unit, 1))


def _read_state(state: Mapping[str, Any]) -> Iterator[GaugeValue]:
    """Yield the samples of state.json. Each status has a sample, 1 for the current one."""
    values: dict[str, float | None] = {
        "total_steps": state.get("total_steps"),
        "checkpoints": max(state.get("checkpoints", []), default=None),
        "copied": state.get("copied"),
        "updated": state.get("updated"),
    }
    for status in Status if state else ():
        is_current = float(status == state.get("status"))
        _, meaning, gauge = STATE["status"]
        yield GaugeValue(gauge, meaning, {"status": str(status)}, is_current)
    for key, value in values.items():
        if value is not None:
            _, meaning, gauge = STATE[key]
            yield GaugeValue(gauge, meaning, {}, value)


def format_samples(samples: list[GaugeValue], experiment: str) -> str:
    """Return samples in the text format of Prometheus. Samples of one gauge must be adjacent.

    The text contains no timestamps, because the textfile collector refuses them.
    """
    lines = []
    before = ""
    for name, meaning, labels, value in samples:
        if name != before:
            before = name
            lines += [
                f"# HELP {PREFIX}{name} {_escape_text(meaning.replace('`', ''))}",
                f"# TYPE {PREFIX}{name} gauge",
            ]
        pairs = [
            f'{key}="{_escape_text(text, True)}"' for key, text in _list_labels(experiment, labels)
        ]
        lines.append(f"{PREFIX}{name}{{{','.join(pairs)}}} {_format_number(value)}")
    return "\n".join(lines) + "\n"


def _list_labels(experiment: str, labels: dict[str, str]) -> list[tuple[str, str]]:
    return [("exp", experiment), *labels.items()]


def _escape_text(text: str, in_quotes: bool = False) -> str:
    """Return a text with the escapes of the format: one line of valid UTF-8."""
    text = text.encode("utf-8", "backslashreplace").decode()
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if in_quotes else text


def _format_number(value: float) -> str:
    """Return a number in the form that Go's parser accepts."""
    text = repr(value)
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
