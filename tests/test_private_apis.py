# covers: docs/explanation/private-apis.md, tests/private_apis.py
"""docs/explanation/private-apis.md names every undocumented API that is used, and each exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import private_apis

ROOT = private_apis.ROOT
# The oldest versions that the code supports. What these need comes with them.
OLDEST = ("torch==2.11.0", "transformers==5.17.0")


def resolve_table(python: Path | str) -> None:
    """Resolve the table in another process, where nothing of ours hides a package."""
    done = subprocess.run(
        [python, "-m", "tests.private_apis"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_every_name_of_the_table_exists() -> None:
    resolve_table(sys.executable)


def test_a_name_that_is_gone_is_missing() -> None:
    assert not private_apis.is_available("torch._C._get_sdp_priority_orders")
    assert not private_apis.is_available("torch._gone.name")
    assert not private_apis.is_available("torch.nn.Module:_parameter_")
    assert private_apis.is_available("torch.nn.Module:_parameters")
    gone = ("torch._gone", "torch._C")
    assert private_apis.Row(gone, False, None, ()).missing() == ["torch._gone"]
    assert private_apis.Row(gone, True, None, ()).missing() == []
    assert private_apis.Row(gone[:1], False, ("torch", "99.0"), ()).missing() == []
    assert private_apis.Row(gone[:1], False, ("torch", "2.0"), ()).missing() == ["torch._gone"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._inner import name", ["torch._inner.name"]),
        ("import torch._inner", ["torch._inner"]),
        ("from transformers.integrations import moe", ["transformers.integrations.moe"]),
        ("import torch\ntorch._C.name()", ["_C"]),
        ("import torch\ntorch._dynamo.maybe_mark_dynamic(tensor, 0)", []),
        ("import torch\ntorch._dynamo.reset()", ["_dynamo"]),
        ("getattr(model, '_concealed')", ["_concealed"]),
        ("class A:\n  def _own(self): return self._own", []),
        ("from torch.nn import functional\nrow._replace()", []),
    ],
)
def test_private_names_are_found_in_code(code: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert [name for name, _ in private_apis.find_private_names(tmp_path / "module.py")] == names


def test_the_table_names_every_private_name_and_its_module() -> None:
    rows = private_apis.read_table()
    missing = []
    for path in private_apis.list_modules():
        module = path.relative_to(ROOT).as_posix()
        named = {name for row in rows if module in row.users for name in row.names}
        parts = {part for name in named for part in re.split(r"[.:]", name)}
        for name, line in private_apis.find_private_names(path):
            is_dotted = any(used == name or used.startswith(f"{name}.") for used in named)
            if not is_dotted and name not in parts:
                missing.append(f"{module}:{line}: {name}")
    assert not missing, "not in docs/explanation/private-apis.md with that module"


def test_the_table_names_nothing_that_is_not_used() -> None:
    for row in private_apis.read_table():
        for user in row.users:
            text = (ROOT / user).read_text(encoding="utf-8")
            words = {re.split(r"[.:]", name)[-1] for name in row.names}
            assert words & {*re.findall(r"\w+", text)}, (row.names, user)


@pytest.mark.long
def test_every_name_exists_in_the_oldest_supported_versions(tmp_path: Path) -> None:
    """It needs a few GB of disk, and ten minutes to install torch with its CUDA libraries."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pins = [
        line
        for name in ("requirements.txt", "requirements-optional.txt")
        for line in (ROOT / name).read_text().splitlines()
        if re.match(r"datasets|numpy|jinja2|torchao", line)
    ]
    # This process alone may connect: pip fetches the packages. The guard fails all others.
    environment = {k: v for k, v in os.environ.items() if k != "NETWORK_GUARD_REPORT"}
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *OLDEST, *pins],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"cannot install {' and '.join(OLDEST)}: {installed.stderr.strip()[-200:]}")
    resolve_table(python)
