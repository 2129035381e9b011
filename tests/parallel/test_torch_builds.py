# covers: lib/parallel/torch_builds.py
"""The table of torch, CUDA and drivers gives the right builds."""

from __future__ import annotations

import argparse

import pytest

from lib.core.errors import UsageError
from lib.parallel import torch_builds
from lib.parallel.torch_builds import RELEASES, Torch
from tests.conftest import ROOT

PINS = (ROOT / "requirements.txt").read_text()


def test_the_table_contains_the_torch_that_is_required():
    torch = torch_builds.find_pin(PINS)
    assert torch.cuda and torch.oldest_driver and torch.requirement in PINS.splitlines()
    for minor, known in RELEASES.items():
        assert known.newest.startswith(f"{minor}.") and known.default in known.builds, minor
        assert list(known.builds) == sorted(known.builds, key=float)
        assert all(Torch(known.newest, cuda).oldest_driver for cuda in known.builds)


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("580", "13.2"),
        ("580.65.06", "13.2"),
        ("579.9", "12.6"),
        ("525.60.13", "12.6"),
        ("524", None),
    ],
)
def test_a_driver_gets_the_newest_cuda_that_it_can_run(driver: str, cuda: str | None):
    build = torch_builds.find_build(Torch("2.13.0", "13.0"), driver)
    assert (build.cuda if build else None) == cuda


def test_builds_of_older_releases_follow_the_pinned_one():
    builds = torch_builds.list_builds(Torch("2.13.0", "13.0"), "535.104.05")
    assert list(map(str, builds)) == [
        "2.13.0+cu126",
        "2.12.1+cu126",
        "2.11.0+cu128",
        "2.11.0+cu126",
    ]
    assert torch_builds.list_builds(Torch("2.11.0", "13.0"), "470.57") == []


def test_the_pin_of_a_list_of_requirements_is_replaced():
    text = torch_builds.replace_pin(PINS, Torch("2.12.1", "12.6"))
    assert "torch==2.12.1+cu126\n" in text and text.count("\n") == PINS.count("\n")
    assert torch_builds.find_pin(text) == Torch("2.12.1", "12.6")
    assert torch_builds.replace_pin(text, Torch("2.13.0", "13.0")) == PINS
    assert torch_builds.find_pin("torch==2.13.0+cpu\n") == Torch("2.13.0", "")
    for wrong in ("numpy==1.0\n", "torch==1.13.0\n", "torch==2.13.0+cu118\n"):
        with pytest.raises(UsageError):
            torch_builds.find_pin(wrong)


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cu126", "12.6"),
        ("12.6", "12.6"),
        ("cpu", "none"),
        ("none", "none"),
        ("", ""),
        ("cu13", None),
        ("13", None),
        ("latest", None),
    ],
)
def test_cuda_versions_are_parsed(text: str, cuda: str | None):
    if cuda is None:
        with pytest.raises(argparse.ArgumentTypeError):
            torch_builds.parse_cuda(text)
    else:
        assert torch_builds.parse_cuda(text) == cuda
