# covers: lib/core/commands.py, lib/core/errors.py
"""Remedies: the `run:` lines that the code prints are typed here, and cure.

A situation is made, a command is typed in it, and what its error says after `run:` is run as it
stands: rm and mv by a shell, scripts of this project in this process, which saves their imports
(test_a_shell_runs_the_printed_commands runs some in a real one). Then the first command must work.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow.parquet
import pytest
import torch

from lib.checkpoints import commit, copies
from lib.core import offline, paths
from lib.core.errors import StageError, UsageError
from lib.core.paths import Experiment
from lib.corpus import work_units
from lib.export import adapter_files, checkpoint_choice
from lib.models import (
    remote_code,
)
from lib.models.directory import CODE_DIGESTS
from lib.train.output import symptoms
from tests import fork_server
from tests.conftest import ROOT, run_stage
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
            _refuse_to_begin,
        )
        trained.fails(*longer, "--resume-with-changes")
    error = trained.fails(*longer)
    assert "step_00000004 was started" in error.problem
    trained.follow(error)
    assert Path("outputs/run/checkpoints/step_00000006").exists()


def test_remedies_for_the_evaluation_on_tasks_work(trained: Terminal) -> None:
    suite = ("--eval-suite", "small:1")
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


def _refuse_to_begin(_: object) -> None:
    raise UsageError("stop")
