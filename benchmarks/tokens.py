#!/usr/bin/env python3
"""Measure how fast text becomes tokens and tokens become batches, beside other libraries.

  python benchmarks/tokens.py --dataset hf_datasets/demo --tokenizer .cache/models/demo

Everything runs in one thread. The dataset is read from the page cache. `datasets.map` uses the same
tokenizer in batches, in one process. Prints a table; the ratios belong to this run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

from lib.core import offline


def run_timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that an action takes, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def main() -> None:
    """Run the measurements and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", type=Path, required=True, help="dataset of stage 02")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory")
    parser.add_argument(
        "--slow-bytes",
        type=int,
        default=8_000_000,
        help="bytes of text for the slow measurements, with the Hugging Face tokenizer",
    )
    arguments = parser.parse_args()
    offline.enable_offline_mode()
    rows = [*measure_tokenizing(arguments), *measure_chats(arguments), *measure_loading(arguments)]
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name:<{width}}  {figure}")


def measure_tokenizing(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return rates in MB of text per second on one core, and whether both encoders agree."""
    import datasets
    import numpy as np

    from lib.tokens.dataset import open_dataset
    from lib.tokens.encode import Encoder

    dataset = open_dataset(arguments.dataset)
    texts = [text for batch in dataset.documents("train") for text in batch]
    few = []
    size = 0
    for text in texts:
        if size < arguments.slow_bytes:
            few.append(text)
            size += len(text)
    total = sum(map(len, texts))
    encoder = Encoder(arguments.tokenizer, 1)
    decoded = [text.decode() for text in few]
    backend = encoder.tokenizer.backend_tokenizer
    raw_s, _ = run_timed(lambda: backend.encode_batch_fast(decoded, add_special_tokens=False))
    fallback_s, (slow_ids, _) = run_timed(lambda: encoder.encode(few))
    encoder.tune(dataset.sample())
    encoder.encode(few[:2])
    fast_s, _ = run_timed(lambda: encoder.encode(texts))
    equal = np.array_equal(encoder.encode(few)[0], slow_ids)
    table = datasets.Dataset.from_dict({"text": decoded})
    with tempfile.TemporaryDirectory() as cache:
        map_s, _ = run_timed(
            lambda: table.map(
                lambda rows: encoder.tokenizer(rows["text"]),
                batched=True,
                cache_file_name=f"{cache}/map.arrow",
            )
        )
    store_rate = total / fast_s / 1e6
    map_rate = size / map_s / 1e6
    return [
        (
            "store's encoder",
            f"{store_rate:.1f} MB/s ({type(encoder._engine).__name__}, ids equal: {equal})",
        ),
        ("tokenizers, raw encode_batch_fast", f"{size / raw_s / 1e6:.2f} MB/s"),
        (
            "store's encoder without gigatoken",
            f"{size / fallback_s / 1e6:.2f} MB/s ({raw_s / fallback_s:.2f} of raw)",
        ),
        (
            "datasets.map(batched=True)",
            f"{map_rate:.2f} MB/s; the store is {store_rate / map_rate:.0f}×",
        ),
    ]


# A template without generation marks, and one of thinking models, which drop earlier thoughts.
_UNMARKED_TEMPLATE = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
_THINKING_TEMPLATE = _UNMARKED_TEMPLATE.replace(
    "+ m.content",
    "+ ('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content",
)


def measure_chats(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return rates in MB of messages per second on one core, and the time share of rendering."""
    from tokenizers import Tokenizer

    from lib.core.conversation import Conversation
    from lib.tokens.chat.encode import ChatEncoder
    from lib.tokens.chat.policy import ChatPolicy
    from lib.tokens.dataset import open_dataset
    from lib.tokens.encode import Encoder

    texts = [
        text.decode()
        for batch in open_dataset(arguments.dataset).documents("train")
        for text in batch
    ]
    corpus = "".join(texts)[:8_000_000]
    rates = []
    marked_template = Path("chat_templates/chatml.jinja").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(f"{folder}/tokenizer.json")
        for name, turns, size in (("4 turns, 2 kB", 4, 500), ("16 turns, 64 kB", 16, 4000)):
            parts = [
                corpus[start : start + size].strip() or "x" for start in range(0, len(corpus), size)
            ]
            conversations = [
                Conversation(
                    [
                        {"role": "assistant" if n % 2 else "user", "content": part}
                        for n, part in enumerate(parts[start : start + turns])
                    ]
                )
                for start in range(0, len(parts) - turns, turns)
            ]
            for kind, source in (
                ("unmarked", _UNMARKED_TEMPLATE),
                ("marked", marked_template),
                ("rewritten", _THINKING_TEMPLATE),
            ):
                encoder = ChatEncoder(
                    ChatPolicy(source, "assistant", "drop", 1 << 30), Encoder(Path(folder), 1)
                )
                encoder.tune(conversations[:20])
                rates.append((f"chat, {name}, {kind}", _measure_rate(encoder, conversations)))
    return rates


def _measure_rate(encoder: Any, conversations: list[Any]) -> str:
    """Return how fast conversations become samples, in groups of 200, by processor time."""
    import numpy as np

    groups = [conversations[start : start + 200] for start in range(0, len(conversations), 200)] * 3
    sizes = np.array(
        [
            sum(len(turn["content"].encode()) for chat in group for turn in chat.messages)
            for group in groups
        ]
    )
    seconds = []
    lost = 0
    for group in groups:
        began = time.process_time()
        encoder._render_texts(group)
        rendered = time.process_time()
        lost += len(encoder.encode(group).dropped)
        seconds.append((rendered - began, time.process_time() - rendered))
    rendering, totals = np.array(seconds).T
    rates = sizes / totals / 1e6
    return (
        f"{np.median(rates):.1f} MB/s, at best {rates.max():.1f}; "
        f"{100 * np.median(rendering / totals):.0f} % renders and masks; {lost} dropped"
    )


def measure_loading(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the loader's rates for windows in random order, and its time to the first batch."""
    import numpy as np
    import torch

    from lib.tokens.batches import Position, SampleStream
    from lib.tokens.order import Division
    from lib.tokens.samples import Windows

    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 60_000, 200_000_000, dtype=np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        for length in (2048, 8192):
            windows = Windows(tokens, length)
            steps = 200
            chosen = np.random.default_rng(1).integers(0, len(windows), (steps, 16))
            take_s, _ = run_timed(
                lambda w=windows, c=chosen: [len(w.read_windows(numbers)) for numbers in c]
            )
            rates.append(
                (
                    f"random windows of {length}",
                    f"{steps * 16 * length / take_s / 1e6:,.0f} M tokens/s",
                )
            )
            batches = SampleStream(windows, 0, Division(16, 1, 0, 1), torch.device("cpu")).steps(
                Position(), steps
            )
            first_s, _ = run_timed(lambda iterator=batches: next(iterator))
            rest_s, _ = run_timed(lambda iterator=batches: [None for _ in iterator])
            rate = (steps - 1) * 16 * length / rest_s / 1e6
            rates.append(
                (
                    f"loader, windows of {length}",
                    f"{rate:,.0f} M tokens/s, first batch after {first_s * 1000:.1f} ms",
                )
            )
    return rates


if __name__ == "__main__":
    main()
