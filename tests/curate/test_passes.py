# covers: lib/curate/__main__.py, lib/curate/unit_files.py, lib/curate/disk_array.py
# covers: lib/curate/first_pass.py, lib/curate/second_pass.py, lib/curate/output.py
# covers: lib/curate/reader.py, lib/curate/schema.py, lib/curate/steps/own_filter.py
# covers: lib/curate/command.py, lib/curate/pipeline.py, lib/curate/whole.py
"""The two passes of a curation: its inputs, kills, full disks, and filters of the user's own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lib.core.errors import UsageError
from lib.curate import reader
from lib.curate.steps.own_filter import OwnFilterOptions, OwnFilters
from tests.conftest import run_stage
from tests.curate.curations import (
    curate,
    curate_in_units,
    cut_small_units,
    read_dropped,
    read_rows,
    write_chats,
    write_texts,
)
from tests.fault_points import Fault
from tests.training import read_dataset_files

NO_CODE = """
NAME = "no code"
def find_reason(text):
    return "it has a brace" if "{" in text else ""
"""
# Kills the command in its first pass, once, when it comes to the text `kill`.
KILLER = """
import multiprocessing, os, pathlib
NAME = "killer"
def find_reason(text):
    if text == "kill" and not (mark := pathlib.Path("was_killed")).exists():
        mark.touch()
        os.kill(multiprocessing.parent_process().pid, 9)
    return "short" if len(text) < 10 else ""
"""
_FAULTS = {
    "decision": Fault("", 2, match="unfinished/decisions"),
    "writing": Fault("", 3, kinds=("unlink",), match="unfinished/written"),
    "publishing": Fault("", 1, kinds=("rename",), match="/content"),
    "full decision": Fault("", 1, "ENOSPC", times=10**6, match="unfinished/decisions"),
    "full second pass": Fault("", 1, "ENOSPC", times=10**6, kinds=("create",), match=".jsonl"),
}


def make_texts(count: int) -> list[str]:
    return [f"This is text number {number}, which has a few words." for number in range(count)]


def write_filter(directory: Path, code: str = NO_CODE, name: str = "filter.py") -> Path:
    (directory / name).write_text(code)
    return directory / name


def curate_with_fault(cwd: Path, fault: str, *arguments: object) -> int:
    """Run the command with a fault of _FAULTS in its main process; return its exit code."""
    before = f"{__name__}:install_fault"
    environment = {"LAUNCH_MARK": fault}
    return curate(cwd, *arguments, before=before, env=environment, expect=None).returncode


def install_fault(rank: int) -> None:
    """Install a fault below the current directory, and cut small units."""
    from dataclasses import replace

    cut_small_units(rank)
    replace(_FAULTS[os.environ["LAUNCH_MARK"]], under=str(Path.cwd())).install()


@pytest.mark.slow
def test_columns_of_another_program_stay_if_they_are_plain(tmp_path):
    import datasets

    rows = {
        "id": [7, 8, None],
        "text": ["first text", None, "third { text"],
        "score": [0.5, 0.25, None],
        "url": ["a", None, "c"],
        "tags": [["x"], [], ["y", "z"]],
        "meta": [{"a": 1}, {"a": 2}, {"a": 3}],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "raw"))
    write_filter(tmp_path)
    done = curate(tmp_path, "raw", "--save-dir", "out", "--step", "filter.py")
    assert "columns tags, meta" in done.stdout
    table = read_rows(tmp_path / "out")
    assert sorted(table.column_names) == ["id", "score", "text", "url"]
    kept_values = {name: table[name].to_pylist() for name in ("id", "score", "url")}
    assert kept_values == {"id": [7, 8], "score": [0.5, 0.25], "url": ["a", None]}
    assert [text or "" for text in table["text"].to_pylist()] == ["first text", ""]
    assert datasets.load_from_disk(str(tmp_path / "out")).num_rows == 2
    (line,) = read_dropped(tmp_path / "out")
    assert line == {
        "split": "train",
        "row": 2,
        "rule": "no code",
        "value": "it has a brace",
        "duplicate_of": None,
    }


@pytest.mark.slow
def test_a_dataset_of_stage_02_keeps_its_splits_and_its_bytes(tmp_path):
    """Curating a curated dataset changes nothing; the result is as stage 02 writes it."""
    (tmp_path / "raw").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in make_texts(60)]
    (tmp_path / "raw/a.jsonl").write_text("".join(lines))
    write_filter(tmp_path)
    for name, more in (("one", ()), ("two", ("--validation-percent", 20))):
        options = ("--data-folder", "raw", "--keep-source", *more)
        run_stage("02_build_hf_dataset.py", *options, "--save-dir", name, cwd=tmp_path)
        curate(tmp_path, name, "--save-dir", f"{name}-out", "--step", "filter.py")
        again = ("--save-dir", f"{name}-again", "--step", "filter.py")
        curate(tmp_path, f"{name}-out", *again)
        ours = {"dropped.jsonl", "errors.jsonl", "report.html"}
        contents = [
            {
                path: content
                for path, content in read_dataset_files(tmp_path / directory).items()
                if path not in ours
            }
            for directory in (name, f"{name}-out", f"{name}-again")
        ]
        assert contents[0] == contents[1] == contents[2]
    assert (tmp_path / "two-out/validation").is_dir()
    assert "already done" in curate(tmp_path, "two-out", *again).stdout
    (tmp_path / "two-again/note.txt").write_text("mine")
    refused = curate(tmp_path, "two-out", "--save-dir", "two-again", expect=2)
    assert "--overwrite" in refused.stderr
    curate(tmp_path, "two-out", "--save-dir", "two-again", "--overwrite")


def test_conversations_in_other_layouts_become_those_of_stage_02(tmp_path):
    turns = [[{"content": f"question {n}?", "role": "user", "extra": n}] for n in range(3)]
    for chat in turns:
        chat.append({"content": "answer", "role": "assistant", "extra": 0})
    kind = pa.list_(
        pa.struct([("content", pa.string()), ("role", pa.string()), ("extra", pa.int64())])
    )
    write_chats(tmp_path / "raw", turns)
    (file,) = (tmp_path / "raw").glob("*.arrow")
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    place = table.column_names.index("messages")
    table = table.set_column(place, "messages", pa.array(turns, kind))
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    write_filter(tmp_path, NO_CODE.replace('"{"', '"question 1?"'))
    curate(tmp_path, "raw", "--save-dir", "out", "--step", "filter.py")
    messages = read_rows(tmp_path / "out")["messages"].to_pylist()
    assert [chat[0]["content"] for chat in messages] == ["question 0?", "question 2?"]
    assert [*messages[0][0]][:2] == ["role", "content"] and "extra" not in messages[0][0]


def test_an_arrow_file_and_a_file_with_a_footer_can_be_curated(tmp_path):
    texts = [*make_texts(5), "a { brace"]
    for name, opened in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        table = pa.table({"text": texts})
        path = tmp_path / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as out, opened(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        write_filter(tmp_path)
        curate(tmp_path, path.name, "--save-dir", f"{name}-out", "--step", "filter.py")
        assert read_rows(tmp_path / f"{name}-out")["text"].to_pylist() == texts[:-1]


def test_a_damaged_or_missing_shard_is_an_error(tmp_path):
    write_texts(tmp_path / "raw", make_texts(200))
    (file,) = (tmp_path / "raw").glob("*.arrow")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    options = ("--save-dir", "out", "--step", write_filter(tmp_path))
    done = curate(tmp_path, "raw", *options, expect=3)
    assert file.name in done.stderr and "Traceback" not in done.stderr
    file.unlink()
    done = curate(tmp_path, "raw", *options, expect=3)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_units_have_whole_batches_and_may_be_a_single_row(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "UNIT_BYTES", 4000)
    texts = make_texts(50)
    texts[30] = "long " * 5000
    write_texts(tmp_path / "raw", texts)
    write_texts(tmp_path / "raw", pa.array([], pa.string()), "validation")
    source = reader.open_source(tmp_path / "raw")
    rows = [row for unit in source.units for batch in unit.read_rows() for row in batch.rows]
    assert [row.text for row in rows] == texts
    assert [row.number for row in rows] == [*range(50)]
    assert source.rows == 50 and len(source.units) == 2
    write_filter(tmp_path)
    curate_in_units(tmp_path, "raw", "--save-dir", "out", "--step", "filter.py")
    assert read_rows(tmp_path / "out/train")["text"].to_pylist() == texts
    assert len(read_rows(tmp_path / "out/validation")) == 0


def test_a_dataset_that_changes_meanwhile_is_refused(tmp_path):
    write_texts(tmp_path / "raw", make_texts(10))
    code = "import os, pathlib\n" + NO_CODE.replace(
        "    return", "    os.utime(next(pathlib.Path('raw').iterdir()), (1, 1))\n    return"
    )
    options = ("--save-dir", "out", "--step", write_filter(tmp_path, code))
    done = curate(tmp_path, "raw", *options, expect=2)
    assert "changed" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_curation_continues_and_writes_the_same_bytes(tmp_path):
    texts = make_texts(300)
    texts[150:150] = ["kill", "tiny", "small"]
    write_texts(tmp_path / "raw", texts[:60], "validation")
    write_texts(tmp_path / "raw", texts[60:])
    options = ("raw", "--step", write_filter(tmp_path, KILLER), "--dedup", "exact")
    (tmp_path / "was_killed").touch()
    curate_in_units(tmp_path, *options, "--save-dir", "whole", "--num-workers", 3)
    expected = read_dataset_files(tmp_path / "whole")
    assert len(read_dropped(tmp_path / "whole")) == 3
    (tmp_path / "was_killed").unlink()
    done = curate_in_units(tmp_path, *options, "--save-dir", "out", expect=None)
    assert done.returncode == -signal.SIGKILL and (tmp_path / "was_killed").exists()
    assert [*tmp_path.glob("out.partial-*/content*/unfinished/first/*.json")]
    for fault in ("decision", "writing", "publishing"):
        code = curate_with_fault(tmp_path, fault, *options, "--save-dir", "out")
        assert code == -signal.SIGKILL, fault
        assert not (tmp_path / "out").exists()
    curate_in_units(tmp_path, *options, "--save-dir", "out")
    assert read_dataset_files(tmp_path / "out") == expected
    assert not [*tmp_path.glob("out.partial*")]


@pytest.mark.slow
def test_a_full_disk_ends_a_curation_that_can_continue(tmp_path):
    write_texts(tmp_path / "raw", make_texts(100))
    options = ("raw", "--save-dir", "out", "--step", write_filter(tmp_path))
    for fault in ("full decision", "full second pass"):
        assert curate_with_fault(tmp_path, fault, *options) == 4, fault
    curate_in_units(tmp_path, *options)
    assert len(read_rows(tmp_path / "out")) == 100


def make_filters(*paths: Path) -> OwnFilters | None:
    return OwnFilters.from_options(OwnFilterOptions(step=[*paths]))


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (["def find_reason(text): return ''"], "defines no filter"),
        (["NAME = 'x'"], "defines no filter"),
        (["NAME = 'x'\nfind_reason = 3"], "defines no filter"),
        (["1 / 0"], "ZeroDivisionError"),
        (["raise SystemExit"], "SystemExit"),
        ([NO_CODE.replace("no code", "no\\ncode")], "defines no filter"),
        (["def"], "SyntaxError"),
        ([NO_CODE, NO_CODE + "\n"], "same NAME"),
    ],
)
def test_a_file_without_a_filter_is_refused(
    tmp_path: Path, codes: Sequence[str], words: str
) -> None:
    paths = [write_filter(tmp_path, code, f"{number}.py") for number, code in enumerate(codes)]
    with pytest.raises(UsageError) as refused:
        make_filters(*paths)
    assert words in refused.value.render()


def test_a_filter_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        make_filters(tmp_path / "absent.py")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("text[5000]", "IndexError"),
        ("exit()", "SystemExit"),
        ("True", "does not return a text"),
    ],
)
def test_a_filter_that_fails_ends_the_curation_with_its_line(tmp_path, body, words):
    write_texts(tmp_path / "raw", make_texts(3))
    write_filter(tmp_path, f"NAME = 'mine'\ndef find_reason(text):\n    return {body}\n")
    done = curate(tmp_path, "raw", "--save-dir", "out", "--step", "filter.py", expect=2)
    assert words in done.stderr and "'mine'" in done.stderr and "Traceback" not in done.stderr


def test_a_filter_has_a_rule_name_of_its_own(tmp_path):
    write_texts(tmp_path / "raw", make_texts(3))
    write_filter(tmp_path, NO_CODE.replace("no code", "duplicate"))
    options: tuple[Any, ...] = ("--step", "filter.py", "--dedup", "exact")
    done = curate(tmp_path, "raw", *options, "--dry-run", expect=2)
    assert "the name 'duplicate'" in done.stderr


def test_a_file_of_options_cannot_name_a_filter(tmp_path):
    write_texts(tmp_path / "raw", make_texts(3))
    write_filter(tmp_path)
    (tmp_path / "options.yaml").write_text("step: filter.py\n")
    done = curate(tmp_path, "raw", "--config", "options.yaml", "--dry-run", expect=2)
    assert "only the command line" in done.stderr


def test_a_filter_may_not_import_a_file_beside_it(tmp_path: Path) -> None:
    """A change of that file would leave the dataset "already done"."""
    (tmp_path / "neighbour.py").touch()
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport neighbour, html.entities\n"
    with pytest.raises(UsageError, match="imports neighbour"):
        make_filters(write_filter(tmp_path, code + NO_CODE))
    sys.path.remove(str(tmp_path))
    del sys.modules["neighbour"]


def test_the_order_of_filters_belongs_to_a_dataset(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", make_texts(3))
    write_filter(tmp_path)
    write_filter(tmp_path, NO_CODE.replace("no code", "other"), "other.py")
    options = ("raw", "--save-dir", "out")
    curate(tmp_path, *options, "--step", "filter.py", "--step", "other.py")
    curate(tmp_path, *options, "--step", "other.py", "--step", "filter.py", expect=2)


def test_a_filter_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", make_texts(3))
    code = NO_CODE.replace("    return", "    open('filter.py', 'a').write('#')\n    return")
    options = ("--save-dir", "out", "--step", write_filter(tmp_path, code).name)
    for part in ((), ("--part", "1/1")):
        done = curate(tmp_path, "raw", *options, *part, expect=2)
        assert "changed" in done.stderr
    assert not [*tmp_path.glob("out*/*")] and not [*tmp_path.glob("out*/**/unfinished")]


def test_damage_in_a_dataset_of_this_project_is_found(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", make_texts(50))
    curate(tmp_path, "raw", "--save-dir", "one", "--dedup", "exact")
    (shard,) = (tmp_path / "one").glob("*.arrow")
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"number 7,", b"number 8,"))
    done = curate(tmp_path, "one", "--save-dir", "two", "--dedup", "exact", expect=3)
    assert shard.name in done.stderr and not (tmp_path / "two").exists()


@pytest.mark.slow
def test_columns_may_differ_between_the_shards(tmp_path: Path) -> None:
    """Columns of steps, too: another program may have written values of any kind."""
    texts = make_texts(6)
    words = pa.array(texts).dictionary_encode()
    write_texts(tmp_path / "raw", words, "validation", cluster_size=["many"] * 6, size=[1.5] * 6)
    write_texts(tmp_path / "raw", [*texts, "new text"], cluster_size=[3, -1, None, 2, 2, 2, 2])
    path = tmp_path / "raw/rows-train.arrow"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    with pa.OSFile(str(path), "wb") as file:
        table = table.append_column("size", pa.array([1] * 7))
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    done = curate(tmp_path, "raw", "--save-dir", "out", "--dedup", "near")
    assert "columns size" in done.stdout
    table = read_rows(tmp_path / "out/validation")
    assert table["text"].to_pylist() == texts
    assert table["cluster_size"].to_pylist() == [4, 2, 2, 3, 3, 3]
    assert read_rows(tmp_path / "out/train")["text"].to_pylist() == ["new text"]


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    size = pa.array([0, 4, 8], pa.int32()).buffers()[1]
    texts = pa.StringArray.from_buffers(2, size, pa.py_buffer(b"goodba\xffd"))
    write_texts(tmp_path / "raw", texts)
    done = curate(tmp_path, "raw", "--save-dir", "out", "--dedup", "exact", expect=3)
    assert "row 1" in done.stderr and "Traceback" not in done.stderr


def test_a_part_that_was_made_otherwise_is_read_again_as_printed(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", make_texts(3))
    near = ("raw", "--save-dir", "out", "--dedup", "near")
    curate(tmp_path, *near, "--near-words", "4", "--part", "1/1")
    done = curate(tmp_path, *near, "--merge", expect=2)
    assert re.search(r"--part 1/1 --overwrite$", done.stderr, re.MULTILINE)
    curate(tmp_path, *near, "--part", "1/1", "--overwrite")
    curate(tmp_path, *near, "--merge")
