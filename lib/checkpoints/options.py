"""Declare the options of checkpoints, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from lib.core.declared import Role, option
from lib.core.options import count, on_off, positive_int


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of writing, keeping and copying checkpoints."""

    ckpt_freq: int = option(
        500,
        "--checkpoint-interval",
        aliases=("save_steps", "checkpoint_freq", "checkpoint.interval"),
        group="logs, checkpoints and evaluation",
        role=Role.ALIKE,
        parse=positive_int,
        help="steps between checkpoints",
    )
    ckpt_keep: int = option(
        3,
        aliases=("save_total_limit", "checkpoint.keep_latest_k"),
        role=Role.ALIKE,
        parse=count,
        help="keep the N newest checkpoints (2 or more; 0: all); the best one by --best-by is "
        "always kept",
    )
    ckpt_async: bool = option(
        True,
        role=Role.ALIKE,
        parse=on_off,
        help="write checkpoints in the background, from copies in host memory",
    )
    ckpt_local_dir: str | None = option(
        None,
        role=Role.LOCAL,
        metavar="DIR|hyperpod:auto|hyperpod:URL",
        help="directory on each node's own disk for additional checkpoints, ten times as often as "
        "--ckpt-freq. hyperpod:auto keeps them in the memory of a HyperPod cluster instead, and "
        "finds its service; hyperpod:URL names the service. If the run resumes on the same nodes "
        "with as many ranks, it uses the newest checkpoint, from here or from the run's directory "
        "(default: none)",
    )
    ckpt_copy_to: str | None = option(
        None,
        role=Role.ALIKE,
        metavar="DIR|s3://BUCKET/PREFIX",
        help="copy each checkpoint in the background to another directory or to S3, and verify the "
        "copy. A run that has lost its checkpoints is restored from the copies. s3:// needs the "
        "package s3fs and a network connection (default: no copies)",
    )
