"""The items of benchmarks/gpu.py: on the CPU with tiny sizes, and on a GPU as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_stage
from tests.gpu import items, kit, machine
from tests.gpu.items import Item
from tests.gpu.place import Place

ALL = [(command, item.name) for command, found in items.COMMANDS.items() for item in found]
# The settings of speed.mfu differ on a GPU alone.
REHEARSED = [pytest.param(command, name, id=name) for command, name in ALL
             if "_compile_" not in name or name.endswith("8b-wide_2x8192_compile_off")]


@pytest.fixture(scope="session")
def small_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a kit of little text, without wheels."""
    root = tmp_path_factory.mktemp("kit")
    texts = root / "texts"
    texts.mkdir()
    for number, path in enumerate(sorted((ROOT / "lib").glob("*/*.py"))):
        (texts / f"{number:03d}.py").write_bytes(path.read_bytes())
    kit.make(root / "gpu_kit", lambda script, *given: run_stage(script, *given, cwd=root), texts,
             wheels=False)
    return root / "gpu_kit"


def results(out: Path, command: str) -> dict[str, dict]:
    """Return the results that were written, by item."""
    return {result["item"]: result for result in
            map(json.loads, (out / f"{command}.jsonl").read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), REHEARSED)
def test_each_runs_on_a_cpu(small_kit: Path, tmp_path: Path, command: str, name: str) -> None:
    run_stage("benchmarks/gpu.py", command, "--rehearse", "--kit", small_kit, "--out", tmp_path,
              "--only", name, cwd=tmp_path, expect=None)
    result = results(tmp_path, command)[name]
    assert result["rehearsed"] and result["machine"]["torch"]
    if result["outcome"] == "not here":
        pytest.skip(result["error"])
    assert result["outcome"] == "passed" and result["figures"], result["error"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for command, name in ALL if command == "correctness"])
def test_each_holds_on_a_gpu(tmp_path: Path, name: str) -> None:
    if not machine.has_gpu():
        pytest.skip("There is no GPU here.")
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    subprocess.run([sys.executable, ROOT / "benchmarks/gpu.py", "correctness", "--out", tmp_path,
                    "--only", name], env=environment, cwd=ROOT)
    result = results(tmp_path, "correctness")[name]
    if result["outcome"] == "not here":
        pytest.skip(result["error"])
    assert result["outcome"] == "passed", result["error"]


WITH_ODD_ITEMS = f"""
import runpy, sys
sys.path.insert(0, "{ROOT}")
from tests.gpu.test_items import odd_items
odd_items()
runpy.run_path("{ROOT}/benchmarks/gpu.py", run_name="__main__")
"""


WITHOUT = """
from importlib.machinery import PathFinder
LACKING = {"datasets", "pyarrow", "orjson", "gigatoken", "tensorboard", "matplotlib"}
found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *where:
    None if name.partition(".")[0] in LACKING else found(name, *where))
"""


def odd_items() -> None:
    """Put items that end in every way into the place of those that measure."""
    def fails(place: Place) -> None:
        place.note(seen=1)
        raise AssertionError("as it should")

    def dies(place: Place) -> None:
        os._exit(7)

    def hangs(place: Place) -> None:
        place.launch("04_train_fsdp.py", "--help", command=["sleep", 600])
        time.sleep(600)

    def lacks(place: Place) -> None:
        place.need(False, "a second GPU")

    def refuses(place: Place) -> None:
        place.train("x", "--no-such-option")

    def passes(place: Place) -> None:
        place.note(seen=2)

    items.COMMANDS["rest"] = [Item(run.__name__, run, 2 if run is hangs else 30)
                              for run in (fails, dies, hangs, lacks, refuses, passes)]


def test_one_that_ends_badly_stops_no_other(small_kit: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(WITH_ODD_ITEMS)
    done = run_stage(str(tmp_path / "odd.py"), "rest", "--rehearse", "--kit", small_kit, "--out",
                     tmp_path, cwd=tmp_path, expect=1)
    found = results(tmp_path, "rest")
    assert {name: result["outcome"] for name, result in found.items()} == {
        "fails": "failed", "dies": "failed", "hangs": "too slow", "lacks": "not here",
        "refuses": "not here", "passes": "passed"}
    assert found["fails"]["figures"] == {"seen": 1} and "as it should" in found["fails"]["error"]
    assert "7" in found["dies"]["error"] and found["lacks"]["error"] == "a second GPU"
    assert "not in this version: unknown option --no-such-option" in found["refuses"]["error"]
    assert "as it should" in (tmp_path / "rest.log").read_text() and "passed" in done.stdout
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline")
                if path.exists() and path.read_bytes().startswith(b"sleep\x00600")]


def test_what_there_is_no_time_for_is_told(small_kit: Path, tmp_path: Path) -> None:
    run_stage("benchmarks/gpu.py", "mfu", "--rehearse", "--kit", small_kit, "--out", tmp_path,
              "--deadline", 5, cwd=tmp_path)
    assert {result["outcome"] for result in results(tmp_path, "mfu").values()} == {"no time"}


@pytest.mark.slow
def test_a_prepared_store_is_enough_for_an_image_without_these_packages(small_kit: Path,
                                                                       tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    done = subprocess.run([sys.executable, ROOT / "benchmarks/gpu.py", "correctness", "--rehearse",
                           "--kit", small_kit, "--out", tmp_path, "--only", "a_run,export"],
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 2


def test_a_kit_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = run_stage("benchmarks/gpu.py", "--kit", tmp_path, cwd=tmp_path, expect=2)
    assert "make gpu-kit" in done.stderr
