# covers: lib/corpus/scan.py, lib/corpus/place.py, lib/corpus/kinds.py
"""The files that a scan takes, and the reasons to skip others."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.core import partial_dirs
from lib.core.errors import StageError, UsageError
from lib.core.paths import escape_path
from lib.corpus import kinds, place
from lib.corpus.scan import (
    ARTIFACT,
    DESCRIPTION,
    HUB_CACHE,
    Rules,
    Scan,
    identify_files,
    scan_tree,
    select_taken,
)


def find_reasons(root: Path, *args, **rules) -> dict[str, str]:
    return {entry.path: entry.skipped for entry in scan_tree(root, Rules(**rules), *args)}


def test_every_entry_is_taken_or_has_a_reason(tmp_path):
    src = tmp_path / "src"
    elsewhere = tmp_path / "elsewhere"
    for path in ("a.txt", "d/b.txt", ".hidden", ".git/config", "empty"):
        (src / path).parent.mkdir(parents=True, exist_ok=True)
        (src / path).write_text("" if path == "empty" else "x")
    elsewhere.mkdir()
    (elsewhere / "o.txt").write_text("x")
    os.mkfifo(src / "pipe")
    for name, target in {
        "gone": "nowhere",
        "in": "a.txt",
        "out": "../elsewhere/o.txt",
        "loop": "loop",
        "up": ".",
        "outdir": "../elsewhere",
    }.items():
        (src / name).symlink_to(target)
    plain = {
        "a.txt": "",
        "d/b.txt": "",
        ".hidden": "hidden",
        ".git/": "hidden",
        "empty": "empty",
        "pipe": "special",
        "gone": "link dangles",
        "loop": "link loops",
    }
    assert find_reasons(src) == plain | {
        "in": "link inside the source",
        "up": "link inside the source",
        "out": "link leads outside",
        "outdir": "link leads outside",
    }
    assert find_reasons(src, follow_symlinks=True) == plain | {
        "in": "",
        "out": "",
        "outdir/o.txt": "",
        "up/": "link loops",
    }


def test_patterns_match_the_path_or_the_basename(tmp_path):
    for path in ("a.txt", "b.log", "d/c.txt", "d/e.log", "skip/f.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x")
    assert [
        path for path, reason in find_reasons(tmp_path, include=("*.txt",)).items() if not reason
    ] == [
        "a.txt",
        "d/c.txt",
        "skip/f.txt",
    ]
    assert find_reasons(tmp_path, include=("*.txt", "d/*"), exclude=("skip", "./d/c.txt")) == {
        "a.txt": "",
        "b.log": "pattern",
        "d/c.txt": "pattern",
        "d/e.log": "",
        "skip/": "pattern",
    }
    assert [
        path for path, reason in find_reasons(tmp_path, include=("**/a.txt",)).items() if not reason
    ] == ["a.txt"]


def test_the_output_of_the_stage_is_not_scanned(tmp_path):
    for path in (
        "a.txt",
        "splits/split_00/a.txt",
        "splits.partial-1/content/x.txt",
        "splits.partial-mine/b.txt",
        "splits2/b.txt",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    partial_dirs.mark_path(tmp_path / "splits.partial-1").touch()
    reasons = find_reasons(tmp_path, tmp_path / "splits")
    assert [path for path, reason in reasons.items() if not reason] == [
        "a.txt",
        "splits.partial-mine/b.txt",
        "splits2/b.txt",
    ]


def test_an_unreadable_directory_is_noted(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    real = os.scandir

    def scandir(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert find_reasons(tmp_path) == {"a.txt": "", "closed/": "unreadable"}


def test_a_failing_disk_ends_the_scan_except_for_excluded_files(tmp_path, monkeypatch):
    """The content of the file is unknown, and skipping it would lose text."""
    for name in ("a.txt", "bad.txt"):
        (tmp_path / name).write_text("x")

    def fail(*_, **options):
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path / "bad.txt"))

    bad = SimpleNamespace(name="bad.txt", path=str(tmp_path / "bad.txt"), stat=fail)
    with pytest.raises(OSError, match="Stale"):
        Scan(tmp_path, Rules())._examine(bad, "bad.txt", ())
    assert (
        Scan(tmp_path, Rules(exclude=("bad*",)))._examine(bad, "bad.txt", ()).skipped
        == "unreadable"
    )
    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(OSError, match="Stale"):
        place._sniff_chunk([str(tmp_path / "a.txt")])


def test_the_identity_of_files_ignores_their_directory_and_sees_changes(tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.txt").write_text("x")
    before = identify_files(select_taken(scan_tree(one, Rules())))
    assert identify_files(select_taken(scan_tree(one.rename(tmp_path / "two"), Rules()))) == before
    os.utime(tmp_path / "two/a.txt", ns=(1, 1))
    assert identify_files(select_taken(scan_tree(tmp_path / "two", Rules()))) != before


def test_names_that_are_not_utf8_are_escaped():
    assert escape_path(os.fsdecode(b"a\xff\nb\xc3\xa9")) == "a\\xff\\nbé"


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a", b"", "empty"),
        ("a.txt", b"text", "text"),
        ("a.txt", b"\x00\x01", "binary"),
        ("a.txt", b"\xff\xfea\x00", "text"),
        ("a.txt", b"\xff\xfe\x00\x00a\x00\x00\x00", "binary"),
        ("a.pdf", b"%PDF-1.4\n" + bytes(range(1, 9)), "pdf"),
        ("a.html", b"<p>\x1b", "text"),
        ("a.json", b"{\n", "json"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "jsonl"),
        ("a.json", b'{"a": 1}\n{\n"a": 2}\n', "json"),
        ("a.JSONL", b"{}", "jsonl"),
        ("a.txt", b"{}\n{}\n", "text"),
        ("a.yml", b"a: b", "yaml"),
        ("a.csv", b"a,b", "csv"),
        ("a.txt", b"\x1f\x8b\x08", "gzip"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a.arrow", b"ARROW1\0\0", "arrow"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\0", "arrow"),
        ("a.json", b"[" * 20_000, "json"),
    ],
)
def test_kinds_are_detected_from_name_and_content(name, head, kind):
    assert kinds.sniff_kind(name, head) == kind


def test_a_hard_link_that_fails_becomes_a_copy(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    source = tmp_path / "a"
    source.write_text("x")
    os.utime(source, ns=(5, 7))
    assert place.place_file(source, tmp_path / "b", "hardlink") == "copy"
    assert (tmp_path / "b").read_text() == "x"
    assert (tmp_path / "b").stat().st_mtime_ns == 7
    assert place.choose_mode(source, tmp_path, "hardlink", 1) == "copy"


def test_artifacts_are_not_taken_as_text(tmp_path: Path) -> None:
    artifact_kinds = {
        "corpus": "dataset/1",
        "store": "tokens/1",
        "model": "model/1",
        "fetched": "raw/1",
        "foreign": "dataset",
    }
    for name, kind in artifact_kinds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"kind": kind}))
        (tmp_path / name / "text.txt").write_text("text")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "state.json", "checkpoints/x.txt"):
        (tmp_path / "run" / name).write_text("text")
    entries = scan_tree(tmp_path, Rules())
    assert {e.path.partition("/")[0] for e in select_taken(entries)} == {"fetched", "foreign"}
    assert [e.path for e in entries if e.skipped == ARTIFACT] == [
        "corpus/",
        "model/",
        "run/",
        "store/",
    ]


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_file_that_changes_while_it_is_placed_is_reported(tmp_path, monkeypatch, mode, size):
    """A copy may contain a part of the old and a part of the new content."""
    root = tmp_path / "raw"
    act = place.place_file
    root.mkdir()
    (root / "a.txt").write_text("text")
    [entry] = scan_tree(root, Rules(), progress=False)

    def disturbed(source: str, *arguments: str) -> str:
        way = act(source, *arguments)
        Path(source).write_text("x" * size)
        return way

    monkeypatch.setattr(place, "place_file", disturbed)
    with (
        place.Workers(1) as workers,
        pytest.raises(UsageError, match=r"changed|written to"),
    ):
        place.place_files(root, tmp_path / "splits", [(entry, "split_00")], mode, workers, False)


def _die_in_worker(paths: list[str]) -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return paths


def test_a_dead_worker_is_reported() -> None:
    with place.Workers(1) as workers, pytest.raises(StageError, match="has died"):
        list(workers.map(_die_in_worker, ["a"] * 600, 600))


def test_a_data_card_beside_records_is_no_document(tmp_path):
    for name in ("card", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "card/README.md").write_text("---\nlicense: mit\npretty_name: X\n---\n# X\n")
    (tmp_path / "card/loader.py").write_text("code")
    (tmp_path / "card/data").mkdir()
    (tmp_path / "card/data/a.jsonl").write_text("{}")
    (tmp_path / "texts/README.md").write_text("---\ntitle: a post\n---\n")
    (tmp_path / "texts/other.md").write_text("text")
    reasons = find_reasons(tmp_path)
    assert [path for path, reason in reasons.items() if reason] == ["card/README.md"]
    assert reasons["card/README.md"] == DESCRIPTION


@pytest.mark.parametrize("root", ["", "datasets--o--n", "datasets--o--n/snapshots/01"])
def test_a_repository_in_the_cache_of_the_hub_is_read_once(tmp_path, root):
    repository = tmp_path / "datasets--o--n"
    for name in ("blobs", "refs", "snapshots/01/data", "snapshots/02/data"):
        (repository / name).mkdir(parents=True)
    (repository / "refs/main").write_text("01")
    (repository / "blobs/aa").write_text("text")
    for revision in ("01", "02"):
        (repository / f"snapshots/{revision}/data/a.jsonl").symlink_to("../../../blobs/aa")
    (repository / "snapshots/01/secret").symlink_to("/etc/hostname")
    taken = select_taken(scan_tree(tmp_path / root, Rules()))
    assert len(taken) == 1 and taken[0].path.endswith("data/a.jsonl")
    assert "link leads outside" in find_reasons(tmp_path / root).values()
    if not root:
        assert [*find_reasons(tmp_path).values()].count(HUB_CACHE) == 3
        (repository / "refs/main").unlink()
        with pytest.raises(UsageError, match="several revisions"):
            scan_tree(tmp_path, Rules())
