"""Computes logits with an earlier transformers: a script for an environment of its own.

usage: earlier_reader.py DIR…: each with a model and ids.pt, beside which read.pt is written
       earlier_reader.py --write DIR: writes models, with ids.pt and logits.pt
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


def read_model(directory: Path) -> dict[str, Any]:
    """Return the logits of the model in a directory, and the token IDs of some texts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    results: dict[str, Any] = {"version": transformers.__version__, "dtype": str(model.dtype)}
    with torch.no_grad():
        results["logits"] = model.eval().float()(torch.load(directory / "ids.pt")).logits
    if (directory / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        results["text"] = tokenizer(TEXT)["input_ids"]
        results["special"] = sorted(tokenizer.all_special_tokens)
        results["batch"] = tokenizer(["a b", "c"], padding=True)["attention_mask"]
        results["texts"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        results["decoded"] = [tokenizer.decode(ids) for ids in results["texts"]]
        results["length"] = len(tokenizer)
        if tokenizer.chat_template:
            results["chat"] = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    return results


WRITTEN = ("LlamaConfig", "Qwen2Config", "MixtralConfig")


def write_model(directory: Path, name: str) -> None:
    """Save a model with random weights and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    scaling = {"rope_type": "linear", "factor": 2.0} if name == "LlamaConfig" else None
    config = getattr(transformers, name)(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=5e5,
        **({"rope_scaling": scaling} if scaling else {}),
        **({"num_local_experts": 3} if name == "MixtralConfig" else {}),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().save_pretrained(directory)
    ids = torch.randint(3, 290, (2, 64))
    torch.save(ids, directory / "ids.pt")
    with torch.no_grad():
        torch.save(model(ids).logits, directory / "logits.pt")
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator([TEXT] * 3, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--write":
        for name in WRITTEN:
            write_model(Path(sys.argv[2]) / name, name)
        sys.exit()
    for name in sys.argv[1:]:
        try:
            found = read_model(Path(name))
        except Exception as error:  # of one model; the tests of the others go on
            found = {"error": repr(error)}
        torch.save(found, Path(name) / "read.pt")
