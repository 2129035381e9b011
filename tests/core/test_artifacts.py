# covers: lib/core/artifacts.py, lib/core/artifact_checks.py
"""Find and fingerprint the files of a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib.core import artifact_checks, artifacts
from lib.core.errors import ArtifactError


def write_files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_text(name)
    return directory


def test_fingerprints_of_earlier_versions_stay_valid(tmp_path: Path) -> None:
    """Token stores and runs contain it, so files that it did not cover must not change it."""
    names = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "tokenizer.model")
    before = artifacts.tokenizer_fingerprint(write_files(tmp_path, *names))
    write_files(tmp_path, "sentencepiece.bpe.model", "tekken.json", "chat_template.json")
    assert artifacts.tokenizer_fingerprint(tmp_path) == before == "0e3f97e8a7875409"


@pytest.mark.parametrize("name", artifacts.VOCABULARIES)
def test_each_vocabulary_alone_is_a_tokenizer(tmp_path: Path, name: str) -> None:
    before = artifacts.tokenizer_fingerprint(write_files(tmp_path, name))
    (tmp_path / name).write_text("another")
    assert artifacts.tokenizer_fingerprint(tmp_path) != before


def test_settings_without_a_vocabulary_are_no_tokenizer(tmp_path: Path) -> None:
    write_files(tmp_path, "tokenizer_config.json", "special_tokens_map.json", "merges.txt")
    with pytest.raises(ArtifactError, match="no tokenizer"):
        artifacts.tokenizer_fingerprint(tmp_path)


def test_every_kind_of_artifact_is_verified() -> None:
    """Checkpoints lie in runs, which `python -m lib.checkpoints verify` checks."""
    root = Path(__file__).parents[2]
    written = {
        kind
        for path in (*root.glob("0*.py"), *root.glob("lib/**/*.py"))
        for kind in re.findall(r'^_?\w*KIND = "([\w-]+)/\d+"', path.read_text(), re.MULTILINE)
    }
    assert written - {"checkpoint"} <= {*artifact_checks._KINDS} and "scratch" in written
