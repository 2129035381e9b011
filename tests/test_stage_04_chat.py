# covers: 04_train_fsdp.py, lib/train/sources/corpora.py, lib/train/source.py, lib/tokens/chat/*.py
"""Train on conversations: losses of trained tokens, resumes, mixtures and refusals."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lib.core.declared import list_fields
from lib.optim.schedule import Schedule
from lib.tokens import mixture, packing, store
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import TOO_LONG, TRAIN_ON, ChatPolicy
from lib.tokens.dataset import open_dataset
from lib.tokens.encode import Encoder
from lib.tokens.samples import IGNORED, Samples, Windows
from lib.train.config import Config
from tests.conftest import run_stage
from tests.models.families import make_tiny_llama
from tests.tokens.chat import chats
from tests.training import metrics, read_log, save_model

STEPS = 8
BATCH = 4
LENGTH = 256
TRAIN = (
    "04_train_fsdp.py",
    "-m",
    "model",
    "-s",
    LENGTH,
    "--lr",
    "1e-2",
    "--precision",
    "fp32",
    "--log-freq",
    1,
    "--num-workers",
    2,
)
RUN = (
    *TRAIN,
    "-e",
    "run",
    "-d",
    "talks",
    "-b",
    2,
    "--grad-accum-steps",
    2,
    "--max-steps",
    STEPS,
    "--eval-freq",
    STEPS,
    "--ckpt-freq",
    STEPS // 2,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with a chat dataset, one of text, a model, and a run of one process."""
    import datasets

    root = tmp_path_factory.mktemp("chats")
    talks = [chats.make_conversation(seed) for seed in range(110)]
    chats.save_dataset(root / "hf_datasets/talks", train=talks[:90], validation=talks[90:])
    text = [" ".join(message["content"] for message in talk.messages) for talk in talks]
    datasets.Dataset.from_dict({"text": text}).save_to_disk(str(root / "hf_datasets/text"))
    chats.save_tokenizer(root / "model")
    save_model(
        root / "model",
        make_tiny_llama(vocab_size=320, max_position_embeddings=LENGTH, tie_word_embeddings=True),
    )
    run_stage(*RUN, cwd=root)
    return root


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that project, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "project"))


def samples_of(root: Path, dataset: str, way: str = "documents", split: str = "train") -> Samples:
    [directory] = (
        path for path in (root / ".cache/tokens").glob(f"{dataset}-*") if ".packs-" not in path.name
    )
    opened = store.open_store(directory)
    if way != "concat":
        return packing.prepare_packs(opened, LENGTH, way == "none")[split]
    store_split = opened.splits[split]
    return Windows(store_split.tokens, LENGTH, store_split.labels)


def one_by_one(model: torch.nn.Module, samples: Samples, numbers: np.ndarray) -> torch.Tensor:
    """Return the mean loss over the labels, with a forward pass for each document."""
    total = torch.zeros(())
    count = 0
    for number in numbers:
        rows = samples.read_samples(np.array([number]))
        inputs, labels = (torch.from_numpy(part.copy())[0] for part in rows[:2])
        begins = [0] if rows.positions is None else np.flatnonzero(rows.positions[0] == 0).tolist()
        last = len(inputs) if rows.lengths is None else int(rows.lengths[0])
        begins = [begin for begin in begins if begin < last]  # without the padding
        for begin, end in zip(begins, [*begins[1:], last], strict=True):
            if (labels[begin:end] != IGNORED).any():
                logits = model(inputs[None, begin:end], use_cache=False).logits[0]
                total = total + F.cross_entropy(
                    logits, labels[begin:end], ignore_index=IGNORED, reduction="sum"
                )
        count += int((labels != IGNORED).sum())
    return total / count


def reference(
    model_dir: Path, samples: Samples, steps: int, held_out: Samples | None = None
) -> tuple[list[float], float]:
    """Return the loss of each step of a plain training loop, and of the validation samples."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = Schedule("cosine", 1e-2, 1e-3, 0, steps)
    losses_of_steps = []
    for step in range(steps):
        loss = one_by_one(model, samples, samples.stream(step * BATCH, BATCH, seed=0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = schedule.lr(step)
        adamw.step()
        adamw.zero_grad()
        losses_of_steps.append(loss.item())
    with torch.no_grad():
        held = one_by_one(model, held_out, np.arange(len(held_out))).item() if held_out else 0.0
    return losses_of_steps, held


def losses(root: Path, run: str = "run") -> list[float]:
    return [row["train/loss"] for row in metrics(root, run)]


@pytest.mark.slow
def test_the_loss_equals_that_of_a_plain_loop_over_trained_tokens(trained: Path) -> None:
    held_out = samples_of(trained, "talks", split="validation")
    expected, held = reference(trained / "model", samples_of(trained, "talks"), STEPS, held_out)
    rows = metrics(trained, "run")
    assert losses(trained) == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0] - 0.5
    assert rows[-1]["eval/loss"] == pytest.approx(held, rel=1e-5)
    config = (trained / "outputs/run/config.yaml").read_text()
    assert "packing: documents" in config and "chat template" in config


def test_the_store_equals_the_result_of_one_encoder(trained: Path) -> None:
    """Two processes wrote the store."""
    dataset = open_dataset(trained / "hf_datasets/talks")
    encoder = ChatEncoder(
        ChatPolicy(chats.CHATML, "assistant", "drop", LENGTH), Encoder(trained / "model", 1)
    )
    encoded = encoder.encode([chat for chat, _ in chats.read_conversations(dataset, "train")])
    [path] = (
        path for path in (trained / ".cache/tokens").glob("talks-*") if "packs" not in path.name
    )
    split = store.open_store(path).splits["train"]
    assert np.array_equal(split.tokens, encoded.tokens)
    assert np.array_equal(split.labels[:], encoded.trained) and encoded.trained.any()


@pytest.mark.slow
def test_ranks_and_a_resume_do_not_change_the_losses(project: Path, trained: Path) -> None:
    shutil.rmtree(project / "outputs/run/checkpoints/step_00000008")
    done = run_stage(*RUN, cwd=project)
    assert "resumed from outputs/run/checkpoints/step_00000004" in done.stdout
    assert losses(project) == losses(trained)
    shards = [
        sorted((root / "outputs/run/checkpoints/step_00000008/dcp").glob("*.distcp"))
        for root in (project, trained)
    ]
    assert shards[0] and [one.read_bytes() for one in shards[0]] == [
        one.read_bytes() for one in shards[1]
    ]
    run_stage(
        *TRAIN,
        "-e",
        "two",
        "-d",
        "talks",
        "-b",
        2,
        "--max-steps",
        STEPS,
        "--eval-freq",
        STEPS,
        cwd=project,
        ranks=2,
    )
    assert losses(project, "two") == pytest.approx(losses(trained), rel=1e-5)
    assert metrics(project, "two")[-1]["eval/loss"] == pytest.approx(
        metrics(trained, "run")[-1]["eval/loss"], rel=1e-5
    )


@pytest.mark.slow
def test_options_that_decide_labels_are_part_of_a_run(project: Path) -> None:
    (project / "other.jinja").write_text("{# another one #}" + chats.CHATML)
    changes = (
        "--train-on",
        "last",
        "--too-long",
        "split",
        "--packing",
        "concat",
        "--chat-template",
        "other.jinja",
    )
    done = run_stage(*RUN, *changes, "--max-steps", 9, cwd=project, expect=2)
    assert "other settings" in done.stderr
    assert all(change in done.stderr for change in (*changes[:6:2], "chat template"))
    assert len(list((project / ".cache/tokens").iterdir())) == 2, "nothing was prepared for it"
    done = run_stage(
        *RUN, "--train-on", "last", "--max-steps", 9, "--resume-with-changes", cwd=project
    )
    assert "--resume-with-changes: --train-on" in done.stdout + done.stderr
    assert len(losses(project)) == 9


def read_remedy(printed: str) -> list[str]:
    """Return the words of the command that an error prints."""
    return shlex.split(printed.partition("  run:      ")[2].splitlines()[0])


@pytest.mark.slow
def test_a_run_keeps_the_chat_template_it_started_with(project: Path) -> None:
    """The model may lose its template; the command in the error keeps that of the run."""
    (project / "other.jinja").write_text("{# another one #}" + chats.CHATML)
    more = (*RUN, "--max-steps", 9)
    for changes in ((), ("--train-on", "last")):
        done = run_stage(*more, "--chat-template", "other.jinja", *changes, cwd=project, expect=2)
        script, *words = read_remedy(done.stderr)[1:]
        done = run_stage(Path(script).name, *words, "--dry-run", cwd=project)
        assert "other settings" not in done.stderr
    template = project / "model/chat_template.jinja"
    for becomes in (lambda: template.write_text("{# changed #}" + chats.CHATML), template.unlink):
        becomes()
        done = run_stage(*more, "--dry-run", cwd=project)
        assert "the run was started" in done.stdout
    done = run_stage(*more, cwd=project)
    assert "resumed from" in done.stdout and len(losses(project)) == 9
    done = run_stage(*more, "--overwrite", cwd=project, expect=2)  # which begins anew, without it
    assert "has no chat template" in done.stderr


@pytest.mark.parametrize(
    "way", ["concat", "documents", pytest.param("none", marks=pytest.mark.slow)]
)
def test_a_mixture_of_conversations_and_text(project: Path, way: str) -> None:
    run_stage(
        *TRAIN,
        "-e",
        "mixed",
        "-d",
        "talks=2",
        "-d",
        "text=1",
        "-b",
        BATCH,
        "--max-steps",
        4,
        "--packing",
        way,
        "--eval-freq",
        4,
        cwd=project,
    )
    assert " trained (" in read_log(project, "mixed")
    corpora = mixture.open_corpora(
        [f"{project}/hf_datasets/{name}={weight}" for name, weight in (("talks", 2), ("text", 1))]
    )
    samples = mixture.mix_samples(
        corpora, [samples_of(project, name, way) for name in ("talks", "text")]
    )
    held_out = samples_of(project, "talks", way, "validation")
    expected, held = reference(project / "model", samples, 4, held_out)
    assert losses(project, "mixed") == pytest.approx(expected, rel=1e-5)
    assert metrics(project, "mixed")[-1]["eval/loss"] == pytest.approx(held, rel=1e-5)
    numbers = samples.stream(0, 4 * BATCH, 0)
    labels, tokens = samples.token_counts(numbers)
    assert labels < tokens and metrics(project, "mixed")[-1]["train/tokens_seen"] == tokens


@pytest.mark.slow
def test_chat_options_need_a_chat_dataset(project: Path) -> None:
    choices = {field.name: field.metadata["more"].get("choices") for field in list_fields(Config)}
    assert (choices["train_on"], choices["too_long"]) == (TRAIN_ON, TOO_LONG)
    words = ("--train-on", "last", "--too-long", "split", "--chat-template", "other.jinja")
    done = run_stage(*TRAIN, "-e", "x", "-d", "text", *words, "--dry-run", cwd=project, expect=2)
    for name in words[::2]:
        assert f"{name} belongs to chat" in done.stderr
    done = run_stage(*TRAIN, "-e", "x", "-d", "text", "--dry-run", "--num-epochs", 1, cwd=project)
    assert "--packing" not in done.stdout
    plan = (*TRAIN, "-e", "x", "-d", "talks", "--dry-run")
    done = run_stage(*plan, cwd=project)
    assert "of them trained" in done.stdout and "(a chat dataset)" in done.stdout
    (project / "model/chat_template.jinja").unlink()
    done = run_stage(*plan, cwd=project, expect=2)
    assert "has no chat template" in done.stderr and "chat_templates/chatml.jinja" in done.stderr
    shutil.rmtree(project / ".cache")
    (project / "other.jinja").write_text(chats.CHATML)
    done = run_stage(*plan, "--chat-template", "other.jinja", cwd=project)
    assert "not prepared yet" in done.stdout and not (project / ".cache/tokens").exists()
