# covers: lib/generate/*, lib/evaluate/model_options.py
"""A model continues prompts and answers questions as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import run_stage
from tests.training import SMALL_RUN

GENERATE = "lib/generate/__main__.py"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def generate(place: Path, *options: object, **settings: object) -> str:
    """Return what the command prints."""
    return run_stage(GENERATE, *options, cwd=place, **settings).stdout


def continue_greedily(model_dir: Path, ids: list[int], count: int) -> str:
    """Return the most likely continuation, by one forward pass over everything per token."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    written = list(ids)
    with torch.no_grad():
        for _ in range(count):
            written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
            if written[-1] == tokenizer.eos_token_id:
                break
    return tokenizer.decode(written[len(ids) :], skip_special_tokens=True)


@pytest.mark.slow
def test_a_run_and_its_export_write_the_most_likely_tokens(project: Path) -> None:
    run = ("04_train_fsdp.py", "-e", "run", *SMALL_RUN, "--max-steps", 8, "--lr", 0.01)
    run_stage(*run, cwd=project)
    run_stage("05_export_checkpoint.py", "-e", "run", "--out", "out", cwd=project)
    tokenizer = AutoTokenizer.from_pretrained(project / "out")
    expected = continue_greedily(project / "out", tokenizer("katalon")["input_ids"], 12)
    for model in ("run", "out"):
        printed = generate(project, model, "--prompt", "katalon", "--max-new-tokens", 12)
        assert f"katalon{expected}" in printed
        assert "cut after 12 tokens" in printed


def test_questions_are_answered_with_the_chat_template(project: Path) -> None:
    (project / "model/chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    messages = [{"role": "system", "content": "ka"}, {"role": "user", "content": "lo mi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    options = ("model", "--prompt", "lo mi", "--max-new-tokens", 9)
    answer = continue_greedily(project / "model", ids, 9)
    assert f"--- lo mi\n{answer}\n" in generate(project, *options, "--system", "ka")
    assert "lo mi" + continue_greedily(
        project / "model", tokenizer("lo mi")["input_ids"], 9
    ) in generate(project, *options, "--chat", "off")


def test_a_temperature_draws_tokens_by_the_seed(project: Path) -> None:
    options = ("model", "--prompt", "ka", "--max-new-tokens", 9, "--temperature", 1)
    first, again, other = (generate(project, *options, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_text_ends_with_the_context_of_the_model(project: Path) -> None:
    assert "(cut after 127 tokens)" in generate(project, "model", "-p", "ka", "--top-p", 0.5)


def test_what_cannot_be_continued_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*options: object, expect: int = 2) -> str:
        return run_stage(GENERATE, *options, cwd=project, expect=expect).stderr

    assert "no prompt" in refuse("model", "-p", " ")
    assert "chat template" in refuse("model", "-p", "x", "--system", "y")
    assert "chat template" in refuse("model", "-p", "x", "--chat", "on")
    assert "too long" in refuse("model", "-p", "ka " * 500)
    assert "absent" in refuse("absent", "-p", "x", expect=3)
    (project / "model/model.safetensors").unlink()
    assert "weights" in refuse("model", "-p", "x", expect=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in refuse("model", "-p", "x")
