"""Export eight kinds of models as runs leave them, for the tests of other programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from lib.core.artifacts import OTHER_TOKENIZER_FILES, TOKENIZER_FILES
from lib.models import scratch, tokenizer
from lib.models.architecture import build_on_meta
from lib.models.lora import Lora
from lib.models.weights import load_pretrained
from lib.parallel import loss
from lib.tokens.batches import MicroBatch
from tests.export.exports import change_json, run_stage_05, save_run
from tests.export.lora_runs import build_lora_model, save_lora_run
from tests.models.families import FAMILIES, LLAMA3, make_checkpoint
from tests.models.two_ranks import shard_model

TOKENS = 300
ROWS = 384  # of an embedding that is padded
TEXTS = (
    "Once upon a time, there were 1,234 tests.\n\tThey said: “It's fine.”",
    "def f(x):\n    return x[0]  # naïve\n",
    "漢字かな交じり文 Съешь ёё 👩🏽‍🚀∑",
    "   many   spaces   \n\n\n",
)
QUESTION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOME = "/home/someone/models/base"


def _base(value: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value, **more}}


def _family(name: str, **fields: Any) -> Callable[[], PretrainedConfig]:
    return lambda: FAMILIES[name](**{"vocabulary": TOKENS, **fields})


# Without sliding windows, which other programs compute only for longer texts.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama3": _family(
        "llama3",
        max_position_embeddings=65_536,
        rope_parameters={**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    ),
    "qwen2": _family("qwen2", **_base(1e6)),
    "qwen3": _family("qwen3", **_base(1e6)),
    "gemma": _family("gemma", **_base(3e4)),
    "mixtral": _family("mixtral", **_base(1e6)),
    "scratch": lambda: scratch.make_config("1M", TOKENS, 0, 1, 2),
    "lora": _family("llama", **_base(5e5)),
    "added": _family("llama_tied", vocabulary=ROWS, **_base(5e5)),
}


def _build_byte_level() -> Tokenizer:
    """Return a trained byte-level BPE."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - 2,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(TEXTS * 3, trainer)
    return built


def _build_byte_fallback() -> Tokenizer:
    """Return a BPE with a token for each byte, as that of Gemma."""
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    letters = [*"▁abcdefghijklmnopqrst"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *letters, "▁t", "▁th"])}
    built = Tokenizer(
        models.BPE(vocabulary, [("▁", "t"), ("▁t", "h")], unk_token="<unk>", byte_fallback=True)
    )
    built.normalizer = normalizers.Replace(Regex(" "), "▁")
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def save_tokenizer(directory: Path, name: str) -> None:
    """Write the tokenizer of a base model as transformers 5 does, with traces of a machine."""
    if name == "scratch":
        tokenizer.train_tokenizer([], TOKENS, 128, directory, workers=1, show_progress=False)
        return
    built = _build_byte_fallback() if name == "gemma" else _build_byte_level()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if name == "gemma":
        special["unk_token"] = "<unk>"
    fast = PreTrainedTokenizerFast(tokenizer_object=built, **special)
    if name in ("added", "lora"):
        turns = ["<|im_start|>", "<|im_end|>"]
        fast.add_special_tokens({"extra_special_tokens": turns})
        fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    change_json(
        directory / "tokenizer_config.json",
        is_local=True,
        local_files_only=True,
        name_or_path=HOME,
        special_tokens_map_file=f"{HOME}/special_tokens_map.json",
    )
    (directory / "tokenizer.model.v3").write_bytes(b"\0\xff any bytes")
    if name == "gemma":
        (directory / "tokenizer.model").write_bytes(b"\n\x07\x00 any bytes")


def export_model(root: Path, name: str) -> Path:
    """Write a run of the model, which changed no weight, and return its export in float32.

    The base model lies in `root/model`; for `lora`, `root/trained` has the merged weights.
    """
    base = root / "model"
    make_checkpoint(base, CONFIGS[name]())
    save_tokenizer(base, name)
    change_json(base / "config.json", _name_or_path=HOME, tie_word_embeddings=None)
    change_json(base / "config.json", tie_word_embeddings=CONFIGS[name]().tie_word_embeddings)
    if name == "lora":
        lora = Lora(4, 8.0)
        save_lora_run(root, base, lora)
    else:
        save_run(root, base)
    model_dir = root / "exp" / "model"
    for file in (*TOKENIZER_FILES, *OTHER_TOKENIZER_FILES):
        if (base / file).is_file():
            shutil.copyfile(base / file, model_dir / file)
    if name in ("added", "lora"):
        stop = json.loads((base / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
        change_json(model_dir / "generation_config.json", eos_token_id=[stop, 2])
    out = root / "out"
    run_stage_05("-e", "exp", "--save-dir", root, "--out", out, "--dtype", "float32")
    return out


def draw_tokens(rows: int = 32, length: int = 129) -> torch.Tensor:
    """Return random tokens; by default, rows whose labels are 4,096 tokens."""
    return torch.randint(3, TOKENS - 4, (rows, length), generator=torch.Generator().manual_seed(1))


def compute_run_loss(root: Path, name: str) -> float:
    """Return the mean loss of 4,096 tokens as the trainer computes it, with the base's weights."""
    if name == "lora":
        model = build_lora_model(root / "model", Lora(4, 8.0))
    else:
        model = build_on_meta(root / "model")
        shard_model(model, None, [1])
        model.to_empty(device="cpu")
        load_pretrained(model, root / "model")
    tokens = draw_tokens()
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    with torch.no_grad():
        return float(loss.token_loss_sum(model.eval(), batch)) / batch.labels.numel()


def compute_loss(logits: torch.Tensor) -> float:
    """Return the mean loss of `draw_tokens()` for the logits of another program."""
    labels = draw_tokens()[:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels))


def load_export(out: Path) -> torch.nn.Module:
    """Return an export as the installed transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
