"""Name the class that writes what a launch leaves behind, for each kind of output."""

from __future__ import annotations

from lib.core.paths import Experiment
from lib.train.config import Config
from lib.train.output.bench_output import BenchOutput
from lib.train.output.kinds import choose_kind
from lib.train.output.output import Output
from lib.train.output.run_output import RunOutput

OUTPUTS: tuple[type[Output], ...] = (BenchOutput, RunOutput)


def open_output(config: Config) -> Output:
    """Return the output of a launch. config: the options after OutputKind.fill_options."""
    kind = choose_kind(config)
    output = next(output for output in OUTPUTS if output.kind is kind)
    return output(Experiment(config.save_dir, config.experiment_name))
