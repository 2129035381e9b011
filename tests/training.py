"""Make a small corpus and a tiny model with weights, and read the files of a run."""

from __future__ import annotations

import functools
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from lib.checkpoints import commit
from lib.core import paths
from tests.forks import Launch
from tests.models.families import make_tiny_llama

VOCABULARY = 512
SEQ_LENGTH = 32
# Options of stage 04 for the corpus and the model of `prepare_project`; tests add their own.
SMALL_RUN = (
    *("-d", "corpus", "-m", "model", "-s", SEQ_LENGTH),
    *("--precision", "fp32", "--log-freq", 1, "--eval-batches", 4),
)


def write_corpus(folder: Path, documents: int = 60) -> None:
    """Write text files of random sentences; each call writes the same ones."""
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ru", "se") for b in ("", "n", "ta", "vi", "x")]
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for i in range(documents):
        lines = [" ".join(rng.choices(words, k=rng.randint(3, 12))) + "." for _ in range(30)]
        (folder / f"document_{i:03d}.txt").write_text("\n".join(lines) + "\n")


def save_tokenizer(directory: Path, corpus: Path, vocabulary: int = VOCABULARY) -> None:
    """Train and save a byte-level tokenizer with BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text() for path in sorted(corpus.rglob("*.txt"))]
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def save_model(
    directory: Path, config: PretrainedConfig | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Save a model with random weights (by default, a Llama with tied embeddings)."""
    config = config or make_tiny_llama(vocab_size=VOCABULARY, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(dtype).save_pretrained(directory)


def metrics(root: Path, experiment: str) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    text = (root / "outputs" / experiment / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_log(root: Path, experiment: str) -> str:
    """Return the log of rank 0 of all launches of a run."""
    return (root / "outputs" / experiment / "logs" / "rank_00000.log").read_text()


def losses(root: Path, experiment: str) -> dict[int, float]:
    """Return the training loss of each logged step."""
    return {row["step"]: row["train/loss"] for row in metrics(root, experiment)}


def read_events(root: Path, *names: str, experiment: str = "run") -> list[dict[str, Any]]:
    """Return the events with one of these names, or all; none without events.jsonl."""
    path = root / "outputs" / experiment / "events.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [row for row in rows if not names or row["event"] in names]


def list_saved_steps(root: Path, experiment: str) -> list[int]:
    """Return the steps of the checkpoints that have their final names, oldest first."""
    folder = root / "outputs" / experiment / "checkpoints"
    steps = (paths.step_of(path.name) for path in folder.glob("step_*"))
    return sorted(step for step in steps if step is not None)


def wait_for_save(launch: Launch, root: Path, experiment: str, rows: int = 0) -> None:
    """Wait until a run has a complete checkpoint and has logged at least `rows` steps.

    A logged step does not mean that its checkpoint is complete: it is written in the background.
    """
    run = paths.Experiment(root / "outputs", experiment)
    deadline = time.monotonic() + 300
    while not (
        commit.find_newest(run.checkpoints)
        and run.metrics.exists()
        and len(run.metrics.read_text().splitlines()) >= rows
    ):
        assert not launch.poll(0.005) and time.monotonic() < deadline


def read_dataset_files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file except the manifest, which contains the time."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def load_dataset(path: Path) -> Any:
    """Return a dataset as the library `datasets` reads it."""
    import datasets

    return datasets.load_from_disk(str(path))


def train_model(root: Path, name: str, *options: object, **settings: Any) -> str:
    """Run stage 04 for an experiment and return its output. settings: see `run_stage`."""
    from tests.conftest import run_stage

    result = run_stage("04_train_fsdp.py", "-e", name, *options, cwd=root, **settings)
    return result.stdout + result.stderr


def assert_refused(root: Path, *arguments: object, code: int, says: str, **settings: Any) -> None:
    """Assert that stage 04 ends with a code and a message, and without a traceback."""
    from tests.conftest import run_stage

    result = run_stage("04_train_fsdp.py", *arguments, cwd=root, expect=code, **settings)
    assert says in result.stderr, result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def plan_one_batch(rank: int) -> None:
    """Let a plan trace only one batch size. A fork calls this function first."""
    from lib.planning import memory

    memory._BATCH_FACTORS = (1,)


def wait_for_estimates(rank: int) -> None:
    """Let a run wait long for its memory estimate. A fork calls this function first."""
    from lib.planning import memory

    memory._PATIENCE_S = 600


def roll_back_early(rank: int) -> None:
    """Let a run roll back after 3 bad steps. A fork calls this function first."""
    from lib.train.output.report import Report

    Report.rollback_after = 3


def offer_little_memory(rank: int) -> None:
    """Let this process find 1 KiB of free memory. A fork calls this function first."""
    from lib.planning import capacity

    capacity.count_free = lambda device: 1 << 10
    capacity.count_total = lambda device: 1 << 10


def note_graphs(rank: int) -> None:
    """Let torch.compile generate no code, and add a line to graphs.txt for each of its graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with Path("graphs.txt").open("a") as file:
            file.write(f"{len(inputs)} inputs\n")
        return aot_eager(graph, inputs)

    torch.compile = functools.partial(torch.compile, backend=note)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Make this process a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project directory with raw_text/, hf_datasets/corpus and model/."""
    return prepare_project(tmp_path_factory.mktemp("prepared"))


def prepare_project(root: Path) -> Path:
    """Make raw_text/, hf_datasets/corpus and model/ in a directory, and return it."""
    from tests.conftest import run_stage

    write_corpus(root / "raw_text")
    run_stage("01_organize_data.py", "--src_dir", "raw_text", "--num_dirs", 3, cwd=root)
    run_stage(
        "02_build_hf_dataset.py", "--data_folder", "splits", "--validation-percent", 5, cwd=root
    )
    save_tokenizer(root / "model", root / "raw_text")
    save_model(root / "model")
    return root


@pytest.fixture
def project(prepared_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the prepared project that a test may change."""
    shutil.copytree(prepared_once, tmp_path, dirs_exist_ok=True)
    return tmp_path
