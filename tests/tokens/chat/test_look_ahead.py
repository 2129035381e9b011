# covers: lib/tokens/chat/answers.py, lib/tokens/chat/boundaries.py
"""Templates that look ahead: each answer is trained after the text that precedes it at inference.

The reference is rendered by transformers, a prefix of the conversation at a time.
"""

from __future__ import annotations

import random
import re

import pytest

from lib.core.conversation import Conversation, Message
from lib.tokens.encode import Encoder
from tests.tokens.chat import tokenizer_kinds
from tests.tokens.chat.test_masks import coder, make_chat
from tests.tokens.chat.tokenizer_kinds import shown

THOUGHT = "<think>t</think>"
# True if a message follows the current one `m`; written in the loop over the messages.
SEES_MORE = [
    "not loop.last",
    "loop.nextitem",
    "loop.nextitem is defined",
    "loop.length > loop.index",
    "loop.revindex > 1",
    "loop.revindex0",
    "messages[loop.index:]",
    "not not messages[loop.index:]",
    "messages[loop.index:] | default('', true)",
    "messages[loop.index:] and true",
    "false or messages[loop.index:]",
    "messages[loop.index:] | length",
    "messages[loop.index:] != []",
    "messages[loop.index:] | list",
    "messages[loop.index:] | first is defined",
    "(messages[loop.index:] | string) != '[]'",
    "(messages[loop.index:] | tojson) != '[]'",
    "messages[loop.index:] | selectattr('role') | list",
    "messages[loop.index:] | map(attribute='role') | join",
    "messages[loop.index:] | groupby('role') | list",
    "messages[loop.index:] | batch(2) | list",
    "'user' in (messages[loop.index:] | map(attribute='role'))",
    "given(messages[loop.index:])",
    "messages[loop.index]",
    "messages[loop.index] is defined",
    "messages | length > loop.index",
    "messages | count > loop.index",
    "messages[-1] != m",
    "messages | last != m",
    "(messages | reverse | first) != m",
    "messages[::-1][0] != m",
    "ns.count > loop.index",
    "kept[loop.index:]",
    "messages.index(m) + 1 < messages | length",
    "(messages ~ '') | length > (messages[:loop.index] ~ '') | length",
]
# True of conversations with more than two messages; known before the loop.
SEES_LENGTH = [
    "messages[2:]",
    "not not messages[2:]",
    "messages[2:] | default('', true)",
    "messages[2] is defined",
    "messages | length > 2",
    "given(messages[2:])",
    "ns.many",
]
FORMS = [
    "{% if not (MORE) %}THOUGHT{% endif %}",
    "{{ '' if (MORE) else 'THOUGHT' }}",
    "{{ (not (MORE)) and 'THOUGHT' or '' }}",
    "{% set more = MORE %}{{ 'THOUGHT' if not more }}",
    "{% with more = (MORE) %}{{ 'THOUGHT' if not more }}{% endwith %}",
    "{% for _ in [1] if (MORE) %}{% else %}THOUGHT{% endfor %}",
    "{% for _ in ((MORE) and [1]) or [] %}{% else %}THOUGHT{% endfor %}",
    "{% filter trim %}{% if not (MORE) %}THOUGHT{% endif %}{% endfilter %}",
    "{{ thought(MORE) }}",
    "{% call(more) asked(MORE) %}{{ 'THOUGHT' if not more }}{% endcall %}",
    "{% set text %}{% if not (MORE) %}THOUGHT{% endif %}{% endset %}{{ text }}",
]
WALKS = [
    "messages",
    "messages[:]",
    "messages[0:]",
    "kept",
    "messages | list",
    "(messages if messages[1:] else messages)",
]
HEAD = """\
{%- macro given(rest) %}{% if rest %}x{% endif %}{% endmacro %}
{%- macro thought(more) %}{{ '' if more else 'THOUGHT' }}{% endmacro %}
{%- macro asked(more) %}{{ caller(more) }}{% endmacro %}
{%- set kept = messages %}"""
COUNT = """\
{%- set ns = namespace(count=0, many=false) %}
{%- for m in messages %}{% set ns.count = loop.index %}{% endfor %}
{%- if messages[2:] %}{% set ns.many = true %}{% endif %}"""
TURN = """\
{%- for m in WALK %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}BEGINFORM{{ m.content }}END{% else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return tokenizer_kinds.encoder(tmp_path_factory.mktemp("t") / "it", "bytes", False)


def fill_template(draw: random.Random, more: str) -> str:
    """Return a template that writes a thought before an answer unless `more` is true."""
    begin, end = draw.choice([("{% generation %}", "{% endgeneration %}"), ("", "")])
    parts = {
        "WALK": draw.choice(WALKS),
        "FORM": draw.choice(FORMS),
        "MORE": more,
        "BEGIN": begin,
        "END": end,
        "THOUGHT": THOUGHT,
    }
    source = HEAD + (COUNT if more.startswith("ns.") else "") + TURN
    for name, part in parts.items():
        source = source.replace(name, part)
    return source


def reference(encoder: Encoder, source: str, messages: list[Message]) -> list[list[str]]:
    """Return the text up to the end of each answer, grouped as samples.

    Consecutive answers share a sample if the text of the later one begins with that of the
    earlier one.
    """
    samples: list[list[str]] = []
    for n, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            text = encoder.tokenizer.apply_chat_template(
                messages[:n], chat_template=source, tokenize=False
            ).removesuffix("\n")
            if samples and text.startswith(samples[-1][-1]):
                samples[-1].append(text)
            else:
                samples.append([text])
    return samples


def trained_prefixes(encoder: Encoder, source: str, conversation: Conversation) -> list[list[str]]:
    """Return the text up to the end of each trained part, for each sample."""
    encoded = coder(encoder, source).encode([conversation])
    assert not encoded.dropped, encoded.dropped
    return [
        [text[: match.end()].replace("⟦", "").replace("⟧", "") for match in re.finditer("⟧", text)]
        for text in shown(encoder, encoded)
    ]


def require_equal(encoder: Encoder, draw: random.Random, more: str) -> None:
    source = fill_template(draw, more)
    count = draw.randint(1, 4)
    conversation = make_chat(
        *(f"{draw.choice('abc')}{n}" for n in range(2 * count)),
        system=more in SEES_MORE and draw.random() < 0.3,
    )
    assert trained_prefixes(encoder, source, conversation) == reference(
        encoder, source, conversation.messages
    ), source


@pytest.mark.parametrize("more", [*SEES_MORE, *SEES_LENGTH])
def test_an_answer_is_trained_behind_the_text_of_its_prefix(encoder: Encoder, more: str) -> None:
    draw = random.Random(more)
    for _ in range(8):
        require_equal(encoder, draw, more)


def test_each_form_of_looking_ahead_gives_one_sample_per_answer(encoder: Encoder) -> None:
    """Of three answers, only the last one keeps its thought."""
    draw = random.Random(0)
    conversation = make_chat("a", "b", "c", "d", "e", "f")
    for more in SEES_MORE:
        source = fill_template(draw, more)
        samples = trained_prefixes(encoder, source, conversation)
        assert [len(sample) for sample in samples] == [1, 1, 1], source
        assert all(sample[0].count(THOUGHT) == 1 for sample in samples)
