# covers: lib/tokens/chat/policy.py
"""Find the source of a chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.tokens.chat import policy
from lib.tokens.chat.render import Template


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
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("other")
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


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\n"
TEXTS = {"default": f"\n  plain {TURNS}", "tool_use": f"{{{{ tools | tojson }}}}\n{TURNS}  "}


@pytest.mark.parametrize("layout", ["files", "config", "config and file", "only default"])
def test_each_layout_of_templates_is_used_as_transformers_uses_it(
    tmp_path: Path, layout: str
) -> None:
    """The template `tool_use` renders conversations with tools."""
    from transformers import PreTrainedTokenizerFast

    from tests.tokens.chat import chats

    chats.save_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if layout.startswith("config"):
        config["chat_template"] = [{"name": name, "template": text} for name, text in TEXTS.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if layout != "config":
        (tmp_path / "chat_template.jinja").write_text(TEXTS["default"])
    if layout == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        path = tmp_path / "additional_chat_templates/tool_use.jinja"
        path.write_text(TEXTS["tool_use"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = Template(policy.find_template(tmp_path, None), tokenizer.special_tokens_map)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert template.render(messages, tools).text == expected
        assert ("plain" in expected) == (
            tools is None or layout in ("config and file", "only default")
        )
    (tmp_path / "own.jinja").write_text("own")
    assert policy.find_template(tmp_path, tmp_path / "own.jinja") == "own"
