"""Write the token store of a chat dataset: its splits, errors, template and summary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import hashing, log, manifest, units
from lib.core.progress import Progress
from lib.tokens import columns
from lib.tokens.chat import checks, processes
from lib.tokens.chat.outcome import ChatCounts
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.chat.writer import ChatWriter
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.split_writer import Written
from lib.tokens.store import ERRORS, TEMPLATE

_EXAMPLES = 2
_BYTES_PER_PROCESS = 32 << 20  # of conversations


def write_splits(
    directory: Path,
    dataset: Dataset,
    encoder: Encoder,
    dtype: str,
    policy: ChatPolicy,
    num_workers: int,
    bar: Progress,
) -> Written:
    """Write the splits of a chat dataset. Raise UsageError if they cannot be trained on."""
    counts: dict[str, dict[str, int]] = {}
    chats: dict[str, ChatCounts] = {}
    files: list[dict[str, Any]] = []
    # A process takes seconds to start. In that time the others prepare about this many bytes.
    count = min(num_workers, 1 + dataset.total_bytes() // _BYTES_PER_PROCESS)
    with processes.start_workers(count, encoder.directory, policy, dataset.some_chats()) as workers:
        for name in dataset.splits:
            writer = ChatWriter(directory, name, dtype, dataset)
            writer.run(workers, bar)
            dataset.require_same()
            files += writer.close()[:-1]  # all but the errors, which are joined below
            counts[name] = writer.manifest_counts()
            chats[name] = writer.chats
            if name == "train":
                checks.require_trainable(
                    writer.chats,
                    policy,
                    dataset.path,
                    _render_examples(directory, name, dtype, encoder),
                )
    _join_errors(directory / ERRORS, list(dataset.splits))
    (directory / TEMPLATE).write_text(policy.template, encoding="utf-8")
    files += [
        manifest.file_entry(directory, directory / name, hashing.FAST)
        for name in (ERRORS, TEMPLATE)
    ]
    return Written(counts, files, _summarise(chats, policy, encoder))


def estimate_tokens(dataset: Dataset, tokenizer_dir: Path, policy: ChatPolicy) -> int:
    """Estimate the tokens of the training split from a sample of its conversations.

    Raises UsageError if the template can render none of them.
    """
    sample = dataset.some_chats()
    if sample is None:
        return 0
    with processes.start_workers(1, tokenizer_dir, policy, None) as workers:
        [(samples, _)] = processes.encode_rows(workers, iter([sample]))
    chats = samples.counts
    if not chats.samples and "too long" not in chats.dropped:
        checks.require_samples(chats, dataset.path)
    if causes := chats.describe_causes():
        log.info(
            f"  {chats.dropped.total()} of {chats.conversations} conversations sampled from "
            f"{dataset.path} would be dropped: {causes}"
        )
    size = dataset.extent()[1]
    return round(size * chats.tokens / max(1, columns.count_content_bytes(sample)))


def _join_errors(path: Path, splits: list[str]) -> None:
    """Concatenate the error files of all splits."""
    with path.open("wb") as file:
        for name in splits:
            part = path.with_name(f"{name}.{ERRORS}")
            with part.open("rb") as errors:
                shutil.copyfileobj(errors, file)


def _summarise(
    chats: dict[str, ChatCounts], policy: ChatPolicy, encoder: Encoder
) -> dict[str, Any]:
    stops = sorted({token for counts in chats.values() for token in counts.stops})
    words = encoder.tokenizer.convert_ids_to_tokens(stops)
    return {
        "train_on": policy.train_on,
        "too_long": policy.too_long,
        "seq_length": policy.longest,
        "stop_tokens": {str(token): str(word) for token, word in zip(stops, words, strict=True)},
        "splits": {name: counts.to_record() for name, counts in chats.items()},
    }


def _render_examples(directory: Path, name: str, dtype: str, encoder: Encoder) -> list[str]:
    """Return the first samples of a split as readable text."""
    ends = np.fromfile(directory / f"{name}.ends.bin", "<i8", _EXAMPLES).tolist()
    if not ends:
        return []
    tokens = np.fromfile(
        directory / f"{name}.tokens.bin", np.dtype(dtype).newbyteorder("<"), ends[-1]
    )
    bits = np.fromfile(directory / f"{name}.labels.bin", np.uint8, units.ceil_div(ends[-1], 8))
    trained = np.unpackbits(bits, bitorder="little").astype(bool)
    return [
        checks.render_sample(encoder.tokenizer, tokens[begin:end], trained[begin:end])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
