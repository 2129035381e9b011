"""Trains tokenizers on a dataset, copies and loads them, from local files alone.

The trained one is byte-level BPE, so any string survives a round trip. It puts
`<|begin_of_text|>` before each text; `<|end_of_text|>` is for whoever joins documents, and
`<|pad|>` fills the short texts of a batch when the model is used. Text that merely looks like one
of these is tokenised as text (`split_special_tokens`): a document cannot forge a boundary. One that
is trained on conversations also has the two tokens of ChatML and its template, and reads special
tokens in text as what they are: templates write them so.
"""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import artifacts, hashing, log, manifest, paths, records, units
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.models import training_text

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"  # not EOS: who masks the padding of a batch must not mask the ends of its texts
TURN = ("<|im_start|>", "<|im_end|>")  # around a turn, by chat_templates/chatml.jinja
SMALLEST_VOCABULARY = 256 + 2  # every byte, BOS and EOS
BYTE_VOCABULARY = SMALLEST_VOCABULARY + 1  # of a tokenizer that is not trained: PAD as well
SAMPLE_BYTES = 100_000_000  # more text hardly changes the merges; this much trains in a minute

_CONFIG = "tokenizer_config.json"

# Splits text into words before merging: contractions, words with the space before them, up to
# three digits, runs of punctuation, line ends, other space. As in Llama 3, to the last character:
# Ollama knows the expression, and llama.cpp has it under the name llama-bpe.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# What a tokenizer must survive: words, spaces, numbers, other alphabets, a character of four bytes.
_TRIP = (
    "The quick brown fox jumps over the lazy dog, 3 times.",
    "def f(x):\n    return x[0]\n",
    "naïve café, Größe",
    "Съешь же ещё этих булок",
    "漢字かな交じり文",
    "👩🏽‍🚀 ∑",
)


@dataclass
class Sample:
    """Says what a tokenizer was trained on. bytes_used, bytes_there: UTF-8 of the text column."""

    documents_used: int
    documents_there: int
    bytes_used: int
    bytes_there: int

    def __str__(self) -> str:
        if self.bytes_used >= self.bytes_there:
            return (
                f"all {units.count(self.documents_used)} documents "
                f"({units.size(self.bytes_used)} of text)"
            )
        return (
            f"{units.count(self.documents_used)} of {units.count(self.documents_there)} "
            f"documents, evenly spread ({units.size(self.bytes_used)} of "
            f"{units.size(self.bytes_there)} of text)"
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
) -> tuple[int, Sample]:
    """Train byte-level BPE on the train splits of some datasets and save it.

    Of no dataset it has a token for each byte, and no others. vocabulary: tokens, special ones
    included; what a small corpus cannot give is made up of names that no text is turned into.
    context: tokens, becomes `model_max_length`; None for no limit. limit: bytes of text to use at
    most. Returns the number of tokens that text can give, and what they were made from, after
    saying both in the log. The same text gives the same bytes.
    """
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # read once, when tokenizers is first used
    import pyarrow.compute
    from tokenizers.trainers import BpeTrainer

    tokenizer, alphabet = _make_untrained()
    found = training_text.read_texts(corpora) if corpora else None
    is_chat = found is not None and found.is_chat
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=_special_tokens(is_chat, vocabulary),
        initial_alphabet=sorted(alphabet),
    )
    sample = Sample(0, 0, 0, 0)
    if found:
        dataset = found.texts
        there = pyarrow.compute.sum(pyarrow.compute.binary_length(dataset.data.column("text")))
        sample = Sample(0, len(dataset), 0, there.as_py() or 0)
        with Progress(
            "text for the tokenizer", min(limit, sample.bytes_there), "B", show_progress
        ) as progress:
            tokenizer.train_from_iterator(_draw_batches(dataset, sample, limit, progress), trainer)
    else:
        tokenizer.train_from_iterator([], trainer)
    made = tokenizer.get_vocab_size()
    _add_bos(tokenizer)
    _save_filled(tokenizer, vocabulary, destination / "tokenizer.json")
    manifest.write_json(
        destination / _CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            **({"pad_token": PAD} if tokenizer.token_to_id(PAD) is not None else {}),
            **_make_limit(context),
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": not is_chat,
        },
    )
    if is_chat:
        shutil.copyfile(paths.CHAT_TEMPLATES / "chatml.jinja", destination / CHAT_TEMPLATE)
    log.info(
        f"tokenizer: {vocabulary:,} tokens from {sample}"
        if corpora
        else "tokenizer: a token for each byte, since there is no dataset to train one on"
    )
    if made < vocabulary and corpora:
        log.warn(
            f"{', '.join(map(str, corpora))} {'holds' if len(corpora) == 1 else 'hold'} too little "
            f"text for {vocabulary:,} tokens: text gives {made:,} of them, the others stay unused"
        )
    return made, sample


def copy_tokenizer(source: Path, context: int | None, destination: Path) -> None:
    """Copy the tokenizer files of a directory; `model_max_length` becomes the context, if any."""
    for path in _find_files(source):
        shutil.copyfile(path, destination / path.name)
    config = destination / _CONFIG
    content = records.read_json(config) if config.exists() else {}
    manifest.write_json(config, {**content, **_make_limit(context)})


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory, running no code of it; UsageError when it cannot be."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a file made elsewhere provokes in there
        said = "\n".join(str(error).strip().splitlines()[:3]) or type(error).__name__
        if "trust_remote_code" in said:
            said = "it needs code of its own, which is not run"
        raise UsageError(
            f"the tokenizer in {directory} does not load",
            found=said,
            expected="tokenizer.json, or the files of a tokenizer that transformers knows",
        ) from None


def _make_limit(context: int | None) -> dict[str, int]:
    return {"model_max_length": context} if context else {}


def find_losses(tokenizer: PreTrainedTokenizerBase, directory: Path) -> list[str]:
    """Return texts that come back from encoding and decoding changed, as `text → what came back`.

    A tokenizer that normalises, or lacks characters, changes some by nature. One that gives back
    what was not there is broken: UsageError.
    """
    changed = []
    for text in _TRIP:
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            back = tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except Exception as error:  # each kind of tokenizer fails in a way of its own
            ids = []
            back = repr(error)
        if tokenizer.unk_token_id not in ids and not _is_part(_reduce(back), _reduce(text)):
            raise UsageError(
                f"the tokenizer in {directory} does not give back what it was given",
                expected=text,
                found=back,
            )
        if back != text:
            changed.append(f"{text!r} → {back!r}")
    return changed


def _reduce(text: str) -> str:
    """Return a text without what tokenizers may normalise: case, accents, space."""
    return "".join(
        char
        for char in unicodedata.normalize("NFKD", text.casefold())
        if not char.isspace() and not unicodedata.combining(char)
    )


def _is_part(short: str, long: str) -> bool:
    """Tell whether the characters of a text stand in another, in the same order."""
    characters = iter(long)
    return all(char in characters for char in short)


def fingerprint_tokenizer(source: Path) -> str:
    """Return a fingerprint of a directory's tokenizer files; UsageError when there are none."""
    return hashing.fingerprint(
        {path.name: hashing.file_digest(path, "sha256") for path in _find_files(source)}
    )


def _find_files(source: Path) -> list[Path]:
    files = artifacts.list_tokenizer_files(source)
    if not files:
        there = sorted(path.name for path in source.iterdir())[:10] if source.is_dir() else []
        raise UsageError(
            f"{source} holds no tokenizer",
            expected="tokenizer.json",
            found=(", ".join(there) or "an empty directory")
            if source.is_dir()
            else "no such directory",
        )
    return files


def _draw_batches(
    dataset: Dataset, sample: Sample, limit: int, progress: Progress
) -> Iterator[list[str]]:
    """Yield documents evenly spread over the dataset, `limit` bytes of them at most."""
    share = min(1.0, limit / max(sample.bytes_there, 1))
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
            texts.append(encoded.decode(errors="ignore"))  # a cut may fall inside a character
            if sample.bytes_used >= limit:
                break
        yield texts
        if sample.bytes_used >= limit:
            return


def _special_tokens(is_chat: bool, vocabulary: int) -> list[str]:
    """Return the special tokens, for which and every byte a vocabulary must have room.

    The smallest vocabulary has no room for PAD.
    """
    if is_chat and vocabulary < SMALLEST_VOCABULARY + len(TURN):
        raise UsageError(
            f"{vocabulary} tokens are too few for a tokenizer of conversations",
            expected=f"{SMALLEST_VOCABULARY + len(TURN)} or more: every byte and four "
            "special tokens",
        )
    needed = [BOS, EOS, *(TURN if is_chat else ())]
    return [*needed, PAD] if vocabulary > 256 + len(needed) else needed


def _make_untrained() -> tuple[Tokenizer, list[str]]:
    """Return a byte-level BPE without merges, and the 256 characters that stand for bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    to_bytes: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet()


def _save_filled(tokenizer: Tokenizer, vocabulary: int, path: Path) -> None:
    """Write tokenizer.json with as many tokens as asked for; no merge leads to those added."""
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
