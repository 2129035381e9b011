"""Which tokens of a conversation are trained, by the templates of well-known families."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from lib.core.conversation import Conversation
from lib.tokens.chat import ChatEncoder, ChatPolicy, EncodedChats
from lib.tokens.encode import Encoder
from tests.tokens.chat_templates import ANSWERS, SPECIAL, TEMPLATES, WITHOUT_BOS
from tests.tokens.conftest import save_tokenizer

USER, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Encoder]:
    """Return encoders of a byte-level tokenizer that puts BOS in front, and of one that does not.
    """
    found = {}
    for bos in (True, False):
        home = save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "it", bos=bos)
        whole = Tokenizer.from_file(str(home / "tokenizer.json"))
        whole.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
        whole.save(str(home / "tokenizer.json"))
        found[bos] = Encoder(home, 1)
    return found


def coder(encoders: dict[bool, Encoder], name: str, source: str = "", train_on: str = "assistant",
          too_long: str = "drop", longest: int = 10_000) -> ChatEncoder:
    return ChatEncoder(ChatPolicy(source or TEMPLATES[name], train_on, too_long, longest),
                       encoders[name not in WITHOUT_BOS])


def parts(encoder: Encoder, encoded: EncodedChats) -> list[str]:
    """Return the runs of trained tokens of all samples, decoded."""
    found, ends = [], np.cumsum(encoded.lengths)
    for begin, end in zip([0, *ends], ends, strict=False):
        trained = encoded.trained[begin:end].astype(int)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], trained, [0]])))
        found += [encoder.tokenizer.decode(encoded.tokens[begin + start:begin + stop].tolist(),
                                           skip_special_tokens=False)
                  for start, stop in edges.reshape(-1, 2)]
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_what_ends_them_are_trained(encoders: dict[bool, Encoder], name: str) -> None:
    rng = random.Random(name)
    words = ["ä", "be\nsee", "dee", "", "e", "f\tgee", "你好", "'x'", "<y>", "{z}"]
    answer = ANSWERS.get(name, "{}<|im_end|>")
    it = coder(encoders, name)
    for _ in range(50):
        said = [" ".join(rng.choices(words, k=rng.randint(1, 8))).strip() or "x" for _ in range(6)]
        turns = [{"role": role, "content": text}
                 for role, text in zip(("user", "assistant") * 3, said, strict=True)]
        turns = [SYSTEM] * rng.randint(0, name != "mistral") + turns[:2 * rng.randint(1, 3)]
        encoded = it.encode([Conversation(turns)])
        assert parts(encoders[True], encoded) == [answer.format(turn["content"]) for turn in turns
                         if turn["role"] == "assistant"]
        begins = np.cumsum(encoded.lengths) - encoded.lengths
        assert ((encoded.tokens[begins] == 0) == (name not in WITHOUT_BOS)).all()
