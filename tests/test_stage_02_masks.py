# covers: 02_build_hf_dataset.py, lib/curate/masks/part_masker.py, lib/curate/masks/second_pass.py
# covers: lib/curate/masks/mask_options.py, lib/curate/near/shingle_sets.py
"""Stage 02 with --mask: the text of a dataset is masked, whatever built it, and nothing leaks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from lib.curate.near.build import Planner

from lib.core import errors
from lib.corpus import chat_rows, inputs, parts, shards, split_parts, work_units
from lib.corpus import dataset as dataset_module
from lib.corpus.dataset import PARTS, PLAN, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.curate.masks import mask_options, part_masker, second_pass
from lib.curate.masks.choices import KINDS
from lib.curate.masks.masker import Masker
from lib.curate.masks.matches import MaskedMatches
from tests.conftest import StageRunner
from tests.test_stage_02_near import change_words, make_words, read_table, write_lines
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
MASK = ("--mask", "email,ip,phone,iban,card", "--mask-phone-country", "US")
SECRETS = (
    "joe.smith@mail.example.org",
    "Müller@example.de",
    "83.149.9.216",
    "2001:4860:4860::8844",
    "+49 30 1234567",
    "(212) 555-1234",
    "DE89 3704 0044 0532 0130 00",
    "4111 1111 1111 1111",
)
MASKER = Masker(KINDS, ["US"])


def make_texts(draw: random.Random, count: int) -> list[str]:
    """Return texts of which every second one contains some of SECRETS, and some are similar."""
    texts: list[str] = []
    for number in range(count):
        words = make_words(draw, draw.randint(20, 120))
        if number % 3 == 1 and texts:
            words = change_words(draw, texts[-1].split(" "), 1)
        if number % 2:
            words.insert(draw.randint(0, len(words)), draw.choice(SECRETS))
        if number % 10 == 0:
            words.append("\n" + draw.choice(SECRETS) + "\n")
        texts.append(" ".join(words))
    # In the report, a sample of this text would end in the middle of a secret.
    long = "word " * 38 + " ".join(SECRETS) + " word" * 50
    return [*texts, *texts[:9], *SECRETS, long, long]


def write_sources(root: Path, count: int = 240) -> list[str]:
    texts = make_texts(random.Random(0), count)
    write_lines(root / "web/a.jsonl", texts[: count // 2])
    write_lines(root / "mail/b.jsonl", texts[count // 2 :])
    (root / "c.txt").write_text(f"{texts[1]}\n{SECRETS[0]}: hello")
    return texts


def require_no_leak(directory: Path, *outputs: str) -> None:
    """Assert that no file of a dataset and no output contains a secret or a part of one."""
    files = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    for secret in (*SECRETS, "joe.smith", "149.9.2", "30 1234", "3704 0044", "555-1234"):
        assert files and not any(secret.encode() in data for data in files), secret
        assert not any(secret in text for text in outputs), secret


def list_texts(directory: Path) -> list[str]:
    return read_table(directory)["text"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_machines_and_workers_give_the_same_masked_rows(
    stage: StageRunner, tmp_path: Path, dedup: str
):
    write_sources(tmp_path / "raw_text")
    stage("01_organize_data.py", "--num-dirs", 3)
    common = (SCRIPT, "--dedup", dedup, "--validation-percent", 10, "--keep-source")
    common += ("--min-chars", 30)  # some of SECRETS are dropped, and shown as samples
    stage(*common, "--save-dir", "plain")
    done = stage(*common, *MASK, "--save-dir", "one")
    one = read_dataset_files(tmp_path / "one")
    for split in ("train", "validation"):
        plain = list_texts(tmp_path / "plain" / split)
        assert list_texts(tmp_path / "one" / split) == [*map(MASKER.mask_text, plain)]
    require_no_leak(tmp_path / "one", done.stdout, done.stderr)
    assert "&lt;email&gt;" in (tmp_path / "one/report.html").read_text()
    for workers in (2, 3):
        stage(*common, *MASK, "--save-dir", f"n{workers}", "--num-workers", workers)
        assert read_dataset_files(tmp_path / f"n{workers}") == one
    for splits in ("2", "0,1"):
        stage(*common, *MASK, "--save-dir", "many", "--only-splits", splits)
    stage(*common, *MASK, "--save-dir", "many", "--merge", "--num-workers", 2)
    assert read_dataset_files(tmp_path / "many") == one

    summary = json.loads((tmp_path / "one/manifest.json").read_text())["summary"]
    masks = summary["masks"]
    texts = [
        text for split in ("train", "validation") for text in list_texts(tmp_path / "one" / split)
    ]
    for kind, count in masks["counts"].items():
        assert count == sum(text.count(f"<{kind}>") for text in texts)
        assert count == sum(counts.get(kind, 0) for counts in masks["sources"].values())
    assert {"web", "mail"} <= {*masks["sources"]} <= {"web", "mail", ""}
    assert {*masks["counts"]} == {*KINDS}
    assert {*masks["shapes"]["card"]} == {"0000 0000 0000 0000"}
    assert f"{masks['counts']['email']:,} email" in done.stdout
    assert "masks" in done.stdout and "national format of US" in done.stdout


def build_dataset(folder: Path, out: Path, shape: RowOptions, units: int | None = None) -> None:
    """Build a dataset with masks in this process. units: stop after them, as if killed."""
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir(exist_ok=True)
    with DatasetWriter(out, shape, deletes_parts=shape.drops_near) as dataset:
        folder_of_parts = f"{PLAN}/parts" if shape.drops_near else PARTS
        tasks = work_units.cut_files(folder, files, out / folder_of_parts, shape)
        if not shape.drops_near:
            for task in tasks[dataset.units : units]:
                dataset.add(work_units.process_unit(task))
        else:
            work = Planner(out / PLAN, shape, files, 1)
            if not work.is_collected:
                for task in tasks:
                    split_parts.process_unit(task)
            plan = work.make_plan(split_parts.read_results(tasks), False)
            dataset.follow(plan)
            remaining = split_parts.read_results(tasks[dataset.units :])
            for number, (result, masked) in enumerate(
                second_pass.mask_units(remaining, dataset, shape, 2),
                dataset.units,
            ):
                if number == units:
                    break  # while later units are masked already
                dataset.add(result, masked)
        if units is None:
            dataset.finish()
            assert dataset.masks.total


@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_a_build_stopped_after_any_unit_gives_the_same_bytes(tmp_path, monkeypatch, dedup):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 12_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)
    write_sources(tmp_path / "raw")
    shape = RowOptions(dedup=dedup, mask=[*KINDS], mask_phone_country=["US"], near_keep="upsample")
    build_dataset(tmp_path / "raw", tmp_path / "whole", shape)
    require_no_leak(tmp_path / "whole")
    for units in (0, 2, 5):
        build_dataset(tmp_path / "raw", tmp_path / "out", shape, units)
    build_dataset(tmp_path / "raw", tmp_path / "out", shape)
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


def test_a_damaged_part_of_the_second_pass_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 12_000)
    write_sources(tmp_path / "raw", 60)
    shape = RowOptions(dedup="near", mask=["email"])
    build_dataset(tmp_path / "raw", tmp_path / "out", shape, 0)
    part = next((tmp_path / "out" / PLAN / "parts").glob("*.train"))
    part.write_bytes(part.read_bytes()[:-300] + b"x" * 300)
    with pytest.raises(errors.ArtifactError, match="damaged"):
        build_dataset(tmp_path / "raw", tmp_path / "out", shape)


def make_call(arguments: object, identifier: str) -> dict:
    function = {"name": "send", "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def test_turns_calls_and_results_are_masked_and_calls_stay_valid(stage, tmp_path):
    mail = "joe.smith@mail.example.org"
    arguments = {
        "to": [mail],
        "body": f"a\n{SECRETS[5]}\n{SECRETS[7]}\\",
        mail: {"card": 4111111111111111},
    }
    chats = [
        {
            "tools": [{"name": "send", "parameters": {"example": f"\t{mail}"}}],
            "messages": [
                {"role": "user", "content": f"Write to {mail}"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [make_call(arguments, "4111111111111111")],
                },
                {"role": "tool", "content": f"sent to {mail}", "tool_call_id": "4111111111111111"},
                {"role": "assistant", "content": "Done.", "reasoning_content": f"It was {mail}."},
            ],
        },
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}]},
    ]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = (SCRIPT, "--data-folder", "raw", "--format", "chat")
    for name, options in (("out", ()), ("near", ("--dedup", "near"))):
        done = stage(*command, *MASK, *options, "--save-dir", name)
        first, second = read_table(tmp_path / name).select(["messages", "tools"]).to_pylist()
        turns = first["messages"]
        assert [turn["content"] for turn in turns] == [
            "Write to <email>",
            "",
            "sent to <email>",
            "Done.",
        ]
        assert turns[3]["reasoning_content"] == "It was <email>."
        assert turns[2]["tool_call_id"] == "4111111111111111"
        masked = {"to": ["<email>"], "body": "a\n<phone>\n<card>\\", "<email>": {"card": "<card>"}}
        assert json.loads(turns[1]["tool_calls"]) == [make_call(masked, "4111111111111111")]
        tool = {"name": "send", "parameters": {"example": "\t<email>"}}
        assert json.loads(first["tools"]) == [{"type": "function", "function": tool}]
        assert [turn["content"] for turn in second["messages"]] == ["Hi", "Hi!"]
        assert second["tools"] is None
        assert mail not in done.stdout
    summary = json.loads((tmp_path / "out/manifest.json").read_text())["summary"]
    assert summary["masks"]["counts"] == {"email": 6, "phone": 1, "card": 2}
    assert summary["text_bytes"] == sum(
        len(turn["content"]) for turn in [*turns, *second["messages"]]
    )


def test_keys_that_are_masked_alike_keep_their_values():
    value = {"a@firma.de": 1, "<email>": 2, "b@firma.de": {"c@firma.de": 3}, "<email> (2)": 4}
    masked = part_masker._mask_value(value, MASKER, MaskedMatches())
    expected = {"<email> (3)": 1, "<email>": 2, "<email> (4)": {"<email>": 3}, "<email> (2)": 4}
    assert masked == expected and [*masked] == [*expected]
    assert part_masker._mask_value(masked, MASKER, MaskedMatches()) == masked


def write_part(path: Path, texts: Sequence[str]) -> pa.Schema:
    with path.open("wb") as file:
        writer = parts.PartWriter(file, keep_source=True)
        for text in texts:
            writer.add(text.encode(), "a.txt")
            writer.flush()
        writer.finish()
    return parts.make_text_schema(True)


def read_part(path: Path, schema: pa.Schema) -> list[str]:
    with pa.OSFile(str(path)) as file:
        rows = []
        while file.tell() < file.size():
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
            batch.validate(full=True)
            rows += batch["text"].to_pylist()
        return rows


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_text_larger_than_memory_is_masked_in_pieces(tmp_path, monkeypatch, end):
    texts = [
        "none",
        *(end.join(make_texts(random.Random(i), 40)) for i in range(2)),
        "none",
        "é" * 9000,
    ]
    schema = write_part(tmp_path / "part", texts)
    one_part = part_masker.mask_part(tmp_path / "part", tmp_path / "whole", schema, MASKER)
    monkeypatch.setattr(parts, "LARGE_PART", 5000)
    monkeypatch.setattr(part_masker, "_PIECE_BYTES", 1000)
    pieces = part_masker.mask_part(tmp_path / "part", tmp_path / "pieces", schema, MASKER)
    masked = [*map(MASKER.mask_text, texts)]
    assert read_part(tmp_path / "pieces", schema) == read_part(tmp_path / "whole", schema) == masked
    assert one_part.hits.rows == pieces.hits.rows
    size = sum(len(text.encode()) for text in masked) - sum(len(text.encode()) for text in texts)
    assert one_part.text_bytes == pieces.text_bytes == size
    assert {path.name for path in tmp_path.iterdir()} == {"part", "whole", "pieces"}
    monkeypatch.setattr(part_masker, "_LONGEST_LINE", 2000)  # a longer line is cut after a space
    part_masker.mask_part(tmp_path / "part", tmp_path / "cut", schema, MASKER)
    unmasked = sum(text.count("<") for text in masked)
    cut = read_part(tmp_path / "cut", schema)
    assert unmasked - 5 < sum(text.count("<") for text in cut) <= unmasked
    assert cut[4] == texts[4]


@pytest.mark.parametrize("dedup", ["none", "near"])
def test_a_conversation_larger_than_a_large_text_is_masked_and_written(
    tmp_path, monkeypatch, dedup
):
    monkeypatch.setattr(parts, "LARGE_PART", 1000)
    question = " ".join(make_words(random.Random(2), 300))
    answer = f"write to {SECRETS[0]}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    shape = RowOptions(format="chat", dedup=dedup, mask=["email"])
    build_dataset(tmp_path / "raw", tmp_path / "out", shape)
    (messages,) = read_table(tmp_path / "out")["messages"].to_pylist()
    assert [turn["content"] for turn in messages] == [question, "write to <email>"]


def test_a_part_without_a_match_and_rows_that_are_dropped_are_not_rewritten(tmp_path):
    import numpy as np

    schema = write_part(tmp_path / "part", ["none", SECRETS[0], SECRETS[2]])
    is_kept = np.array([True, False, False])
    masked = part_masker.mask_part(tmp_path / "part", tmp_path / "out", schema, MASKER, is_kept)
    assert masked.path is None and not masked.hits.rows and not (tmp_path / "out").exists()
    is_kept[2] = True
    masked = part_masker.mask_part(tmp_path / "part", tmp_path / "out", schema, MASKER, is_kept)
    assert masked.hits.rows == {"ip": [2]}
    assert read_part(tmp_path / "out", schema) == ["none", SECRETS[0], "<ip>"]


def test_hashes_need_a_key_and_depend_on_it(stage, tmp_path):
    write_lines(tmp_path / "raw/a.jsonl", [SECRETS[0], SECRETS[0].upper(), SECRETS[2]])
    command = (SCRIPT, "--data-folder", "raw", "--mask", "email", "--mask-with", "hash")
    refused = stage(*command, "--save-dir", "x", expect=2)
    assert "--mask-key" in refused.stderr and "urandom" in refused.stderr
    refused = stage(*command, "--mask-key", "nothing", "--save-dir", "x", expect=2)
    assert "--mask-key nothing: No such file" in refused.stderr and "urandom" in refused.stderr
    (tmp_path / "mask.key").write_bytes(b"0123456789abcdef")
    stage(*command, "--mask-key", "mask.key", "--save-dir", "out")
    one, two, three = list_texts(tmp_path / "out")
    assert one == two and one.startswith("<email:") and three == SECRETS[2]
    assert b"0123456789abcdef" not in (tmp_path / "out/manifest.json").read_bytes()
    assert "already done" in stage(*command, "--mask-key", "mask.key", "--save-dir", "out").stdout
    (tmp_path / "mask.key").write_bytes(b"another key of 24 bytes!")
    other = stage(*command, "--mask-key", "mask.key", "--save-dir", "out", expect=2)
    assert "mask_key" in other.stderr or "--mask-key" in other.stderr


@pytest.mark.slow
def test_an_earlier_dataset_is_compared_as_it_was_masked(stage: StageRunner, tmp_path: Path):
    """Both texts are masked, so a row that differs only in what was masked is a duplicate."""
    draw = random.Random(1)
    words = [make_words(draw, 12) for _ in range(20)]
    old = [" ".join([*parts_of_text, SECRETS[0], *parts_of_text[::-1]]) for parts_of_text in words]
    new = [text.replace(SECRETS[0], "other@mail.example.org") for text in old]
    write_lines(tmp_path / "old/a.jsonl", old)
    write_lines(tmp_path / "new/b.jsonl", [*new, "and another row that nothing is similar to"])
    near = (SCRIPT, "--dedup", "near", "--near-bands", 60, "--near-band-size", 2)
    email = ("--mask", "email")
    stage(*near, *email, "--data-folder", "old", "--save-dir", "masked")
    stage(*near, "--data-folder", "old", "--save-dir", "plain")
    add = (*near, "--data-folder", "new", "--save-dir", "out", "--near-against")
    dropped = {}
    for name, mask in (("masked", email), ("plain", ()), ("plain", MASK)):
        done = stage(*add, name, *mask, "--overwrite", expect=None)
        if name == "plain" and mask == MASK:
            dropped["both"] = done.returncode
        rows = read_table(tmp_path / "out").num_rows
        dropped.setdefault(name, rows)
    assert dropped["masked"] == 1 and dropped["plain"] > dropped["masked"]
    assert dropped["both"] == 0  # earlier rows without masks are compared without masks
    for names, mask in ((["masked"], ()), (["masked"], MASK), (["masked", "plain"], email)):
        against = [word for name in names for word in ("--near-against", name)]
        refused = stage(*add[:-1], *against, *mask, "--overwrite", expect=2)
        assert "other masks" in refused.stderr and "--mask email" in refused.stderr


def test_datasets_with_other_masks_are_compared_only_if_all_are_alike():
    ours = RowOptions(mask=["email"])
    same = mask_options.identify_masks(ours)
    other = mask_options.identify_masks(RowOptions(mask=["ip"]))
    are_masked = mask_options.are_masked
    assert not are_masked([], ours) and not are_masked([{"dedup": "near"}], ours)
    assert are_masked([same, {**same, "dedup": "near"}], ours)
    for earlier in ([other], [same, {}], [{**same, "mask_version": 0}]):
        with pytest.raises(errors.UsageError):
            are_masked(earlier, ours)


def test_the_package_that_knows_numbers_identifies_masked_numbers_only():
    masked = mask_options.identify_masks(RowOptions(mask=["email", "phone"]))
    version = masked.pop("mask_phonenumbers")
    assert "mask_phonenumbers" not in mask_options.identify_masks(RowOptions(mask=["email"]))
    for other in ({}, {"mask_phonenumbers": "0.1"}):  # masked by our own table, or another version
        with pytest.raises(errors.UsageError) as caught:
            mask_options.are_masked([masked | other], RowOptions(mask=["email", "phone"]))
        assert f"phonenumbers {version}" in caught.value.found and not caught.value.run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mask", "email,name"), "among email,ip,phone,iban,card"),
        (("--mask-phone-country", "US"), "needs --mask"),
        (("--mask", "phone", "--mask-phone-country", "XX"), "numbers begin with 0"),
    ],
)
def test_bad_usage_is_reported(stage, tmp_path, arguments, words):
    write_lines(tmp_path / "raw/a.jsonl", ["text"])
    refused = stage(SCRIPT, "--data-folder", "raw", *arguments, expect=2)
    assert words in refused.stderr and "Traceback" not in refused.stderr


def test_content_is_the_first_text_field_that_is_masked():
    assert part_masker._TEXT_FIELDS[0] == chat_rows.CONTENT
