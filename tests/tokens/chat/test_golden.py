# covers: lib/tokens/chat/encode.py, lib/tokens/chat/render.py
"""The loss masks of well-known families: trained text stands between ⟦ and ⟧."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.core.conversation import Conversation
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.encode import Encoder
from tests.tokens.chat import tokenizer_kinds
from tests.tokens.chat.templates import TEMPLATES, WITHOUT_BOS


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS = {
    "turns": Conversation(
        [
            {"role": "system", "content": "Be brief."},
            user("hi"),
            assistant("hello"),
            user("more"),
            assistant("no"),
        ]
    ),
    "no system": Conversation([user("hi"), assistant("hello"), user("more"), assistant("no")]),
    "tools": Conversation(
        [
            user("1+0?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "content": "1"},
            assistant("One."),
        ],
        [ADD],
    ),
    "thoughts": Conversation(
        [
            user("hi"),
            assistant("hello", reasoning_content="greet"),
            user("more"),
            assistant("no", reasoning_content="stop"),
        ]
    ),
}
ADD_JSON = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
CALL_JSON = '{"name": "add", "arguments": {"a": 1}}'
CHATML = [
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n⟦hello<|im_end|>⟧\n<|im_start|>user\nmore<|im_end|>\n"
    "<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
]
LLAMA_3 = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023"
    "\nToday Date: 26 Jul 2024\n\n"
)
OSS = "<|start|>system<|message|>You are a large language model.<|end|>"
GOLDEN = {
    ("llama 2", "turns"): [
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST]⟦ hello </s>⟧"
        "<s>[INST] more [/INST]⟦ no </s>⟧"
    ],
    ("llama 3", "turns"): [
        LLAMA_3 + "Be brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦hello<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦no<|eot_id|>⟧"
    ],
    ("llama 3", "tools"): [
        LLAMA_3 + 'You have these functions:\n{\n    "type": "function",\n    "function": {\n'
        '        "name": "add",\n        "parameters": {\n            "type": "object"\n        }\n'
        "    }\n}\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n1+0?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n⟦{"name": "add", "parameters": {"a": 1}}'
        "<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦One.<|eot_id|>⟧"
    ],
    ("mistral", "no system"): ["<s>[INST] hi[/INST]⟦ hello</s>⟧[INST] more[/INST]⟦ no</s>⟧"],
    ("mistral", "tools"): [
        f"<s>[AVAILABLE_TOOLS] [{ADD_JSON}][/AVAILABLE_TOOLS][INST] 1+0?[/INST]"
        '⟦[TOOL_CALLS] [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
        "</s>⟧[TOOL_RESULTS] 1[/TOOL_RESULTS]⟦ One.</s>⟧"
    ],
    ("chatml", "turns"): CHATML,
    ("marked", "turns"): CHATML,
    ("shipped chatml", "turns"): CHATML,
    ("shipped plain", "turns"): [
        "System:\nBe brief.\n\nUser:\nhi\n\nAssistant:\n⟦hello</s>⟧\nUser:\nmore\n\n"
        "Assistant:\n⟦no</s>⟧\n"
    ],
    ("qwen 2.5", "turns"): CHATML,
    ("qwen 2.5", "tools"): [
        f"<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n{ADD_JSON}\n<|im_end|>\n"
        "<|im_start|>user\n1+0?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦One.<|im_end|>⟧\n"
    ],
    ("qwen 3", "no system"): [
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nhello<|im_end|>⟧\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nno<|im_end|>⟧\n",
    ],
    ("qwen 3", "thoughts"): [
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\ngreet\n</think>\n\nhello<|im_end|>⟧\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nstop\n</think>\n\nno<|im_end|>⟧\n",
    ],
    ("gemma 3", "turns"): [
        "<s><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n"
        "<start_of_turn>model\n⟦hello<end_of_turn>⟧\n<start_of_turn>user\nmore<end_of_turn>\n"
        "<start_of_turn>model\n⟦no<end_of_turn>⟧\n"
    ],
    ("phi 3", "turns"): [
        "<s><|system|>\nBe brief.<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n⟦hello<|end|>⟧\n"
        "<|user|>\nmore<|end|>\n<|assistant|>\n⟦no<|end|>⟧\n</s>"
    ],
    ("gpt-oss", "turns"): [
        OSS + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>hello<|return|>⟧",
        OSS + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>hello<|end|>"
        "<|start|>user<|message|>more<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>no<|return|>⟧",
    ],
    ("gpt-oss", "tools"): [
        OSS + "<|start|>developer<|message|># Tools\n\ntype add = (_: any) => any;\n<|end|>"
        "<|start|>user<|message|>1+0?<|end|><|start|>assistant"
        '⟦ to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>⟧'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>One.<|return|>⟧"
    ],
    ("gpt-oss", "thoughts"): [
        OSS + "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>greet<|end|>"
        "<|start|>assistant<|channel|>final<|message|>hello<|return|>⟧",
        OSS + "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>hello<|end|>"
        "<|start|>user<|message|>more<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>stop<|end|>"
        "<|start|>assistant<|channel|>final<|message|>no<|return|>⟧",
    ],
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Encoder]:
    """Return encoders of bytes and of merged bytes, with and without BOS before a text."""
    return {
        (kind, bos): tokenizer_kinds.encoder(tmp_path_factory.mktemp("t") / "it", kind, bos)
        for kind in ("bytes", "merged")
        for bos in (True, False)
    }


@pytest.mark.parametrize(("name", "kind"), GOLDEN, ids=map(" ".join, GOLDEN))
def test_mask(encoders: dict[tuple[str, bool], Encoder], name: str, kind: str) -> None:
    source = (
        TEMPLATES.get(name)
        or Path(f"chat_templates/{name.removeprefix('shipped ')}.jinja").read_text()
    )
    has_bos = name not in WITHOUT_BOS and name in TEMPLATES
    for tokens in ("bytes", "merged"):
        encoder = encoders[tokens, has_bos]
        chats = ChatEncoder(ChatPolicy(source, "assistant", "drop", 10_000), encoder)
        chats.tune([CONVERSATIONS[kind]])
        encoded = chats.encode([CONVERSATIONS[kind]])
        assert not encoded.dropped
        expected = GOLDEN[name, kind]
        assert tokenizer_kinds.shown(encoder, encoded) == expected
        # Token by token: the same as encoding each part of the text by itself, for special tokens
        # and bytes, and as the tokenizer itself reads the whole text, for merged bytes.
        text = "".join(expected).replace("⟦", "").replace("⟧", "")
        bare = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoded.tokens.tolist() == bare
        if tokens == "bytes":
            flags = [flag for text in expected for flag in _flags(encoder, text)]
            assert encoded.trained.astype(int).tolist() == flags


def _flags(encoder: Encoder, text: str) -> list[int]:
    """Return 1 for each token between ⟦ and ⟧."""
    flags = []
    for number, part in enumerate(text.replace("⟧", "⟦").split("⟦")):
        ids = encoder.tokenizer(part, add_special_tokens=False)["input_ids"]
        flags += [number % 2] * len(ids)
    return flags


def test_a_system_prompt_that_moves_is_refused_with_both_lines(
    encoders: dict[tuple[str, bool], Encoder],
) -> None:
    """Mistral's template writes it only before the last question of a conversation."""
    chats = ChatEncoder(
        ChatPolicy(TEMPLATES["mistral"], "assistant", "drop", 10_000), encoders["bytes", True]
    )
    [dropped] = chats.encode([CONVERSATIONS["turns"]]).dropped
    assert dropped.kind == "no boundary" and "before an answer" in dropped.message
    assert dropped.lines == (
        "<s>[INST] hi[/INST] hello</s>[INST] Be brief.",
        "<s>[INST] hi[/INST] hello</s>[INST] more[/INST] no</s>",
    )
    assert all(repr(line) in dropped.message for line in dropped.lines)


@pytest.mark.parametrize("name", ["chatml", "gemma 3", "llama 2", "phi 3", "marked"])
def test_conversations_with_omitted_tools_are_dropped(
    encoders: dict[tuple[str, bool], Encoder], name: str
) -> None:
    chats = ChatEncoder(
        ChatPolicy(TEMPLATES[name], "assistant", "drop", 10_000),
        encoders["bytes", name not in WITHOUT_BOS],
    )
    tools = CONVERSATIONS["tools"]
    [dropped] = chats.encode([tools]).dropped
    assert dropped.kind == "template"
    [dropped] = chats.encode([tools._replace(tools=None)]).dropped
    keywords = ("leaves out the call", "marks nothing", "roles must alternate")
    assert any(keyword in dropped.message for keyword in keywords)
