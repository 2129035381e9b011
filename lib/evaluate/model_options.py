"""Declare the options that name a model or a run, and how it is computed.

`lib.evaluate` and `lib.generate` share them; `open_model` finds and loads what they name. This
module imports no torch, so that `--help` and wrong options need no wait.
"""

from __future__ import annotations

from pathlib import Path

from lib.core import options


def add_model_options(parser: options.Parser) -> None:
    """Add the positional argument MODEL_OR_RUN, and the options for the model that it names."""
    parser.add_argument(
        "model",
        metavar="MODEL_OR_RUN",
        help="model directory, prepared model, name of a run, its directory, or a checkpoint in it",
    )
    parser.add_argument(
        "--step",
        metavar="N|latest|best",
        help="which checkpoint of a run; best is the checkpoint with the best value of the run's "
        "--best-by (default: latest, or the newest export if the run has no checkpoint)",
    )
    parser.add_argument(
        "-m",
        "--model-name",
        metavar="NAME|DIR",
        help="for a LoRA run, the base model, if it was moved since the run (default: where the "
        "run found it)",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of weights and compute (default: bf16 on a GPU that supports it, else fp32)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="auto: the GPUs, if there are any"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="directory of what stage 03 has prepared",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that came with the model, if its model type needs that",
    )
