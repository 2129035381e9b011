# covers: recipes/*.yaml
"""The recipes: what stage 04 takes as they stand, and what their own comments promise."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lib.core import units
from lib.train import batch_division, checks
from tests.conftest import ROOT
from tests.scripts import load_script

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
KINDS = ("none", "selective", "full")


@pytest.fixture(scope="module")
def stage() -> ModuleType:
    return load_script("04_train_fsdp.py")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_what_config_takes_and_divides(
    recipe: Path, stage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = recipe.read_text()
    nodes, gpus = map(int, re.search(r"on (\d+) nodes? of (\d+) [AH]\d+G? \([pg]5", text).groups())
    monkeypatch.setenv("WORLD_SIZE", str(nodes * gpus))
    content = yaml.safe_load(recipe.read_text())
    opts = stage.parse(["--config", str(recipe), "-e", "exp", "-d", "corpus"])
    assert (opts.model_name or opts.model_size) and opts.lr == float(content["lr"])
    assert not {"experiment-name", "dataset-name", "nodes"} & set(content), "they are the user's"
    checks.require_consistent(opts, has_begun=False)
    bench = stage.parse(["--config", str(recipe), "--bench", "--model-size", "1B"])
    checks.require_consistent(bench, has_begun=False)
    assert (bench.batch_size, bench.model_name) == (opts.batch_size, None)
    untested = text.index("# This recipe has not been run on its hardware yet")
    assert untested < text.index("# A step trains on") < text.index("# Peak in GiB")
    assert f"--plan-gpus {nodes * gpus}" in text and f"--config recipes/{recipe.name}" in text
    division = batch_division.divide_batch(opts, 0, nodes * gpus)
    tokens = division.global_batch * opts.seq_length
    shared = opts.context_parallel
    passes = units.counted(division.accumulation, "micro-batch")
    reader = "GPU." if shared == 1 else f"group of {shared} GPUs, which share the row"
    assert (
        f"A step trains on {tokens:,} tokens: {passes} of {opts.batch_size} × "
        f"{opts.seq_length:,} tokens on each {reader}" in " ".join(text.split("\n# "))
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_the_row_of_its_plan_that_fits(recipe: Path, stage: ModuleType) -> None:
    opts = stage.parse(["--config", str(recipe), "-e", "exp", "-d", "corpus"])
    text = recipe.read_text()
    row = next(line for line in text.splitlines() if "← " in line)
    figures, kind = row.lstrip("# ").split("← ")
    batch, *peaks = figures.split()
    usable = float(text.partition("usable: ")[2].split()[0])
    assert int(batch) == opts.batch_size and opts.activation_checkpointing in (kind, "auto")
    assert float(peaks[KINDS.index(kind)]) <= usable
