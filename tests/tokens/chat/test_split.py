# covers: lib/tokens/chat/encode.py, lib/tokens/encode.py
"""Conversations longer than a sample are dropped, or cut between turns."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lib.core.conversation import Conversation
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.encode import Encoder
from tests.tokens.chat import tokenizer_kinds
from tests.tokens.chat.templates import CHATML, MARKED, QWEN_2_5, QWEN_3

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    home: Path = tmp_path_factory.mktemp("tokenizer") / "it"
    return tokenizer_kinds.encoder(home, "merged", False)


def make_chat(count: int, size: int = 20) -> Conversation:
    """Return a system prompt and numbered questions and answers."""
    turns = [
        {"role": role, "content": f"{role[0]}{n} " + "word " * size}
        for n in range(count)
        for role in ("user", "assistant")
    ]
    return Conversation([SYSTEM, *turns])


def texts(
    encoder: Encoder,
    source: str,
    chat: Conversation,
    longest: int,
    train_on: str = "assistant",
    too_long: str = "split",
) -> tuple[list[str], list]:
    chat_encoder = ChatEncoder(ChatPolicy(source, train_on, too_long, longest), encoder)
    encoded = chat_encoder.encode([make_chat(1, 1), chat, make_chat(1, 2)])
    assert (encoded.lengths <= longest).all()
    assert encoded.owners.tolist() == sorted(encoded.owners.tolist())
    ends = np.cumsum(encoded.lengths)
    assert not encoded.trained[ends - encoded.lengths].any()
    assert np.logical_or.reduceat(encoded.trained, ends - encoded.lengths).all()
    shown_texts = tokenizer_kinds.shown(encoder, encoded)
    return [
        text for text, owner in zip(shown_texts, encoded.owners, strict=True) if owner == 1
    ], encoded.dropped


@pytest.mark.parametrize("source", [CHATML, MARKED, QWEN_3], ids=["plain", "marked", "rewritten"])
@pytest.mark.parametrize("longest", [140, 300, 500])
def test_each_answer_is_trained_once_with_the_system_prompt_in_front(
    encoder: Encoder, source: str, longest: int
) -> None:
    parts, dropped = texts(encoder, source, make_chat(12), longest)
    assert not dropped and len(parts) > 1
    for text in parts:
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert text.removesuffix("\n").endswith("<|im_end|>⟧")
    answers = [
        re.search(r"a(\d+) ", part)[1]
        for text in parts
        for part in re.findall("⟦(.*?)⟧", text, re.S)
    ]
    assert answers == [str(n) for n in range(12)]


def test_parts_are_as_long_as_possible(encoder: Encoder) -> None:
    _, [dropped] = texts(encoder, CHATML, make_chat(12), 300, too_long="drop")
    assert len(texts(encoder, CHATML, make_chat(12), dropped.tokens)[0]) == 1
    assert len(texts(encoder, CHATML, make_chat(12), dropped.tokens - 1)[0]) == 2


def test_long_conversations_are_dropped_by_default_and_counted(encoder: Encoder) -> None:
    parts, [dropped] = texts(encoder, CHATML, make_chat(12), 300, too_long="drop")
    assert not parts and dropped.kind == "too long" and dropped.number == 1
    size = len(
        encoder.tokenizer(
            texts(encoder, CHATML, make_chat(12), 10_000)[0][0].translate(
                dict.fromkeys(map(ord, "⟦⟧"))
            )
        )["input_ids"]
    )
    assert dropped.tokens == size
    assert f"{size:,} tokens" in dropped.message and "at most 300" in dropped.message


def test_only_a_question_that_does_not_fit_with_its_answer_is_lost(encoder: Encoder) -> None:
    chat = make_chat(6)
    chat.messages[5]["content"] += "word " * 300  # the third question
    parts, [dropped] = texts(encoder, CHATML, chat, 300)
    assert dropped.kind == "too long" and dropped.partly and dropped.tokens > 300
    assert "1 answer of it" in dropped.message
    assert sorted(re.findall(r"⟦a(\d)", "".join(parts))) == ["0", "1", "3", "4", "5"]
    parts, [dropped] = texts(encoder, CHATML, make_chat(2, 400), 300)
    assert not parts and not dropped.partly and "2 answers" in dropped.message


def test_tool_calls_are_cut_after_an_answer(encoder: Encoder) -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "1 " * 50},
    ] * 6
    chat = Conversation(
        [
            SYSTEM,
            {"role": "user", "content": "q"},
            *turns,
            {"role": "assistant", "content": "Done."},
        ],
        [call],
    )
    [text], [dropped] = texts(encoder, QWEN_2_5, chat, 400)
    assert "# Tools" in text and text.endswith("</tool_call><|im_end|>⟧\n")
    assert (
        dropped.partly
        and text.count("⟦") + int(re.search(r"; (\d) answers of it", dropped.message)[1]) == 7
    )


def test_the_last_answer_keeps_the_last_turns(encoder: Encoder) -> None:
    [text], dropped = texts(encoder, CHATML, make_chat(12), 300, train_on="last")
    assert not dropped and text.startswith("<|im_start|>system\nBe brief.")
    assert re.findall(r"⟦a(\d+) ", text) == ["11"] and "u10 " in text and "u2 " not in text


def test_parts_can_train_all_turns(encoder: Encoder) -> None:
    parts, dropped = texts(encoder, CHATML, make_chat(12), 300, train_on="all")
    assert not dropped
    assert re.findall(r"\ba(\d+) ", "".join(parts)) == [str(n) for n in range(12)]
