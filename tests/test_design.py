# covers: lib/curate/step.py, lib/curate/table.py, lib/optim/optimizers.py
# covers: lib/parallel/placement.py, lib/train/settle.py
"""The recipes of docs/explanation/design.md, followed on a throw-away copy of the code.

cloud/test_kubernetes_render.py follows the recipe for a kind of job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import ROOT, run_forked, run_stage
from tests.training import prepare_project

pytestmark = pytest.mark.slow


def blocks(heading: str) -> list[str]:
    """Return the code that a section of docs/explanation/design.md shows."""
    section = (
        (ROOT / "docs/explanation/design.md").read_text("utf-8").partition(f"## {heading}\n")[2]
    )
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


# The bytes that memory estimates count are those of the states that the optimizer makes.
COUNT_STATES = """
import torch
from lib.optim import optimizers, registry
from lib.planning import sizes
model = torch.nn.Sequential(torch.nn.Linear(300, 20), torch.nn.LayerNorm(20))
for kind in optimizers.OPTIMIZERS:
    states = registry.named_states(model, registry.build_optimizer(kind, model, 1e-3))
    made = sum(tensor.nbytes for tensor in states.values())
    assert made == sizes.count_states(model, optimizers.Choice(kind), 1)["optimizer"], kind
"""


Run = Callable[..., str]


def replace_in(path: Path, before: str, after: str) -> None:
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after))


def append_text(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def follow_recipes(copy: Path) -> None:
    """Change a copy of the code as the sections of docs/explanation/design.md say."""
    (option,) = blocks("How to add an option")
    derived, rule = blocks("How to add a derived option")
    before = "    watchdog_minutes: float = option("
    replace_in(copy / "lib/train/options.py", before, option + derived + before)
    append_text(copy / "lib/train/settle.py", "\n\n" + rule)

    row, module = blocks("How to add an optimizer")
    append_text(copy / "lib/optim/optimizers.py", "\n\n" + row)
    (copy / "lib/optim/signs.py").write_text(module)

    line, module = blocks("How to wrap attention")
    (copy / "lib/parallel/ranges.py").write_text(module)
    path = copy / "lib/train/model.py"
    before = "    attention.avoid_device_reads(model"
    replace_in(path, before, line + before)
    first = "from lib.parallel.compiling import"
    replace_in(path, first, f"from lib.parallel import ranges\n{first}")

    row, module = blocks("How to add a model change")
    append_text(copy / "lib/models/model_changes.py", "\n" + row)
    (copy / "lib/models/scaled.py").write_text(module)

    (module,) = blocks("How to add a filter")
    (copy / "lib/curate/steps/capitals.py").write_text(module)
    path = copy / "lib/curate/table.py"
    before = "\nSTEPS: "
    line = "from lib.curate.steps.capitals import FewCapitals\n"
    replace_in(path, before, line + before)
    replace_in(path, "    Masks,\n)", "    Masks,\n    FewCapitals,\n)")


def test_the_recipes_work_on_one_copy_of_the_code(tmp_path: Path) -> None:
    """One copy gets all changes, so that one process imports the changed code for all checks."""
    for name in ("lib", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    for name in ("02_build_hf_dataset.py", "04_train_fsdp.py", "tests/fork_server.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    follow_recipes(tmp_path)
    prepare_project(tmp_path)
    server = forks.ForkServer("stages", tmp_path)
    environment = {**os.environ, **forks.CPU_VARIABLES}

    def run(script: str, *words: object, expect: int = 0) -> str:
        """Run a script of the copy as a fork, and return what it prints."""
        path = str(tmp_path / script)
        done = run_forked(server, [path], path, words, tmp_path, environment, 0, 120)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        for check in (
            check_options,
            check_optimizer,
            check_wrapper_of_attention,
            check_model_change,
            check_filter,
        ):
            check(tmp_path, run)
    finally:
        server.close()


def check_options(copy: Path, run: Run) -> None:
    """A derived option is one field and one rule."""
    assert "--greeting GREETING" in run("04_train_fsdp.py", "--help-all")
    train = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "-s", 64, "--dry-run")
    assert "--log-tokens 640 (--log-freq)" in run(*train)
    assert "(--log-freq)" not in run(*train, "--log-tokens", 7)


def check_optimizer(copy: Path, run: Run) -> None:
    train = (
        *("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "--precision", "fp32"),
        *("--optimizer", "signs", "-s", 64, "-b", 2, "--ckpt-freq", 2, "--eval-freq", 0),
    )
    assert "--momentum X" in run("04_train_fsdp.py", "--help-all")
    for options, error in (
        (("--momentum", 1), "the momentum must be below 1"),
        (("--momentum", 0.5, "--optimizer", "adamw"), "--momentum belongs to --optimizer signs"),
        (("--lr", 0.05), "--lr 0.05 is too large"),
    ):
        assert error in run(*train, *options, expect=2)
    run(*train, "--max-steps", 2)
    assert "step 2 of 4" in run(*train, "--max-steps", 4)
    assert "signs" in (copy / "outputs/x/checkpoints/step_00000004/COMMIT.json").read_text()
    (copy / "count_states.py").write_text(COUNT_STATES)
    run("count_states.py")


def check_wrapper_of_attention(copy: Path, run: Run) -> None:
    """The profile of a run contains the range that the wrapper opens; torch prints nothing."""
    printed = run(
        *("04_train_fsdp.py", "-d", "corpus", "-m", "model", "--precision", "fp32", "-s", 64),
        *("-b", 2, "--packing", "documents", "--attention", "varlen", "--eval-freq", 0),
        *("--max-steps", 3, "--log-freq", 1, "-e", "wrapped", "--profile", "2:3"),
    )
    [table] = (copy / "outputs/wrapped/profile").glob("*.txt")
    assert "attention of a layer" in table.read_text("utf-8") and "USDT" not in printed


FOLD_CHANGE = """
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
"""


def check_model_change(copy: Path, run: Run) -> None:
    (copy / "fold_change.py").write_text(FOLD_CHANGE)
    assert "['2 layers scaled']\n" in run("fold_change.py")


def check_filter(copy: Path, run: Run) -> None:
    texts = ["LOUD AND LARGE", "a text of some length", "another one", "ANOTHER LOUD ONE"]
    (copy / "raw").mkdir()
    for number, text in enumerate(texts):
        (copy / f"raw/{number}.txt").write_text(text)
    run("02_build_hf_dataset.py", "--data-folder", "raw", "--no-progress", "--save-dir", "plain")
    curate = ("lib/curate/__main__.py", "plain", "--no-progress", "--save-dir")
    run(*curate, "chosen", "--max-capitals", "0.5")
    manifest = json.loads((copy / "chosen/manifest.json").read_text())
    assert manifest["summary"]["rows"] == 2
    lines = [json.loads(line) for line in (copy / "chosen/dropped.jsonl").open()]
    assert [(line["row"], line["rule"]) for line in lines] == [(0, "capitals"), (3, "capitals")]


def test_a_wrapper_reaches_every_implementation_of_attention(tmp_path: Path) -> None:
    """The results stay the same; sdpa replaces flash_attn and flex, which are slow or absent."""
    (tmp_path / "wrap.py").write_text(
        """
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from lib.parallel import attention
from lib.tokens.batches import MicroBatch

def compute_sdpa(module, query, key, value, mask, **options):
    return AttentionInterface()["sdpa"](module, query, key, value, None, is_causal=True)

for name in ("flash_attention_2", "flex_attention"):
    AttentionInterface.register(name, compute_sdpa)
calls = []

def count(attend):
    def attend_and_count(module, *heads, **options):
        calls.append(module.config._attn_implementation)
        return attend(module, *heads, **options)
    return attend_and_count

model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2))
tokens = torch.arange(24).reshape(2, 12)
names = ("sdpa", "eager", "varlen", "flash_attention_2", "flex_attention")
logits = []
for wrapped in (False, True):
    if wrapped:
        attention.wrap_functions(count)
    for name in names:
        model.config._attn_implementation = name
        with torch.no_grad():
            inputs = attention.make_inputs(model, MicroBatch(tokens, tokens))
            logits.append(model(**inputs).logits)
for number, name in enumerate(names):
    assert torch.equal(logits[number], logits[number + len(names)]), name
print(*calls)
"""
    )
    printed = run_stage(str(tmp_path / "wrap.py"), cwd=tmp_path).stdout
    names = ("sdpa", "eager", "varlen", "flash_attention_2", "flex_attention")
    assert printed.split() == [name for name in names for _ in range(2)]
