# covers: lib/export/full_model.py, lib/export/companions.py, lib/models/piece_tokenizer.py
"""CTranslate2, lm-eval and a GGUF converter read exports and compute what transformers does.

GGUF_CONVERTER=PATH names the script convert_hf_to_gguf.py of llama.cpp, beside its packages.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from lib.models import piece_tokenizer, scratch, tokenizer
from tests.export import eight_models, other_programs
from tests.export.environments import clean_environment, make_environment
from tests.export.exports import run_stage_05, save_run
from tests.models.families import make_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("group")]
_NOT_IN_CTRANSLATE2 = "mixtral"  # CTranslate2 knows no model with experts
_PROMPT = list(range(5, 17))
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def choose_greedily(model: torch.nn.Module, prompt: list[int], first: int = 0) -> list[int]:
    """Return 16 tokens, each the likeliest one from `first` on."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(other_programs.COUNT):
            chosen = model(ids).logits[:, -1:, first:].argmax(-1) + first
            ids = torch.cat([ids, chosen], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, group: None) -> dict[str, Path]:
    """Return an export of each of the eight kinds of models."""
    return {
        name: eight_models.export_model(tmp_path_factory.mktemp(name), name)
        for name in eight_models.CONFIGS
    }


@pytest.fixture(scope="module")
def translated(
    exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the tokens that CTranslate2 chooses for each export, or its error."""
    python = make_environment(tmp_path_factory.mktemp("ctranslate2"), "ctranslate2==4.8.5")
    chosen = {name: out for name, out in exports.items() if name != _NOT_IN_CTRANSLATE2}
    for out in chosen.values():
        (out / "prompt.json").write_text(json.dumps(_PROMPT))
    subprocess.run(
        [python, other_programs.__file__, "ctranslate2", *chosen.values()],
        check=True,
        env=clean_environment(**_OFFLINE),
    )
    return {
        name: json.loads((out / "ctranslate2.json").read_text()) for name, out in chosen.items()
    }


@pytest.mark.parametrize("name", [n for n in eight_models.CONFIGS if n != _NOT_IN_CTRANSLATE2])
def test_ctranslate2_chooses_the_same_tokens(
    exports: dict[str, Path], translated: dict[str, Any], name: str
) -> None:
    model = eight_models.load_export(exports[name])
    assert translated[name] == choose_greedily(model, _PROMPT)


_TASK = """\
task: numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""


def compute_log_likelihood(model: torch.nn.Module, context: list[int], answer: list[int]) -> Tensor:
    """Return the log-likelihood of tokens after others."""
    with torch.no_grad():
        logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()


def test_lm_eval_scores_an_export_without_a_network(
    exports: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("lm-eval")
    python = make_environment(place, "lm_eval==0.4.13", with_dependencies=True)
    items = [
        {"question": f"One and {i} make", "choices": ["two", "many", "none"], "label": i % 3}
        for i in range(6)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "numbers.yaml").write_text(_TASK.format(items=tmp_path / "items.jsonl"))
    out = exports["llama3"]
    options = ["--tasks", "numbers", "--include_path", tmp_path, "--batch_size", "2"]
    options += ["--device", "cpu", "--output_path", tmp_path / "found", "--log_samples"]
    arguments = f"pretrained={out},dtype=float32"
    subprocess.run(
        [python, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, *options],
        check=True,
        env=clean_environment(**_OFFLINE, HF_HOME=str(tmp_path / "cache")),
    )
    (log,) = (tmp_path / "found").rglob("samples_numbers_*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == len(items)
    model = eight_models.load_export(out)
    encode = AutoTokenizer.from_pretrained(out)
    for row in rows:
        context = encode(row["doc"]["question"])["input_ids"]
        for choice, (response,) in zip(row["doc"]["choices"], row["resps"], strict=True):
            answer = encode(f" {choice}", add_special_tokens=False)["input_ids"]
            expected = compute_log_likelihood(model, context, answer)
            assert abs(float(response[0]) - float(expected)) < 1e-4


@pytest.fixture(scope="module")
def gguf_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the packages of the converter, and llama.cpp."""
    if not os.environ.get("GGUF_CONVERTER"):
        pytest.skip("the check with a GGUF converter: GGUF_CONVERTER=PATH names none")
    pins = ("gguf==0.19.0", "sentencepiece==0.2.3", "xllamacpp==2026.10.11549")
    return make_environment(tmp_path_factory.mktemp("gguf"), *pins)


def test_a_gguf_file_continues_a_text_with_the_same_tokens(
    tmp_path: Path, gguf_python: Path
) -> None:
    """The tokenizer is one that stage 03 trains, in the form of SentencePiece."""
    base = tmp_path / "model"
    make_checkpoint(base, scratch.make_config("1M", 640, 1, 2, 3))
    save_run(tmp_path, base)
    special = [tokenizer.BOS, tokenizer.EOS, tokenizer.PAD]
    model_dir = tmp_path / "exp" / "model"
    tokenizer.train_tokenizer(
        [], 640, 128, model_dir, workers=1, show_progress=False, kind=tokenizer.PIECES
    )
    texts = [path.read_text() for path in sorted(Path(tokenizer.__file__).parent.glob("*.py"))]
    pieces = piece_tokenizer.train_pieces([texts], 640, special)
    assert len(pieces) == 640
    piece_tokenizer.write_tokenizer(pieces, special, 640, model_dir)
    first = pieces.index(piece_tokenizer.BYTES[-1]) + 1
    out = tmp_path / "out"
    run_stage_05("-e", "exp", "--save-dir", tmp_path, "--out", out, "--dtype", "float32")
    file = tmp_path / "model.gguf"
    converter = os.environ["GGUF_CONVERTER"]
    environment = clean_environment(**_OFFLINE)
    subprocess.run(
        [gguf_python, converter, out, "--outfile", file, "--outtype", "f32"],
        check=True,
        env=environment,
    )
    prompt = "    naïve 漢字  x\n"
    done = subprocess.run(
        [gguf_python, other_programs.__file__, "gguf", file, prompt, str(first)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    loaded = AutoTokenizer.from_pretrained(out)
    ids = loaded(prompt)["input_ids"]
    assert answer["prompt"] == len(ids)
    assert answer["tokens"] == choose_greedily(eight_models.load_export(out), ids, first)
