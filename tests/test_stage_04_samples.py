# covers: lib/train/sampling.py, lib/parallel/generation.py, lib/tokens/prompts.py, 04_train_fsdp.py
"""Samples while training: compared with plain loops, for several ranks, resumes and bad prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lib.parallel import generation
from lib.tokens import prompts
from lib.train.data import SAMPLE_TOKENS as TOKENS
from tests.conftest import run_stage
from tests.models.families import make_tiny_llama
from tests.tokens.chat import chats
from tests.training import SMALL_RUN, VOCABULARY, metrics, read_log, save_model

PROMPTS = ("kalo mi", "se", "ru ru lovi minta")
SEED = 5


def train_samples(root: Path, name: str, *options: object, ranks: int = 1, **more: Any) -> Any:
    return run_stage(
        "04_train_fsdp.py",
        *("-e", name, *SMALL_RUN, "--global-batch-size", 12, "--seed", SEED, *options),
        cwd=root,
        ranks=ranks,
        **more,
    )


def samples(root: Path, name: str) -> list[dict[str, Any]]:
    text = (root / "outputs" / name / "samples.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def options_of(root: Path, every: int = 2) -> tuple[object, ...]:
    path = root / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return ("--sample-prompts", path.name, "--eval-freq", every, "-s", 128)


@torch.no_grad()
def continue_alone(
    model: torch.nn.Module, ids: list[int], uniforms: np.ndarray | None
) -> list[int]:
    """Return the most likely continuation of one prompt, or one drawn with these numbers."""
    ids = list(ids)
    for number in range(TOKENS):
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        if uniforms is None:
            ids.append(int(logits.argmax()))
        else:
            reached = torch.softmax(logits, -1).cumsum(-1)
            ids.append(int((reached <= uniforms[number]).sum()))
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, (), marks=pytest.mark.long),
        (2, ("--packing", "documents", "-b", 3)),
        (3, ()),
        (2, ("--lora-rank", 4)),
        pytest.param(4, ("--shard-size", 2), marks=pytest.mark.long),
        pytest.param(2, ("--compile", "on", "--packing", "documents"), marks=pytest.mark.long),
    ],
)
def test_samples_equal_those_of_a_plain_loop(
    project: Path, ranks: int, options: tuple[object, ...]
) -> None:
    """With --lr 0 and B = 0 of LoRA, the weights stay those of the model directory."""
    steps = ("--max-steps", 3, "--lr", 0, "--compile", "off")
    train_samples(project, "run", *steps, *options_of(project), *options, ranks=ranks)
    model = AutoModelForCausalLM.from_pretrained(project / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    expected = []
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        uniforms = np.random.default_rng([SEED, index]).random(TOKENS)
        for kind, numbers in (("greedy", None), ("drawn", uniforms)):
            new = continue_alone(model, ids, numbers)[len(ids) :]
            end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else TOKENS
            text = tokenizer.decode(ids + new[:end])[len(prompt) :]
            expected.append((index, prompt, kind, text, end, end < TOKENS))
    rows = samples(project, "run")
    assert [row["step"] for row in rows] == [2] * 6 + [3] * 6
    names = ("prompt_index", "prompt", "kind", "text", "tokens", "ended")
    for step in (2, 3):
        chosen = [row for row in rows if row["step"] == step]
        assert [tuple(row[name] for name in names) for row in chosen] == expected
    seen = {row["step"]: row["train/tokens_seen"] for row in metrics(project, "run")}
    assert all(row["tokens_seen"] == seen[row["step"]] for row in rows)
    assert "64 forward passes over 6 × " in read_log(project, "run")


@pytest.mark.slow
def test_samples_change_no_loss_and_a_resume_repeats_them(project: Path) -> None:
    """The model has dropout, so a changed random state would change the losses."""
    config = make_tiny_llama(vocab_size=VOCABULARY, attention_dropout=0.2, tie_word_embeddings=True)
    save_model(project / "model", config)
    steps = ("--max-steps", 6, "--lr", 1e-2, "--ckpt-freq", 2, "--ckpt-keep", 0)
    steps += ("--eval-freq", 1, "-s", 128)
    train_samples(project, "without", *steps, ranks=2)
    train_samples(project, "run", *steps, *options_of(project, 1), ranks=2)
    names = ("train/loss", "train/grad_norm", "eval/loss")
    one, other = (
        [[row.get(name) for name in names] for row in metrics(project, name)]
        for name in ("without", "run")
    )
    assert one == other
    before = samples(project, "run")
    assert len({row["text"] for row in before}) > 6
    root = project / "outputs/run"
    for step in (4, 6):
        shutil.rmtree(root / f"checkpoints/step_{step:08d}")
    with (root / "samples.jsonl").open("a") as file:
        file.write('{"step": 6, "tor')  # a kill in the middle of a write
    train_samples(project, "run", *steps, *options_of(project, 1), ranks=2)
    assert samples(project, "run") == before


@pytest.mark.slow
def test_prompts_of_conversations_use_the_template(tmp_path: Path) -> None:
    talks = [chats.make_conversation(seed) for seed in range(40)]
    chats.save_dataset(tmp_path / "hf_datasets/talks", train=talks)
    chats.save_tokenizer(tmp_path / "model")
    config = make_tiny_llama(vocab_size=320, max_position_embeddings=256)
    save_model(tmp_path / "model", config)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    rows = [{"prompt": "why?"}, {"messages": messages}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_stage(
        *("04_train_fsdp.py", "-e", "run", "-d", "talks", "-m", "model", "-s", 256, "-b", 2),
        *("--precision", "fp32", "--max-steps", 2, "--lr", 0, "--sample-prompts", "p.jsonl"),
        cwd=tmp_path,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "outputs/run/model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    sample_rows = samples(tmp_path, "run")
    for index, prompt in enumerate((messages[1:], messages)):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        new = continue_alone(model, ids, None)[len(ids) :]
        greedy = sample_rows[2 * index]
        assert greedy["prompt"] == text and greedy["kind"] == "greedy"
        assert tokenizer.decode(new).startswith(greedy["text"])


@pytest.mark.slow
def test_bad_prompts_are_refused_before_the_model_is_loaded(project: Path) -> None:
    (project / "bad.jsonl").write_text('{"prompt": 1}\nx\n{"messages": []}\n')
    result = train_samples(project, "run", "--sample-prompts", "bad.jsonl", expect=2, ranks=0)
    assert "3 problems" in result.stderr and "line 2 is not JSON" in result.stderr
    (project / "long.txt").write_text("fine\n" + "kalo mi " * 40 + "\n")
    result = train_samples(project, "run", "--sample-prompts", "long.txt", expect=2, ranks=0)
    assert "2 problems" in result.stderr  # with 64 tokens, line 1 does not fit either
    assert "line 2 is too" in result.stderr and not (project / "outputs/run").exists()


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = np.array([[np.log(2), -np.inf, 0.0, 0.0]] * 5, np.float32)
    drawn = generation.draw_tokens(logits, np.array([0.0, 0.49, 0.51, 0.76, 0.9999999]))
    assert drawn.tolist() == [0, 0, 2, 3, 3]
    bad = np.full((1, 4), np.nan, np.float32)
    assert generation.draw_tokens(bad, np.array([0.5])).tolist() == [3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "messages": []}', "a prompt and messages"),
        ('{"text": "a"}', "neither"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "no role"),
        ('{"messages": [{"role": "user", "content": 1}]}', "content of message 1"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "writes the answer"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "`tools`"),
        ("\n\n", "0 prompts"),
        ('{"prompt": "a"}\n' * 65, "65 prompts"),
    ],
)
def test_a_bad_line_is_described(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(prompts.UsageError) as error:
        prompts.read_prompts(path)
    assert message in error.value.render()


def test_a_text_file_contains_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two \xe2\x80\xa8three\n")
    assert [prompt.text for prompt in prompts.read_prompts(path)] == ["one", "  two \u2028three"]
    path.write_bytes(b"\xff\n")
    with pytest.raises(prompts.UsageError, match="cannot be read"):
        prompts.read_prompts(path)
