# covers: lib/core/code_version.py
"""The commit of the code comes from git, or from the bundle that was unpacked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lib.core import code_version


def test_the_commit_comes_from_git_or_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_version.find_git_commit() == ""
    (tmp_path / ".bundle.json").write_text(json.dumps({"summary": {"commit": "2c47"}}))
    assert code_version.find_git_commit() == "2c47"
    (tmp_path / "code.py").touch()
    for words in (["init"], ["add", "code.py"], ["commit", "-m", "x"]):
        name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)
    commit = code_version.find_git_commit()
    assert len(commit) == 40
    (tmp_path / "code.py").write_text("changed")
    assert code_version.find_git_commit() == f"{commit}+"
