# covers: docs/explanation/tested.md
"""Pages about hardware on which nothing has run say so, and link to what was tested."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

PAGE = "explanation/tested.md"
HARDWARE = re.compile(r"\b(GPUs?|EFA|EKS|HyperPod)\b")
OFTEN = 5  # a page that names such hardware more rarely is about something else
# Lists of names or of symptoms, and the pages of measurements that name their machines.
EXEMPT = {
    "dependencies.md",
    "design.md",
    "faults.md",
    "log.md",
    "private-apis.md",
    "tested.md",
    "artifacts.md",
    "exit-codes.md",
    "metrics.md",
    "options.md",
}
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in EXEMPT]


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_pages_about_unseen_hardware_say_so(path) -> None:
    text = path.read_text(encoding="utf-8")
    if len(HARDWARE.findall(text)) >= OFTEN:
        assert PAGE.rpartition("/")[2] in text, f"link to docs/{PAGE}, and say what was not seen"


def test_the_page_names_all_that_was_not_seen() -> None:
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    first = text.partition("**")[2].partition("**")[0]
    for name in ("GPU", "EFA", "EKS", "HyperPod", "Slurm cluster with GPUs"):
        assert name in first
