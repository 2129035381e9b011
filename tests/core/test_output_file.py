# covers: lib/core/output_file.py
"""A file that a person names is checked before the work, and links and devices stay."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lib.core.output_file import add_json_option, parse_output_file, write_output


def parse(text: str) -> Path:
    return parse_output_file(text, is_own=lambda content: content == "ours")


def test_the_file_is_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("away/new")
    for name in ("file", "new", "not/yet/there", "link"):
        assert parse(str(tmp_path / name)) == tmp_path / name
    for name, problem in ((".", "is a directory"), ("file/x", "file is a file")):
        with pytest.raises(argparse.ArgumentTypeError, match=problem):
            parse(str(tmp_path / name))
    with pytest.raises(argparse.ArgumentTypeError, match="got ''"):
        parse("")
    monkeypatch.setattr("os.access", lambda *_: False)
    for name in ("file", "new", "not/yet/there", "link"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} is read-only"):
            parse(str(tmp_path / name))
    monkeypatch.setenv("RANK", "1")
    assert parse(str(tmp_path)) == tmp_path  # rank 0 reports it


def test_links_and_devices_stay(tmp_path: Path) -> None:
    """A rename would replace /dev/stdout itself, and as root it could."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("long content of before")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("away/new")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_output(parse(str(tmp_path / "pipe")), "one")
        assert read.result(10) == "one" and (tmp_path / "pipe").is_fifo()
    write_output(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "two"
    write_output(tmp_path / "broken", "three")
    assert (tmp_path / "away" / "new").read_text() == "three"
    write_output(tmp_path / "a" / "b", "four")
    assert (tmp_path / "a" / "b").read_text() == "four"


def test_a_file_of_a_person_is_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("ours")
    assert parse(str(notes)) == notes
    notes.write_text("notes of a person")
    (tmp_path / "link").symlink_to("notes.txt")
    for name in ("notes.txt", "link"):
        with pytest.raises(argparse.ArgumentTypeError, match="did not write it"):
            parse(str(tmp_path / name))
    assert notes.read_text() == "notes of a person"


def test_a_command_recognises_its_json_by_its_keys(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_json_option(parser, "findings", "findings", "speed")
    file = tmp_path / "out.json"
    for content, is_own in (
        ('{"findings": [], "speed": 1, "nodes": []}', True),
        ("", True),
        ('{"findings": []}', False),
        ("[1]", False),
        ("notes", False),
    ):
        file.write_text(content)
        try:
            assert parser.parse_args(["--json", str(file)]).json == file and is_own
        except argparse.ArgumentError:
            assert not is_own
