"""Train a tokenizer on datasets, or copy and load one, from local files.

A trained tokenizer is a byte-level BPE, so it decodes any string unchanged. It adds
`<|begin_of_text|>` before each text. `<|end_of_text|>` separates documents, and `<|pad|>` pads
batches at inference. Text that looks like a special token is encoded as text
(`split_special_tokens`), so a document cannot forge a boundary. A tokenizer that is trained on
conversations also has the two tokens of ChatML and its template. Such a tokenizer does recognise
special tokens in text, because templates write them as text. With `kind` PIECES, the tokenizer has
the form of SentencePiece instead; see piece_tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import artifacts, hashing, log, manifest, paths, placeholders, records, units
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.models import piece_tokenizer, training_text
from lib.models.directory import CONFIG

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"  # not EOS, because masking the padding must not mask the ends of documents
TURN = ("<|im_start|>", "<|im_end|>")  # start and end of a turn in chat_templates/chatml.jinja
SMALLEST_VOCABULARY = 256 + 2  # all bytes, BOS and EOS
BYTE_VOCABULARY = SMALLEST_VOCABULARY + 1  # of an untrained tokenizer: also PAD
BYTE_LEVEL = "byte-level"
PIECES = "sentencepiece"
KINDS = (BYTE_LEVEL, PIECES)
SAMPLE_BYTES = 100_000_000  # more text hardly changes the merges; training takes about a minute
_SAMPLE_BYTES_PER_TOKEN = 10_000  # so that a small vocabulary takes a tenth of the time

_CONFIG = "tokenizer_config.json"
# For programs that read tokenizer.model: no space is added before a text.
_PIECES_SETTINGS = {
    "unk_token": piece_tokenizer.UNKNOWN,
    "add_bos_token": True,
    "add_prefix_space": False,
}

# Splits text into words before merging: contractions, words with the preceding space, up to three
# digits, punctuation, line ends, other space. It equals Llama 3's expression in every character,
# because Ollama recognises it, and llama.cpp has it under the name llama-bpe.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Texts that are encoded and decoded for a check: words, spaces, numbers, alphabets, emoji.
_ROUND_TRIP_TEXTS = (
    "The quick brown fox jumps over the lazy dog, 3 times.",
    "def f(x):\n    return x[0]\n",
    "naïve café, Größe",
    "Съешь же ещё этих булок",
    "漢字かな交じり文",
    "👩🏽‍🚀 ∑",
)


@dataclass
class Sample:
    """Counts the documents and UTF-8 bytes that a tokenizer was trained on, and all there were."""

    documents_used: int
    documents_total: int
    bytes_used: int
    bytes_total: int

    def __str__(self) -> str:
        if self.bytes_used >= self.bytes_total:
            return (
                f"all {units.count(self.documents_used)} documents "
                f"({units.size(self.bytes_used)} of text)"
            )
        return (
            f"{units.count(self.documents_used)} of {units.count(self.documents_total)} "
            f"documents, evenly spread ({units.size(self.bytes_used)} of "
            f"{units.size(self.bytes_total)} of text)"
        )


def train_tokenizer(
    corpora: Sequence[Path],
    vocabulary: int,
    context: int | None,
    destination: Path,
    *,
    workers: int,
    show_progress: bool,
    limit: int = SAMPLE_BYTES,
    kind: str = BYTE_LEVEL,
) -> tuple[int, Sample]:
    """Train a tokenizer on the train splits of datasets, save it and log a summary.

    Without a dataset, the tokenizer has only the tokens for bytes and special tokens. vocabulary:
    number of tokens, including special ones; if there is too little text, unused tokens fill it.
    context: tokens, written as `model_max_length`; None for no limit. limit: maximum bytes of text.
    kind: one of KINDS. Returns the number of tokens without unused ones, and the sample. The same
    text results in identical files.
    """
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # read once, when tokenizers is first used
    training = training_text.read_texts(corpora) if corpora else None
    is_chat = training is not None and training.is_chat
    special = _list_special_tokens(is_chat, vocabulary, kind)
    sample = Sample(0, 0, 0, 0)
    texts: Iterable[list[str]] = []
    with ExitStack() as stack:
        if training:
            dataset = training.texts
            sample = Sample(0, len(dataset), 0, _count_text_bytes(dataset))
            limit = min(limit, _SAMPLE_BYTES_PER_TOKEN * vocabulary)
            total = min(limit, sample.bytes_total)
            progress = stack.enter_context(
                Progress("text for the tokenizer", total, "B", show_progress)
            )
            texts = _draw_batches(dataset, sample, limit, progress)
        train = _train_pieces if kind == PIECES else _train_byte_level
        used_tokens = train(texts, vocabulary, special, destination)
    manifest.write_json(
        destination / _CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            **({"pad_token": PAD} if PAD in special else {}),
            **(_PIECES_SETTINGS if kind == PIECES else {}),
            **_limit_entry(context),
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": not is_chat,
        },
    )
    if is_chat:
        shutil.copyfile(paths.CHAT_TEMPLATES / "chatml.jinja", destination / CHAT_TEMPLATE)
    log.detail(
        f"tokenizer: {vocabulary:,} tokens from {sample}"
        if corpora
        else "tokenizer: one token per byte, because there is no dataset to train one on"
    )
    if used_tokens < vocabulary and corpora:
        log.warn(
            f"too little text for {vocabulary:,} tokens in {', '.join(map(str, corpora))}: it "
            f"results in {used_tokens:,} tokens, and the others stay unused"
        )
    return used_tokens, sample


def describe_readers(directory: Path, tokens: Mapping[str, int]) -> str:
    """Return which program will not know a byte-level tokenizer that was trained here, else "".

    tokens: the ID of each token.
    """
    is_ours = tokens.get(BOS) == 0 and PAD in tokens
    if not is_ours or (directory / piece_tokenizer.MODEL_FILE).exists():
        return ""
    return (
        "the converter of llama.cpp will not know this tokenizer (Ollama, vLLM, SGLang, mlx-lm and "
        f"CTranslate2 do); stage 03 with --tokenizer-kind {PIECES} trains one that it knows"
    )


def copy_tokenizer(source: Path, context: int | None, destination: Path) -> None:
    """Copy the files of a tokenizer, and set `model_max_length` to `context` unless it is None."""
    for path in _find_files(source):
        shutil.copyfile(path, destination / path.name)
    config = destination / _CONFIG
    content = records.read_json(config) if config.exists() else {}
    manifest.write_json(config, {**content, **_limit_entry(context)})


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory without running its code.

    Raises UsageError if it does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # files from elsewhere cause many kinds of errors in transformers
        reason = "\n".join(str(error).strip().splitlines()[:3]) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it needs its own code, which is not run"
        raise UsageError(
            f"the tokenizer in {directory} does not load",
            found=reason,
            expected="tokenizer.json, or the files of a tokenizer that transformers supports",
        ) from None


def _limit_entry(context: int | None) -> dict[str, int]:
    return {"model_max_length": context} if context else {}


def find_losses(tokenizer: PreTrainedTokenizerBase, directory: Path) -> list[str]:
    """Return the test texts that encoding and decoding change, as `text → decoded text`.

    Tokenizers that normalise text or lack characters change some of them. Raises UsageError if
    decoding adds characters, which only a broken tokenizer does.
    """
    changed = []
    for text in _ROUND_TRIP_TEXTS:
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            decoded = tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except Exception as error:  # each kind of tokenizer raises other errors
            ids = []
            decoded = repr(error)
        if tokenizer.unk_token_id not in ids and not _is_part(
            _normalize_text(decoded), _normalize_text(text)
        ):
            raise UsageError(
                f"the tokenizer in {directory} decodes its own tokens to another text",
                expected=text,
                found=decoded,
            )
        if decoded != text:
            changed.append(f"{text!r} → {decoded!r}")
    return changed


def _normalize_text(text: str) -> str:
    """Return a text without case, accents and whitespace, which tokenizers may change."""
    return "".join(
        char
        for char in unicodedata.normalize("NFKD", text.casefold())
        if not char.isspace() and not unicodedata.combining(char)
    )


def _is_part(short: str, long: str) -> bool:
    """Return whether `long` contains all characters of `short` in the same order."""
    characters = iter(long)
    return all(char in characters for char in short)


def fingerprint_tokenizer(source: Path) -> str:
    """Return a fingerprint of the tokenizer files in a directory.

    Raises UsageError if there are none.
    """
    return hashing.fingerprint(
        {path.name: hashing.file_digest(path, "sha256") for path in _find_files(source)}
    )


def _find_files(source: Path) -> list[Path]:
    files = artifacts.list_tokenizer_files(source)
    if not files:
        present = sorted(path.name for path in source.iterdir())[:10] if source.is_dir() else []
        raise UsageError(
            f"{source} contains no tokenizer",
            expected="tokenizer.json",
            found=(", ".join(present) or "an empty directory")
            if source.is_dir()
            else "no such directory",
        )
    placeholders.require_data([*files, source / CONFIG], str(source))
    return files


def _draw_batches(
    dataset: Dataset, sample: Sample, limit: int, progress: Progress
) -> Iterator[list[str]]:
    """Yield batches of documents, evenly spread over the dataset, with `limit` bytes at most."""
    share = min(1.0, limit / max(sample.bytes_total, 1))
    chosen = max(1, int(len(dataset) * share))
    step = 256
    for start in range(0, chosen, step):
        rows = [i * len(dataset) // chosen for i in range(start, min(start + step, chosen))]
        texts: list[str] = []
        for text in dataset[rows]["text"]:
            encoded = (text or "").encode()[: limit - sample.bytes_used]
            sample.bytes_used += len(encoded)
            sample.documents_used += 1
            progress.advance(len(encoded))
            texts.append(encoded.decode(errors="ignore"))  # the limit may cut a character in two
            if sample.bytes_used >= limit:
                break
        yield texts
        if sample.bytes_used >= limit:
            return


def _list_special_tokens(is_chat: bool, vocabulary: int, kind: str) -> list[str]:
    """Return the special tokens. The smallest vocabulary has no room for PAD.

    Raises UsageError if the vocabulary is too small.
    """
    needed = [BOS, EOS, *(TURN if is_chat else ())]
    smallest = 256 + len(needed)
    if kind == PIECES:
        smallest += len((PAD, piece_tokenizer.UNKNOWN, piece_tokenizer.SPACE))
    if vocabulary < smallest:
        of_what = "of conversations" if is_chat else f"of kind {kind}"
        raise UsageError(
            f"{vocabulary} tokens are too few for a tokenizer {of_what}",
            expected=f"{smallest} or more: every byte and {smallest - 256} other tokens",
        )
    return [*needed, PAD] if vocabulary > 256 + len(needed) else needed


def _count_text_bytes(dataset: Dataset) -> int:
    """Return the UTF-8 bytes of the texts of a dataset."""
    import pyarrow.compute

    lengths = pyarrow.compute.binary_length(dataset.data.column("text"))
    return pyarrow.compute.sum(lengths).as_py() or 0


def _train_byte_level(
    texts: Iterable[list[str]], vocabulary: int, special: Sequence[str], destination: Path
) -> int:
    """Train a byte-level BPE, write tokenizer.json, and return the number of used tokens."""
    from tokenizers.trainers import BpeTrainer

    tokenizer, alphabet = _build_untrained()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
    )
    tokenizer.train_from_iterator(texts, trainer)
    used_tokens = tokenizer.get_vocab_size()
    _add_bos(tokenizer)
    _save_filled(tokenizer, vocabulary, destination / "tokenizer.json")
    return used_tokens


def _train_pieces(
    texts: Iterable[list[str]], vocabulary: int, special: Sequence[str], destination: Path
) -> int:
    """Train a tokenizer in the form of SentencePiece, write it, and return the used tokens."""
    pieces = piece_tokenizer.train_pieces(texts, vocabulary, special)
    piece_tokenizer.write_tokenizer(pieces, special, vocabulary, destination)
    return len(pieces)


def _build_untrained() -> tuple[Tokenizer, list[str]]:
    """Return a byte-level BPE without merges, and the 256 characters that represent bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    to_bytes: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet()


def _save_filled(tokenizer: Tokenizer, vocabulary: int, path: Path) -> None:
    """Write tokenizer.json, with unused tokens up to the size of the vocabulary."""
    content = json.loads(tokenizer.to_str(pretty=True))
    tokens = content["model"]["vocab"]
    tokens |= {f"<|unused_{i}|>": i for i in range(len(tokens), vocabulary)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _add_bos(tokenizer: Tokenizer) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS}:1 $B:1",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
