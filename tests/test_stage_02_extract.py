# covers: 01_organize_data.py, 02_build_hf_dataset.py, lib/corpus/extraction.py
# covers: lib/corpus/extract/process.py, lib/corpus/place.py
"""Build datasets from HTML, PDF, DOCX and EPUB files with the real stages."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lib.core import manifest
from tests.conftest import stage_command
from tests.corpus.sample_documents import make_docx, make_epub, make_pdf, paragraph
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
EXTRACT = ("--extract", "html,pdf,docx,epub", "--keep-source", "--dedup", "exact")


def write_documents(root: Path, count: int) -> None:
    """Write documents of each kind, and some that cannot be read."""
    root.mkdir()
    for number in range(count):
        text = f"document {number} " + "with several words " * (number % 7)
        page = f"<!doctype html><html><body><p>{text}</p></body></html>"
        (root / f"{number}.html").write_text(page)
        (root / f"{number}.pdf").write_bytes(make_pdf([text, f"page two of {number}"]))
        (root / f"{number}.docx").write_bytes(make_docx(paragraph(text)))
        (root / f"{number}.epub").write_bytes(make_epub({"a.xhtml": page}, ["a.xhtml"]))
        (root / f"{number}.cut.docx").write_bytes(make_docx(paragraph(text))[:-9])
        (root / f"{number}.txt").write_text(text)
    (root / "scan.pdf").write_bytes(make_pdf([""]))


def problems(directory: Path) -> dict[str, str]:
    """Return the kind of the problem of each file, except duplicates."""
    lines = (directory / "errors.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["kind"] != "duplicate"]
    return {entry["path"]: entry["kind"] for entry in entries}


def test_documents_are_announced_and_the_printed_command_extracts_them(stage, tmp_path):
    write_documents(tmp_path / "raw_text", 2)
    done = stage("01_organize_data.py", "--num-dirs", 1)
    assert "3 pdf" in done.stdout and "binary" not in done.stdout
    done = stage(SCRIPT, "--save-dir", "out", "--dry-run")
    line = "3 PDF, 4 DOCX and 2 EPUB files, which are skipped, and 2 HTML files, which are read"
    assert done.stdout.index(line) < done.stdout.index("build splits → out")
    command = next(line for line in done.stdout.splitlines() if "--overwrite" in line)
    assert command.endswith("--extract html,pdf,docx,epub --overwrite")
    words = shlex.split(command)
    arguments = words[words.index("--save-dir") :]
    done = stage(SCRIPT, *arguments)
    assert "which are skipped" not in done.stdout
    assert "2 DOCX, 2 EPUB, 2 HTML, 2 PDF" in done.stdout
    identity = json.loads((tmp_path / "out/manifest.json").read_text())["identity"]
    assert identity["options"]["extract"]["pdf"].startswith("1, pypdfium2 ")
    assert sorted(problems(tmp_path / "out").values()) == ["damaged", "damaged", "no text"]
    assert "2 DOCX damaged" in done.stdout and "1 PDF no text" in done.stdout
    again = stage(SCRIPT, *arguments[:-1], "--extract", "epub,docx")
    assert "already done" in again.stdout  # the same kinds in another order


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--extract", "html,doc"], "expected kinds such as html,pdf,docx,epub"),
        (["--extract", "html", "--format", "chat"], "--extract and --format chat exclude"),
        (["--extract-seconds", 5], "--extract-seconds needs --extract"),
    ],
)
def test_bad_usage_is_reported(stage, tmp_path, arguments, words):
    (tmp_path / "splits").mkdir()
    done = stage(SCRIPT, *arguments, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr


def test_splits_that_an_earlier_stage_01_made_without_documents(stage, tmp_path):
    write_documents(tmp_path / "raw_text", 1)
    stage("01_organize_data.py", "--num-dirs", 1)
    path = tmp_path / "splits/files.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in lines:  # as versions before --extract listed them
        if entry["path"].endswith(".pdf"):
            (tmp_path / "splits" / entry["split"] / entry["path"]).unlink()
            entry |= {"skipped": "binary"}
            del entry["split"], entry["kind"]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    place = tmp_path / "splits/manifest.json"
    listed = json.loads(place.read_text())
    listed["files"] = [manifest.file_entry(path.parent, path)]
    place.write_text(json.dumps(listed))
    done = stage(SCRIPT, *EXTRACT, "--dry-run")
    assert "2 PDF files" in done.stdout
    assert "01_organize_data.py" in done.stdout and "--overwrite" in done.stdout


@pytest.mark.slow
def test_workers_machines_and_hanging_documents_give_the_same_bytes(stage, tmp_path):
    write_documents(tmp_path / "raw_text", 12)
    (tmp_path / "raw_text/hang.html").write_text("<html>" + "<div>" * 200_000)
    stage("01_organize_data.py", "--num-dirs", 3)
    options = (*EXTRACT, "--extract-seconds", 1, "--validation-percent", 20)
    stage(SCRIPT, *options, "--save-dir", "one")
    one = read_dataset_files(tmp_path / "one")
    listed = problems(tmp_path / "one")
    assert sorted(listed.values()) == ["damaged"] * 12 + ["no text", "timeout"]
    assert [path.rpartition("/")[2] for path, kind in listed.items() if kind == "timeout"] == [
        "hang.html"
    ]
    stage(SCRIPT, *options, "--save-dir", "by3", "--num-workers", 3)
    assert read_dataset_files(tmp_path / "by3") == one
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", "1-2", "--num-workers", 2)
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", 0)
    stage(SCRIPT, *options, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == one


@pytest.mark.slow
def test_a_build_killed_while_it_extracts_continues(stage, tmp_path):
    write_documents(tmp_path / "raw_text", 700)  # three units
    stage(SCRIPT, "--data-folder", "raw_text", *EXTRACT, "--save-dir", "whole")
    for seconds in (0.8, 1.2, 1.6):
        process = subprocess.Popen(
            stage_command(SCRIPT, "--data-folder", "raw_text", *EXTRACT, "--save-dir", "out"),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    stage(SCRIPT, "--data-folder", "raw_text", *EXTRACT, "--save-dir", "out", "--num-workers", 2)
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")
    assert not list(tmp_path.glob("out.*"))
