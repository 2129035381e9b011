# covers: lib/core/manifest.py
"""Write, read and check manifest.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.core import manifest
from lib.core.errors import ArtifactError


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Return a finished artifact of two files."""
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / "a.bin").write_bytes(b"aaa")
    (root / "sub/b.bin").write_bytes(b"bbbb")
    files = [manifest.file_entry(root, root / name) for name in ("a.bin", "sub/b.bin")]
    manifest.write_manifest(
        root,
        kind="thing/1",
        stage="00.py",
        identity={"options": {"x": 1}},
        options={"x": 1},
        files=iter(files),
        summary={"rows": 2},
    )
    return root


def read_thing(root: Path) -> dict:
    return manifest.read_manifest(root, "thing/1", "the thing", run="python 00.py")


def test_a_written_manifest_is_read_back(artifact: Path) -> None:
    content = read_thing(artifact)
    assert content["summary"] == {"rows": 2} and content["identity"] == {"options": {"x": 1}}
    assert [(entry["path"], entry["bytes"]) for entry in content["files"]] == [
        ("a.bin", 3),
        ("sub/b.bin", 4),
    ]
    assert content["versions"]["python"] and content["versions"]["torch"]
    assert content == manifest.read_if_any(artifact)
    assert sorted(path.name for path in artifact.iterdir()) == ["a.bin", "manifest.json", "sub"]


def test_an_intact_artifact_has_no_damage_after_a_move(artifact: Path) -> None:
    moved = artifact.rename(artifact.with_name("elsewhere"))
    manifest.require_intact(moved, read_thing(moved), "the thing", deep=True)


def test_all_damaged_files_are_reported_at_once(artifact: Path) -> None:
    (artifact / "a.bin").write_bytes(b"axa")
    (artifact / "sub/b.bin").write_bytes(b"bb")
    shallow = manifest.find_damage(artifact, read_thing(artifact), deep=False)
    assert len(shallow) == 1 and "b.bin has 2 bytes instead of 4" in shallow[0]
    (artifact / "sub/b.bin").unlink()
    with pytest.raises(ArtifactError) as caught:
        manifest.require_intact(
            artifact, read_thing(artifact), "the thing", run="python 00.py", deep=True
        )
    message = caught.value.render()
    assert "a.bin has other content" in message and "b.bin is missing" in message
    assert "python 00.py" in message


def test_a_long_list_of_damaged_files_is_shortened(tmp_path: Path) -> None:
    files = [{"path": f"{n}", "bytes": 1, "digest": ""} for n in range(25)]
    with pytest.raises(ArtifactError, match="damaged") as caught:
        manifest.require_intact(tmp_path, {"files": files}, "the thing")
    assert caught.value.found.endswith("… and 15 more")


def test_errors_for_missing_artifacts_name_leftovers_and_a_command(tmp_path: Path) -> None:
    missing = tmp_path / "corpus[1]"  # brackets are no pattern
    (tmp_path / "corpus[1].partial-81f3").mkdir()
    with pytest.raises(ArtifactError, match="does not exist") as caught:
        read_thing(missing)
    assert "corpus[1].partial-81f3 (0 min old)" in caught.value.found
    assert caught.value.run == "python 00.py"
    missing.mkdir()
    with pytest.raises(ArtifactError, match=r"\(no manifest.json\)") as caught:
        read_thing(missing)
    assert "partial-81f3" in caught.value.found


def test_without_leftovers_none_are_described(tmp_path: Path) -> None:
    assert manifest.describe_leftovers(tmp_path / "corpus") == ""
    assert manifest.describe_leftovers(tmp_path / "no/such/parent") == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '"kind"'])
def test_a_damaged_manifest_is_reported(artifact: Path, text: str) -> None:
    (artifact / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match="is damaged"):
        read_thing(artifact)
    assert manifest.read_if_any(artifact) is None


def test_another_kind_is_refused(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="contains no splits") as caught:
        manifest.read_manifest(artifact, "splits/1", "the splits")
    assert (caught.value.expected, caught.value.found) == ("kind splits/1", "kind thing/1")


def test_json_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    manifest.write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        manifest.write_json(path, {"step": 2, "bad": object()})
    assert path.read_text() == '{\n "step": 1\n}\n'
