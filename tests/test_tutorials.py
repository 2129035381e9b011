# covers: docs/tutorials/*.md
"""Run every `bash` block of docs/tutorials/ as a reader would type it.

A local server stands for the Hub, with a tiny model under the name that a tutorial uses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.hub_models import USER_VARIABLES, hub_variables, make_model_files
from tests.hub_server import HubServer, Repo
from tests.test_airgap import check_out
from tests.training import write_corpus

TUTORIALS = ROOT / "docs" / "tutorials"
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Wheels take minutes to pack and to install; tests/test_airgap.py has bundles with them.
WITHOUT_WHEELS = {"pack --out": "pack --no-wheels --out", " --install": ""}

Runner = Callable[..., str]


def blocks(name: str) -> list[str]:
    """Return the blocks of commands in a tutorial."""
    text = (TUTORIALS / name).read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def tiny_chat_model(where: Path) -> dict[str, bytes]:
    """Return the files of a small Llama with a chat template."""
    files = make_model_files(where)
    tokenizer = json.loads(files["tokenizer.json"])
    end = {"id": 256, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [end | flags]
    settings = json.loads(files["tokenizer_config.json"])
    settings |= {"eos_token": END, "chat_template": TEMPLATE}
    return files | {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a block in a checkout and returns what it printed."""
    project = check_out(tmp_path / "checkout")
    (project / ".venv").symlink_to(sys.prefix)
    for variable in USER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with HubServer() as hub:
        files = tiny_chat_model(tmp_path / "model")
        for name in ("Llama-3.2-1B", "Llama-3.2-1B-Instruct"):
            hub.repos[f"meta-llama/{name}"] = Repo(files)
        environment = {
            **os.environ,
            **hub_variables(hub, tmp_path / "hf_home"),
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

        def run(block: str) -> str:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=project,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert not done.returncode, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            return done.stdout

        run.project = project  # type: ignore[attr-defined]
        yield run


def losses(text: str) -> list[float]:
    """Return the losses of the console lines of a run."""
    return [float(loss) for loss in re.findall(r"step +\d+/\d+ +loss ([\d.]+)", text)]


def test_all_tutorials_are_run() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == {
        "pretrain.md",
        "chat.md",
        "lora.md",
        "airgap.md",
    }


@pytest.mark.slow
def test_pretraining_on_own_files(typed: Runner) -> None:
    printed = [typed(block) for block in blocks("pretrain.md")]
    first, *_, last = next(values for text in printed if (values := losses(text)))
    assert last < first - 1
    assert "def read(self" in printed[-1]


@pytest.mark.slow
def test_conversations_and_then_an_adapter(typed: Runner) -> None:
    printed = [typed(block) for block in blocks("chat.md")]
    assert "'role': 'assistant'" in printed[-1]
    adapted = [typed(block) for block in blocks("lora.md")]
    first, *_, last = next(values for text in adapted if (values := losses(text)))
    assert last < first
    export = typed.project / "outputs/ideas/export"  # type: ignore[attr-defined]
    assert (export / "adapter/adapter_config.json").exists()
    assert (export / "merged/model.safetensors").exists()


@pytest.mark.slow
def test_a_cluster_without_a_network(typed: Runner) -> None:
    project: Path = typed.project  # type: ignore[attr-defined]
    write_corpus(project / "raw_text")
    for block in blocks("airgap.md"):
        for ours, instead in WITHOUT_WHEELS.items():
            block = block.replace(ours, instead)
        typed(block)
        if (project / "project").is_dir() and not (project / "project/.venv").exists():
            (project / "project/.venv").symlink_to(sys.prefix)
    assert (project / "project/outputs/exp/export/final/model.safetensors").exists()
    shutil.rmtree(project)
