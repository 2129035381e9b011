# covers: lib/train/experiment.py
"""The chat template that a run keeps: at inference, texts begin as samples did in training."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lib.train import experiment
from tests.tokens.conftest import save_tokenizer

TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
PICKY = "{% if messages | length < 2 %}{{ raise_exception('no') }}{% endif %}" + TURNS


@pytest.mark.parametrize(
    ("adds", "source", "begins"),
    [
        (True, TURNS, "<s>user"),
        (True, PICKY, "<s>user"),
        (False, TURNS, "user"),
        (True, "{{ bos_token }}" + TURNS, "<s>user"),
        (True, "{{ bos_token }}" + PICKY, "<s>user"),
    ],
)
def test_bos_occurs_once_at_inference(tmp_path: Path, adds: bool, source: str, begins: str) -> None:
    tokenizer_dir = save_tokenizer(tmp_path / "it", bos=adds)
    template = experiment.add_bos_to_template(source, tokenizer_dir)
    assert experiment.add_bos_to_template(template, tokenizer_dir) == template
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = AutoTokenizer.from_pretrained(tokenizer_dir).apply_chat_template(
        conversation, chat_template=template, tokenize=False
    )
    assert text.startswith(begins) and text.count("<s>") == begins.count("<s>")
