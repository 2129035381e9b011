# covers: lib/evaluate/__main__.py, lib/evaluate/open_model.py, lib/evaluate/scoring.py
"""`python -m lib.evaluate` gives the likelihoods of transformers, for any ranks and batch size."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lib.core import manifest
from tests.conftest import ROOT, run_stage
from tests.models.families import FAMILIES
from tests.training import VOCABULARY, save_model, save_tokenizer, write_corpus

ANSWERS = [
    {"context": "", "answer": "kan lota"},
    {"context": "kan \n", "answer": "größer 🙂 日本"},
    {"context": "kan lota mivi " * 80, "answer": "rux"},
    {"context": "se", "answer": "lo mi ru " * 80},
]
CHOICES = [
    {"context": f"ka {word}", "choices": ["lota.", "mi", "rux sevi"], "gold": number % 3}
    for number, word in enumerate(("kan", "lo", "mita", "ruvi", "sex"))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with model/ (vocabulary 512, context length 128) and suite/."""
    root = tmp_path_factory.mktemp("evaluate")
    write_corpus(root / "text", 4)
    save_tokenizer(root / "model", root / "text")
    save_model(root / "model")
    (root / "suite").mkdir()
    for name, lines in (("answers", ANSWERS), ("choices", CHOICES)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (root / "suite" / f"{name}.jsonl").write_text(text)
    return root


def run_evaluator(
    place: Path, *arguments: object, ranks: int = 0, expect: int = 0
) -> subprocess.CompletedProcess:
    """Run the command in a directory as a fork; its ranks have the variables of torchrun."""
    return run_stage("lib/evaluate/__main__.py", *arguments, cwd=place, ranks=ranks, expect=expect)


def evaluate_with_torchrun(place: Path, *arguments: object) -> None:
    """Run the command as a user types it, on two ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [sys.executable, *torchrun, "-m", "lib.evaluate", *map(str, arguments)],
        cwd=place,
        check=True,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def read_values(place: Path, name: str = "results.json") -> dict[str, dict[str, Any]]:
    content = json.loads((place / name).read_text())
    return {task: result["values"] for task, result in content["tasks"].items()}


def compute_nats(place: Path, context: str, answer: str) -> float:
    """Return the nats of an answer as transformers computes them, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    stripped = context.rstrip()
    ids = tokenizer(context + answer, add_special_tokens=False)["input_ids"]
    start = len(tokenizer(stripped, add_special_tokens=False)["input_ids"]) if stripped else 0
    ids = ids if stripped else [tokenizer.eos_token_id, *ids]
    start += not stripped
    total = 0.0
    with torch.no_grad():
        for place_of in range(start, len(ids)):
            window = ids[max(0, place_of - 128) : place_of]
            logits = model(torch.tensor([window])).logits[0, -1]
            total += F.cross_entropy(logits, torch.tensor(ids[place_of])).item()
    return total


@pytest.mark.slow
def test_results_are_those_of_transformers(place: Path) -> None:
    done = run_evaluator(place, "model", "--suite", "suite", "--json", "results.json")
    values = read_values(place)
    lines = done.stdout.splitlines()
    (cut,) = [line for line in lines if "cut at the left" in line]
    assert "answers: 2 prompts" in cut and "128 tokens" in cut
    assert any(line.startswith("choices      5  accuracy") for line in lines)
    nats = {}
    for item in CHOICES:
        for choice in item["choices"]:
            nats[item["context"], choice] = compute_nats(place, item["context"], f" {choice}")
    best = [
        max(range(3), key=lambda index, item=item: -nats[item["context"], item["choices"][index]])
        for item in CHOICES
    ]
    hits = [choice == item["gold"] for choice, item in zip(best, CHOICES, strict=True)]
    assert values["choices"]["accuracy"] == sum(hits) / 5
    gold = [(item["context"], item["choices"][item["gold"]]) for item in CHOICES]
    size = sum(len(f" {choice}".encode()) for _, choice in gold)
    expected = sum(nats[pair] for pair in gold) / math.log(2) / size
    assert values["choices"]["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    # The last answer is longer than the context length. Its parts see fewer tokens than those of a
    # sliding window would.
    (place / "short").mkdir()
    text = "".join(f"{json.dumps(line)}\n" for line in ANSWERS[:3])
    (place / "short" / "answers.jsonl").write_text(text)
    run_evaluator(place, "model", "--suite", "short", "--json", "short.json")
    total = compute_nats(place, "", "kan lota") + compute_nats(place, "kan \n", "größer 🙂 日本")
    total += compute_nats(place, ANSWERS[2]["context"], "rux")
    size = len("kan lota") + len(" \ngrößer 🙂 日本".encode()) + len(" rux")
    expected = total / math.log(2) / size
    value = read_values(place, "short.json")["answers"]["bits_per_byte"]
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_results_are_the_same_for_any_ranks_and_batch_size(place: Path) -> None:
    suite = ("--suite", "suite")
    run_evaluator(place, "model", *suite, "--json", "one.json")
    for ranks in (2, 3):
        run_evaluator(place, "model", *suite, "--json", "many.json", ranks=ranks)
        assert (place / "many.json").read_bytes() == (place / "one.json").read_bytes()
    for size in (1, 7):
        run_evaluator(place, "model", *suite, "--json", "other.json", "--batch-size", size)
        one, other = (read_values(place, name) for name in ("one.json", "other.json"))
        for task, values in one.items():
            for metric, value in values.items():
                exact = metric.startswith("accuracy")
                assert other[task][metric] == pytest.approx(value, rel=0 if exact else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "torchrun"),
    [
        pytest.param("gemma3", False, marks=pytest.mark.long),
        ("mixtral", False),
        ("gpt2", False),
        pytest.param("gpt2", True, marks=pytest.mark.long, id="gpt2-torchrun"),
    ],
)
def test_families(place: Path, tmp_path: Path, family: str, torchrun: bool) -> None:
    save_tokenizer(tmp_path / "model", place / "text")
    save_model(tmp_path / "model", FAMILIES[family](VOCABULARY))
    suite = ("--suite", place / "suite", "--limit", 3)
    run_evaluator(tmp_path, "model", *suite, "--json", "one.json")
    if torchrun:
        evaluate_with_torchrun(tmp_path, "model", *suite, "--json", "two.json")
    else:
        run_evaluator(tmp_path, "model", *suite, "--json", "two.json", ranks=2)
    assert read_values(tmp_path, "one.json") == read_values(tmp_path, "two.json")


def test_a_run_without_checkpoints_stands_for_its_newest_export(
    place: Path, tmp_path: Path
) -> None:
    from lib.core.errors import ArtifactError, UsageError
    from lib.core.paths import Experiment
    from lib.evaluate.open_model import find_evaluated_model

    run = Experiment(tmp_path, "exp")
    run.model.mkdir(parents=True)
    with pytest.raises(ArtifactError) as caught:
        find_evaluated_model(str(run.root), tmp_path, None, None)
    assert "no checkpoint and no" in str(caught.value)
    for step, name in ((20, "final"), (10, "step_00000010")):
        export = run.exports / name
        save_model(export)
        files = [manifest.file_entry(export, path) for path in sorted(export.iterdir())]
        identity: dict[str, Any] = {"options": {}, "inputs": {}}
        manifest.write_manifest(
            export,
            kind="export/1",
            stage="05_export_checkpoint.py",
            identity=identity,
            options={},
            files=files,
            summary={"step": step},
        )
    source = find_evaluated_model(str(run.root), tmp_path, None, None)
    assert (source.path, source.checkpoint) == (run.exports / "final", None)
    (run.exports / "final" / "model.safetensors").unlink()
    with pytest.raises(ArtifactError):
        find_evaluated_model(str(run.root), tmp_path, None, None)
    with pytest.raises((ArtifactError, UsageError)):
        find_evaluated_model("nothing", tmp_path, None, None)


def test_texts_that_cannot_be_scored_are_reported_before_the_weights_are_read(
    place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        if (path := tmp_path / "model" / name).exists():
            content = json.loads(path.read_text())
            for key in ("bos_token", "eos_token", "bos_token_id", "eos_token_id"):
                content.pop(key, None)
            path.write_text(json.dumps(content))
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[16:40] = b"x" * 24  # the header
    weights.write_bytes(data)
    done = run_evaluator(tmp_path, "model", "--suite", place / "suite", expect=2)
    assert "neither BOS nor EOS" in done.stderr and "Traceback" not in done.stderr


def test_a_bad_suite_is_reported_before_the_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "bad.jsonl").write_text('{"context": 1}\n')
    done = run_evaluator(tmp_path, "missing", "--suite", "suite", expect=2)
    assert "line 1" in done.stderr and "Traceback" not in done.stderr
    done = run_evaluator(tmp_path, "missing", "--json", "suite", expect=2)
    assert "suite is a directory" in done.stderr and "Traceback" not in done.stderr
