# covers: launch/cloud/kube/fetch.py, launch/cloud/kube/sender.py
"""Test copies of directories from the volume, through `kubectl exec` with its real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cloud.kube import fetch, sender
from launch.cloud.kube.kubectl import Kubectl
from lib.core import partial_dirs
from lib.core.errors import ArtifactError, UsageError
from tests.cloud.kube_cluster import SCRIPT, run_launcher
from tests.cloud.kube_exec import Call
from tests.cloud.kube_node import Node, list_pods
from tests.cloud.kube_server import Cluster, Object

FETCH = ("fetch", "outputs/exp/export", "copy")
ORIGIN = "claim fsx-claim, namespace default, context current"


def make_export(volume: Path, megabytes: int = 3) -> dict[str, str]:
    """Write a directory with files of several kinds; return the SHA-256 of each."""
    export = volume / "outputs" / "exp" / "export"
    (export / "a b" / "ü").mkdir(parents=True)
    (export / "model.safetensors").write_bytes(os.urandom(megabytes << 20))
    (export / "empty").touch()
    (export / "a b" / "ü" / "config.json").write_text("{}\n")
    (export / "link").symlink_to("a b/ü/config.json")
    return hash_files(export)


def hash_files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.name != fetch.RECORD
    }


def test_a_directory_is_copied_and_its_digests_are_kept(node: Node, kube: Cluster) -> None:
    expected = make_export(node.volume)
    result = run_launcher(*FETCH, *node.options())
    assert hash_files(Path("copy")) == expected and "SHA-256" in result.stderr
    record = json.loads(Path("copy", fetch.RECORD).read_text())
    assert record["files"] == {name: f"sha256:{digest}" for name, digest in expected.items()}
    assert not Path("copy/link").is_symlink()
    assert [path.name for path in Path().iterdir()] == ["copy"] and not list_pods(kube)
    refused = run_launcher(*FETCH, *node.options(), expect=2)
    assert "copy exists" in refused.stderr and "--overwrite" in refused.stderr
    (node.volume / "outputs" / "exp" / "export" / "empty").unlink()
    run_launcher(*FETCH, *node.options(), "--overwrite")
    assert len(hash_files(Path("copy"))) == len(expected) - 1
    assert [path.name for path in Path().iterdir()] == ["copy"]
    run_launcher("fetch", "outputs/exp/export/model.safetensors", "one/file", *node.options())
    assert [*hash_files(Path("one/file"))] == ["model.safetensors"]


def test_other_directories_are_not_replaced(node: Node, kube: Cluster) -> None:
    make_export(node.volume)
    Path("copy").mkdir()
    Path("copy/mine").touch()
    before = len(kube.requests)
    for more in ((), ("--overwrite",)):
        refused = run_launcher(*FETCH, *node.options(), *more, expect=2)
        assert "copy exists" in refused.stderr and "run:" not in refused.stderr
    assert len(kube.requests) == before and Path("copy/mine").exists()
    missing = run_launcher("fetch", "outputs/none", "other", *node.options(), expect=2)
    assert "outputs/none is not on" in missing.stderr and not list_pods(kube)
    (node.volume / "outputs" / "exp" / "export" / "gone").symlink_to("nowhere")
    odd = run_launcher("fetch", "outputs/exp/export", "other", *node.options(), expect=2)
    assert "gone is neither" in odd.stderr and not Path("other").exists()


def test_a_copy_continues_over_lost_connections_and_damage(node: Node, kube: Cluster) -> None:
    expected = make_export(node.volume)
    node.calls += [{}, {"cut_after": 1 << 20}, {}, {"flip": 1 << 20}, {}, {}]
    result = run_launcher(*FETCH, *node.options())
    assert hash_files(Path("copy")) == expected
    assert "the connection" in result.stderr
    assert "arrived with another SHA-256" in result.stderr and not node.calls


def test_damage_of_every_attempt_is_an_error(node: Node, kube: Cluster) -> None:
    make_export(node.volume)
    node.calls += [{}, {"flip": 2 << 20}, {}, {"flip": 2 << 20}]
    result = run_launcher(*FETCH, *node.options(), expect=ArtifactError.code)
    assert "another SHA-256" in result.stderr
    assert not Path("copy").exists() and not list_pods(kube)


def test_an_interrupted_copy_continues_with_the_next_command(
    node: Node, kube: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_export(node.volume, megabytes=8)
    node.calls += [{}, *({"cut_after": 5 << 20}, {"cut_after": 0}) * 3]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *FETCH, *node.options()], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("continuing in" in line for line in process.stderr)
    process.kill()
    process.wait()
    [partial] = Path().glob("copy.partial-*")
    size = (partial / "content" / "model.safetensors").stat().st_size
    assert size > 1 << 20 and not Path("copy").exists()
    node.calls.clear()
    result = run_launcher(*FETCH, *node.options())
    assert "of them received earlier" in result.stderr and hash_files(Path("copy")) == expected
    assert not [*Path().glob("copy.partial-*")]


def test_a_directory_that_changes_is_not_copied(node: Node, kube: Cluster) -> None:
    make_export(node.volume)
    changing = node.volume / "outputs" / "exp" / "export" / "model.safetensors"
    calls = []

    def change_first(cluster: Cluster, pod: Object, call: Call) -> None:
        calls.append(call)
        if len(calls) == 3:  # list, send, list
            os.utime(changing)
        node.run_call(cluster, pod, call)

    kube.on_exec = change_first
    result = run_launcher(*FETCH, *node.options(), expect=2)
    assert "changed while it" in result.stderr and not Path("copy").exists()
    run_launcher(*FETCH, *node.options())


@pytest.mark.parametrize("path", ["../../etc", "/etc", "/bucket/raw", "/dataset"])
def test_a_path_outside_of_the_volume_is_refused_before_a_pod_exists(
    kube: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("fetch", path, "copy", "--image", "i:1")
    refused = run_launcher(*words, expect=2)
    assert f"{path} is not on" in refused.stderr and "below /data" in refused.stderr
    assert not [request for request in kube.requests if request.startswith("POST")]
    empty = run_launcher("fetch", "", *words[2:], expect=2)  # an unset variable
    assert "PATH: expected" in empty.stderr
    if path.startswith("/bucket"):
        run_launcher(*words, "--bucket-pvc", "b", "--dry-run")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([["a\0b", 1, 1]], "not a relative path"),
        ([["../a", 1, 1]], "not a relative path"),
        ([[7, 1, 1]], "not a relative path"),
        ([["\ud800", 1, 1]], "not a relative path"),
        ([["a" * 300, 1, 1]], "not a relative path"),
        ([["a", 1, 1], ["a/b/c", 1, 1]], "both a file 'a' and a file 'a/b/c' inside it"),
        ([["a", 1, 1], ["a", 2, 1]], "not valid"),
        ([["a", -1, 1]], "not valid"),
        ([["a", "1", 1]], "not valid"),
        ([["a"]], "not valid"),
        ([7], "not valid"),
        (7, "not valid"),
        (None, "not valid"),
        ([], "contains no files"),
        ([[".fetched.json", 1, 1]], "has its record in"),
        ([[".fetched.json/a", 1, 1]], "has its record in"),
    ],
)
def test_a_list_that_no_directory_can_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, files: object, says: str
) -> None:
    source = fetch.Source(Kubectl("default"), "pod", "/data/x")
    monkeypatch.setattr(source, "_query", lambda: {"files": files})
    with pytest.raises(UsageError, match=says):
        source.list_files()


def test_a_file_in_place_of_an_earlier_directory_is_copied(node: Node, kube: Cluster) -> None:
    """An interrupted copy may contain a directory where the volume has a file now."""
    make_export(node.volume)
    path = str(node.volume / "outputs" / "exp" / "export")
    copy = fetch.Copy(fetch.Source(Kubectl("default"), "pod", path), Path("copy"), ORIGIN)
    copy._partial.mkdir()
    partial_dirs.claim_directory(copy._partial)
    (copy._content / "empty" / "old").mkdir(parents=True)
    (copy._content / "empty" / "old" / "file").write_text("x")
    (copy._partial / "files.json").write_text('{"empty/old/file": [1, 1]}')
    run_launcher(*FETCH, *node.options())
    assert Path("copy/empty").is_file()


def test_a_file_with_the_name_of_the_record_is_not_overwritten(node: Node, kube: Cluster) -> None:
    make_export(node.volume)
    (node.volume / "outputs" / "exp" / "export" / fetch.RECORD).write_text("{}")
    refused = run_launcher(*FETCH, *node.options(), expect=2)
    assert "has its record in" in refused.stderr and not Path("copy").exists()


def test_a_file_that_has_become_shorter_ends(tmp_path: Path) -> None:
    """The pod would otherwise show signs of life forever."""
    (tmp_path / "file").touch()
    request = json.dumps({"path": str(tmp_path), "files": [["file", 10]]})
    sent = subprocess.run(
        [sys.executable, sender.__file__], input=request.encode() + b"\n", capture_output=True,
        timeout=60, check=True,
    ).stdout  # fmt: skip
    assert sent.splitlines()[-1].decode() == hashlib.sha256(b"").hexdigest()


def test_a_copy_that_was_being_replaced_is_restored(node: Node, kube: Cluster) -> None:
    """A kill between the two renames of --overwrite leaves no directory of that name."""
    expected = make_export(node.volume)
    run_launcher(*FETCH, *node.options())
    path = str(node.volume / "outputs" / "exp" / "export")
    copy = fetch.Copy(fetch.Source(Kubectl("default"), "pod", path), Path("copy"), ORIGIN)
    copy._partial.mkdir()
    partial_dirs.claim_directory(copy._partial)
    Path("copy").rename(copy._partial / "replaced")
    (node.volume / "outputs" / "exp" / "export" / "empty").unlink()
    assert "copy exists" in run_launcher(*FETCH, *node.options(), expect=2).stderr
    assert hash_files(Path("copy")) == expected
