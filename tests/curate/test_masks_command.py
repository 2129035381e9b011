# covers: lib/curate/steps/masks.py, lib/curate/masks/row_masker.py, lib/curate/masks/choices.py
"""A curation with --mask: the rows of a dataset are masked, and nothing leaks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest

from lib.core.errors import UsageError
from lib.corpus import parts
from lib.curate.masks import row_masker
from lib.curate.masks.choices import KINDS
from lib.curate.masks.masker import Masker
from lib.curate.masks.matches import MaskedMatches
from lib.curate.steps import masks
from lib.curate.steps.masks import MaskOptions, Masks
from tests.curate.curations import curate, curate_in_units, read_rows, write_chats, write_texts
from tests.training import read_dataset_files

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
FILTER = """
NAME = "no mail"

def find_reason(text):
    return "mail" if "@mail" in text else ""
"""


def make_texts(draw: random.Random, count: int) -> list[str]:
    """Return texts of which every second one contains some of SECRETS."""
    texts: list[str] = []
    for number in range(count):
        words = [f"w{draw.randrange(500)}" for _ in range(draw.randint(20, 60))]
        if number % 2:
            words.insert(draw.randint(0, len(words)), draw.choice(SECRETS))
        if number % 10 == 0:
            words.append("\n" + draw.choice(SECRETS) + "\n")
        texts.append(" ".join(words))
    # In the report, a sample of this text would end in the middle of a secret.
    return [*texts, *SECRETS, "word " * 38 + " ".join(SECRETS) + " word" * 50]


def require_no_leak(directory: Path, *outputs: str) -> None:
    """Assert that no file of a dataset and no output contains a secret or a part of one."""
    files = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    for secret in (*SECRETS, "joe.smith", "149.9.2", "30 1234", "3704 0044", "555-1234"):
        assert files and not any(secret.encode() in data for data in files), secret
        assert not any(secret in text for text in outputs), secret


def list_texts(directory: Path) -> list[str]:
    return read_rows(directory)["text"].to_pylist()


@pytest.mark.slow
def test_workers_give_the_same_masked_rows_and_masking_them_again_changes_nothing(
    tmp_path: Path,
) -> None:
    texts = make_texts(random.Random(0), 240)
    sources = [f"{'web' if number % 3 else 'mail'}/{number}.txt" for number in range(len(texts))]
    sources[241] = "c.txt"
    write_texts(tmp_path / "in", texts[:200], source=sources[:200])
    write_texts(tmp_path / "in", texts[200:], "validation", source=sources[200:])
    (tmp_path / "filter.py").write_text(FILTER)
    options = ("--step", "filter.py", *MASK, "--save-dir")
    done = curate_in_units(tmp_path, "in", *options, "one", "--num-workers", 1)
    kept_texts = [text for text in texts if "@mail" not in text]  # the filter reads unmasked text
    masked_texts = [*list_texts(tmp_path / "one/train"), *list_texts(tmp_path / "one/validation")]
    assert masked_texts == [*map(MASKER.mask_text, kept_texts)]
    require_no_leak(tmp_path / "one", done.stdout, done.stderr)
    curate_in_units(tmp_path, "in", *options, "three", "--num-workers", 3)
    one = read_dataset_files(tmp_path / "one")
    assert read_dataset_files(tmp_path / "three") == one
    without_masks = ("in", "--step", "filter.py", "--save-dir", "merged", "--part", "1/1")
    curate_in_units(tmp_path, *without_masks)
    curate_in_units(tmp_path, "in", *options, "merged", "--merge")
    assert read_dataset_files(tmp_path / "merged") == one
    counts = [(kind, sum(text.count(f"<{kind}>") for text in masked_texts)) for kind in KINDS]
    assert ", ".join(f"{number:,} {kind}" for kind, number in counts) in done.stdout
    assert all(f"{name} " in done.stdout for name in ("(by source: web", "mail", "(no directory)"))
    assert "national format of US" in done.stdout
    totals = json.loads((tmp_path / "one/manifest.json").read_text())["summary"]["masks"]
    assert totals["counts"] == dict(counts)
    assert {*totals["sources"]} == {"web", "mail", ""} and {*totals["shapes"]} == {*KINDS}

    again = curate_in_units(tmp_path, "one", *options, "twice")
    assert "nothing found" in again.stdout
    for split in ("train", "validation"):
        assert read_rows(tmp_path / "twice" / split) == read_rows(tmp_path / "one" / split)


def make_call(arguments: object, identifier: str) -> dict:
    function = {"name": "send", "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def test_turns_calls_and_results_are_masked_and_calls_stay_valid(tmp_path: Path) -> None:
    mail = "joe.smith@mail.example.org"
    body = f"a\n{SECRETS[5]}\n{SECRETS[7]}\\"
    arguments = {"to": [mail], "body": body, mail: {"card": 4111111111111111}}
    number = "4111111111111111"
    tool = {"name": "send", "parameters": {"example": f"\t{mail}"}}
    chat = [
        {"role": "user", "content": f"Write to {mail}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": json.dumps([make_call(arguments, number)]),
        },
        {"role": "tool", "content": f"sent to {mail}", "tool_call_id": number},
        {"role": "assistant", "content": "Done.", "reasoning_content": f"It was {mail}."},
    ]
    fields = ("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")
    chats = [
        [{field: turn.get(field) for field in fields} for turn in turns]
        for turns in (
            chat,
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}],
        )
    ]
    kwargs = json.dumps({"who": mail})
    tools = [json.dumps([{"type": "function", "function": tool}]), None]
    write_chats(tmp_path / "in", chats, tools=tools, chat_template_kwargs=[None, kwargs])
    done = curate(tmp_path, "in", *MASK, "--save-dir", "out")
    first, second = read_rows(tmp_path / "out").to_pylist()
    turns = first["messages"]
    contents = ["Write to <email>", "", "sent to <email>", "Done."]
    assert [turn["content"] for turn in turns] == contents
    assert turns[3]["reasoning_content"] == "It was <email>."
    assert turns[2]["tool_call_id"] == number
    masked = {"to": ["<email>"], "body": "a\n<phone>\n<card>\\", "<email>": {"card": "<card>"}}
    assert json.loads(turns[1]["tool_calls"]) == [make_call(masked, number)]
    tool["parameters"] = {"example": "\t<email>"}
    assert json.loads(first["tools"]) == [{"type": "function", "function": tool}]
    assert second["messages"] == chats[1] and second["tools"] is None
    assert json.loads(second["chat_template_kwargs"]) == {"who": "<email>"}
    assert "7 email, 1 phone, 2 card (by source: " in done.stdout
    assert mail not in done.stdout + done.stderr
    curate(tmp_path, "out", *MASK, "--save-dir", "twice")
    assert read_rows(tmp_path / "twice") == read_rows(tmp_path / "out")
    summary = json.loads((tmp_path / "out/manifest.json").read_text())["summary"]
    assert summary["text_bytes"] == len("".join([*contents, "Hi", "Hi!"]))


def test_keys_that_are_masked_alike_keep_their_values() -> None:
    value = {"a@firma.de": 1, "<email>": 2, "b@firma.de": {"c@firma.de": 3}, "<email> (2)": 4}
    masked = row_masker._mask_value(value, MASKER, MaskedMatches())
    expected = {"<email> (3)": 1, "<email>": 2, "<email> (4)": {"<email>": 3}, "<email> (2)": 4}
    assert masked == expected and [*masked] == [*expected]
    assert row_masker._mask_value(masked, MASKER, MaskedMatches()) == masked


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_text_larger_than_memory_is_masked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    long = [end.join(make_texts(random.Random(i), 40)) for i in range(2)]
    texts = ["none", long[0], None, SECRETS[0], long[1], "none", "é" * 9000, ""]
    rows = pa.record_batch({"text": pa.array(texts, pa.large_string()), "n": range(len(texts))})
    at_once, hits = row_masker.mask_rows(rows, MASKER, None)
    monkeypatch.setattr(parts, "LARGE_PART", 5000)
    monkeypatch.setattr(row_masker, "_PIECE_BYTES", 1000)
    in_pieces, hits_in_pieces = row_masker.mask_rows(rows, MASKER, tmp_path)
    in_pieces.validate(full=True)
    masked = [text and MASKER.mask_text(text) for text in texts]
    assert at_once["text"].to_pylist() == in_pieces["text"].to_pylist() == masked
    assert hits_in_pieces == hits and {*hits.rows} == {*KINDS}
    assert not [*tmp_path.iterdir()]
    unchanged, no_hits = row_masker.mask_rows(rows.slice(5), MASKER, tmp_path)
    assert unchanged["text"].equals(rows["text"].slice(5)) and not no_hits.rows
    monkeypatch.setattr(row_masker, "_LONGEST_LINE", 2000)  # a longer line is cut after a space
    cut, _ = row_masker.mask_rows(rows, MASKER, tmp_path)
    cut.validate(full=True)
    matches = [
        sum((text or "").count("<") for text in column)
        for column in (masked, cut["text"].to_pylist())
    ]
    assert matches[0] - 5 < matches[1] <= matches[0]
    assert cut["text"][6].as_py() == texts[6]


def test_hashes_need_a_key_and_depend_on_it(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [SECRETS[0], SECRETS[0].upper(), SECRETS[2]])
    command = ("in", "--mask", "email", "--mask-with", "hash")
    refused = curate(tmp_path, *command, "--save-dir", "x", expect=2)
    assert "--mask-key" in refused.stderr and "urandom" in refused.stderr
    refused = curate(tmp_path, *command, "--mask-key", "nothing", "--save-dir", "x", expect=2)
    assert "--mask-key nothing" in refused.stderr and "urandom" in refused.stderr
    command = (*command, "--mask-key", "mask.key", "--save-dir", "out")
    (tmp_path / "mask.key").write_bytes(b"0123456789abcdef")
    curate(tmp_path, *command)
    one, two, three = list_texts(tmp_path / "out")
    assert one == two and one.startswith("<email:") and three == SECRETS[2]
    assert b"0123456789abcdef" not in (tmp_path / "out/manifest.json").read_bytes()
    assert "already done" in curate(tmp_path, *command).stdout
    (tmp_path / "mask.key").write_bytes(b"another key of 24 bytes!")
    assert "--mask-key" in curate(tmp_path, *command, expect=2).stderr


def raise_version(rank: int) -> None:
    """Let this process pretend that its patterns are newer."""
    masks._VERSION += 1


def test_another_version_of_the_patterns_is_not_shown_as_an_option(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", ["text"])
    command = ("in", "--mask", "email", "--save-dir", "out")
    curate(tmp_path, *command)
    refused = curate(tmp_path, *command, before=f"{__name__}:raise_version", expect=2)
    assert f"versions.masks: {masks._VERSION} there" in refused.stderr
    assert "--versions" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mask", "email,name"), "among email,ip,phone,iban,card"),
        (("--mask-phone-country", "US"), "needs --mask"),
        (("--mask", "phone", "--mask-phone-country", "XX"), "numbers begin with 0"),
    ],
)
def test_bad_usage_is_reported(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    write_texts(tmp_path / "in", ["text"])
    refused = curate(tmp_path, "in", *arguments, expect=2)
    assert words in refused.stderr and "Traceback" not in refused.stderr


def test_contradictory_options_and_bad_keys_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "mask.key"
    key.write_bytes(b"k" * 15)
    for values in (
        {"mask_with": "hash"},
        {"mask": ["email"], "mask_phone_country": ["US"]},
        {"mask": ["email"], "mask_with": "hash"},
        {"mask": ["email"], "mask_key": key},
        {"mask": ["email"], "mask_with": "hash", "mask_key": key},
        {"mask": ["email"], "mask_with": "hash", "mask_key": tmp_path / "none"},
    ):
        with pytest.raises(UsageError):
            Masks.from_options(MaskOptions(**values))
    key.write_bytes(b"k" * 16)
    hashed = Masks.from_options(MaskOptions(mask=["ip", "email"], mask_with="hash", mask_key=key))
    assert hashed and b"k" * 8 not in str(hashed.identify()).encode()
    one, two = (Masks(MaskOptions(mask=kinds)) for kinds in (["email", "ip"], ["ip", "email"]))
    assert one.identify() == two.identify() and one.list_versions() == two.list_versions()
    assert "phonenumbers" not in one.list_versions()
    assert "phonenumbers" in Masks(MaskOptions(mask=["phone"])).list_versions()
    assert Masks.from_options(MaskOptions()) is None
