# covers: lib/evaluate/passes.py, lib/evaluate/results.py, lib/evaluate/scoring.py
"""Results equal those of lm-eval on the same items, to 1e-4."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from lib.evaluate import tasks
from lib.evaluate.tasks import Item, Request
from tests.conftest import ROOT
from tests.training import save_model, save_tokenizer, write_corpus

pytestmark = pytest.mark.long
PIN = "lm-eval==0.4.13"
LONG = " ".join(["kan lota mivi"] * 80)
ITEMS = {
    "own": [
        Item((Request("kan lota", " größer 🙂"), Request("kan lota", " 日本"))),
        Item((Request("Größe:", " 1"), Request("Größe:", " 22"), Request("Größe:", " 333")), 2),
        Item((Request(LONG, " ka"), Request(LONG, " lo mi"))),
    ],
    "spaced": [Item((Request("kan lota \n", "mi"), Request("kan lota \n", "rux se")))],
}


@pytest.fixture(scope="module")
def peer_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an environment with lm-eval and our packages.

    PEER_PYTHON names one that exists already.
    """
    if interpreter := os.environ.get("PEER_PYTHON"):
        return interpreter
    place = tmp_path_factory.mktemp("lm-eval")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    ours = sysconfig.get_path("purelib")
    Path(theirs.stdout.strip(), "ours.pth").write_text(f"{ours}\n")  # searched after its own
    install = [python, "-m", "pip", "install", "--quiet", PIN]
    subprocess.run(install, check=True, env=bare_environment())
    return str(python)


def bare_environment() -> dict[str, str]:
    left_out = ("PYTHONPATH", "NETWORK_GUARD_REPORT")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return variables | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("adds_bos", [False, True])
def test_results_equal_those_of_lm_eval(tmp_path: Path, peer_python: str, adds_bos: bool) -> None:
    write_corpus(tmp_path / "text", 4)
    save_tokenizer(tmp_path / "model", tmp_path / "text")
    save_model(tmp_path / "model")
    if adds_bos:
        path = str(tmp_path / "model" / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        tokenizer.save(path)
    small = tasks.read_suite(tasks.find_suite("small"), limit=10)
    sizes = write_suites(tmp_path, {task.name: task.items for task in small} | ITEMS)
    subprocess.run(
        [peer_python, Path(__file__).with_name("peer.py"), "model", "suite", "peer.json"],
        cwd=tmp_path,
        check=True,
        env=bare_environment(),
    )
    theirs = json.loads((tmp_path / "peer.json").read_text())
    ours = {name: evaluate_suite(tmp_path, name) for name in ("suite", "choices")}
    for name, expected in theirs.items():
        values = ours["suite"][name]["values"]
        for metric in ("accuracy", "accuracy_per_char"):
            assert values[metric] == pytest.approx(expected[metric], abs=1e-4), (name, metric)
        for item, nats in enumerate(expected["nats"]):
            for choice, value in enumerate(nats):
                own_name = f"{name}.{item}.{choice}"
                bits = ours["choices"][own_name]["values"]["bits_per_byte"] * sizes[own_name]
                assert bits * math.log(2) == pytest.approx(value, abs=1e-4), own_name


def write_suites(place: Path, items: dict[str, Sequence[Item]]) -> dict[str, int]:
    """Write suite/, and choices/ with a task for each choice; return the bytes of these texts."""
    sizes = {}
    (place / "suite").mkdir()
    (place / "choices").mkdir()
    for name, of_task in items.items():
        lines = []
        for number, item in enumerate(of_task):
            texts = [request.continuation.removeprefix(" ") for request in item.requests]
            context = item.requests[0].context
            lines.append({"context": context, "choices": texts, "gold": item.gold})
            for choice, request in enumerate(item.requests):
                own_name = f"{name}.{number}.{choice}"
                line = json.dumps({"context": context, "answer": texts[choice]})
                (place / "choices" / f"{own_name}.jsonl").write_text(line)
                moved = context[len(context.rstrip()) :]  # counts as part of the answer
                sizes[own_name] = len((moved + request.continuation).encode())
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (place / "suite" / f"{name}.jsonl").write_text(text)
    return sizes


def evaluate_suite(place: Path, suite: str) -> dict[str, dict]:
    command = [sys.executable, "-m", "lib.evaluate", "model", "--suite", suite]
    subprocess.run(
        [*command, "--json", f"{suite}-results.json", "--no-progress"],
        cwd=place,
        check=True,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return json.loads((place / f"{suite}-results.json").read_text())["tasks"]
