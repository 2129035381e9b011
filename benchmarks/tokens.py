#!/usr/bin/env python3
"""How fast text becomes tokens, and tokens become batches, against what others do with the same.

  python benchmarks/tokens.py --dataset hf_datasets/demo --tokenizer .cache/models/demo

Everything runs on one core (one thread each). The dataset is read from the page cache. Prints a
table; ratios are of this one run. `datasets.map` gets the same tokenizer, batched, one process.
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


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that an action takes, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", type=Path, required=True, help="dataset of stage 02")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory")
    parser.add_argument(
        "--slow-bytes",
        type=int,
        default=8_000_000,
        help="bytes of text for what is slow (the Hugging Face tokenizer)",
    )
    arguments = parser.parse_args()
    offline.enable()
    rows = [*tokenising(arguments), *chats(arguments), *loading(arguments)]
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name:<{width}}  {figure}")


def tokenising(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return rates in MB of text per second, one core, and whether ids are equal."""
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
    plain = [text.decode() for text in few]
    backend = encoder.tokenizer.backend_tokenizer
    raw_s, _ = timed(lambda: backend.encode_batch_fast(plain, add_special_tokens=False))
    fallback_s, (slow_ids, _) = timed(lambda: encoder.encode(few))
    encoder.tune(dataset.sample())
    encoder.encode(few[:2])
    fast_s, _ = timed(lambda: encoder.encode(texts))
    equal = np.array_equal(encoder.encode(few)[0], slow_ids)
    table = datasets.Dataset.from_dict({"text": plain})
    with tempfile.TemporaryDirectory() as cache:
        map_s, _ = timed(
            lambda: table.map(
                lambda rows: encoder.tokenizer(rows["text"]),
                batched=True,
                cache_file_name=f"{cache}/map.arrow",
            )
        )
    fast = total / fast_s / 1e6
    mapped = size / map_s / 1e6
    return [
        (
            "store's encoder",
            f"{fast:.1f} MB/s ({type(encoder._engine).__name__}, ids equal: {equal})",
        ),
        ("tokenizers, raw encode_batch_fast", f"{size / raw_s / 1e6:.2f} MB/s"),
        (
            "store's encoder without gigatoken",
            f"{size / fallback_s / 1e6:.2f} MB/s ({raw_s / fallback_s:.2f} of raw)",
        ),
        ("datasets.map(batched=True)", f"{mapped:.2f} MB/s; the store is {fast / mapped:.0f}×"),
    ]


# As families write that mark nothing, and as thinking models write, who drop earlier thoughts.
_UNMARKED = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
_THINKING = _UNMARKED.replace(
    "+ m.content",
    "+ ('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content",
)


def chats(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return rates in MB of what is said per second, one core, and how much of it is rendering."""
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
    found = []
    marked = Path("chat_templates/chatml.jinja").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(f"{folder}/tokenizer.json")
        for name, turns, size in (("4 turns, 2 kB", 4, 500), ("16 turns, 64 kB", 16, 4000)):
            parts = [corpus[at : at + size].strip() or "x" for at in range(0, len(corpus), size)]
            said = [
                Conversation(
                    [
                        {"role": "assistant" if n % 2 else "user", "content": part}
                        for n, part in enumerate(parts[at : at + turns])
                    ]
                )
                for at in range(0, len(parts) - turns, turns)
            ]
            for kind, source in (
                ("unmarked", _UNMARKED),
                ("marked", marked),
                ("rewritten", _THINKING),
            ):
                it = ChatEncoder(
                    ChatPolicy(source, "assistant", "drop", 1 << 30), Encoder(Path(folder), 1)
                )
                it.tune(said[:20])
                found.append((f"chat, {name}, {kind}", _rate(it, said)))
    return found


def _rate(it: Any, said: list[Any]) -> str:
    """Return how fast conversations become samples, by processor time, in groups of 200."""
    import numpy as np

    groups = [said[at : at + 200] for at in range(0, len(said), 200)] * 3
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
        it._render_texts(group)
        between = time.process_time()
        lost += len(it.encode(group).dropped)
        seconds.append((between - began, time.process_time() - between))
    rendering, whole = np.array(seconds).T
    rates = sizes / whole / 1e6
    return (
        f"{np.median(rates):.1f} MB/s, at best {rates.max():.1f}; "
        f"{100 * np.median(rendering / whole):.0f} % renders and masks; {lost} dropped"
    )


def loading(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the loader's rate for windows in random order, and the time to the first batch."""
    import numpy as np
    import torch

    from lib.tokens.batches import Position, SampleStream
    from lib.tokens.order import Division
    from lib.tokens.samples import Windows

    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 60_000, 200_000_000, dtype=np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        for length in (2048, 8192):
            windows = Windows(tokens, length)
            steps = 200
            chosen = np.random.default_rng(1).integers(0, len(windows), (steps, 16))
            take_s, _ = timed(lambda w=windows, c=chosen: [len(w.take(some)) for some in c])
            found.append(
                (
                    f"random windows of {length}",
                    f"{steps * 16 * length / take_s / 1e6:,.0f} M tokens/s",
                )
            )
            batches = SampleStream(windows, 0, Division(16, 1, 0, 1), torch.device("cpu")).steps(
                Position(), steps
            )
            first_s, _ = timed(lambda it=batches: next(it))
            rest_s, _ = timed(lambda it=batches: [None for _ in it])
            rate = (steps - 1) * 16 * length / rest_s / 1e6
            found.append(
                (
                    f"loader, windows of {length}",
                    f"{rate:,.0f} M tokens/s, first batch after {first_s * 1000:.1f} ms",
                )
            )
    return found


if __name__ == "__main__":
    main()
