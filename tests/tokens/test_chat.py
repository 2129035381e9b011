"""Which tokens of a conversation are trained, by the templates of well-known families."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lib.tokens.chat import ChatEncoder, ChatSample, Conversation
from lib.tokens.template import Template
from tests.tokens.chat_templates import ANSWERS, SPECIAL, TEMPLATES, WITHOUT_BOS

USER, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return made


def encoder(tokenizer: Tokenizer, name: str, source: str = "", **more: object) -> ChatEncoder:
    def encode(texts):
        return [np.array(one.ids, np.uint32)
                for one in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    bos = None if name in WITHOUT_BOS else tokenizer.token_to_id("<s>")
    template = Template(source or TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    return ChatEncoder(template, encode, bos, SPECIAL, **more)


def parts(tokenizer: Tokenizer, sample: ChatSample) -> list[str]:
    """Return the runs of trained tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.trained.astype(int), [0]])))
    return [tokenizer.decode(sample.tokens[start:end].tolist(), skip_special_tokens=False)
            for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_what_ends_them_are_trained(tokenizer: Tokenizer, name: str) -> None:
    rng = random.Random(name)
    words = ["ä", "be\nsee", "dee", "", "e", "f\tgee", "你好", "'x'", "<y>", "{z}"]
    answer = ANSWERS.get(name, "{}<|im_end|>")
    coder = encoder(tokenizer, name)
    for _ in range(50):
        said = [" ".join(rng.choices(words, k=rng.randint(1, 8))).strip() or "x" for _ in range(6)]
        turns = [{"role": role, "content": text}
                 for role, text in zip(("user", "assistant") * 3, said, strict=True)]
        turns = [SYSTEM] * rng.randint(0, name != "mistral") + turns[:2 * rng.randint(1, 3)]
        samples = coder.samples(Conversation(turns))
        found = [part for sample in samples for part in parts(tokenizer, sample)]
        assert found == [answer.format(turn["content"]) for turn in turns
                         if turn["role"] == "assistant"]
        for sample in samples:
            assert (sample.tokens[0] == 256) == (name not in WITHOUT_BOS)
