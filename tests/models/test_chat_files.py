"""What a run on conversations adds to the files of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.models import chat_files


@pytest.mark.parametrize(("before", "expected"), [
    ({"eos_token_id": 2, "temperature": 0.6}, {"eos_token_id": [7, 9, 2], "temperature": 0.6}),
    ({"eos_token_id": [9, 2]}, {"eos_token_id": [7, 9, 2]}),
    (None, {"bos_token_id": 1, "eos_token_id": [7, 9, 2]}),
])
def test_generation_ends_where_answers_were_trained_to(tmp_path: Path, before: dict | None,
                                                       expected: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "chat_template": "old", "split_special_tokens": True}))
    if before is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(before))
    for _ in range(2):  # the second launch of a run writes the same
        chat_files.write(tmp_path, "{{ messages }}", [7, 9])
        assert json.loads((tmp_path / "generation_config.json").read_text()) == expected
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>", "split_special_tokens": False}
