# covers: lib/models/chat_files.py
"""A run on conversations writes the chat template and the stop tokens to its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError
from lib.models import chat_files


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({"eos_token_id": 2, "temperature": 0.6}, {"eos_token_id": [7, 9, 2], "temperature": 0.6}),
        ({"eos_token_id": [9, 2]}, {"eos_token_id": [7, 9, 2]}),
        (None, {"bos_token_id": 1, "eos_token_id": [7, 9, 2]}),
    ],
)
def test_generation_stops_at_the_trained_end_of_an_answer(
    tmp_path: Path, before: dict | None, expected: dict
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": "old", "split_special_tokens": True})
    )
    if before is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(before))
    for _ in range(2):  # the second launch of a run writes the same
        chat_files.write_chat_files(tmp_path, "{{ messages }}", [7, 9])
        assert json.loads((tmp_path / "generation_config.json").read_text()) == expected
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>",
        "split_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generation_config.json", [1], "not a JSON object"),
        ("generation_config.json", "x", "object"),
        ("config.json", 5, "not a JSON object"),
        ("tokenizer_config.json", [], "not a JSON object"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x', not a token id"),
        ("generation_config.json", {"eos_token_id": [1, None]}, "eos_token_id is [1, None]"),
        ("generation_config.json", {"pad_token_id": 1.5}, "pad_token_id is 1.5"),
        ("generation_config.json", {"bos_token_id": True}, "bos_token_id is True"),
        ("config.json", {"eos_token_id": {"id": 1}}, "eos_token_id is {'id': 1}"),
        ("generation_config.json", b"{", "generation_config.json: "),
    ],
)
def test_invalid_stop_tokens_in_configs_are_reported(
    tmp_path: Path, name: str, content: object, says: str
) -> None:
    assert chat_files.find_faults(tmp_path) == []
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    [fault] = chat_files.find_faults(tmp_path)
    assert says in fault
    if name == "generation_config.json" and isinstance(content, dict):
        chat_files.write_chat_files(tmp_path, "x", [7])
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == [7]
    elif name != "config.json":
        with pytest.raises(ArtifactError, match="is damaged"):
            chat_files.write_chat_files(tmp_path, "x", [7])


def test_an_export_contains_no_invalid_token_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "model"
    target = tmp_path / "out"
    source.mkdir(), target.mkdir()
    assert not chat_files.copy_generation(source, target)
    for content, expected in (
        ({"eos_token_id": [1, 2], "top_p": 0.9},) * 2,
        ({"eos_token_id": "x", "top_p": 0.9}, {"top_p": 0.9}),
    ):
        (source / "generation_config.json").write_text(json.dumps(content))
        assert chat_files.copy_generation(source, target)
        assert json.loads((target / "generation_config.json").read_text()) == expected
    assert "left out: eos_token_id" in caplog.text
    (source / "generation_config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="is damaged"):
        chat_files.copy_generation(source, target)


def test_named_templates_of_a_config_become_files(tmp_path: Path) -> None:
    templates = [{"name": name, "template": f"{name}!"} for name in ("default", "rag", "../x")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    chat_files.write_chat_files(tmp_path, "{{ messages }}", [2])
    (written,) = tmp_path.glob("additional_chat_templates/*")
    assert written.name == "rag.jinja" and written.read_text() == "rag!"
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
