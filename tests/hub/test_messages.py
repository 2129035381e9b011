# covers: lib/hub/repository.py, lib/hub/client.py, lib/hub/raw_text.py
"""The wording of the errors of lib/hub; behaviour tests elsewhere look for one keyword only."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from lib.core.errors import StageError
from lib.hub import client, raw_text, repository
from lib.hub.repository import RemoteFile, Repository
from tests.conftest import message_lines

RUN = "python 03_download_model.py --model-name org/name"


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", RUN.split()[1:])


def test_an_unreachable_hub():
    error = client._unreachable_error(ConnectionError("refused"), "https://hub")
    assert message_lines(error) == [
        "error: the Hub at https://hub is unreachable",
        "expected: a network connection, or a copy of .cache/ from a connected machine",
        "found:    ConnectionError: refused",
        "hint:     finished files are kept; when the network is back:",
    ]
    assert "03_download_model.py --model-name org/name" in error.run


def test_a_hub_that_stays_busy():
    answer = SimpleNamespace(response=SimpleNamespace(status_code=503))
    assert message_lines(client._refusal_error(answer, "org/name", "https://hub", False)) == [
        "error: the Hub at https://hub refused to serve org/name",
        "found:    HTTP status 503, repeatedly",
        "hint:     finished files are kept; try again later:",
    ]


def test_a_download_in_an_offline_environment():
    hub = object.__new__(client.Hub)
    hub.endpoint = "https://hub"
    with pytest.raises(StageError) as caught, hub._translate_errors("org/name", "main", "model"):
        raise errors.OfflineModeIsEnabled("offline")
    assert message_lines(caught.value) == [
        "error: the Hub is needed, but HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
        "hint:     to allow the network for this command:",
    ]


def test_a_repository_without_usable_weights():
    names = ["config.json", "tokenizer.json", repository.PICKLE]
    files = {name: RemoteFile(name, 1, "", "") for name in names}
    error = repository._incomplete_model_error(Repository("org/name", "c", files), False)
    assert message_lines(error) == [
        "error: org/name has no safetensors weights",
        "expected: model.safetensors or model.safetensors.index.json",
        "found:    only pickles, which can run code when loaded: pytorch_model.bin",
        "hint:     choose a repository or a --revision that has them (conversions are often "
        "published as refs/pr/N), or convert the pickles, which runs none of their code:",
    ]
    assert error.run.endswith("--allow-pickle")


def test_globs_without_a_match_and_unsafe_paths():
    files = [RemoteFile("README.md", 1, "", "")]
    with pytest.raises(StageError) as caught:
        repository.select_by_globs(files, ["en/*"], "org/text")
    assert message_lines(caught.value) == [
        "error: org/text has no file that matches en/*",
        "expected: a glob of paths in the repository, such as 'en/*.json.gz'",
        "found:    README.md",
    ]
    with pytest.raises(StageError) as caught:
        repository.require_safe_paths([RemoteFile("../x", 1, "", "")], "org/text")
    assert message_lines(caught.value) == [
        "error: org/text contains unsafe paths",
        "expected: relative paths that stay inside the repository",
        "found:    '../x'",
    ]


def test_files_that_stage_03_did_not_write(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(StageError) as caught:
        raw_text.require_no_conflicts(tmp_path / ".hub", [RemoteFile("a.txt", 9, "", "")])
    assert message_lines(caught.value) == [
        f"error: stage 03 would overwrite 1 file in {tmp_path} that it did not write",
        "expected: no files at these paths, or files that stage 03 downloaded",
        "found:    a.txt",
        "hint:     move the files away, or choose another --dst-root",
    ]
