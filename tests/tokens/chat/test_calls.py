# covers: lib/tokens/chat/calls.py, lib/corpus/tool_calls.py
"""Calls reach templates of all shapes, with the text that transformers writes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lib.corpus import conversations
from lib.tokens.chat.calls import fit_calls
from lib.tokens.chat.render import Template, TemplateError

TEXT = '{"key": "ä", "n": 1.50}'
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
# The shapes in which well-known families write calls, by family.
_TURNS = (
    "{%- for m in messages %}{%- if m.tool_calls %}CALLS{%- elif m.role == 'tool' %}"
    "[RESULT]{{ m.content }}{%- else %}[{{ m.role }}]{{ m.content }}<|end|>{%- endif %}"
    "{%- endfor %}"
)
SHAPES = {
    "deepseek": "{%- for c in m.tool_calls %}{{- '<call>' + c.function.name + '\\n' + "
    "c.function.arguments + '</call>' }}{%- endfor %}<|end|>",
    "deepseek, null": "{%- if m['content'] is not defined or m['content'] is none %}"
    "{%- for c in m.tool_calls %}{{- c.function.name + c.function.arguments }}{%- endfor %}"
    "{%- endif %}<|end|>",
    "qwen": '{%- for c in m.tool_calls %}{%- set f = c.function %}<call>{"name": "{{ f.name }}"'
    ', "arguments": {% if f.arguments is string %}{{ f.arguments }}{% else %}'
    "{{ f.arguments | tojson }}{% endif %}}</call>{%- endfor %}<|end|>",
    "hermes": "{%- for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{%- endfor %}<|end|>",
    "coder": "{%- for c in m.tool_calls %}<{{ c.function.name }}>{%- for k, v in "
    "c.function.arguments | items %}<{{ k }}>{{ v }}{%- endfor %}{%- endfor %}<|end|>",
    "python": "{%- for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}"
    "{%- endfor %}<|end|>",
    "mistral": "{%- for c in m.tool_calls %}{%- if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('IDs have nine characters') }}{%- endif %}{{ c.function | tojson }}"
    "{{ c.id }}{%- endfor %}<|end|>",
    "whole": "{{ m.tool_calls | tojson }}<|end|>",
}
TEMPLATES = {name: _TURNS.replace("CALLS", shape) for name, shape in SHAPES.items()}
# The families whose templates take arguments as text, and those that take them as an object.
TAKES_TEXT = {"deepseek", "deepseek, null", "qwen", "python"}
TAKES_OBJECT = {"qwen", "hermes", "coder", "mistral", "whole"}


def make_record(*arguments: Any, **call: Any) -> dict[str, Any]:
    """Return a record with one turn of parallel calls. No arguments: `...`."""
    calls = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": "lookup"} | ({} if value is ... else {"arguments": value}),
            **call,
        }
        for number, value in enumerate(arguments)
    ]
    return {
        "messages": [
            {"role": "user", "content": "Say it."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": one["id"], "content": "1"} for one in calls),
            {"role": "assistant", "content": "It."},
        ],
        "tools": [TOOL],
    }


def render_record(name: str, record: dict[str, Any]) -> str:
    """Return the text that the project renders from a record."""
    messages, tools, *_ = conversations.parse_record(copy.deepcopy(record), "messages")
    template = Template(TEMPLATES[name], {})
    stored = json.loads(json.dumps(messages))
    fitted = fit_calls(stored, lambda turns: template.render(turns, tools).text)
    return template.render(fitted, tools).text


def render_with_transformers(name: str, record: dict[str, Any]) -> str:
    """Return the text that apply_chat_template renders from the same record."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {key: value for key, value in turn.items() if value is not None}
        for turn in record["messages"]
    ]
    [text], _ = render_jinja_template([messages], record["tools"], chat_template=TEMPLATES[name])
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    """In the form that the template takes; records may contain either form."""
    for arguments in ([TEXT], [TEXT, TEXT], [json.loads(TEXT)], [{"z": 1, "a": [2.0, None]}, {}]):
        record = make_record(*arguments)
        as_text = isinstance(arguments[0], str)
        if not (as_text and name in TAKES_TEXT) and not (not as_text and name in TAKES_OBJECT):
            convert = json.loads if as_text else lambda value: json.dumps(value, ensure_ascii=False)
            expected = make_record(*map(convert, arguments))
        else:
            expected = record
        assert render_record(name, record) == render_with_transformers(name, expected)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_without_arguments_has_an_empty_object(name: str) -> None:
    empty = [render_record(name, make_record(value)) for value in ("null", "", " ", None, ..., {})]
    assert len({*empty, render_record(name, make_record("{}"))}) == 1
    if name != "coder":
        assert "{}" in empty[0] and '"{}"' not in empty[0]


def test_ids_are_rewritten_in_calls_and_results_if_the_template_refuses_them() -> None:
    source = TEMPLATES["mistral"].replace("[RESULT]", "[RESULT]{{ m.tool_call_id }}:")
    compiled = Template(source, {})
    for identifiers in (("call_9f3K2LmQ", "call_other"), ("abc123XYZ", "abc123XYA"), (None, None)):
        record = make_record(TEXT, "{}")
        calls = record["messages"][1]["tool_calls"]
        for call, result, name in zip(calls, record["messages"][2:4], identifiers, strict=True):
            call["id"] = name
            result["tool_call_id"] = name
        chat = conversations.parse_record(record, "messages")
        fitted = fit_calls(chat.messages, lambda turns: compiled.render(turns, [TOOL]).text)
        ids = [call.get("id") for call in fitted[1]["tool_calls"]]
        assert [turn["tool_call_id"] for turn in fitted[2:4]] == ids
        assert all(len(one) == 9 and one.isalnum() for one in ids) and ids[0] != ids[1]
        assert identifiers[0] != "abc123XYZ" or tuple(ids) == identifiers
        compiled.render(fitted, chat.tools)
    chat = conversations.parse_record(make_record(TEXT, id="call_9f3K2LmQ"), "messages")
    template = Template(TEMPLATES["qwen"], {})
    assert fit_calls(chat.messages, lambda turns: template.render(turns).text) is chat.messages


def test_a_template_that_no_form_suits_gives_its_own_error() -> None:
    template = Template("{{ raise_exception('no calls here') }}", {})
    chat = conversations.parse_record(make_record(TEXT), "messages")
    fitted = fit_calls(chat.messages, lambda turns: template.render(turns).text)
    assert fitted is chat.messages
    with pytest.raises(TemplateError, match="no calls here"):
        template.render(fitted)
