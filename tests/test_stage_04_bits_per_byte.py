# covers: lib/train/output/bits_per_byte.py, lib/tokens/text_bytes.py
"""Bits per byte by source, compared with a plain loop over the validated documents."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lib.core import manifest
from lib.tokens import store
from tests.conftest import run_stage
from tests.models.families import make_tiny_llama
from tests.training import VOCABULARY, metrics, save_model, save_tokenizer

pytestmark = pytest.mark.slow

GLOBAL_BATCH = 6
SEQ_LENGTH = 48


def write_sources(folder: Path) -> None:
    """Write documents of three sources: two directories, and numbered files beside them."""
    rng = random.Random(1)
    words = ["kalo", "mira", "sevi", "naïve", "日本", "übergröße", "x = 1", "🙂"]
    for name, count in (("books/a", 60), ("code", 60), ("", 60)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picked = words[:3] if name else words
            text = " ".join(rng.choices(picked, k=rng.randint(2, 60)))
            (folder / name / f"notes_{i:03d}.txt").write_text(text + "\n")


def save_tokenizer_with_bos(directory: Path, corpus: Path) -> None:
    """Save a byte-level tokenizer that puts a BOS before each text."""
    save_tokenizer(directory, corpus)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(path)


def save_fallback_tokenizer(directory: Path, corpus: Path) -> None:
    """Save a tokenizer of pieces with bytes as a fallback, and an EOS but no BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 256,
        limit_alphabet=40,
        special_tokens=["<unk>", "</s>"],
        show_progress=False,
    )
    texts = [path.read_text() for path in sorted(corpus.rglob("*.txt"))]
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="</s>"
    ).save_pretrained(directory)


@pytest.fixture(scope="module", params=["byte-level", "pieces"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose dataset has three sources, with one of two tokenizers."""
    root = tmp_path_factory.mktemp(request.param)
    write_sources(root / "raw_text")
    run_stage("01_organize_data.py", "--src_dir", "raw_text", "--num_dirs", 2, cwd=root)
    run_stage(
        *("02_build_hf_dataset.py", "--data_folder", "splits", "--validation-percent", 30),
        "--keep-source",
        cwd=root,
    )
    save = save_tokenizer_with_bos if request.param == "byte-level" else save_fallback_tokenizer
    save(root / "model", root / "raw_text")
    save_model(root / "model", make_tiny_llama(vocab_size=VOCABULARY))
    return root


def train_one_step(root: Path, name: str, *options: object, ranks: int = 1) -> dict[str, float]:
    """Train one step that changes no weight, and return the last row of the run."""
    run_stage(
        "04_train_fsdp.py",
        *("-e", name, "-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "--max-steps", 1),
        *("--lr", 0, "--precision", "fp32", "--global-batch-size", GLOBAL_BATCH),
        *options,
        cwd=root,
        ranks=ranks,
    )
    return metrics(root, name)[-1]


def loop_over_documents(root: Path, packing: str, batches: int) -> dict[str, float]:
    """Return bits per byte by source, computed without lib/."""
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    model = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    documents = []
    for row in load_from_disk(str(root / "hf_datasets" / "corpus"))["validation"]:
        ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        name = row["source"].split("/")[0] if "/" in row["source"] else "notes"
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        documents.append((name, bos, ids, row["text"]))
    stream = [
        (number, i, token)
        for number, (_, bos, ids, _) in enumerate(documents)
        for i, token in enumerate([*bos, *ids, tokenizer.eos_token_id], -len(bos))
    ]
    if packing == "concat":
        most = min(batches * GLOBAL_BATCH, (len(stream) - 1) // SEQ_LENGTH)
        samples = [stream[i * SEQ_LENGTH : (i + 1) * SEQ_LENGTH + 1] for i in range(most)]
    else:
        by_document = defaultdict(list)
        for entry in stream:
            by_document[entry[0]].append(entry)
        samples = [
            entries[first : first + SEQ_LENGTH + 1]
            for entries in by_document.values()
            for first in range(0, len(entries), SEQ_LENGTH)
        ]
    nats: dict[str, float] = defaultdict(float)
    labelled: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if len(sample) < 2:
            continue
        tokens = torch.tensor([token for _, _, token in sample])
        with torch.no_grad():
            scores = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
        for place, (number, i, token) in enumerate(sample[1:]):
            name, _, ids, _ = documents[number]
            if 0 <= i < len(ids):
                nats[name] -= scores[place, token].item()
                labelled[number].append(i)
    sizes: dict[str, int] = defaultdict(int)
    for number, places in labelled.items():
        name, _, ids, text = documents[number]
        ends = [len(tokenizer.decode(ids[:n]).encode()) for n in (min(places), max(places) + 1)]
        is_whole = max(places) + 1 == len(ids)
        assert not is_whole or ends[1] == len(text.encode())
        sizes[name] += ends[1] - ends[0]
    bits = {f"eval/{name}/bits_per_byte": nats[name] / math.log(2) / sizes[name] for name in nats}
    bits["eval/bits_per_byte"] = sum(nats.values()) / math.log(2) / sum(sizes.values())
    return bits


@pytest.mark.parametrize(("packing", "batches"), [("concat", 5), ("documents", 100)])
def test_bits_per_byte_equal_those_of_a_plain_loop_for_1_2_and_3_ranks(
    prepared: Path, packing: str, batches: int
) -> None:
    """With documents, the evaluation covers all packs; else it ends within a document."""
    expected = loop_over_documents(prepared, packing, batches)
    assert len(expected) == 4
    for ranks, batch in ((1, 6), (2, 1), (3, 2)):
        name = f"{packing}-{ranks}"
        options = ("--packing", packing, "-b", batch)
        row = train_one_step(prepared, name, *options, "--eval-batches", batches, ranks=ranks)
        figures = {key: row[key] for key in row if key.endswith("bits_per_byte")}
        assert figures == pytest.approx(expected, rel=1e-5)


def test_a_store_without_bytes_stays_as_it_is(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    result = run_stage(
        "04_train_fsdp.py",
        *("-e", "new", "-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "--prepare-only"),
        cwd=tmp_path,
    )
    [directory] = (tmp_path / ".cache" / "tokens").glob("corpus-????????????")
    content = manifest.read_manifest(directory, store.KIND, "the store")
    assert content["summary"]["text_bytes"] == {"sources": ["books", "code", "notes"]}
    del content["summary"]["text_bytes"]
    content["files"] = [
        entry
        for entry in content["files"]
        if not entry["path"].endswith(("bytes.bin", "sources.bin"))
    ]
    (directory / "validation.bytes.bin").unlink()
    (directory / "validation.sources.bin").unlink()
    manifest.write_json(directory / "manifest.json", content)
    row = train_one_step(tmp_path, "old")
    assert "eval/loss" in row and not any("bits_per_byte" in key for key in row)
    assert not (directory / "validation.bytes.bin").exists()
    result = run_stage(
        "04_train_fsdp.py",
        *("-e", "other", "-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "--prepare-only"),
        cwd=tmp_path,
    )
    assert (result.stdout + result.stderr).count("no bits per byte") == 1


def test_a_mixture_reports_its_datasets(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "raw_text" / "code", tmp_path / "second")
    run_stage(
        *("02_build_hf_dataset.py", "--data_folder", "second", "--validation-percent", 40),
        *("--save-dir", "hf_datasets/code"),
        cwd=tmp_path,
    )
    row = train_one_step(tmp_path, "mixture", "-d", "code", "-b", 6)
    figures = {key for key in row if "bits_per_byte" in key}
    assert figures == {f"eval/{name}bits_per_byte" for name in ("", "corpus/", "code/")}
    low, high = sorted(row[f"eval/{name}/bits_per_byte"] for name in ("corpus", "code"))
    assert low < row["eval/bits_per_byte"] < high
