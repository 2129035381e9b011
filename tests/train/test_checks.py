# covers: lib/train/checks.py, lib/train/mode.py, lib/train/trained.py
"""Checks of options against each other and against the length of a run."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lib.core import commands, options
from lib.core.errors import UsageError
from lib.train import checks
from lib.train.command_line import add_options, read_options
from lib.train.config import Config
from lib.train.trained import LoraAdapter
from tests.conftest import ROOT


def parse_options(*argv: Any) -> Config:
    """Return the options of a command line, with the learning rates filled in."""
    parser = options.Parser("training")
    add_options(parser)
    config = read_options(parser, [str(word) for word in argv])
    lr = 1e-3 if config.lr is None else config.lr
    return replace(config, lr=lr, min_lr=lr / 10 if config.min_lr is None else config.min_lr)


@pytest.mark.parametrize(
    ("argv", "expected_text"),
    [
        (("-s", 1), "--seq-length 1 "),
        (("-s", 7), "8 tokens or more"),
        (("--lr", 0.9), "--lr 0.9 "),
        (("--max-steps", 100, "--warmup-steps", 101), "--warmup-steps 101 "),
        (("--max-steps", 100, "--warmup-steps", 100), "at most 50 .* --max-steps$"),
        (("--max-steps", 10, "--profile", "20:22"), "--profile 20:22 "),
        (("--max-steps", 10, "--profile", "8:11"), "such as --profile 8:10"),
        (("--lora-rank", 8, "--lora-targets", "([a-z_.0-9]+)+!"), "may never end"),
        (("--lora-rank", 8, "--lora-targets", "("), "regular expression"),
        (("--lora-rank", 8, "--lora-alpha", 1e300), "between 1e-06 and 1,000,000"),
        (
            ("--ckpt-copy-to", "s3://key:word@bucket/x"),
            r"s3://\[redacted\]@bucket/x names no bucket",
        ),
        (("--ckpt-copy-to", "s3:bucket"), "names no bucket"),
        (("--ckpt-copy-to", ""), "--ckpt-copy-to is empty"),
        (("--ckpt-copy-to", "ssh://bucket"), "s3://BUCKET/PREFIX"),
        (("-e", "exp", "--ckpt-copy-to", "outputs/exp/copies"), "directory of the run"),
        (("--max-steps", 1, "--profile", "2:2"), "of 1 step: .* --profile 1:1"),
        (
            ("--activation-offload", "on", "--activation-checkpointing", "selective"),
            "--activation-checkpointing full",
        ),
    ],
)
def test_impossible_options_are_refused(argv: tuple, expected_text: str) -> None:
    with pytest.raises(UsageError) as caught:
        checks.require_consistent(parse_options(*argv), has_begun=False)
    assert re.search(
        expected_text, " ".join(caught.value.render().replace("expected:", "").split())
    )


def test_a_warm_up_that_is_too_long_names_the_limiting_option() -> None:
    for argv, limit in (
        (("--max-steps", 1000), "--max-steps"),
        ((), "--num-epochs"),
        (("--max-steps", 9000), "--num-epochs"),
    ):
        with pytest.raises(UsageError) as caught:
            checks.require_enough_steps(
                parse_options(*argv, "--warmup-steps", 2000), 1000, has_begun=False
            )
        assert caught.value.expected.endswith(f"or a larger {limit}")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(UsageError, match="4 problems") as caught:
        checks.require_consistent(
            parse_options(
                "-s", 1, "--lr", 5, "--max-steps", 9, "--warmup-steps", 10, "--profile", "3:12"
            ),
            has_begun=False,
        )
    assert len(caught.value.several) == 4


@pytest.mark.parametrize(
    "argv",
    [
        ("-s", 8, "--lr", 0.1),
        ("--max-steps", 100, "--warmup-steps", 99),
        ("--max-steps", 9, "--warmup-steps", 9, "--lr-scheduler", "constant"),  # a test of rates
        ("--max-steps", 10, "--profile", "1:10"),
        ("--max-steps", 3, "--warmup-steps", 0),
        ("--warmup-steps", 500),
        ("--beta1", 0),
        ("--lr", 0),
        ("--steps-per-epoch", 1000, "--warmup-steps", 2000),
        ("-e", "exp", "--ckpt-copy-to", "second"),  # which needs no package
    ],
)
def test_possible_options_are_accepted(argv: tuple) -> None:
    checks.require_consistent(parse_options(*argv), has_begun=False)


@pytest.mark.parametrize(
    ("argv", "package"),
    [
        (("--wandb", "on"), "wandb"),
        (("--ckpt-local-dir", "hyperpod:auto"), "amzn-sagemaker-checkpointing"),
        (("--ckpt-copy-to", "s3://bucket/x"), "s3fs"),
    ],
)
def test_a_missing_package_of_an_option_is_reported_first(
    argv: tuple, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", find)
    installed: set[str] = set()
    with pytest.raises(UsageError, match=f"needs the package {package}, which is not") as caught:
        checks.require_consistent(parse_options(*argv), has_begun=False)
    pin = caught.value.run.split()[-1]
    assert pin in (ROOT / "requirements-optional.txt").read_text().splitlines()
    assert pin.startswith(f"{package}==") and "--optional" in caught.value.hint
    (tmp_path / "wheelhouse").mkdir()  # of a bundle
    shutil.copy(ROOT / "requirements-optional.txt", tmp_path)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert f"--no-index --find-links {tmp_path}/wheelhouse {pin}" in commands.pip_install_optional(
        package
    )
    # A machine that only prepares or plans does not need it.
    for more in (("--prepare-only",), ("--dry-run", "--plan-gpus", 8)):
        checks.require_consistent(parse_options(*argv, *more), has_begun=False)
    installed.add(package)
    checks.require_consistent(parse_options(*argv), has_begun=False)


def test_a_resumed_run_may_keep_a_long_warm_up() -> None:
    opts = parse_options("--max-steps", 10, "--warmup-steps", 20)
    checks.require_enough_steps(opts, 10, has_begun=True)
    [warning] = checks.list_unusual_options(opts, 10, True, "")
    assert "100 % of the run" in warning
    assert not checks.list_unusual_options(opts, 400, True, "")  # with a larger --max-steps


def test_a_directory_whose_disk_is_not_mounted_is_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opts = parse_options("--save-dir", "/mnt/nas/runs", "--ckpt-local-dir", "/scratch")
    monkeypatch.setattr(checks.paths, "find_missing_mount", lambda path: Path("/mnt/nas"))
    warnings = checks.list_unusual_options(opts, 400, True, "")
    assert [warning.split()[:2] for warning in warnings] == [
        ["--save-dir", "/mnt/nas/runs"],
        ["--ckpt-local-dir", "/scratch"],
    ]


@pytest.mark.parametrize(
    ("argv", "steps", "expected_text"),
    [
        (("--warmup-steps", 80), 100, "80 takes 80 % of"),
        (("--lr-scheduler", "constant", "--min-lr", 0), 9, "--min-lr 0 does nothing"),
        (("--ckpt-keep", 1), 1000, "--ckpt-keep 1 keeps 2 checkpoints"),
        (("--ckpt-freq", 200), 100, "--ckpt-freq 200 is more"),
        (("--log-freq", 200), 100, "its first and its last"),
        (("--eval-freq", 200), 100, "measured once"),
    ],
)
def test_unusual_options_cause_a_warning(argv: tuple, steps: int, expected_text: str) -> None:
    warnings = checks.list_unusual_options(parse_options(*argv), steps, True, "")
    assert len(warnings) == 1 and expected_text in warnings[0]


@pytest.mark.parametrize(
    ("lr", "parameters", "scratch", "usual"),
    [
        (1e-2, 1e6, True, ""),
        (0.05, 1e6, True, "above 0.03, the most that"),
        (3e-3, 135e6, True, ""),
        (4e-3, 135e6, True, "above 0.003,"),
        (3e-4, 7e9, False, ""),
        (1e-3, 7e9, False, "above 0.0003,"),
        (1e-3, 135e6, False, ""),
        (1e-3, 7e9, True, ""),
    ],
)
def test_a_learning_rate_is_compared_with_published_ones(
    lr: float, parameters: float, scratch: bool, usual: str
) -> None:
    warning = checks.describe_high_lr(lr, int(parameters), scratch)
    assert usual in warning and bool(usual) == bool(warning)
    assert not warning or " parameters from scratch:" in warning or " with weights:" in warning
    assert not checks.describe_high_lr(10 * 3e-4, 7_000_000_000, False, LoraAdapter)
    assert "parameters with LoRA:" in checks.describe_high_lr(4e-3, 7 * 10**9, False, LoraAdapter)


def test_a_resumed_run_may_keep_a_large_learning_rate() -> None:
    checks.require_consistent(parse_options("--lr", 0.9), has_begun=True)


def test_evaluation_options_without_a_validation_split_cause_a_warning() -> None:
    both = parse_options("--eval-freq", 5, "--eval-batches", 7)
    [warning, *_] = checks.list_unusual_options(both, 9, False, "")
    assert "--eval-freq and --eval-batches" in warning
    assert (
        "--eval-batches has nothing"
        in checks.list_unusual_options(parse_options("--eval-batches", 7), 9, False, "")[0]
    )
    assert (
        "with --streaming"
        in checks.list_unusual_options(parse_options("--eval-freq", 5), 9, False, "--streaming")[0]
    )
    assert not checks.list_unusual_options(parse_options("--eval-freq", 0), 9, False, "")


def test_defaults_never_cause_a_warning() -> None:
    assert not [
        text
        for steps in (1, 9, 10**6)
        for valid in (True, False)
        for text in checks.list_unusual_options(parse_options(), steps, valid, "")
    ]
