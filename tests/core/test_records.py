# covers: lib/core/records.py, lib/core/config_file.py
"""Records of others are read within limits, and their paths stay inside a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lib.core import config_file, manifest, records
from lib.core.errors import ArtifactError, UsageError
from lib.hub.raw_text import delete_outdated

DEEP = 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 8)
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * DEEP, "levels deep"),
        ("[" * 500 + "]" * 500, "levels deep"),
        ('{"a":' * DEEP, "levels deep"),
        ("{", "Expecting"),
        ("1" * 5000, "4300 digits"),
    ],
)
def test_invalid_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        records.parse_json(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * DEEP, "levels deep"),
        ("- " * DEEP + "x", "levels deep"),
        (BOMB, "aliases expanded"),
        (MERGES, "aliases expanded"),
        ("a: &a [*a]", "an alias"),
        ("x" * (1 << 21), "more than"),
        ("a: !!bool x", "type that it names"),
        ("a: !!timestamp x", "type that it names"),
        ("a: 2020-13-45", "looks like"),
        ("a: " + "1" * 5000, "looks like"),
        ("a: \x00", "not allow"),
        ("a: !!python/object/apply:os.system [ls]", "constructor for the tag"),
        ("a: *b", "alias"),
    ],
)
def test_invalid_yaml_is_refused(text: str, message: str) -> None:
    """YAML is refused before its values are built."""
    with pytest.raises(ValueError, match=message):
        records.parse_yaml(text)


def test_valid_yaml_and_json_are_read(tmp_path: Path) -> None:
    assert records.parse_yaml("a: &a [1, 2]\nb: *a\nc: {<<: {d: 1}}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": 1},
    }
    many = {"files": [{"path": f"{n}"} for n in range(100_000)]}
    (tmp_path / "manifest.json").write_text(json.dumps(many))
    assert records.read_yaml(tmp_path / "manifest.json") == many


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1\ntoken: hf_s3cret: x\n",
        "token: 'hf_s3cret\n",
        "token hf_s3cret\nlr: 1\n",
        "token: *hf_s3cret\n",
        "token: !hf_s3cret x\n",
        "token: [hf_s3cret\n",
        'token: "hf_s3cret\n',
        "token: @hf_s3cret\n",
        "lr: 1\n\ttoken: hf_s3cret\n",
        "hf_s3cret",
        "- token: hf_s3cret",
        "token: !!int hf_s3cret",
        "token: !!float hf_s3cret",
        "token: !!binary hf_s3cret\u00e9",
    ],
)
def test_messages_do_not_quote_the_content_of_a_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        config_file.read_yaml(tmp_path / "run.yaml", "--config: ")
    assert "s3cret" not in caught.value.render() and "run.yaml" in caught.value.problem


@pytest.mark.parametrize(
    "path",
    ["../f", "/etc/passwd", "a/../../f", "a//b", "", ".", "a\0b", 5, None, "a/./b", "\ud800"],
)
def test_a_manifest_with_outside_paths_is_invalid(tmp_path: Path, path: object) -> None:
    assert records.leads_out(path)
    content = {
        "kind": "model/1",
        "summary": {},
        "identity": {},
        "options": {},
        "files": [{"path": path, "bytes": 1, "digest": "xxh3:0"}],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert manifest.read_if_any(tmp_path) is None
    assert "is no file of" in manifest.find_damage(tmp_path, content, deep=True)[0]


def test_a_record_deletes_nothing_outside(tmp_path: Path) -> None:
    """Neither the parts of a path nor a link in the directory lead outside."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/f").write_text("mine")
    target = tmp_path / "raw/org--name/.hub"
    target.mkdir(parents=True)
    (target.parent / "en").symlink_to(tmp_path / "mine")
    (target.parent / "g").symlink_to(tmp_path / "mine/f")
    for path in ("../../mine/f", str(tmp_path / "mine/f"), "en/f", "g"):
        with pytest.raises(ArtifactError, match="names a file outside"):
            records.safe_join(target.parent, path)
        delete_outdated(target, [path])
    assert (tmp_path / "mine/f").read_text() == "mine"


def test_reading_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert manifest.read_if_any(tmp_path) is None and manifest.read_kind(tmp_path) == ""
    with pytest.raises(ValueError, match="not a regular file"):
        records.read_json(tmp_path / "manifest.json")
