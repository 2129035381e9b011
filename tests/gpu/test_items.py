# covers: tests/gpu/items.py, benchmarks/gpu.py
"""Run the items of benchmarks/gpu.py: in tiny sizes on the CPU, in full on a GPU."""

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
from tests.gpu.items import ITEMS, Item
from tests.gpu.place import Place

# The items of make_mfu_item differ only on a GPU, so one of them is enough.
REHEARSED_ITEMS = [
    item.name
    for item in ITEMS
    if "_compile_" not in item.name or item.name == "8b-wide_2x8192_compile_off"
]

# A rehearsal of one of these items takes more than about four seconds, with several ranks half a
# minute. `chat`, `packed` and `saves` rehearse the same ways to start a run.
LONG_ITEMS = (
    *("adapters", "adapters_resume", "adapter_speed", "batch_auto", "bench", "first_step"),
    *("graphs_gemma", "launcher", "leak", "log_rows", "memory", "optimizers", "resume"),
    *("peers_1b", "peers_adapters", "peers_experts", "peers_packed", "peers_slow"),
    *("watchdog", "whole_run"),
    "scaling",
    "collectives",
    "saving_threads",
    "communication",
    "late_rank",
    "bench_shares",
    "context_ranks",
)
_SLEEP_S = 617  # a number that no other process on this machine uses


@pytest.fixture(scope="session")
def small_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a kit with little text and no wheels."""
    root = tmp_path_factory.mktemp("kit")
    texts = root / "texts"
    texts.mkdir()
    for number, path in enumerate(sorted((ROOT / "lib").glob("*/*.py"))):
        (texts / f"{number:03d}.py").write_bytes(path.read_bytes())
    kit.make_kit(
        root / "gpu_kit",
        lambda script, *arguments: run_stage(script, *arguments, cwd=root),
        texts,
        wheels=False,
    )
    return root / "gpu_kit"


def read_results(out: Path) -> dict[str, dict]:
    """Return the written results, by item."""
    return {
        result["item"]: result
        for path in out.glob("*.jsonl")
        for result in map(json.loads, path.read_text().splitlines())
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in LONG_ITEMS else name
        for name in REHEARSED_ITEMS
    ],
)
def test_each_item_runs_on_a_cpu(small_kit: Path, tmp_path: Path, name: str) -> None:
    run_stage(
        "benchmarks/gpu.py",
        "--rehearse",
        "--kit",
        small_kit,
        "--out",
        tmp_path,
        "--only",
        name,
        cwd=tmp_path,
        expect=None,
    )
    result = read_results(tmp_path)[name]
    assert result["rehearsed"] and result["machine"]["torch"]
    if result["outcome"] == "not here":
        pytest.skip(result["error"])
    assert result["outcome"] == "passed" and result["figures"], result["error"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [item.name for item in ITEMS if item.command == "correctness"])
def test_each_item_passes_on_a_gpu(tmp_path: Path, name: str) -> None:
    if not machine.has_gpu():
        pytest.skip("There is no GPU here.")
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu.py", "--out", tmp_path, "--only", name],
        env=environment,
        cwd=ROOT,
    )
    result = read_results(tmp_path)[name]
    if result["outcome"] == "not here":
        pytest.skip(result["error"])
    assert result["outcome"] == "passed", result["error"]


def test_names_are_unique_and_every_item_has_a_call() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert {item.command for item in ITEMS} == {"correctness", "mfu", "rest"}
    single_gpu_calls = {item.call for item in ITEMS if item.gpus == 1}
    extra_calls = (items.EXTRA_CALL, items.LONG_ROWS_CALL)
    assert single_gpu_calls == {*items.SINGLE_GPU_CALLS, *extra_calls}
    assert not [
        item.name for item in ITEMS if item.gpus > 1 and item.call in items.SINGLE_GPU_CALLS
    ]
    assert ITEMS[0].name == "ready" and ITEMS[0].alone


def test_each_call_takes_ten_minutes_at_most_and_all_for_one_gpu_thirty_five() -> None:
    estimates = {
        call: items.estimate_seconds(items.select_items(("correctness", "mfu", "rest"), call=call))
        for call in sorted({item.call for item in ITEMS})
    }
    assert max(estimates.values()) <= items.CALL_S
    assert sum(estimates[call] for call in items.SINGLE_GPU_CALLS) <= 35 * 60
    assert (
        items.estimate_seconds(items.select_items(("correctness", "mfu", "rest"), "adapters,fp8"))
        == 267
    )


def test_the_page_of_results_lists_all_calls_and_items() -> None:
    text = (ROOT / "benchmarks/results/gpu.md").read_text(encoding="utf-8")
    assert items.format_calls() in text, "python benchmarks/gpu.py --list-calls prints the table"
    tables = text.split("## Aims")[1]
    assert not [item.name for item in ITEMS if f"`{item.name}`" not in tables]


def test_names_and_calls_that_do_not_exist_are_errors() -> None:
    with pytest.raises(ValueError, match="b, c"):
        items.select_items(("rest",), "c,b,fp8")
    with pytest.raises(ValueError, match="no call 99"):
        items.select_items(("rest",), call=99)


ODD_ITEMS_SCRIPT = f"""
import runpy, sys
sys.path.insert(0, "{ROOT}")
from tests.gpu.test_items import use_odd_items
use_odd_items(sys.argv.pop(1))
runpy.run_path("{ROOT}/benchmarks/gpu.py", run_name="__main__")
"""


HIDE_PACKAGES = """
from importlib.machinery import PathFinder
LACKING = {"datasets", "pyarrow", "orjson", "gigatoken", "tensorboard", "matplotlib"}
found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *where:
    None if name.partition(".")[0] in LACKING else found(name, *where))
"""


def use_odd_items(kind: str) -> None:
    """Replace the items: by one for each outcome, by some that wait, or by one that passes."""

    def fails(place: Place) -> None:
        place.note(seen=1)
        raise AssertionError("as it should")

    def dies(place: Place) -> None:
        os._exit(7)

    def hangs(place: Place) -> None:
        place.launch("04_train_fsdp.py", "--help", command=["sleep", _SLEEP_S])
        time.sleep(600)

    def lacks(place: Place) -> None:
        place.need(False, "a second GPU")

    def refuses(place: Place) -> None:
        place.train("x", "--no-such-option")

    def passes(place: Place) -> None:
        place.note(seen=2)

    def waits(place: Place) -> None:
        place.note(began=time.monotonic())
        time.sleep(1.5)
        place.note(ended=time.monotonic())

    outcome_items = [
        Item(run.__name__, run, "rest", 1, -14 if run is hangs else 15)  # which limits it to 2 s
        for run in (fails, dies, hangs, lacks, refuses, passes)
    ]
    waiting_items = [
        Item(f"{name}", waits, "rest", 1, 15, alone=name == "alone")
        for name in ("one", "two", "three", "alone", "last")
    ]
    items.ITEMS[:] = {
        "ends": outcome_items,
        "together": waiting_items,
        "passes": outcome_items[-1:],
    }[kind]


def run_odd_items(kind: str, out: Path, *options: object, expect: int) -> str:
    """Run items of `use_odd_items`, which need no kit, and return the output."""
    (out / "odd.py").write_text(ODD_ITEMS_SCRIPT)
    (out / "kit/models").mkdir(parents=True)
    return run_stage(
        str(out / "odd.py"),
        kind,
        "rest",
        "--rehearse",
        "--kit",
        out / "kit",
        "--out",
        out,
        *options,
        cwd=out,
        expect=expect,
    ).stdout


@pytest.mark.slow
def test_an_item_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    printed = run_odd_items("ends", tmp_path, expect=1)
    by_item = read_results(tmp_path)
    assert {name: result["outcome"] for name, result in by_item.items()} == {
        "fails": "failed",
        "dies": "failed",
        "hangs": "too slow",
        "lacks": "not here",
        "refuses": "not here",
        "passes": "passed",
    }
    assert "1 passed, 2 failed, 1 too slow, 2 not here, 0 not run; " in printed.splitlines()[-1]
    assert (
        by_item["fails"]["figures"] == {"seen": 1} and "as it should" in by_item["fails"]["error"]
    )
    assert "7" in by_item["dies"]["error"] and by_item["lacks"]["error"] == "a second GPU"
    assert "unknown option --no-such-option" in by_item["refuses"]["error"]
    assert "as it should" in (tmp_path / "rest.log").read_text()
    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and path.read_bytes().startswith(f"sleep\0{_SLEEP_S}".encode())
    ]


@pytest.mark.slow
def test_items_run_at_the_same_time_unless_they_must_run_alone(tmp_path: Path) -> None:
    run_odd_items("together", tmp_path, "--jobs", 2, expect=0)
    spans = {
        name: (result["figures"]["began"], result["figures"]["ended"])
        for name, result in read_results(tmp_path).items()
    }

    def overlap(one: str, other: str) -> bool:
        return spans[one][0] < spans[other][1] and spans[other][0] < spans[one][1]

    assert overlap("one", "two") and not (overlap("one", "three") and overlap("two", "three"))
    assert not [name for name in spans if name != "alone" and overlap("alone", name)]
    assert spans["alone"][1] < spans["last"][0]


@pytest.mark.parametrize(
    ("seconds", "expect"), [(5, 3), pytest.param(60, 0, marks=pytest.mark.slow)]
)
def test_an_item_without_enough_time_is_not_run_and_the_exit_code_says_so(
    tmp_path: Path, seconds: int, expect: int
) -> None:
    printed = run_odd_items("passes", tmp_path, "--deadline", seconds, expect=expect)
    (result,) = read_results(tmp_path).values()
    assert result["outcome"] == ("not run" if expect else "passed")
    assert not expect or result["error"].startswith("no time: ")
    passed = int(not expect)
    assert f"{passed} passed, 0 failed, {1 - passed} not run" in printed.splitlines()[-1]


@pytest.mark.slow
def test_the_kit_works_in_an_image_without_some_packages(small_kit: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_PACKAGES)
    result = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks/gpu.py",
            "--rehearse",
            "--kit",
            small_kit,
            "--out",
            tmp_path,
            "--only",
            "a_run,export,chat",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed, 0 failed, 0 not run" in result.stdout


def test_without_a_kit_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    result = run_stage("benchmarks/gpu.py", "--kit", tmp_path, cwd=tmp_path, expect=2)
    assert "make gpu-kit" in result.stderr
