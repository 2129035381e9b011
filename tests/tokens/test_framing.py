# covers: lib/tokens/framing.py
"""BOS and EOS are added as in training, whatever the files of a tokenizer say about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lib.core.conversation import Conversation
from lib.tokens import build, framing, store
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.dataset import open_dataset
from lib.tokens.encode import Encoder
from lib.tokens.text_writer import TextTokenization
from lib.train.experiment import add_bos_to_template
from tests.tokens.conftest import save_tokenizer

LLAMA = {"tokenizer_class": "LlamaTokenizerFast"}
SAVED_BY_5 = {"backend": "tokenizers"}


@pytest.mark.parametrize(
    ("in_file", "settings", "bos", "lines"),
    [
        (False, {**LLAMA, "add_bos_token": True}, True, 1),
        (False, {"add_bos_token": True}, True, 1),
        (False, LLAMA, True, 1),
        (False, {**LLAMA, **SAVED_BY_5}, False, 0),
        (True, {**LLAMA, "add_bos_token": False}, False, 1),
        (True, {"add_bos_token": False}, True, 1),
        (True, {**LLAMA, "add_bos_token": True, "add_eos_token": False}, True, 0),
        (True, {**LLAMA, "add_bos_token": None}, True, 0),
        (False, {"tokenizer_class": "GPTNeoXTokenizer"}, False, 0),
        (False, {}, False, 0),
        (True, {"add_eos_token": True}, True, 1),
    ],
)
def test_bos_is_added_as_in_training_and_exports_agree(
    tmp_path: Path, in_file: bool, settings: dict[str, Any], bos: bool, lines: int
) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer", bos=in_file)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    encoder = Encoder(directory, 1)
    assert len(encoder.disagreements) == lines, encoder.disagreements
    assert all("counts" in line and "add_" in line for line in encoder.disagreements)
    ids, _ = encoder.encode([b"a"])
    assert bool(ids[0] == 0) is bos and ids[-1] == 1
    out = shutil.copytree(directory, tmp_path / "out")
    framing.write_agreeing(encoder.tokenizer, out, bool(encoder.disagreements))
    plain = AutoTokenizer.from_pretrained(out)
    assert plain("a")["input_ids"] == encoder.tokenizer("a")["input_ids"]
    assert Encoder(out, 1).disagreements == []
    written = json.loads((out / "tokenizer_config.json").read_text())
    if written["tokenizer_class"].startswith("Llama"):  # transformers 4 reads only the settings
        assert written.get("add_bos_token", True) is bos


def test_only_a_run_that_has_begun_keeps_a_store_of_a_version_that_ignored_the_settings(
    of_stage_02: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer", bos=False)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LLAMA))

    def prepare(has_begun: bool) -> Path:
        tokenization = TextTokenization(open_dataset(of_stage_02), directory, 1, False)
        return build.prepare_store(tokenization, tmp_path, 9999, has_begun=has_begun)

    def first_token(path: Path) -> int:
        return int(store.open_store(path).splits["train"].tokens[0])

    with monkeypatch.context() as earlier:
        earlier.setattr(framing, "follow_settings", lambda *arguments: ({}, []))
        old = prepare(has_begun=False)
    assert first_token(old) != 0
    assert prepare(has_begun=True) == old
    new = prepare(has_begun=False)
    assert first_token(new) == 0
    assert prepare(has_begun=True) == new, "its own, if it was begun by this version"


@pytest.mark.parametrize("begin", ["{{ bos_token }}", ""])
def test_a_conversation_gets_one_bos(tmp_path: Path, begin: str) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer", bos=False)
    path = directory / "tokenizer_config.json"
    settings = LLAMA | {"add_bos_token": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    template = begin + (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    policy = ChatPolicy(template, "assistant", "drop", 1000)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    encoded = ChatEncoder(policy, Encoder(directory, 1)).encode([Conversation(messages)])
    assert not encoded.dropped
    assert encoded.tokens[0] == 0 and (encoded.tokens == 0).sum() == 1
    exported = add_bos_to_template(template, directory)
    assert exported.count("bos_token") == 1
