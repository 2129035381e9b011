"""Computes logits with an earlier transformers: a script for an environment of its own.

usage: earlier_reader.py DIR…: each with a model and ids.pt, beside which read.pt is written
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = "One 2three.\n"
TEXTS = (TEXT, "naïve 漢字 👩🏽‍🚀\t\tx = [0]", "<|im_end|> </s>", "   many   spaces   \n\n\n")
QUESTION = [{"role": "user", "content": "Hi"}]


def read(directory: Path) -> dict[str, Any]:
    """Return the logits of the model in a directory, and the token IDs of some texts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    found: dict[str, Any] = {"version": transformers.__version__, "dtype": str(model.dtype)}
    with torch.no_grad():
        found["logits"] = model.eval().float()(torch.load(directory / "ids.pt")).logits
    if (directory / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        found["text"] = tokenizer(TEXT)["input_ids"]
        found["special"] = sorted(tokenizer.all_special_tokens)
        found["batch"] = tokenizer(["a b", "c"], padding=True)["attention_mask"]
        found["texts"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        found["decoded"] = [tokenizer.decode(ids) for ids in found["texts"]]
        found["length"] = len(tokenizer)
        if tokenizer.chat_template:
            found["chat"] = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        try:
            found = read(Path(name))
        except Exception as error:  # of one model; the tests of the others go on
            found = {"error": repr(error)}
        torch.save(found, Path(name) / "read.pt")
