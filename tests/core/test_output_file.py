# covers: lib/core/output_file.py
"""A file that a person names is checked before the work, and links and devices stay."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lib.core.output_file import parse_output_file, write_output


def test_the_file_is_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("away/new")
    for name in ("file", "new", "not/yet/there", "link"):
        assert parse_output_file(str(tmp_path / name)) == tmp_path / name
    for name, problem in ((".", "is a directory"), ("file/x", "file is a file")):
        with pytest.raises(argparse.ArgumentTypeError, match=problem):
            parse_output_file(str(tmp_path / name))
    with pytest.raises(argparse.ArgumentTypeError, match="got ''"):
        parse_output_file("")
    monkeypatch.setattr("os.access", lambda *_: False)
    for name in ("file", "new", "not/yet/there", "link"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} is read-only"):
            parse_output_file(str(tmp_path / name))
    monkeypatch.setenv("RANK", "1")
    assert parse_output_file(str(tmp_path)) == tmp_path  # rank 0 reports it


def test_links_and_devices_stay(tmp_path: Path) -> None:
    """A rename would replace /dev/stdout itself, and as root it could."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("long content of before")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("away/new")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_output(parse_output_file(str(tmp_path / "pipe")), "one")
        assert read.result(10) == "one" and (tmp_path / "pipe").is_fifo()
    write_output(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "two"
    write_output(tmp_path / "broken", "three")
    assert (tmp_path / "away" / "new").read_text() == "three"
    write_output(tmp_path / "a" / "b", "four")
    assert (tmp_path / "a" / "b").read_text() == "four"
