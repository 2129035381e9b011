"""The recipes of docs/explanation/design.md, followed on a throw-away copy of the code.

That of a kind of job: test_launch_kubernetes_render.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training import prepare

pytestmark = pytest.mark.slow


def blocks(heading: str) -> list[str]:
    """Return the code that a section of docs/explanation/design.md shows."""
    section = (
        (ROOT / "docs/explanation/design.md").read_text("utf-8").partition(f"## {heading}\n")[2]
    )
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the code."""
    for name in ("lib", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copyfile(ROOT / "04_train_fsdp.py", tmp_path / "04_train_fsdp.py")
    return tmp_path


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_option(copy: Path) -> None:
    path = copy / "lib/train/config.py"
    text = path.read_text("utf-8")
    (field,) = blocks("How to add an option")
    before = "    config: Path | None = option("
    assert before in text
    path.write_text(text.replace(before, field + before))
    assert "--greeting GREETING" in run("04_train_fsdp.py", "--help-all", cwd=copy)


def test_an_optimizer(copy: Path) -> None:
    row, module = blocks("How to add an optimizer")
    with (copy / "lib/optim/registry.py").open("a") as file:
        file.write("\n\n" + row)
    (copy / "lib/optim/signs.py").write_text(module)
    prepare(copy)
    train = (
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "corpus",
        "-m",
        "model",
        "--precision",
        "fp32",
        "--optimizer",
        "signs",
        "-s",
        64,
        "-b",
        2,
        "--ckpt-freq",
        2,
        "--eval-freq",
        0,
    )
    run(*train, "--max-steps", 2, cwd=copy)
    assert "step 2 of 4" in run(*train, "--max-steps", 4, cwd=copy)
    assert "signs" in (copy / "outputs/x/checkpoints/step_00000004/COMMIT.json").read_text()


def test_an_adapter(copy: Path) -> None:
    row, module = blocks("How to add an adapter")
    with (copy / "lib/models/model_changes.py").open("a") as file:
        file.write("\n" + row)
    (copy / "lib/models/scaled.py").write_text(module)
    assert (
        run(
            "-c",
            """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lib.models import model_changes
from lib.models.sharded import Placement
model, plain = (AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2)) for _ in range(2))
changes = model_changes.build_changes({"scaled": {"ends": ".mlp.down_proj"}})
added, descriptions = model_changes.apply_changes(model, changes, Placement())
tensors = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
model.load_state_dict(tensors)
factors = {name: tensors.pop(name) for name in added}
plain.load_state_dict({name: model_changes.fold_tensor(changes, plain, name, tensor, factors)
                       for name, tensor in tensors.items()})
tokens = torch.arange(24).reshape(2, 12)
torch.testing.assert_close(plain(tokens).logits, model(tokens).logits)
print(descriptions)
""",
            cwd=copy,
        )
        == "['2 layers scaled']\n"
    )
