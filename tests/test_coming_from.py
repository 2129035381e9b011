# covers: lib/core/unknown_options.py, lib/train/config.py, lib/train/command_line.py
# covers: lib/*/options.py
"""Options of other systems: the stage accepts them, or its error names the nearest option."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.core import log, options, unknown_options
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.identity import find_differences
from lib.core.paths import Experiment
from lib.train import command_line, plan
from lib.train.command_line import add_options, read_options
from lib.train.config import Config
from lib.train.new_model import model_from_scratch
from lib.train.output.kinds import RunKind
from lib.train.sources.table import choose_source
from tests.conftest import ROOT, run_stage
from tests.test_commands import parser_of
from tests.test_repository import STAGES

PAGE = (ROOT / "docs/how-to/coming-from.md").read_text(encoding="utf-8")


def asked(*argv: Any) -> Config:
    """Return what stage 04 makes of a command line."""
    parser = options.Parser("training")
    add_options(parser)
    return read_options(parser, [str(word) for word in argv])


COMMANDS_WITH_ALIASES = [
    (STAGES[1], "--validation-percent", "validation_split_percentage"),
    (STAGES[2], "--model-name", "base_model"),
    (STAGES[2], "--token", "hf_token"),
    (STAGES[4], "--model-name", "model_name_or_path"),
    (ROOT / "launch/kubernetes.py", "--nodes", "num_nodes"),
    (ROOT / "launch/kubernetes.py", "--token", "hf_token"),
    (ROOT / "launch/cloud/kube/setup.py", "--nodes", "node_count"),
]


@pytest.mark.parametrize(("path", "option", "alias"), COMMANDS_WITH_ALIASES)
def test_each_command_takes_the_names_of_its_own_options(
    path: Path, option: str, alias: str
) -> None:
    parser = parser_of(path)
    known = parser._option_string_actions
    assert known[options.Parser.to_our_name(parser, f"--{alias}")] is known[option]


def test_aliases_are_in_the_reference_and_not_in_help() -> None:
    parser = parser_of(STAGES[3])
    aliases_of_lr = {
        flag for flag, action in parser._option_string_actions.items() if action.dest == "lr"
    }
    assert {"--learning-rate", "--optimizer.lr"} <= aliases_of_lr
    reference = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
    for name in ("learning-rate", "per-device-train-batch-size", "optimizer.lr", "adam-beta1"):
        assert name not in parser.format_help() + parser.format_all()
        assert f"`--{name}`" in reference


def test_the_page_says_what_replaces_each_option_that_differs_or_is_gone() -> None:
    accepted = {
        flag.lstrip("-").replace("-", "_") for flag in parser_of(STAGES[3])._option_string_actions
    }
    section = PAGE.partition("## Options that differ")[2]
    differ, _, gone = section.partition("## Earlier versions")
    rows = [line.split(" | ")[0] for line in differ.splitlines() if line.startswith("| `")]
    named = {name for row in rows if " in " not in row for name in re.findall(r"`([\w.]+)`", row)}
    assert len(named) > 100
    assert not named & accepted
    assert not [name for name in unknown_options.GONE if f"`{name}`" not in gone]


FROM_SCRATCH = [
    "-e",
    "exp",
    "-d",
    "corpus",
    "--mixed-precision",
    "--use-flash-attn",
    "--checkpoint-dir",
    "ckpt",
    "--checkpoint-interval",
    50,
    "--log-interval",
    5,
    "--max-lr",
    1e-3,
    "--steps-per-epoch",
    100,
    "--batch-size",
    4,
]


@pytest.mark.slow
def test_a_trainer_from_scratch_runs_and_goes_on_as_it_is_typed(project: Path) -> None:
    def train(epochs: int, ranks: int) -> str:
        words = [
            *FROM_SCRATCH,
            "--num-epochs",
            epochs,
            "--from-scratch",
            "--model-size",
            "1M",
            "--vocab-size",
            500,
        ]
        words[words.index(100)] = 2
        words[words.index("--batch-size") + 1] = 1
        run_stage("04_train_fsdp.py", *words, "-s", 32, cwd=project, ranks=ranks)
        return (project / "ckpt/exp/logs/rank_00000.log").read_text()

    first = train(1, ranks=2)
    for line in (
        "tokenizer: 500 tokens from all",
        "1M from scratch with a tokenizer trained on",
        "flash_attention_2",
        "attention: sdpa",
        "'global_step': 2,",
        "experiment ckpt/exp",
    ):
        assert line in first, first
    shutil.rmtree(project / ".cache")  # what is derived of the data is in the run
    again = train(2, ranks=1)
    assert "2 samples of a step" in again
    assert "step 2 of 4" in again and "'global_step': 4," in again
    assert (project / "ckpt/exp/checkpoints/step_00000004/COMMIT.json").is_file()


def test_an_offline_pipeline_is_typed_as_before(project: Path) -> None:
    """Arrow files as a cache has them, and weights in HF_HOME."""
    (project / "cached").mkdir()
    shard = next((project / "hf_datasets/corpus/train").glob("*.arrow"))
    shutil.copy(shard, project / "cached/corpus-train.arrow")
    snapshot = project / "home/hub/models--org--name/snapshots" / ("0" * 40)
    shutil.copytree(project / "model", snapshot)
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text("0" * 40)
    for data in ("cached/corpus-train.arrow", "cached"):
        done = run_stage(
            "04_train_fsdp.py",
            "-e",
            "exp",
            "-d",
            data,
            "-m",
            "org/name",
            "-s",
            32,
            "--max_steps",
            1,
            "--log_freq",
            1,
            cwd=project,
            env={"HF_HOME": str(project / "home")},
        )
        assert "Hugging Face cache" in done.stdout
    assert "already done" in done.stdout  # the directory holds the same text under the same name


@pytest.mark.slow
def test_a_7b_from_scratch_is_planned_as_it_is_typed(project: Path) -> None:
    plan = run_stage(
        "04_train_fsdp.py",
        "-e",
        "big",
        "-d",
        "corpus",
        "--from-scratch",
        "--model-size",
        "7B",
        "--vocab-size",
        32000,
        "--dry-run",
        cwd=project,
    ).stdout
    assert "7B from scratch with a tokenizer trained on the dataset (llama, 6.74B" in plan
    assert "Llama 2 7B" in plan and not (project / ".cache").exists()


def test_without_a_dataset_each_byte_is_a_token(
    project: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.setup()
    monkeypatch.chdir(project)
    config = asked("-e", "x", "-d", "raw", "--streaming", "--from-scratch", "--model-size", "1M")
    exp = Experiment(Path("outputs"), "x")
    with model_from_scratch(config, exp, RunKind, choose_source(config), False) as model_dir:
        assert json.loads((model_dir / "config.json").read_text())["vocab_size"] == 320
    assert " byte" in capsys.readouterr().out


def test_the_words_of_a_trainer_from_scratch() -> None:
    config = asked(*FROM_SCRATCH, "--hf-model", "org/name", "--num-epochs", 3)
    assert (config.model_name, config.precision, config.ckpt_freq, config.log_freq) == (
        "org/name",
        None,
        50,
        5,
    )
    assert (config.save_dir, config.experiment_name) == (Path("ckpt"), "exp")
    assert (config.lr, plan.count_steps(config, 10, 4), plan.count_epochs(config)) == (
        1e-3,
        300,
        None,
    )
    assert config.attention == "flash"
    assert asked("--hf_model=a", "--mixed_precision").model_name == "a"


SAMPLE = [
    "--max_context_width=4096",
    "--num_key_value_heads=32",
    "--intermediate_size=11008",
    "--hidden_width=4096",
    "--num_layers=32",
    "--num_heads=32",
    "--model_type=llama_v2",
    "--checkpoint_freq=5000",
    "--validation_freq=500",
    "--max_steps=5000",
    "--epochs=1",
    "--checkpoint_dir=./checkpoints",
    "--dataset=allenai/c4",
    "--dataset_config_name=en",
    "--resume_from_checkpoint=./checkpoints",
    "--train_batch_size=1",
    "--val_batch_size=1",
    "--sharding_strategy=full",
    "--offload_activations=1",
    "--activation_checkpointing=1",
    "--cpu_offload",
    "0",
    "--logging_freq",
    "1",
    "--warmup",
    "0.0032",
]


def test_what_the_sample_is_given_is_told_all_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        asked("-e", "x", "-d", "y", *SAMPLE)
    untaken = [error.problem.split()[2].rstrip(";") for error in caught.value.several]
    assert untaken == [
        f"--{name}"
        for name in (
            "num-key-value-heads",
            "intermediate-size",
            "hidden-width",
            "num-layers",
            "num-heads",
            "model-type",
            "dataset",
            "dataset-config-name",
            "resume-from-checkpoint",
            "val-batch-size",
            "sharding-strategy",
            "offload-activations",
            "warmup",
        )
    ]
    assert "coming-from.md" in caught.value.hint and "--help" in caught.value.run
    taken = asked(
        "-e",
        "x",
        "-d",
        "y",
        *(
            word
            for word in SAMPLE
            if word.split("=")[0].replace("_", "-") not in {*untaken, "0.0032"}
        ),
    )
    assert (taken.seq_length, taken.ckpt_freq, taken.eval_freq, taken.batch_size) == (
        4096,
        5000,
        500,
        1,
    )
    assert (taken.activation_checkpointing, taken.cpu_offload, taken.log_freq) == ("full", False, 1)
    assert (str(taken.save_dir), taken.experiment_name) == ("checkpoints", "x")


def test_steps_have_two_names_in_the_sample() -> None:
    assert asked("-d", "y", "--max_training_steps", 100).max_steps == 100


def test_a_command_line_of_the_hugging_face_trainer() -> None:
    words = (
        "--model_name_or_path org/name -e exp --output_dir out --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 2 --learning_rate 1e-5 --num_train_epochs 2 "
        "--lr_scheduler_type linear --warmup_steps 10 --adam_beta2 0.99 --max_grad_norm 0.5 "
        "--save_steps 7 --save_total_limit 2 --logging_steps 3 --eval_steps 9 --block_size 64 "
        "--gradient_checkpointing True --attn_implementation sdpa --lora_r 8 --use_rslora True"
    )
    config = asked("-d", "y", *words.split())
    assert config.values_of(*Role) | {
        "model_name": "org/name",
        "save_dir": Path("out"),
        "experiment_name": "exp",
        "batch_size": 4,
        "grad_accum_steps": 2,
        "lr": 1e-5,
        "num_epochs": 2,
        "lr_scheduler": "linear",
        "warmup_steps": 10,
        "beta2": 0.99,
        "grad_clip": 0.5,
        "ckpt_freq": 7,
        "ckpt_keep": 2,
        "log_freq": 3,
        "eval_freq": 9,
        "seq_length": 64,
        "activation_checkpointing": "full",
        "attention": "sdpa",
        "lora_rank": 8,
        "lora_rslora": True,
    } == config.values_of(*Role)
    with pytest.raises(UsageError, match="--attention: invalid choice: 'eager'"):
        asked("-d", "y", "--attn_implementation", "eager")


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    keys = {
        "base_model": "org/name",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "sequence_len": 2048,
        "learning_rate": 2e-5,
        "num_epochs": 1,
        "save_steps": 100,
        "output_dir": "./out/run",
        "logging_steps": 1,
        "gradient_checkpointing": True,
    }
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(keys))
    config = asked("--config", tmp_path / "axolotl.yaml", "-e", "exp", "-d", "corpus")
    assert (config.model_name, config.batch_size, config.grad_accum_steps, config.seq_length) == (
        "org/name",
        2,
        4,
        2048,
    )
    assert (config.save_dir / config.experiment_name, config.activation_checkpointing) == (
        Path("out/run/exp"),
        "full",
    )
    (tmp_path / "axolotl.yaml").write_text("warmup_ratio: 0.1\npad_to_sequence_len: true\n")
    with pytest.raises(UsageError, match=r"(?s)warmup_ratio.*--warmup-steps.*pad_to_") as caught:
        asked("--config", tmp_path / "axolotl.yaml")
    assert "coming-from.md" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("packing: false", "none"),
        ("sample_packing: false", "none"),
        ("sample_packing: true", "documents"),
        ("packing: none", "none"),
        ("packing: concat", "concat"),
    ],
)
def test_packing_is_a_switch_or_has_a_value(tmp_path: Path, line: str, kind: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(line + "\n")
    assert asked("--config", file, "-d", "corpus").packing == kind
    name, value = line.split(": ")
    assert asked(f"--{name}={value}").packing == asked(f"--{name}", value).packing == kind
    assert asked(f"--{name}").packing == "documents"
    with pytest.raises(UsageError, match=r"concat.*documents.*none"):
        asked("--packing", "all")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "auto"),
        (["--gradient_checkpointing"], "full"),
        (["--gradient_checkpointing=False"], "none"),
        (["--activation-checkpointing", "selective"], "selective"),
        (["--activation_checkpointing", "0"], "none"),
    ],
)
def test_recomputation_is_a_flag_or_has_a_value(words: list[str], kind: str) -> None:
    assert asked(*words).activation_checkpointing == kind


def test_launchers_tell_the_same() -> None:
    assert command_line.parse_options(["-e", "x", "-d", "y", "--learning_rate", "1e-4"]).lr == 1e-4
    with pytest.raises(UsageError) as caught:
        command_line.parse_options(["--warmup_ratio", "0.1"])
    assert "--warmup-steps" in caught.value.problem and "coming-from.md" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ([], None),
        (["--mixed-precision"], None),
        (["--mixed-precision", "bf16"], "bf16"),
        (["--mixed_precision=float16"], "fp16"),
        (["--mixed-precision", "no"], "fp32"),
        (["--mixed-precision", "-e", "x"], None),
        (["--precision", "fp32"], "fp32"),
    ],
)
def test_mixed_precision_is_a_flag_or_has_a_value(words: list[str], precision: str | None) -> None:
    assert asked(*words).precision == precision


@pytest.mark.parametrize(("value", "precision"), [(True, None), ("bf16", "bf16"), (False, "fp32")])
def test_mixed_precision_in_a_file(tmp_path: Path, value: object, precision: str | None) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"mixed_precision": value, "use_flash_attn": True})
    )
    assert asked("--config", tmp_path / "run.yaml").precision == precision
    with pytest.raises(UsageError, match="invalid choice: 'int8'"):
        asked("--mixed-precision", "int8")


def test_a_recorded_place_gives_way_to_a_typed_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("save_dir: outputs\nexperiment_name: old\n")
    config = asked("--config", tmp_path / "run.yaml", "--checkpoint_dir", "ckpt")
    assert (config.save_dir, config.experiment_name) == (Path("ckpt"), "old")


@pytest.mark.parametrize("is_record", [False, True])
@pytest.mark.parametrize(
    ("recipe", "precision"), [("tensorwise", "fp8"), ("rowwise", "fp8-rowwise")]
)
def test_8_bit_floats_of_an_earlier_version_are_accepted(
    tmp_path: Path, recipe: str, precision: str, is_record: bool
) -> None:
    values = {"precision": "fp8", "fp8_recipe": recipe}
    content = {"options": values, "versions": {}} if is_record else values
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    config = asked("--config", tmp_path / "run.yaml", "-d", "corpus")
    assert config.precision == precision
    assert not find_differences({"options": values}, {"options": {"precision": precision}})
    (tmp_path / "run.yaml").write_text("precision: bf16\nfp8_recipe: rowwise\n")
    with pytest.raises(UsageError) as error:
        asked("--config", tmp_path / "run.yaml", "-d", "corpus")
    assert "fp8-rowwise" in error.value.render()


@pytest.mark.parametrize("is_record", [False, True])
@pytest.mark.parametrize(
    ("before", "name", "now"),
    [
        ({"ckpt-keep": 2, "ckpt-keep-every": 4}, "ckpt_keep", 0),
        ({"ckpt_hyperpod": "auto"}, "ckpt_local_dir", "hyperpod:auto"),
        ({"eval_suite": "small", "suite_limit": 10}, "eval_suite", "small:10"),
        ({"streaming": True, "text_field": "body"}, "streaming", "body"),
        ({"dataset_name": ["a/b"], "include": ["en/*"]}, "dataset_name", ["a/b/en/*"]),
        ({"precision": "fp8", "fp8-recipe": "rowwise"}, "precision", "fp8-rowwise"),
    ],
)
def test_options_that_became_values_of_others_keep_their_effect(
    tmp_path: Path, before: dict[str, Any], name: str, now: Any, is_record: bool
) -> None:
    if is_record:
        before = {key.replace("-", "_"): value for key, value in before.items()}
    content = {"options": before, "versions": {}} if is_record else before
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert getattr(asked("--config", tmp_path / "run.yaml"), name) == now


def test_the_memory_of_planned_gpus_in_a_file_keeps_its_effect(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("plan_gpus: [8, 64]\nplan_gpu_memory: 141\n")
    (tmp_path / "new.yaml").write_text("plan_gpus: 8,64:141\n")
    old, new = (asked("--config", tmp_path / f"{name}.yaml") for name in ("old", "new"))
    assert old.plan_gpus and old.plan_gpus == new.plan_gpus


def test_a_run_whose_model_was_made_from_a_config_keeps_its_directory(tmp_path: Path) -> None:
    values = {"from_scratch": True, "config_json": "any.json", "tokenizer": "tokens"}
    content = {"options": values, "versions": {}, "model_dir": ".cache/scratch/any"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    config = asked("--config", tmp_path / "run.yaml", "-d", "corpus")
    assert (config.model_name, config.from_scratch) == (".cache/scratch/any", True)
    assert config.tokenizer is None
    (tmp_path / "run.yaml").write_text("config_json: any.json\n")
    with pytest.raises(UsageError) as error:
        asked("--config", tmp_path / "run.yaml", "-d", "corpus")
    assert "--from-scratch" in error.value.render()
