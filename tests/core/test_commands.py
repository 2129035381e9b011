# covers: lib/core/commands.py
"""Printed commands run when they are pasted in the current directory."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lib.core import commands, options
from tests.conftest import ROOT

TORCHRUN = """\
import os, subprocess, sys
ranks = sys.argv[sys.argv.index("--nproc-per-node") + 1]
for rank in range(int(ranks)):
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "LOCAL_WORLD_SIZE": ranks}
    subprocess.run([sys.executable, *sys.argv[3:]], check=True)
"""
SHOWS_ITSELF = """\
import json, os, sys
sys.path.insert(0, {root!r})
from lib.core import commands
if os.environ.get("RANK", "0") == "0" and "--again" not in sys.argv:
    print(commands.as_typed("--again", drop=("-d", "--dataset-name")))
else:
    print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    def type_(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", list(words))
        monkeypatch.setattr(sys, "orig_argv", ["python9", *words])

    return type_


@pytest.mark.parametrize(
    "words, expected",
    [
        (["04.py", "-e", "a b"], "04.py -e 'a b' --overwrite"),
        (["04.py", "-d", "a", "-d", "b=0.5", "-e", "x"], "04.py -e x --overwrite"),
        (["04.py", "--dataset_name=a", "-e", "x"], "04.py -e x --overwrite"),
        (["04.py", "--dataset_name", "a", "-e", "x"], "04.py -e x --overwrite"),
        (["03.py", "--token", "hf_1"], '03.py --token "$HF_TOKEN" --overwrite'),
        (["03.py", "--token=hf_1"], '03.py --token="$HF_TOKEN" --overwrite'),
        (["lib.checkpoints", "list"], "-m lib.checkpoints list --overwrite"),
    ],
)
def test_as_typed_adds_and_drops_options(typed, words: list[str], expected: str) -> None:
    typed(*words)
    command = commands.as_typed("--overwrite", drop=("-d", "--dataset-name"))
    assert command == f"{commands._python()} {expected}"


def test_from_python_the_call_is_repeated() -> None:
    @commands.repeatable_call
    def build(name: str = "", **values: object) -> str:
        return commands.as_typed("--push", "REGISTRY/x", "--create-repository")

    assert build("a", tag="t", push=None, hf_token="hf_1") == (
        "build('a', tag='t', push='REGISTRY/x', hf_token=os.environ['HF_TOKEN'], "
        "create_repository=True)"
    )
    assert "build(" not in commands.as_typed()


@pytest.mark.parametrize(
    "option", ["-m", "--model-name", "--model_name", "--hf-model", "--model_name_or_path"]
)
def test_an_option_is_replaced_under_any_of_its_names(typed, option: str) -> None:
    parser = options.Parser("a stage")
    parser.add_argument("-e", help="name")
    model = parser.add_argument("-m", "--model-name", help="model")
    options.add_aliases(parser, model, ["--hf-model", "--model-name-or-path"])
    for words in ([option, "old"], [f"{option}=old"]):
        typed("04.py", "-e", "old", *words)
        parser.parse(sys.argv[1:])
        assert commands.replace_value(("-m", "--model-name"), "old", "new").endswith(
            f"04.py -e old {' '.join(words).replace('old', 'new')}"
        )
    typed("04.py", option, "old", "-e", "x")
    assert commands.as_typed(drop=["-m", "--model-name"]).endswith("04.py -e x")


@pytest.mark.parametrize(
    "script",
    ["04_train_fsdp.py", "./04_train_fsdp.py", "launch/kubernetes.py", str(ROOT / "01_x.py")],
)
def test_scripts_are_named_relative_to_the_current_directory(
    typed, monkeypatch, script: str
) -> None:
    monkeypatch.chdir(ROOT)
    typed(script)
    name = shlex.split(commands.script("05_export_checkpoint.py"))[1]
    assert Path(name).samefile(ROOT / "05_export_checkpoint.py")
    assert not Path(name).is_absolute()


def test_paths_with_spaces_in_other_directories_are_quoted(
    typed, monkeypatch, tmp_path: Path
) -> None:
    project = tmp_path / "my project"
    project.symlink_to(ROOT)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    typed("../my project/02_build_hf_dataset.py")
    assert commands.script("01_x.py").endswith(" '../my project/01_x.py'")
    assert commands.path_of("requirements.txt") == "../my project/requirements.txt"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_printed_command_runs_in_a_shell(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "a script.py"
    script.write_text(SHOWS_ITSELF.format(root=str(ROOT)))
    (tmp_path / "torchrun").write_text(TORCHRUN)
    torchrun = [str(tmp_path / "torchrun"), "--nproc-per-node", str(ranks)]
    start = [sys.executable, *(torchrun if ranks else []), "a script.py", "-e", "it's", "-d", "x"]

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def output(command: list[str]) -> list[str]:
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            text=True,
            capture_output=True,
            check=True,
        ).stdout.splitlines()

    printed = [line for line in output(start) if line[:1] not in "[{"]
    assert ("torchrun --nproc-per-node" in printed[0]) == bool(ranks)
    stand_in = f'torchrun() {{ {shlex.quote(sys.executable)} ./torchrun "$@"; }}'
    assert output(["bash", "-c", f"{stand_in}\n{printed[0]}"]) == [
        '["-e", "it\'s", "--again"]'
    ] * max(1, ranks)


def test_a_launcher_is_named_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commands.LAUNCHED_AS, r"launch/single_node.sh -- -e a\ b")
    assert commands.as_typed("--overwrite") == "launch/single_node.sh -- -e 'a b' --overwrite"
    assert os.environ[commands.LAUNCHED_AS]


@pytest.mark.parametrize(
    ("script", "nodes", "ranks", "expected"),
    [
        ("04_train_fsdp.py", "1", "1", "torchrun 04_train_fsdp.py -e x"),
        ("04_train_fsdp.py", "1", "2", "torchrun --nproc-per-node 2 04_train_fsdp.py -e x"),
        (
            "04_train_fsdp.py",
            "3",
            "2",
            "torchrun --nnodes 3 --node-rank 1 --master-addr head --master-port 29500 "
            "--nproc-per-node 2 04_train_fsdp.py -e x",
        ),
    ],
)
def test_under_torchrun_the_command_starts_all_ranks(
    typed, monkeypatch, script: str, nodes: str, ranks: str, expected: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(commands, "_torchrun", lambda: ["torchrun"])
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_WORLD_SIZE": nodes,
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    typed(script, "-e", "x")
    assert commands.as_typed() == expected


def test_training_on_several_gpus_goes_through_the_launcher(typed, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHON", sys.executable)
    typed("02_build_hf_dataset.py")
    for gpus, start in ((1, commands._torchrun()), (2, ["launch/single_node.sh", "--"])):
        monkeypatch.setattr(commands.Path, "glob", lambda path, _, gpus=gpus: range(gpus))
        assert commands.train("-e", "x").startswith(" ".join(start))


def test_a_batch_script_takes_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commands.LAUNCHED_AS, "sbatch -N 4 launch/slurm.sbatch -e exp -d c4")
    assert commands.with_options("-e", "y") == "sbatch -N 4 launch/slurm.sbatch -e y"
    assert commands.as_typed("--overwrite").endswith("-e exp -d c4 --overwrite")


@pytest.mark.parametrize("name", ["-o2", "a\nb", "it's\x1b[31m\\", "n\udcfcx\x85", "é ü"])
def test_any_path_becomes_one_shell_word(typed, name: str) -> None:
    typed("01.py")
    printed = commands.shell("printf", "%s", Path(name))
    assert printed.isprintable()
    expected = f"./{name}" if name.startswith("-") else name
    shown = subprocess.run(["bash", "-c", printed], capture_output=True, check=True).stdout
    assert shown == os.fsencode(expected)
