"""The template that a run keeps: whoever renders with it begins as samples began in training."""

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
def test_bos_is_written_once(tmp_path: Path, adds: bool, source: str, begins: str) -> None:
    home = save_tokenizer(tmp_path / "it", bos=adds)
    kept = experiment.add_bos_to_template(source, home)
    assert experiment.add_bos_to_template(kept, home) == kept
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = AutoTokenizer.from_pretrained(home).apply_chat_template(
        said, chat_template=kept, tokenize=False
    )
    assert text.startswith(begins) and text.count("<s>") == begins.count("<s>")
