# covers: lib/export/card.py
"""The model card of an export has correct sentences, and code that loads the export."""

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
def test_a_card_names_the_model_and_shows_how_to_load_it(base: str, says: str, loads: str) -> None:
    text = card.render_card(
        "x", "llama", "float32", 7, {"steps": 1000}, chats=True, adapter_of=base
    )
    assert says in text and loads in text and "A a " not in text
    # AutoPeftModel looks for a bare name on the Hub, which has no such model.
    assert ("`AutoPeftModelForCausalLM` finds the base" in text) == (base == "name")
    assert ("base_model: org/name" in text) == (base == "org/name")
