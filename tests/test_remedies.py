# covers: lib/core/commands.py, lib/core/errors.py
"""Remedies: the `run:` lines that the code prints are typed here, and cure.

A situation is made, a command is typed in it, and what its error says after `run:` is run as it
stands: rm and mv by a shell, scripts of this project in this process, which saves their imports
(test_a_shell_runs_the_printed_commands runs some in a real one). Then the first command must work.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
from fsspec.registry import _registry as file_systems
from torch._dynamo.exc import TorchDynamoException
from transformers import AutoModelForCausalLM

from launch.cloud.checkpoints import hyperpod
from launch.cloud.kube import remedies
from launch.cloud.kube.failure_causes import Cause
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubeconfig import ClusterName
from lib.checkpoints import commit, copies, storage
from lib.core import file_identity, hashing, identity, offline, paths, publish, stage
from lib.core import workers as core_workers
from lib.core.errors import StageError, UsageError
from lib.core.paths import Experiment
from lib.corpus import extraction, place, saved, work_units
from lib.corpus.row_options import RowOptions
from lib.curate.classify import language, predictor
from lib.curate.masks import phones
from lib.export import adapter_files, checkpoint_choice
from lib.hub import client, folder, repository, transfer
from lib.models import (
    architecture,
    float8,
    lookup,
    lora,
    peft_adapter,
    remote_code,
    sharded,
    tensors,
    unread_weights,
    weights,
)
from lib.models.directory import CODE_DIGESTS
from lib.models.scratch import Design
from lib.parallel import attention, compiling, gpus, layout, precision, routers
from lib.parallel.trial import require_isolation
from lib.tokens import build, split_writer
from lib.train import checks, copying, model_files, previous_run
from lib.train import model as train_model
from lib.train.output import symptoms
from tests import fork_server
from tests.conftest import ROOT, run_stage
from tests.models.families import FAMILIES
from tests.scripts import load_script
from tests.training import SEQ_LENGTH

STAGE = re.compile(r"0[1-5]_\w+\.py$|^lib\.\w+$")
CURATE = "lib/curate/__main__.py"
TRAIN = ("04_train_fsdp.py", "-e", "run", "-d", "corpus", "-m", "model", "-s", SEQ_LENGTH)


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stages run in this process: without a GPU and without drawing pages."""
    # transformers is already imported.
    monkeypatch.setattr(offline, "enable_offline_mode", lambda: None)
    for owner, name in fork_server.list_drawing():
        monkeypatch.setattr(owner, name, fork_server.skip_drawing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


class Terminal:
    """A person in a directory: types commands of this project, and those that errors print."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.chdir(directory)
        # As if typed here: `make test` names the interpreter relative to the project.
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *sys.orig_argv[1:]])

    def type(self, script: object, *words: object) -> str:
        """Run a script in this process; return what it printed, raise its StageError."""
        path = Path(str(script))
        name = path.parent.as_posix().replace("/", ".") if path.stem == "__main__" else ROOT / path
        self._patch.setattr(sys, "argv", [str(name), *map(str, words)])
        try:
            with redirect_stdout(io.StringIO()) as printed:
                load_script(str(script)).main(sys.argv[1:])
        finally:
            if torch.distributed.is_initialized():  # a process of its own would end here
                torch.distributed.destroy_process_group()
        return printed.getvalue()

    def fails(self, *command: object) -> StageError:
        """Return the error of a command."""
        with pytest.raises(StageError) as caught:
            self.type(*command)
        return caught.value

    def follow(self, error: StageError, *more: str) -> None:
        """Run the lines of an error's `run:` as they stand.

        more: options that keep what would be a long training short.
        """
        assert error.run and error.run in error.render().replace("\n            ", "\n")
        for line in error.run.splitlines():
            words = shlex.split(line)
            script = next((word for word in words if STAGE.search(word)), "")
            if not script:
                subprocess.run(["bash", "-c", line], check=True)
            elif not {"--help", "--help-all"} & {*words}:
                name = Path(script).name
                if script.startswith("lib."):
                    name = f"{script.replace('.', '/')}/__main__.py"
                else:
                    assert Path(script).resolve().parent == ROOT
                self.type(name, *words[words.index(script) + 1 :], *more)

    def cured(self, *command: object) -> StageError:
        """Have a command fail, do what it says, and have it work; return the error."""
        error = self.fails(*command)
        self.follow(error)
        self.type(*command)
        return error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal in an empty directory whose name has a space."""
    (directory := tmp_path / "a project").mkdir()
    return Terminal(directory, monkeypatch)


@pytest.fixture
def project_terminal(prepared_once: Path, here: Terminal) -> Terminal:
    """Return a terminal in a project with raw text, splits, a dataset and a model."""
    shutil.copytree(prepared_once, Path.cwd(), dirs_exist_ok=True)
    return here


def damage_file(path: str) -> Path:
    """Cut a file that a pattern names; return it."""
    file = next(iter(sorted(Path().glob(path))))
    file.write_bytes(file.read_bytes()[:-1])
    return file


def blank_file(path: str) -> None:
    """Fill a file that a pattern names with spaces."""
    file = next(iter(sorted(Path().glob(path))))
    file.write_bytes(b" " * file.stat().st_size)


def test_remedies_for_splits_work(here: Terminal) -> None:
    Path("raw_text").mkdir()
    Path("raw_text/a.txt").write_text("text " * 50)
    Path("raw_text/b.txt").write_text("other " * 50)
    here.cured("02_build_hf_dataset.py")  # no splits yet
    Path("raw_text/c.txt").write_text("more " * 50)
    here.follow(here.fails("01_organize_data.py"))  # others are there: --overwrite
    next(Path("splits").glob("split_*/b.txt")).unlink()
    here.cured("01_organize_data.py")
    next(Path("splits").glob("split_*/b.txt")).unlink()
    here.cured("02_build_hf_dataset.py", "--overwrite")
    for torn in ("{", '{"kind": "splits/1"}'):
        Path("splits/manifest.json").write_text(torn)
        here.cured("01_organize_data.py")
    damage_file("splits/files.jsonl")
    here.cured("01_organize_data.py")
    damage_file("splits/files.jsonl")
    here.cured("02_build_hf_dataset.py", "--save-dir", "hf_datasets/other")
    shutil.rmtree("splits")
    shutil.move("raw_text", "moved")  # the source of stage 01 is elsewhere
    assert not here.fails("02_build_hf_dataset.py", "--save-dir", "hf_datasets/third").run


def test_remedies_for_parts_of_a_dataset_work(project_terminal: Terminal) -> None:
    build = ("02_build_hf_dataset.py", "--save-dir", "hf_datasets/parts", "--num-workers", 1)
    project_terminal.type(*build, "--only-splits", "0-1")
    project_terminal.cured(*build, "--merge")  # one is not built
    shutil.rmtree("hf_datasets/parts")
    project_terminal.type(*build, "--only-splits", "0-2")
    damage_file("hf_datasets/parts.parts/split_01/*.train")
    project_terminal.cured(*build, "--merge")
    for part in ("train", work_units.RECORD):  # other bytes of the same size
        shutil.rmtree("hf_datasets/parts")
        project_terminal.type(*build, "--only-splits", "0-2")
        blank_file(f"hf_datasets/parts.parts/split_01/*.{part}")
        project_terminal.cured(*build, "--merge")
    learn = (
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--vocab-size",
        300,
        "--train-tokenizer",
    )
    project_terminal.cured(*learn, "hf_datasets/new")
    damage_file("hf_datasets/new/**/*.arrow")
    project_terminal.cured(*learn, "hf_datasets/new", "--overwrite")


def test_remedies_for_curations_work(project_terminal: Terminal) -> None:
    curate = (CURATE, "hf_datasets/corpus", "--no-progress", "--dedup", "near")
    near = (*curate, "--save-dir", "hf_datasets/near")
    project_terminal.type(*curate, "--save-dir", "hf_datasets/old", "--near-bands", 7)
    project_terminal.type(*near)
    project_terminal.follow(project_terminal.fails(*near, "--mask", "email"))  # --overwrite
    assert not project_terminal.fails(*near, "--near-against", "hf_datasets/near").run
    shutil.rmtree("hf_datasets/near")
    Path("later").mkdir()
    Path("later/new.txt").write_text("A text that no earlier document contains. " * 9)
    project_terminal.type(
        "02_build_hf_dataset.py",
        "--data-folder",
        "later",
        "--save-dir",
        "hf_datasets/raw",
        "--num-workers",
        1,
    )
    later = (CURATE, "hf_datasets/raw", *near[2:])
    project_terminal.follow(project_terminal.fails(*later, "--near-against", "hf_datasets/old"))
    shutil.rmtree("hf_datasets/near")
    project_terminal.type(*curate, "--part", "1/2", "--save-dir", "hf_datasets/near")
    project_terminal.cured(*near, "--merge")  # a part is missing


def test_remedies_for_wrong_datasets_work(
    project_terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = ("04_train_fsdp.py", "-e", "x", "-m", "model", "--prepare-only", "-d")
    assert "hf_datasets/raw_text" in project_terminal.fails(*prepare, "raw_text").run
    project_terminal.follow(project_terminal.fails(*prepare, "raw_text"))
    # There is no file beside it.
    project_terminal.follow(project_terminal.fails(*prepare, "raw_text/document_000.txt"))
    assert rows_of("hf_datasets/document_000") == 1
    project_terminal.follow(project_terminal.fails(*prepare, "splits"))
    for directory in ("hf_datasets/corpus", "hf_datasets"):  # what is made already is no text
        error = project_terminal.fails(
            "02_build_hf_dataset.py", "--data-folder", directory, "--save-dir", "x"
        )
        assert "hf_datasets/corpus" in error.run
        project_terminal.follow(error, "-m", "model", "--prepare-only")
        assert project_terminal.fails(
            "01_organize_data.py", "--src-dir", directory, "--dst-root", "x"
        ).run
    project_terminal.follow(project_terminal.fails(*prepare, "hf_datasets"))
    for directory in (".cache/tokens", next(Path(".cache/tokens").iterdir())):
        error = project_terminal.fails(
            "02_build_hf_dataset.py", "--data-folder", directory, "--save-dir", "x"
        )
        assert "token store" in error.problem and error.expected
    text = json.dumps({"text": "some words " * 200}) + "\n"
    Path("one.jsonl").write_text(text * 20)
    Path("two.jsonl").write_text(text)
    (Path("raw_text") / "one.jsonl").write_text(text)
    # It is beside hf_datasets/ and much else.
    project_terminal.follow(project_terminal.fails(*prepare, "one.jsonl"))
    assert rows_of("hf_datasets/one") == 20
    assert not project_terminal.fails(*prepare, "model").run  # a model is not text
    project_terminal.follow(
        project_terminal.fails(
            "04_train_fsdp.py",
            "-e",
            "x",
            "-m",
            "model",
            "-d",
            "corpus",
            "--streaming",
            "--max-steps",
            2,
            "--dry-run",
        )
    )
    assert "--include" in project_terminal.fails(*prepare, "allenai/c4").run.splitlines()[0]
    assert project_terminal.fails(*prepare, "org/text").run.endswith("--include README.md")
    of_the_hub = (*prepare, "org/text")  # fetched; and in another cache
    shutil.copytree("raw_text", "raw_text/org--text")
    Path("raw_text/org--text/.hub").mkdir()
    Path("raw_text/org--text/.hub/manifest.json").write_text("{}")
    project_terminal.cured(*of_the_hub)
    shutil.copytree("hf_datasets/org--text", "cached/org___text")
    Path("cached/org___text/manifest.json").unlink()
    Path("cached/org___text/errors.jsonl").unlink()
    shard = next(Path("cached/org___text").glob("*.arrow"))
    shard.rename(shard.with_name("text-train.arrow"))
    (shard.parent / "state.json").unlink()
    shutil.rmtree("hf_datasets/org--text")
    monkeypatch.setenv("HF_DATASETS_CACHE", "cached")
    error = project_terminal.fails(*of_the_hub)
    assert error.run.endswith("-d cached/org___text")
    project_terminal.follow(error)
    shutil.rmtree("raw_text/org--text")
    shutil.rmtree("hf_datasets")
    project_terminal.cured(*prepare, "hf_datasets/corpus")
    shutil.rmtree("hf_datasets")
    shutil.rmtree("splits")
    project_terminal.cured(*prepare, "hf_datasets/corpus")
    damage_file("hf_datasets/corpus/**/*.arrow")
    project_terminal.cured(*prepare, "hf_datasets/corpus")


def rows_of(dataset: str) -> int:
    return len(datasets.load_from_disk(dataset))


def test_remedies_for_conversations_work(project_terminal: Terminal) -> None:
    prepare = ("04_train_fsdp.py", "-e", "x", "-m", "model", "--prepare-only", "-s", 128, "-d")
    Path("talks").mkdir()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"it is {n}"},
            ]
        }
        for n in range(60)
    ]
    Path("talks/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = project_terminal.fails(
        "04_train_fsdp.py", "-e", "x", "-m", "model", "-d", "talks", "--streaming", "--max-steps", 2
    )
    build, train = error.run.splitlines()
    project_terminal.follow(UsageError("", run=build))
    assert train.endswith("-d hf_datasets/talks --max-steps 2")
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, "talks/b[0].parquet")
    pyarrow.parquet.write_table(table, "talks/c.parquet")
    Path("talks/below").mkdir()
    Path("linked.parquet").symlink_to("talks/c.parquet")
    shutil.copy("talks/c.parquet", "talks/below/b[0].parquet")
    for file, name in (("talks/b[0].parquet", "b[0]"), ("linked.parquet", "linked")):
        error = project_terminal.fails(*prepare, file)
        project_terminal.follow(UsageError("", run="\n".join(error.run.splitlines()[:-1])))
        assert "--format chat" in error.run and rows_of(f"hf_datasets/{name}") == 60
        error = project_terminal.fails(
            TRAIN[0], "-e", "x", "-m", "model", "-d", file, "--streaming", "--max-steps", 2
        )
        assert "--include" in error.run and "--format chat" in error.run
    # The model has no template.
    project_terminal.follow(project_terminal.fails(*prepare, "hf_datasets/talks"))
    datasets.Dataset.from_list(rows).save_to_disk("foreign")
    shutil.copy(ROOT / "chat_templates/plain.jinja", "model/chat_template.jinja")
    project_terminal.follow(project_terminal.fails(*prepare, "foreign"))


def test_remedies_for_token_stores_work(project_terminal: Terminal) -> None:
    prepare = (*TRAIN, "--prepare-only")
    project_terminal.type(*prepare)
    next(Path(".cache/tokens").glob("*/train.tokens.bin")).unlink()
    project_terminal.cured(*prepare)
    damage_file(".cache/tokens/*/train.ends.bin")
    project_terminal.cured(*TRAIN, "--dry-run")
    project_terminal.type(*prepare)
    damage_file(".cache/tokens/*/train.ends.bin")
    project_terminal.cured(*prepare, "--overwrite")
    blank_file(".cache/tokens/*/train.tokens.bin")
    project_terminal.cured(*prepare)
    damage_file(".cache/tokens/*/train.tokens.bin")
    project_terminal.follow(project_terminal.fails(*TRAIN), "--prepare-only")
    next(Path(".cache/tokens").glob("*/manifest.json")).write_text("{")
    project_terminal.cured(*prepare)
    store = next(Path(".cache/tokens").glob("*/manifest.json"))
    for wrong in ({"label_mask": 2}, {"dtype": "uint8"}):
        change_summary(store, wrong)
        project_terminal.cured(*prepare)
    packed = (*prepare, "--packing", "documents")
    project_terminal.type(*packed)
    blank_file(".cache/tokens/*.packs-*/train.lengths.bin")
    error = project_terminal.fails(*packed)
    project_terminal.follow(error)
    project_terminal.type(*packed)
    change_summary(next(Path(".cache/tokens").glob("*.packs-*/manifest.json")), {"splits": 2})
    project_terminal.cured(*packed)


def change_summary(manifest: Path, wrong: dict[str, object]) -> None:
    """Have the summary of a manifest say something else."""
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"summary": content["summary"] | wrong}))


def test_remedies_for_models_from_scratch_work(project_terminal: Terminal) -> None:
    make = (
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--tokenizer",
        "model",
        "--vocab-size",
        512,
    )
    project_terminal.type(*make)
    train = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "scratch-tiny", "--dry-run")
    damage_file(".cache/models/scratch-tiny/tokenizer.json")
    project_terminal.cured(*train)
    damage_file(".cache/models/scratch-tiny/config.json")
    project_terminal.cured("03_download_model.py", "--verify")
    Path(f".cache/models/scratch-tiny/{CODE_DIGESTS}").write_text('{"x.py": "sha256:0"}')
    with pytest.raises(StageError) as changed:
        remote_code.list_code_files(Path(".cache/models/scratch-tiny"))
    project_terminal.follow(changed.value)
    assert not remote_code.list_code_files(Path(".cache/models/scratch-tiny"))
    Path(".cache/models/scratch-tiny/manifest.json").write_text("{")
    project_terminal.cured(*make)
    project_terminal.follow(project_terminal.fails(*make[:-1], 1024))  # other options: --overwrite
    fetch = project_terminal.fails("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "org/name")
    assert fetch.run.endswith("03_download_model.py --model-name org/name")
    scratch = (
        *train[:5],
        "--from-scratch",
        "--model-size",
        "1M",
        "--tokenizer",
        "model",
        "--prepare-only",
    )
    project_terminal.type(*scratch)
    blank_file(".cache/scratch/*/config.json")
    project_terminal.cured(*scratch)
    Path("no model").mkdir()
    assert not project_terminal.fails(
        "04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "no model"
    ).run


def test_remedies_for_options_of_a_run_work(
    project_terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lib.planning.memory.print_memory_table", lambda *options: None
    )  # takes seconds
    dry = (*TRAIN, "--dry-run")
    project_terminal.follow(project_terminal.fails(*TRAIN, "--plan-gpus", 8))
    for attention_ in ("flex", "flash_attention_2"):
        project_terminal.follow(project_terminal.fails(*dry, "--attention", attention_))
    for bad in ((*dry, "--banana"), ("04_train_fsdp.py",), ("03_download_model.py",)):
        assert project_terminal.fails(*bad).run.endswith(("--help", "--help-all"))


@pytest.fixture(scope="module")
def trained_once(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose run has done 4 steps and saved after 2 and 4."""
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage(*TRAIN, *STEPS, cwd=root)
    return root


@pytest.fixture
def trained(trained_once: Path, here: Terminal) -> Terminal:
    shutil.copytree(trained_once, Path.cwd(), dirs_exist_ok=True)
    return here


STEPS = (
    *("--max-steps", 4, "--ckpt-freq", 2, "--precision", "fp32"),
    *("--eval-freq", 0, "--eval-batches", 1),
)


def test_remedies_for_a_begun_run_work(trained: Terminal) -> None:
    trained.follow(trained.fails(*TRAIN, *STEPS, "--lr", 1e-3))  # go on as it was begun
    on = (*TRAIN, *STEPS[2:], "--max-steps", 5, "--dry-run")
    trained.follow(trained.fails(*on, "--resume", "never"))
    trained.follow(
        trained.fails(*on, "--overwrite", "--resume", "outputs/run/checkpoints/step_00000002")
    )


def test_the_remedy_for_damaged_copies_works(trained: Terminal) -> None:
    copied = (*TRAIN, *STEPS, "--ckpt-copy-to", "second")
    run_stage(*copied, cwd=Path.cwd())
    for path in Path("second").glob("*/checkpoints/*/dcp/*"):
        path.write_bytes(b"")
    shutil.rmtree("outputs")
    trained.follow(trained.fails(*copied, "--resume", "copies"))


def test_the_file_system_of_copies_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root could type the command."""
    monkeypatch.setattr(paths, "find_missing_mount", lambda path: Path("/mnt/the nas"))
    with pytest.raises(UsageError) as caught:
        copies.require_mount("/mnt/the nas/copies")
    assert caught.value.run == "mount '/mnt/the nas'"


def test_remedies_for_a_checkpoint_with_other_settings_work(
    trained: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows only when the checkpoint is loaded."""
    on = (*TRAIN[3:], *STEPS, "--lr", 1e-3)
    named = ("--resume", "outputs/run/checkpoints/step_00000002")
    error = trained.fails(TRAIN[0], "-e", "fork", *on, *named)
    assert error.run.endswith("--resume-with-changes")
    trained.follow(error)
    assert Path("outputs/fork/checkpoints/step_00000004").exists()
    other = (TRAIN[0], "-e", "third", *on[:-2], "--optimizer", "adamw8bit", *named)
    error = trained.fails(*other)
    assert "outputs/run/config.yaml" in error.run and "changes" not in error.hint
    trained.follow(error)
    assert Path("outputs/third/checkpoints/step_00000004").exists()
    # Of the run itself: a launch with other options has ended before it saved.
    longer = (*TRAIN, *on[len(TRAIN) - 3 :], "--max-steps", 6)
    with monkeypatch.context() as patch:
        patch.setattr(
            "lib.parallel.stop_request.StopRequest.begin_agreement",
            lambda request: _raise_error(UsageError("stop")),
        )
        trained.fails(*longer, "--resume-with-changes")
    error = trained.fails(*longer)
    assert "step_00000004 was started with other settings" in error.problem
    trained.follow(error)
    assert Path("outputs/run/checkpoints/step_00000006").exists()


def test_remedies_for_the_evaluation_on_tasks_work(trained: Terminal) -> None:
    suite = ("--eval-suite", "small", "--suite-limit", 1)
    synthetic = ("04_train_fsdp.py", "-e", "x", "-d", "synthetic:10K", "-m", "model", *STEPS)
    trained.follow(trained.fails(*synthetic, "-s", 32, *suite, "--dry-run"))
    shutil.rmtree("outputs/run/checkpoints")
    trained.cured("lib/evaluate/__main__.py", "outputs/run", "--limit", 1, "--no-progress")


def test_remedies_for_exports_work(trained: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    export = ("05_export_checkpoint.py", "-e", "run")
    with monkeypatch.context() as patch:
        patch.setattr("lib.export.card.read_scores", lambda *arguments: {})
        best = trained.fails(*export, "--step", "best", "--dry-run")
    trained.follow(best)
    trained.follow(trained.fails(*export, "--adapter", "-m", "model", "--dry-run"))
    with monkeypatch.context() as patch:
        patch.setattr("lib.export.full_model.TensorFile.reads_back", lambda file: False)
        unread = trained.fails(*export)
    trained.follow(unread)
    newest = next(Path("outputs/run/checkpoints/step_00000004/dcp").glob("*.distcp"))
    content = newest.read_bytes()
    newest.write_bytes(bytes(len(content)))
    trained.follow(trained.fails(*export, "--out", "other"))  # found by its hash
    newest.write_bytes(content[1:])
    trained.follow(trained.fails(*export, "--out", "third"))  # found by its size
    with pytest.raises(StageError):
        checkpoint_choice.require_present(commit.Checkpoint(Path("gone"), 1))
    with pytest.raises(UsageError):  # for it trains 2-D linears alone
        adapter_files.plan_adapter(
            SimpleNamespace(shapes={"experts.lora_A": (3, 4, 8)}), torch.float32
        )
    newest.write_bytes(content)
    with monkeypatch.context() as patch:  # --overwrite of another launch
        other = Path("outputs/run/checkpoints/step_00000002/COMMIT.json")
        patch.setattr(
            "lib.export.full_model.verify_model",
            lambda *arguments: shutil.copy(other, other.parents[1] / "step_00000004"),
        )
        replaced = trained.fails(*export, "--out", "fourth")
    assert "was replaced" in replaced.problem and not Path("fourth").exists()
    shutil.rmtree("outputs/run/checkpoints")
    trained.follow(trained.fails(*export), "--dry-run")  # train it again


def test_remedies_for_a_bad_generation_config_work(project_terminal: Terminal) -> None:
    project_terminal.type(
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--model-name",
        "s",
        "--tokenizer",
        "model",
    )
    blank_file(".cache/models/s/generation_config.json")
    project_terminal.follow(project_terminal.fails(*TRAIN[:-4], "-m", "s"))


def test_a_shell_runs_the_printed_commands(trained: Terminal) -> None:
    """A run that diverged goes on at a lower rate, in a real shell, from another directory."""
    shutil.rmtree("outputs/run/checkpoints/step_00000004")
    words = [str(ROOT / TRAIN[0]), *map(str, (*TRAIN[1:], *STEPS, "--lr", 0.09))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        opts = load_script(TRAIN[0]).parse(words[1:])
        opts = replace(opts, min_lr=0.009)
        error = symptoms.make_divergence_error(4, 2, 3, opts, Experiment(opts.save_dir, "run"))
    done = subprocess.run(["bash", "-c", error.run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path("outputs/run-lower-lr/checkpoints/step_00000004")).exists()
    rows = Path("outputs/run-lower-lr/metrics.jsonl").read_text()
    assert '"step": 4' in rows


def _hash_without_xxhash(patch: pytest.MonkeyPatch) -> None:
    with patch.context() as inner:
        inner.delitem(hashing._ALGORITHMS, "xxh3")
        hashing.new_hasher("xxh3")


def situations(patch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Yield what makes an error whose remedy needs a network, a GPU, a race or other programs."""
    patch.setattr(sys, "argv", [str(ROOT / "03_download_model.py"), "--model-name", "org/name"])
    yield lambda: _hash_without_xxhash(patch)
    yield lambda: _raise_error(stage.find_known_error(ModuleNotFoundError("x", name="orjson")))
    yield lambda: _raise_error(
        architecture._code_error(Path("m"), ModuleNotFoundError("x", name="einops"))
    )
    yield lambda: hyperpod._make_client("auto", "x", 0, 1)
    yield lambda: folder.Folder("s3://bucket")
    yield lambda: predictor.require_package("--language")
    yield phones.identify_package
    yield lambda: language._read_labels(Path("models/lid.176.ftz"))
    yield lambda: object.__new__(_class_with(hyperpod, "drop_newer")).drop_newer(1, "so")
    worker = object.__new__(core_workers.Worker)
    worker._process = Fake(exitcode=-9, name="w", join=lambda timeout: None)
    yield lambda: _raise_error(worker._died())
    for size, written in ((-1, 0), (7, 0), (1, 5)):
        fake = Fake(map=lambda *work, placed=("copy", size, written): [placed])
        file = Fake(path="a", bytes=1, mtime_ns=0)
        yield lambda fake=fake, file=file: place.place_files(
            Path(), Path(), [(file, "s")], "copy", fake, False
        )
    yield lambda: work_units.require_unchanged(
        Fake(changed=("a", "it is gone"), unit=Fake(folder="d"))
    )
    Path("built").mkdir(exist_ok=True)
    Path("built/x").touch()
    yield lambda: file_identity.require_same(
        {Path("gone"): (1, 2, 3, 4)}, "a dataset", "it was read"
    )
    Path("words").mkdir()
    Path("words/tokenizer.json").touch()
    yield lambda: Design("1M", None, None, (), Path("words")).require_same({}, "other")
    yield lambda: build.require_same_tokenizer(Path("words"), "of another one")
    sink = split_writer.Sink(Path("words/sink"), 0)
    sink._file.bytes = 1
    yield sink.close
    yield lambda: publish.Build(Path("built"), "x/1", {}, False).__enter__()
    yield _appeared
    yield _vanished
    hub = object.__new__(client.Hub)
    hub.endpoint = "https://hub"
    hub._token = ""
    from huggingface_hub import errors as hub_errors

    yield lambda: _explain_error(hub, hub_errors.OfflineModeIsEnabled("x"))
    yield lambda: _raise_error(
        client._refusal_error(Fake(response=Fake(status_code=503)), "m", "e", False)
    )
    yield lambda: _raise_error(client._unreachable_error(ConnectionError("x"), "https://hub"))
    yield lambda: _explain_error(hub, OSError("5 bytes instead of 6"))
    repository_on_hub = Fake(name="m", commit="c", kind="model")
    yield lambda: hub.download(repository_on_hub, Fake(path="f", size=10**11), Path(), print)
    files = dict.fromkeys(("config.json", "tokenizer.json", repository.PICKLE))
    yield lambda: _raise_error(repository._incomplete_model_error(Fake(files=files), False))
    model = Path(".cache/models/org--name")
    yield lambda: weights._raise_if_any(model, ["x"])
    yield lambda: tensors.read_into(
        tensors.torch.empty(2),
        os.open(os.devnull, os.O_RDONLY),
        0,
        model / "model.safetensors",
        **lookup.model_remedy(model, "--overwrite"),
    )
    fetching = object.__new__(transfer.Transfer)
    fetching._repository = Fake(name="m")
    fetching._hub = Fake(download=lambda *arguments: Path(os.devnull))
    fetching._count_bytes = print
    damaged = Fake(path="f", size=1, describe_difference=lambda path: "other bytes")
    yield lambda: fetching._download(damaged, Path("f"))
    model.mkdir(parents=True)
    (model / "manifest.json").write_text("{")
    yield lambda: lookup.find_model("org/name", Path(".cache"))
    patch.setattr(sys, "argv", [str(ROOT / "01_organize_data.py")])
    yield from of_saved_splits()
    make_train_command(patch)
    yield from of_other_models()
    yield lambda: attention._attend_varlen(None, None, None, None, None, dropout=0.1)
    leaking = AutoModelForCausalLM.from_config(FAMILIES["falcon_7b"](), dtype=torch.float32)
    device = Fake(device=torch.device("cpu"))
    yield lambda: require_isolation(leaking, device)
    opts = load_script(TRAIN[0]).parse(list(map(str, TRAIN[1:])))
    run = Experiment(Path("outputs"), "run")
    yield lambda: _raise_error(
        symptoms.explain_error(RuntimeError("can't allocate memory"), opts, run)
    )
    yield lambda: _raise_error(
        symptoms.explain_error(RuntimeError("Connection reset by peer"), opts, run)
    )
    strict = RuntimeError("x does not have a deterministic implementation")
    in_bucket = Fake(ckpt_copy_to="s3://bucket")
    yield lambda: copying._restore_run(in_bucket, Experiment(Path("lost"), "run"))
    yield lambda: _raise_error(symptoms.explain_error(strict, opts, run))
    yield lambda: compiling.Compiler(True)._give_up(TorchDynamoException("x"))
    patch.setattr(gpus, "find_unusable", lambda: gpus.Unusable("so", "a GPU", "do"))
    yield lambda: gpus.require_usable_gpus(is_plan=False)
    patch.setattr("torch.cuda.is_available", lambda: True)
    patch.setattr("torch.cuda.device_count", lambda: 1)
    yield lambda: layout._choose_device(3)
    yield lambda: attention.choose_attention("varlen", "documents", "fp32", None)
    patch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    for capability in ((8, 0), (9, 0)):
        patch.setattr("torch.cuda.get_device_capability", lambda known=capability: known)
        yield lambda: precision.require_float8(False, False, 1, SEQ_LENGTH)
    no_blocks = Fake(config=Fake(model_type="x"), _no_split_modules=(), named_modules=list)
    yield lambda: float8.Float8("tensorwise").convert(no_blocks, sharded.Placement())
    patch.setattr("importlib.metadata.version", _not_installed)
    yield float8.require_package
    yield lambda: extraction.require_extraction(RowOptions(extract=["html"]))
    yield lambda: checks.require_consistent(
        replace(opts, precision="fp8", lora_rank=4), has_begun=False
    )
    patch.setattr("lib.models.lora.choose_experts", lambda *_: ["experts"])
    yield lambda: lora.Lora(4, 8.0, 0.1, "experts").convert(no_blocks, sharded.Placement())
    yield lambda: checks.require_consistent(replace(opts, wandb=True), has_begun=False)
    balanced = replace(opts, router_aux_loss=0.1, lora_rank=4)
    for method in ("", routers.BIAS):
        patch.setattr(routers, "find_routers", lambda _: [])
        patch.setattr(routers, "find_method", lambda *_, known=method: known)
        yield lambda: train_model._require_router_method(balanced, no_blocks)


def of_saved_splits() -> Iterator[Callable[[], object]]:
    """Yield the error for a saved dataset whose splits would be mixed."""
    Path("saved").mkdir()
    Path("saved/dataset_dict.json").write_text('{"splits": ["en", "de"]}')
    entries = [
        Fake(path="dataset_dict.json", skipped="it describes a dataset"),
        Fake(path="en/a.arrow", skipped=""),
        Fake(path="de/a.arrow", skipped=""),
    ]
    yield lambda: saved.require_readable(Path("saved"), "--src-dir", entries)


def of_other_models() -> Iterator[Callable[[], object]]:
    """Yield errors for models and templates that are there in another form, or not as they were."""
    for name in (
        "merged/part/__0_0.distcp",
        "pickled/pytorch_model.bin",
        "pickled/config.json",
        "outputs/old/checkpoints/step_00000002/COMMIT.json",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    Path("adapter/adapter_model.bin").touch()
    yield lambda: peft_adapter.read_adapter(Path("adapter"))
    for name in ("merged", "pickled", "outputs/old"):
        yield lambda name=name: _raise_error(unread_weights.find_error(Path(name)))
    opts = load_script(TRAIN[0]).parse(list(map(str, TRAIN[1:])))
    yield lambda: checks.require_model_shape(replace(opts, cache_dir=Path("nothing")))
    begun, now = ({"options": {}, "inputs": {previous_run.TEMPLATE: text}} for text in "ab")
    yield lambda: _raise_error(
        previous_run._other_template(
            identity.find_differences(begun, now), Path("a.jinja"), Path("outputs/run")
        )
    )
    cached = Path("hub/models--org--name/snapshots/c")
    cached.mkdir(parents=True)
    yield lambda: model_files.require_base_of_checkpoint(
        {"base": {"model.safetensors": "sha256:0"}}, Fake(model_dir=cached, base={}), Path("step")
    )


class Fake:
    """An object with the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def make_train_command(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [str(ROOT / TRAIN[0]), *map(str, TRAIN[1:])])


def _raise_error(error: StageError | None) -> None:
    assert error
    raise error


def _class_with(module: ModuleType, method: str) -> type:
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and method in vars(value)
    )


def _explain_error(client: client.Hub, error: Exception) -> None:
    with client._translate_errors("org/name", "main", "model"):
        raise error


def _not_installed(name: str) -> None:
    raise PackageNotFoundError(name)


def _appeared() -> None:
    with publish.Build(Path("late"), "x/1", {}, False) as build:
        Path("late").mkdir()
        Path("late/x").touch()
        build.publish(stage="x", options={}, files=[], summary={})


def _vanished() -> None:
    with storage.unwrap_dcp_errors():
        lost = FileNotFoundError(2, "gone", "x")
        raise storage.CheckpointException("x", {0: (lost, None)})


def test_remedies_that_need_more_than_a_test_has(here: Terminal, monkeypatch) -> None:
    """Their commands are at least such as the scripts take, and programs that are there."""
    absent = (
        "amzn_sagemaker_checkpointing",
        "s3fs",
        "fasttext",
        "phonenumbers",
    )  # and what other tests have imported of them
    for name in {*absent, *(m for m in sys.modules if m.partition(".")[0] in absent)}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(file_systems, "s3", raising=False)  # what s3fs registered
    for situation in situations(monkeypatch):
        with pytest.raises(StageError) as caught:
            situation()
        assert caught.value.run, caught.value
        for line in caught.value.run.splitlines():
            words = shlex.split(line)
            script = next((word for word in words if STAGE.search(word)), "")
            if script:
                load_script(Path(script).name).parse(words[words.index(script) + 1 :])
            else:
                assert (
                    words[0] in ("mv", "accelerate")
                    or words[1:2] == ["-c"]
                    or words[1:4] in (["-m", "pip", "install"], ["-m", "pip", "download"])
                    or words[1:4] == ["-m", "zipfile", "-e"]
                    or words[1:4] == ["-m", "huggingface_hub.cli.hf", "download"]
                )


def test_every_command_that_creates_what_a_cluster_lacks_is_rendered() -> None:
    """tests/cloud/test_remedies.py types most of them; here none is left out."""
    eks = ClusterName("eks", "eks", "us-west-2", "prod")
    job = JobOptions(job_name="j", image="registry.example.com/t:1")
    rendered = {
        "format_kubectl": remedies.format_kubectl(eks, "default", "get", "pods"),
        "create_namespace": remedies.create_namespace(eks, "team"),
        "install_operator": "\n".join(remedies.install_operator(eks, kind) for kind in KINDS),
        "create_claim": remedies.create_claim(eks, "team", "data"),
        "create_addon": remedies.create_addon(eks, "aws-efs-csi-driver"),
        "create_bucket_claim": remedies.create_bucket_claim(eks, "team", "raw"),
        "create_pull_secret": remedies.create_pull_secret(eks, "team", "pull", job.image),
        "create_token_secret": remedies.create_token_secret(eks, "team", "hub"),
        "create_service_account": remedies.create_service_account(eks, "team", "training"),
        "raise_namespace_quota": remedies.raise_namespace_quota(eks, "team", "q", "pods", 4),
        "install_nvidia_plugin": remedies.install_nvidia_plugin(eks),
        "install_efa_plugin": remedies.install_efa_plugin(eks),
        "add_nodes": remedies.add_nodes(eks, "gpu", 4),
        "connect": remedies.connect("eks", "us-west-2"),
        "push_image": remedies.push_image(job.image),
        "find_remedy": remedies.find_remedy(Cause("image missing", "", ""), job, eks),
    }
    functions = {
        name
        for name, value in vars(remedies).items()
        if getattr(value, "__module__", "") == remedies.__name__ and not name.startswith("_")
    }
    assert {*rendered} == functions
    programs = {"kubectl", "aws", "eksctl", "helm", "sed", Path(sys.executable).name, "python"}
    for name, text in rendered.items():
        for line in text.splitlines():
            words = shlex.split(line)
            assert Path(words[0]).name in programs and not line.endswith(" "), (name, line)
            assert all((ROOT / word).exists() for word in words if word.startswith("launch/"))
