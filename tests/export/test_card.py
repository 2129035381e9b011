"""The model card of an export: sentences that read well, and code that loads what it says."""

from __future__ import annotations

import pytest

from lib.export import card


@pytest.mark.parametrize(
    ("base", "says", "loads"),
    [
        (
            "",
            "\nA causal language model, exported from step 1,000 of",
            'from_pretrained("<this dir',
        ),
        ("org/name", "\nLoRA adapters of a causal language model", 'from_pretrained("org/name")'),
        ("name", "\nLoRA adapters of a causal language model", '"<directory of name>"'),
    ],
)
def test_the_sentences_and_the_code_of_a_card(base: str, says: str, loads: str) -> None:
    text = card.render_card(
        "x", "llama", "float32", 7, {"steps": 1000}, chats=True, adapter_of=base
    )
    assert says in text and loads in text and "A a " not in text
    # AutoPeftModel looks a bare name up on the Hub, where it is not.
    assert ("`AutoPeftModelForCausalLM` finds the base" in text) == (base == "name")
    assert ("base_model: org/name" in text) == (base == "org/name")
