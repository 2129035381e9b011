# covers: lib/tokens/chat/policy.py
"""Find the source of a chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.tokens.chat import policy


def test_the_template_is_the_given_one_or_the_model_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    config = tmp_path / "tokenizer_config.json"
    path.write_text("mine")
    config.write_text(json.dumps({"chat_template": "of config"}))
    assert policy.find_template(tmp_path, path) == "mine"
    assert policy.find_template(tmp_path, Path("chatml")).startswith("{#- ChatML.")
    assert policy.find_template(tmp_path, None) == "of config"
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "default", "template": "first"},
                    {"name": "rag", "template": "second"},
                ]
            }
        )
    )
    assert policy.find_template(tmp_path, None) == "first"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of json"}))
    assert policy.find_template(tmp_path, None) == "of json"
    (tmp_path / "chat_template.jinja").write_text("of file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("other")
    assert policy.find_template(tmp_path, None) == "of file"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "\ud800"}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ArtifactError, match="not valid Unicode"):
        policy.find_template(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja cannot be read"):
        policy.find_template(tmp_path, None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda path: path.write_text(" \n"), "is empty"),
    ],
)
def test_an_unreadable_given_template_is_refused(tmp_path: Path, make: object, says: str) -> None:
    make(tmp_path / "it.jinja")
    with pytest.raises(UsageError) as caught:
        policy.find_template(tmp_path, tmp_path / "it.jinja")
    assert says in caught.value.render()


def test_the_error_for_a_missing_template_lists_those_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["04_train_fsdp.py", "-e", "x"])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "rag", "template": "x"}]})
    )
    with pytest.raises(UsageError) as caught:
        policy.find_template(tmp_path, None)
    message = caught.value.render()
    assert "chat_templates/chatml.jinja" in message and "chat_templates/plain.jinja" in message
    assert "other purposes: rag" in message
    assert caught.value.run.endswith("/plain.jinja"), "which needs no tokens but eos"
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_end|>"}]}')
    with pytest.raises(UsageError) as caught:
        policy.find_template(tmp_path, None)
    assert "04_train_fsdp.py -e x --chat-template " in caught.value.run
    assert caught.value.run.endswith("/chatml.jinja")
    (tmp_path / "theirs.jinja").write_text("x")
    with pytest.raises(UsageError) as caught:
        policy.find_template(tmp_path, None)
    assert str(tmp_path / "theirs.jinja") in caught.value.run
