# covers: 04_train_fsdp.py, lib/train/overview.py
"""Run stage 04 as a user does: losses, resumes, refusals, and the files of a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests import forks
from tests.conftest import ROOT, free_port, run_stage, start_stage
from tests.training import (
    SEQ_LENGTH,
    SMALL_RUN,
    VOCABULARY,
    assert_refused,
    list_saved_steps,
    losses,
    metrics,
    read_log,
    save_model,
    save_tokenizer,
    train_model,
    wait_for_save,
    write_corpus,
)

STEPS = 12
_MEMORY = ("current", "peak", "window_peak", "reserved", "total", "max_peak")
COMMON = (*SMALL_RUN, "--lr", "1e-2", "--ckpt-freq", 4, "--eval-freq", 6, "--eval-batches", 3)
TRAIN = (*COMMON, "--max-steps", STEPS, "-b", 2, "--grad-accum-steps", 2)  # on two ranks: batch 8


@pytest.fixture(scope="module")
def trained(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the experiment `two`: 12 steps on two ranks, batch 8."""
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", "-e", "two", *TRAIN, cwd=root, ranks=2)
    return root


@pytest.fixture
def experiment(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that project."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_losses_do_not_depend_on_ranks_or_accumulation(trained: Path, project: Path):
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "one",
        *COMMON,
        "--max-steps",
        STEPS,
        "-b",
        2,
        "--global-batch-size",
        8,
        cwd=project,
    )  # without torchrun
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "wide",
        *COMMON,
        "--max-steps",
        STEPS,
        "-b",
        4,
        "--log-freq",
        3,
        "--log-style",
        "dict",
        cwd=project,
        ranks=2,
    )
    expected = losses(trained, "two")
    assert len(expected) == STEPS and expected[STEPS] < expected[1] - 0.5
    assert losses(project, "one") == pytest.approx(expected, rel=1e-4)
    logged = metrics(project, "wide")
    assert [row["step"] for row in logged] == [1, 3, 6, 9, 12]
    for row, first in zip(logged, (1, 2, 4, 7, 10), strict=True):
        since = [expected[step] for step in range(first, row["step"] + 1)]
        assert row["train/loss"] == pytest.approx(since[-1], rel=1e-4)
        assert row["train/loss_mean"] == pytest.approx(sum(since) / len(since), rel=1e-4)
    assert re.findall(
        r"^\d\d:\d\d:\d\d \[rank=(\d)\] {'global_step': (\d+),", done.stdout, re.MULTILINE
    ) == [("0", str(row["step"])) for row in logged]
    for name in ("one", "wide"):
        validation = [row["eval/loss"] for row in metrics(project, name) if "eval/loss" in row]
        assert validation == pytest.approx(
            [row["eval/loss"] for row in metrics(trained, "two") if "eval/loss" in row], rel=1e-4
        )


def test_a_killed_run_resumes_bit_for_bit(trained: Path, project: Path):
    """The killed launch draws no plot, but its successor does."""
    launch = start_stage("04_train_fsdp.py", "-e", "two", *TRAIN, cwd=project, ranks=2)
    wait_for_save(launch, project, "two", rows=6)
    launch.kill()
    assert max(list_saved_steps(project, "two")) < STEPS
    run_stage("04_train_fsdp.py", "-e", "two", *TRAIN, cwd=project, ranks=2, pages=True)
    picture = project / "outputs" / "two" / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    exact = ("step", "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen")
    same = [{key: row[key] for key in exact} for row in metrics(project, "two")]
    undisturbed = metrics(trained, "two")
    assert same == [{key: row[key] for key in exact} for row in undisturbed]
    assert metrics(project, "two")[-1]["eval/loss"] == undisturbed[-1]["eval/loss"]


def test_another_world_size_resumes_the_run(experiment: Path, trained: Path):
    shutil.rmtree(experiment / "outputs" / "two" / "checkpoints" / "step_00000012")
    run_stage(
        "04_train_fsdp.py", "-e", "two", *COMMON, "--max-steps", STEPS, "-b", 2, cwd=experiment
    )
    log = read_log(experiment, "two")
    assert "the 8 samples of a step" in log and "2 per process × 4 accumulation" in log
    assert losses(experiment, "two") == pytest.approx(losses(trained, "two"), rel=1e-5)


def test_a_complete_run_does_nothing_and_resumes_with_more_steps(experiment: Path):
    before = {path: path.stat().st_mtime_ns for path in (experiment / "outputs").rglob("*")}
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "two",
        *COMMON,
        "--max-steps",
        STEPS,
        "-b",
        2,
        "--global-batch-size",
        8,
        cwd=experiment,
    )
    assert "already done" in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in (experiment / "outputs").rglob("*")}
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "two",
        *COMMON,
        "--max-steps",
        STEPS + 2,
        "-b",
        2,
        "--global-batch-size",
        8,
        "--profile",
        "2:4",
        cwd=experiment,
    )
    assert "resumed from" in done.stdout and "the next step has" in done.stdout
    assert "--profile 2:4 records nothing" in done.stdout
    assert [row["step"] for row in metrics(experiment, "two")] == list(range(1, STEPS + 3))
    assert list_saved_steps(experiment, "two") == [8, 12, 14]


def test_a_run_leaves_the_documented_files(trained: Path):
    root = trained / "outputs" / "two"
    state = json.loads((root / "state.json").read_text())
    assert (state["status"], state["step"]) == ("complete", STEPS)
    assert state["sample_cursor"] == STEPS * 8 and state["tokens"] == STEPS * 8 * SEQ_LENGTH
    assert state["checkpoints"] == [12, 8, 4]
    lines = (root / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["start", "save", "save", "save", "complete"]
    config = yaml.safe_load((root / "config.yaml").read_text())
    assert config["options"]["lr"] == 0.01 and config["versions"]["torch"]
    assert list((root / "tb").iterdir()) and (root / "model" / "tokenizer.json").exists()
    assert [p.name for p in sorted((root / "logs").iterdir())] == [
        "rank_00000.log",
        "rank_00001.log",
    ]
    row = metrics(trained, "two")[-1]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row.pop("time"))
    assert row["train/loss_mean"] == row["train/loss"]  # a row for every step
    logs = [(root / "logs" / f"rank_0000{rank}.log").read_text() for rank in (0, 1)]
    rows_of_ranks = [
        re.findall(
            r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO \[rank=(\d)\] "
            r"{'global_step': (\d+), .*'current_gib': .*'peak_gib': .*'window_peak_gib': .*"
            r"'reserved_gib': .*'total_gib': .*'max_peak_gib': .*'time/data'",
            log,
            re.MULTILINE,
        )
        for log in logs
    ]
    assert rows_of_ranks == [
        [(str(rank), str(step)) for step in range(1, STEPS + 1)] for rank in (0, 1)
    ]
    assert "  loss " not in "".join(logs)  # that is the line of the console
    keys = {
        "step",
        "epoch",
        "train/loss",
        "train/loss_mean",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_seen",
        "perf/tokens_per_sec",
        "perf/tokens_per_sec_per_device",
        "perf/run_tokens_per_sec",
        "perf/label_tokens_per_sec",
        "perf/samples_per_sec",
        "perf/tflops",
        "perf/slowest_rank",
        "perf/slowest_ratio",
        "time/optimizer",
        "eval/loss",
        "eval/perplexity",
        "eval/bits_per_byte",
        *(f"time/{name}" for name in ("data", "forward", "backward", "update", "total")),
        *(f"memory/{name}_gib" for name in _MEMORY),
        "memory/max_peak_rank",
    }
    assert keys == set(row) and all(isinstance(row[key], (int, float)) for key in keys)
    files = sorted(p.name for p in (root / "checkpoints" / "step_00000012").iterdir())
    assert files == ["COMMIT.json", "dcp", "manifest.json", "rng.safetensors", "train_state.json"]


def test_changed_options_are_refused_by_name(experiment: Path):
    one = ("-e", "two", *COMMON, "--max-steps", 20, "-b", 2)
    assert_refused(
        experiment, *one, "--global-batch-size", 4, code=2, says="--global-batch-size: 8"
    )
    assert_refused(
        experiment,
        *one,
        "--global-batch-size",
        8,
        "--seed",
        1,
        "--beta1",
        0.8,
        code=2,
        says="--beta1: 0.9 there, 0.8 now",
    )
    assert_refused(
        experiment,
        *one,
        "--global-batch-size",
        8,
        "--seed",
        1,
        code=2,
        says="--seed: 0 there, 1 now",
    )
    save_model(experiment / "model")
    config = json.loads((experiment / "model" / "config.json").read_text())
    (experiment / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert_refused(experiment, *one, "--global-batch-size", 8, code=2, says="model: ")


def test_checkpoints_of_another_model_are_refused(experiment: Path):
    save_model(experiment / "other")
    save_tokenizer(experiment / "other", experiment / "raw_text")
    config = json.loads((experiment / "other" / "config.json").read_text())
    (experiment / "other" / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 1})
    )
    (experiment / "other" / "model.safetensors").unlink()
    arguments = ["-e", "new", *COMMON, "-b", 8, "--max-steps", 4, "--from-scratch"]
    arguments[arguments.index("-m") + 1] = "other"
    run_stage("04_train_fsdp.py", *arguments, cwd=experiment)
    shutil.rmtree(experiment / "outputs" / "new" / "checkpoints")
    shutil.copytree(
        experiment / "outputs" / "two" / "checkpoints",
        experiment / "outputs" / "new" / "checkpoints",
    )
    assert_refused(
        experiment, *arguments, "--max-steps", 20, code=2, says="started with other settings"
    )


def test_a_damaged_checkpoint_falls_back_and_only_damaged_ones_stop_the_run(
    experiment: Path, trained: Path
):
    folder = experiment / "outputs" / "two" / "checkpoints"
    payload = next((folder / "step_00000012" / "dcp").glob("*.distcp"))
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    one = ("-e", "two", *COMMON, "-b", 2, "--global-batch-size", 8)
    done = run_stage("04_train_fsdp.py", *one, "--max-steps", STEPS + 1, cwd=experiment)
    assert "moved to quarantine" in done.stdout
    assert "resumed from outputs/two/checkpoints/step_00000008" in done.stdout
    assert len(list((folder / "quarantine").iterdir())) == 1
    for commit in folder.glob("step_????????/COMMIT.json"):
        commit.unlink()
    for _ in range(2):  # a launcher that tries again must not train from the start either
        assert_refused(experiment, *one, "--max-steps", 30, code=3, says="no valid checkpoint")
    assert not list(folder.glob("step_*"))


def test_bad_input_is_refused_without_a_traceback(project: Path):
    run = ("-e", "exp", "-m", "model", "-s", SEQ_LENGTH)
    assert_refused(project, *run, "-d", "nowhere", code=3, says="dataset nowhere")
    assert_refused(project, "-e", "exp", "-d", "corpus", "-m", "nothing", code=3, says="nothing")
    assert_refused(project, "-e", "exp", "-m", "model", code=2, says="-d")
    assert_refused(project, *run, "-d", "corpus", "--sead", 1, code=2, says="--seed")
    assert_refused(project, *run, "-d", "corpus", "--seq-length", 4096, code=2, says="at most 128")
    assert_refused(
        project,
        *run,
        "-d",
        "corpus",
        "-b",
        3,
        "--global-batch-size",
        8,
        code=2,
        says="a multiple of 3",
    )
    assert_refused(
        project,
        *run,
        "-d",
        "corpus",
        "--min-lr",
        1,
        "--beta1",
        1,
        "-s",
        1,
        "--max-steps",
        3,
        "--warmup-steps",
        4,
        "--profile",
        "2:5",
        code=2,
        says="5 problems",
    )
    (project / "hf_datasets" / "broken").mkdir()
    shutil.copy(
        project / "hf_datasets" / "corpus" / "manifest.json", project / "hf_datasets" / "broken"
    )
    assert_refused(project, *run, "-d", "broken", code=3, says="is missing")
    config = json.loads((project / "model" / "config.json").read_text())
    (project / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    assert_refused(project, *run, "-d", "corpus", code=2, says="vocabulary")
    assert not (project / "outputs").exists()
    assert not (project / ".cache").exists()


def test_a_dataset_without_text_is_refused(project: Path):
    import datasets

    datasets.Dataset.from_dict({"words": ["a"]}).save_to_disk(str(project / "hf_datasets" / "w"))
    assert_refused(project, "-e", "exp", "-m", "model", "-d", "w", code=2, says="no column `text`")


def test_a_dry_run_writes_nothing(project: Path):
    before = sorted(project.rglob("*"))
    done = run_stage("04_train_fsdp.py", "-e", "x", *TRAIN, "--dry-run", cwd=project)
    assert "precision" in done.stdout and sorted(project.rglob("*")) == before


def test_artifacts_may_be_moved_between_stages(project: Path, tmp_path_factory):
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        *COMMON,
        "--prepare-only",
        "--shard-size",
        8,
        "--global-batch-size",
        1000,
        "-b",
        3,
        cwd=project,
    )
    far = tmp_path_factory.mktemp("far")
    shutil.move(project / "hf_datasets" / "corpus", far / "texts")
    shutil.move(project / "model", far / "model")
    shutil.move(project / ".cache", far / "cache")
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        far / "texts",
        "-m",
        far / "model",
        "--cache-dir",
        far / "cache",
        "-s",
        SEQ_LENGTH,
        "--max-steps",
        2,
        "--save-dir",
        far / "out",
        cwd=project,
    )
    assert "done: 2 steps" in done.stdout
    assert len(list((far / "cache" / "tokens").iterdir())) == 1  # the moved token store is used


def test_overwrite_keeps_the_old_run_under_another_name(experiment: Path):
    one = ("-e", "two", *COMMON, "--max-steps", 2, "-b", 8, "--seed", 5)
    run_stage("04_train_fsdp.py", *one, "--overwrite", cwd=experiment)
    replaced = list((experiment / "outputs").glob("two.replaced-*"))
    assert (
        len(replaced) == 1
        and (replaced[0] / "checkpoints" / "step_00000012" / "COMMIT.json").exists()
    )
    assert list_saved_steps(experiment, "two") == [2]


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(project: Path):
    from transformers import GPT2Config

    (project / "model" / "model.safetensors").unlink()
    save_model(
        project / "model",
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            embd_pdrop=0.2,
            resid_pdrop=0.2,
            attn_pdrop=0.2,
        ),
    )
    common = (*COMMON, "-b", 2)
    run_stage("04_train_fsdp.py", "-e", "whole", *common, "--max-steps", 8, cwd=project, ranks=2)
    shutil.copytree(project / "outputs" / "whole", project / "outputs" / "cut")
    shutil.rmtree(project / "outputs" / "cut" / "checkpoints" / "step_00000008")
    run_stage("04_train_fsdp.py", "-e", "cut", *common, "--max-steps", 8, cwd=project, ranks=2)
    assert losses(project, "cut") == losses(project, "whole")


def test_a_run_resumes_from_a_named_checkpoint(experiment: Path, trained: Path):
    folder = experiment / "outputs" / "two" / "checkpoints"
    one = (
        "-e",
        "two",
        *COMMON,
        "-b",
        2,
        "--global-batch-size",
        8,
        "--max-steps",
        STEPS,
        "--resume",
        "outputs/two/checkpoints/step_00000004",
    )
    assert_refused(experiment, *one, "--seed", 3, code=2, says="--seed: 0 there, 3 now")
    assert list_saved_steps(experiment, "two") == [4, 8, 12]  # a refused launch moves nothing
    done = run_stage("04_train_fsdp.py", *one, cwd=experiment)
    assert "step 4 of 12" in done.stdout and len(list((folder / "quarantine").iterdir())) == 2
    assert losses(experiment, "two") == pytest.approx(losses(trained, "two"), rel=1e-5)
    shutil.rmtree(folder / "step_00000012")  # as if it had been stopped: the same command resumes
    done = run_stage("04_train_fsdp.py", *one, cwd=experiment)
    assert "step 8 of 12" in done.stdout
    assert_refused(
        experiment, *one[:-1], "outputs/two/checkpoints/step_9", code=3, says="a checkpoint"
    )
    assert_refused(
        experiment, *one[:-1], "never", "--max-steps", 20, code=2, says="--resume is never"
    )


def test_epochs_end_and_dropped_samples_are_reported(project: Path):
    for name in ("config.json", "generation_config.json"):  # another EOS would be one more line
        config = project / "model" / name
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 1}))
    one = ("-e", "epochs", *COMMON, "-b", 50)
    done = run_stage("04_train_fsdp.py", *one, "--num-epochs", 2, "--grad-clip", 0, cwd=project)
    state = json.loads((project / "outputs" / "epochs" / "state.json").read_text())
    assert state["step"] == 2 * state["samples"] // 50 and state["samples"] % 50
    head = [line.split(": ")[0].split()[-1] for line in done.stdout.splitlines()[:5]]
    assert head == ["model", "data", "steps", "checkpoints", "log"]
    left_out = f"{2 * state['samples'] % 50} samples at the end, too few for a step"
    assert left_out in read_log(project, "epochs") and left_out not in done.stdout
    assert "(100 %) are longer than a row of 32 tokens\n" in read_log(project, "epochs")
    assert state["epoch"] == metrics(project, "epochs")[-1]["epoch"] > 1.5
    assert state["global_step"] == state["step"]
    # A crash after the last save leaves the file of an earlier step behind.
    at = project / "outputs" / "epochs" / "state.json"
    at.write_text(json.dumps(state | {"status": "running", "step": 1, "global_step": 1}))
    again = run_stage("04_train_fsdp.py", *one, "--num-epochs", 2, "--grad-clip", 0, cwd=project)
    completed = json.loads(at.read_text())
    assert (completed["status"], completed["global_step"]) == ("complete", state["step"])
    assert completed["step"] == state["step"] and "epoch" not in completed
    assert "already done: " in again.stdout and "next: " in again.stdout
    lines = (done.stdout + again.stdout).splitlines()  # to the last one, which is a command
    assert all(re.match(r"\d\d:\d\d:\d\d \[rank=0\] ", line) for line in lines), lines
    dry = run_stage(
        "04_train_fsdp.py", *one, "--num-epochs", 3, "--grad-clip", 0, "--dry-run", cwd=project
    ).stdout
    assert "[rank=0]" not in dry  # a plan is no run


def test_a_run_resumes_without_its_records(experiment: Path):
    root = experiment / "outputs" / "two"
    (root / "state.json").unlink()
    (root / "config.yaml").write_text("")
    one = ("-e", "two", *COMMON, "-b", 2, "--global-batch-size", 8, "--max-steps")
    assert "already done" in run_stage("04_train_fsdp.py", *one, STEPS, cwd=experiment).stdout
    assert json.loads((root / "state.json").read_text())["status"] == "complete"
    assert_refused(experiment, *one, STEPS, "--seed", 1, code=2, says="--seed: 0 there, 1 now")
    done = run_stage("04_train_fsdp.py", *one, STEPS + 1, cwd=experiment)
    assert "resumed from" in done.stdout


def test_options_may_change_until_a_checkpoint_is_saved(project: Path):
    one = ("-e", "early", *COMMON, "-b", 2, "--max-steps", 2)
    run_stage("04_train_fsdp.py", *one, cwd=project)
    shutil.rmtree(project / "outputs" / "early" / "checkpoints")
    save_tokenizer(project / "model", project / "raw_text", vocabulary=400)
    run_stage("04_train_fsdp.py", *one, "--seed", 1, cwd=project)
    assert len(metrics(project, "early")) == 2
    tokenizer_file = project / "outputs" / "early" / "model" / "tokenizer.json"
    assert tokenizer_file.read_bytes() == (project / "model" / "tokenizer.json").read_bytes()


def test_ranks_that_were_started_differently_stop(project: Path):
    """Start two ranks by hand; the second logs at other steps, so the first row would hang."""
    run_stage("04_train_fsdp.py", "-e", "x", *COMMON, "--prepare-only", cwd=project)
    launches = [
        start_stage(
            "04_train_fsdp.py",
            "-e",
            "x",
            *COMMON,
            "--log-freq",
            1 + number,
            "--max-steps",
            4,
            cwd=project,
            output=project / f"rank_{number}",
            env=variables,
        )
        for number, variables in enumerate(forks.rank_variables(2, free_port()))
    ]
    assert [launch.wait() for launch in launches] == [[2], [2]]
    for number in range(2):
        error = (project / f"rank_{number}").read_text()
        assert "started differently" in error and "--log-freq" in error
    assert not (project / "outputs").exists()


def test_a_second_launch_is_refused(project: Path):
    arguments = ("-e", "busy", *COMMON, "--max-steps", 100000, "-b", 1, "--ckpt-freq", 100000)
    first = start_stage("04_train_fsdp.py", *arguments, cwd=project)
    while not (project / "outputs" / "busy" / "metrics.jsonl").exists():
        assert not first.poll(0.05)
    assert_refused(project, *arguments, code=2, says="another launch is training")
    assert_refused(project, *arguments, "--overwrite", code=2, says="another launch is training")
    assert not first.poll()
    first.kill()


def test_cheap_checks_come_before_tokenising(experiment: Path):
    shutil.rmtree(experiment / ".cache")
    one = ("-e", "two", *COMMON, "-b", 2, "--global-batch-size", 8, "--max-steps", 20)
    assert_refused(experiment, *one, "--seed", 7, code=2, says="started with other settings")
    assert_refused(
        experiment, *one, "--save-dir", "raw_text/document_000.txt", code=2, says="is a file"
    )
    assert_refused(experiment, *one, "--resume", "foo", code=3, says="foo is not a checkpoint")
    assert_refused(
        experiment, "-e", "x", "-d", "nothing", "-m", "nobody", code=3, says="2 problems"
    )
    (experiment / "model" / "config.json").write_text('{"model_type": "bert"}')
    assert_refused(experiment, *one[2:], "-e", "bert", code=2, says="no causal language model")
    assert not (experiment / ".cache").exists() and not (experiment / "outputs" / "bert").exists()


def test_packed_documents_train_on_any_number_of_ranks(project: Path):
    """Packs contain different numbers of label tokens; the losses must not depend on the ranks."""
    one = (*COMMON, "--max-steps", 6, "--packing", "documents", "-s", 100)
    run_stage("04_train_fsdp.py", "-e", "one", *one, "-b", 4, cwd=project)
    log = read_log(project, "one")
    assert "% padding" in log and "documents (100 %) are longer than a row of 100" in log
    planned = train_model(project, "plan", *one, "-b", 4, "--packing", "none", "--dry-run")
    assert "(100 %) are longer than a row" in planned  # before the documents have their rows
    numbers = re.search(r"without padding +about ([\d,]+) tokens, ([\d,]+) of them", log)
    tokens, labels = (int(number.replace(",", "")) for number in numbers.groups())
    assert labels < tokens < 6 * 400
    assert tokens == pytest.approx(metrics(project, "one")[-1]["train/tokens_seen"], rel=0.03)
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "two",
        *one,
        "-b",
        1,
        "--grad-accum-steps",
        2,
        cwd=project,
        ranks=2,
    )
    assert losses(project, "two") == pytest.approx(losses(project, "one"), rel=1e-4)
    seen = [row["train/tokens_seen"] for row in metrics(project, "one")]
    assert 5 * 400 < seen[-1] < 6 * 400 and seen == sorted(seen)
    assert seen == [row["train/tokens_seen"] for row in metrics(project, "two")]
    flops = [count_flops_per_token(project, name) for name in ("one", "two")]
    assert flops[0] == pytest.approx(flops[1]) and len(set(flops[0])) > 1  # by the documents
    shutil.rmtree(project / "outputs" / "two" / "checkpoints" / "step_00000006")
    run_stage("04_train_fsdp.py", "-e", "two", *one, "-b", 4, cwd=project)
    assert seen == [row["train/tokens_seen"] for row in metrics(project, "two")]


def count_flops_per_token(project: Path, name: str) -> list[float]:
    return [
        row["perf/tflops"] / row["perf/tokens_per_sec_per_device"] for row in metrics(project, name)
    ]


@pytest.mark.slow
def test_a_mixture_trains_and_resumes(project: Path):
    """Shares, losses and a resume do not depend on the ranks, nor on how tokens are read."""
    write_corpus(project / "raw_more", documents=17)
    run_stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        "raw_more",
        "--save-dir",
        "hf_datasets/more",
        "--validation-percent",
        30,
        cwd=project,
    )
    one = (*COMMON[2:], "-d", "corpus=0.75", "-d", "more=0.25", "--max-steps", 8)
    plan = run_stage("04_train_fsdp.py", "-e", "one", *one, "--prepare-only", cwd=project)
    plan = run_stage("04_train_fsdp.py", "-e", "one", *one, "-b", 4, "--dry-run", cwd=project)
    assert "75 % of the samples" in plan.stdout and "25 % of the samples" in plan.stdout
    run_stage("04_train_fsdp.py", "-e", "one", *one, "-b", 4, cwd=project)
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "two",
        *one,
        "-b",
        2,
        cwd=project,
        ranks=2,
    )
    assert losses(project, "two") == pytest.approx(losses(project, "one"), rel=1e-4)
    [*_, last] = (row for row in metrics(project, "one") if "eval/loss" in row)
    assert last["eval/loss"] == pytest.approx(
        0.75 * last["eval/loss/corpus"] + 0.25 * last["eval/loss/more"]
    )
    assert last["eval/loss/corpus"] != last["eval/loss/more"]
    shutil.rmtree(project / "outputs" / "two" / "checkpoints" / "step_00000008")
    run_stage("04_train_fsdp.py", "-e", "two", *one, "-b", 4, cwd=project)
    assert losses(project, "two") == pytest.approx(losses(project, "one"), rel=1e-4)
    other = (*one[:-6], "-d", "corpus=0.7", "-d", "more=0.3", "--max-steps", 8)
    assert_refused(project, "-e", "two", *other, "-b", 4, code=2, says="dataset")


def test_the_loop_is_in_plain_sight():
    source = (ROOT / "04_train_fsdp.py").read_text()
    loop = source[source.index("def train(") : source.index("if __name__")]
    assert len(loop.splitlines()) <= 80 and ".backward()" in loop and "optimizer.step()" in loop
