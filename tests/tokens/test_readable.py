# covers: lib/tokens/readable.py, lib/tokens/store.py
"""Samples as readable text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from lib.tokens import readable
from lib.tokens.store import Split, TokenStore


def test_trained_parts_are_marked(tokenizer: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids = np.array(loaded("ask: ä\x1b[2J\nyes\n\nno", add_special_tokens=True)["input_ids"])
    trained = np.zeros(len(ids), bool)
    trained[-7:] = True
    assert (
        readable.render_sample(ids, trained, loaded, colour=False)
        == "<s>ask: ä\\x1b[2J\n⟦yes\n\nno⟧"
    )
    coloured = readable.render_sample(ids, trained, loaded, colour=True).split("\n")
    assert coloured == [
        "\033[90m<s>ask: ä\\x1b[2J\033[0m",
        "\033[32myes\033[0m",
        "",
        "\033[32mno\033[0m",
    ]
    assert readable.render_sample(ids[:0], trained[:0], loaded, colour=False) == ""


def test_brackets_in_the_text_are_escaped(tokenizer: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids = np.array(loaded("⟦a⟧ b⟧", add_special_tokens=False)["input_ids"])
    trained = np.zeros(len(ids), bool)
    trained[-1 - len(loaded("⟧", add_special_tokens=False)["input_ids"]) :] = True
    text = readable.render_sample(ids, trained, loaded, colour=False)
    assert text.count("⟦") == text.count("⟧") == 1 and text.endswith("⟧")
    assert text.replace("⟦", "").replace("⟧", "") == "\\u27e6a\\u27e7 b\\u27e7"
    assert "⟦a⟧" in readable.render_sample(
        ids, trained, loaded, colour=True
    )  # colours are not brackets
    one_line = readable.render_excerpt(ids, trained, loaded)
    assert one_line.count("⟦") == one_line.count("⟧") == 1 and "\\u27e6a" in one_line


def test_printed_samples_are_spread_evenly(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = np.arange(1, 11) * 3
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    letters = loaded.convert_tokens_to_ids(list("abcdefghij"))
    tokens = np.array([[0, letter, 1] for letter in letters]).ravel()
    labels = np.tile([False, True, False], 10)
    for split, first in (
        (Split(tokens, ends, labels), "<s>⟦a⟧</s>"),
        (Split(tokens, ends), "<s>⟦a</s>⟧"),
    ):
        store = TokenStore(Path("it"), "", 300, {}, {"train": split})
        lines = list(readable.render_documents(store, 3, loaded, colour=False))
        assert [text.split(" of 10")[0] for text in lines] == ["--- 1", "--- 4", "--- 7"]
        assert lines[0].endswith(
            f"3 tokens, {1 if split.labels is not None else 2} trained\n" + first
        )
        assert len(list(readable.render_documents(store, 30, loaded, colour=False))) == 10
        with monkeypatch.context() as patch:
            patch.setattr(readable, "_LONGEST_DOCUMENT", 2)
            [line] = readable.render_documents(store, 1, loaded, colour=False)
        assert line.splitlines()[1] == "<s>⟦a⟧…"
