"""Chat datasets as stage 02 writes them, and a tokenizer with the tokens of ChatML."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from lib.core.conversation import Conversation, Place
from lib.corpus import chat_rows
from lib.tokens.chat import conversations
from lib.tokens.dataset import Dataset

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "ru", "se") for b in ("", "n", "ta", "vi", "x")]


def make_conversation(seed: int, turns: int = 0, words: int = 12) -> Conversation:
    """Return a conversation of invented words, the same one for the same seed."""
    draw = random.Random(seed)
    says = [
        " ".join(draw.choices(_WORDS, k=draw.randint(1, words)))
        for _ in range(2 * (turns or draw.randint(1, 3)))
    ]
    system = [{"role": "system", "content": "short"}] if seed % 3 == 0 else []
    return Conversation(
        [
            *system,
            *(
                {"role": "assistant" if i % 2 else "user", "content": text}
                for i, text in enumerate(says)
            ),
        ]
    )


def make_batch(rows: Sequence[tuple[Conversation, Place]]) -> pa.RecordBatch:
    """Return a few conversations (at least one) as the record batch that stage 02 writes."""
    file = io.BytesIO()
    writer = chat_rows.ChatPartWriter(file)
    for chat, place in rows:
        writer.add(chat, place, chat_rows.encode_chat(chat))
    writer.finish()
    return pa.ipc.read_record_batch(pa.py_buffer(file.getvalue()), chat_rows.make_schema())


def save_dataset(path: Path, rows: int = 10, **splits: Sequence[Conversation]) -> Path:
    """Write a chat dataset. splits: conversations by split. rows: per record batch."""
    (path).mkdir(parents=True)
    (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for name, chats in splits.items():
        (path / name).mkdir()
        placed = [(chat, Place(f"{name}.jsonl", n + 1, 100 * n)) for n, chat in enumerate(chats)]
        shard = path / name / "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(str(shard), chat_rows.make_schema()) as writer:
            for first in range(0, len(placed), rows):
                writer.write_batch(make_batch(placed[first : first + rows]))
        (path / name / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": shard.name}]})
        )
        (path / name / "dataset_info.json").write_text(
            json.dumps({"features": {column: {} for column in chat_rows.make_schema().names}})
        )
    return path


def read_conversations(
    dataset: Dataset, split: str, first: int = 0
) -> list[tuple[Conversation, Place]]:
    """Return the valid conversations of a split from row `first` on, with their sources."""
    batches = dataset.chats(split, first)
    return [row for batch in batches for row in conversations.read_valid_rows(batch)]


def save_tokenizer(directory: Path, template: str | None = CHATML) -> Path:
    """Save a byte-level tokenizer without merges that has the tokens of CHATML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        )
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
