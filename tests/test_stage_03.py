# covers: 03_download_model.py, lib/core/offline.py, lib/hub/fetch.py, lib/hub/cache.py
# covers: lib/core/artifact_checks.py
"""Stage 03 as a person runs it, against a Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, StageRunner, run_code
from tests.hub_models import (
    NAME,
    SCRIPT,
    SHARDS,
    TARGET,
    TOKEN,
    change_config,
    find_files_with,
    list_model_dirs,
)


@pytest.mark.slow
def test_a_download_is_complete_and_loads_offline(hub, stage: StageRunner, tmp_path, model_files):
    repo = hub.repos[NAME]
    change_config(repo, auto_map={"AutoModelForCausalLM": "model.Model"})  # ignored: a known type
    repo.cut[SHARDS[0]] = 100_000
    done = stage(SCRIPT, "--model-name", NAME)
    target = tmp_path / TARGET
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    record = json.loads(files.pop("manifest.json"))
    assert files == {name: repo.files[name] for name in model_files}
    assert hub.paths("/api/") == [f"/api/models/{NAME}/revision/main"]
    assert not [path for path in hub.paths() if not path.startswith(("/api/models/org", "/org/"))]
    assert all(path.is_file() and not path.is_symlink() for path in target.iterdir())
    assert record["kind"] == "model/1" and record["summary"]["source"] == "hub"
    assert record["summary"]["commit"] == repo.commit
    assert record["summary"]["dtype"] == "bfloat16" and record["summary"]["context"] == 128
    assert record["summary"]["memory"] == {} and "to train" not in done.stdout  # it is so small
    assert record["files"] == [
        {
            "path": name,
            "bytes": len(content),
            "digest": "sha256:" + hashlib.sha256(content).hexdigest(),
        }
        for name, content in sorted(files.items())
    ]
    assert f"04_train_fsdp.py -e org--tiny-llama -d hf_datasets/corpus -m {NAME}" in done.stdout
    moved = target.rename(tmp_path / "elsewhere")
    load = (
        "import sys, transformers as t; where = sys.argv[1]; "
        "model = t.AutoModelForCausalLM.from_pretrained(where); "
        "print(model.num_parameters(), len(t.AutoTokenizer.from_pretrained(where)))"
    )
    loaded = run_code(load, moved, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert loaded.stdout.split() == [str(record["summary"]["parameters"]), "256"]


def test_a_second_run_sends_no_request_and_refuses_another_revision(
    hub, stage: StageRunner, tmp_path
):
    stage(SCRIPT, "--model-name", NAME)
    hub.requests.clear()
    assert "already done" in stage(SCRIPT, "--model-name", NAME).stdout
    refused = stage(SCRIPT, "--model-name", NAME, "--revision", "v2", expect=2).stderr
    assert "--revision: main there, v2 now" in refused and "--overwrite" in refused
    assert not hub.requests
    (tmp_path / TARGET / "config.json").unlink()
    assert "config.json is missing" in stage(SCRIPT, "--model-name", NAME, expect=3).stderr
    commit = hub.repos[NAME].commit
    (tmp_path / TARGET / SHARDS[1]).write_bytes(b"x" * len(hub.repos[NAME].files[SHARDS[1]]))
    done = stage(SCRIPT, "--model-name", NAME, "--overwrite", "--revision", commit)
    assert f"{SHARDS[1]} is damaged" in done.stdout
    assert hub.paths(SHARDS[1]) and not hub.paths(SHARDS[0])  # the other was whole
    assert (tmp_path / TARGET / "config.json").exists()
    assert all(f"/resolve/{commit}/" in path for path in hub.paths("/resolve/"))
    assert list_model_dirs(tmp_path) == ["org--tiny-llama"]


def test_dry_run_needs_no_network(hub, stage: StageRunner, tmp_path):
    out = stage(SCRIPT, "--model-name", NAME, "--dry-run").stdout
    assert NAME in out and hub.url in out and str(TARGET) in out
    assert not hub.requests and not list_model_dirs(tmp_path)


@pytest.mark.parametrize("file", [SHARDS[1], "tokenizer.json"])
def test_a_file_of_the_right_size_but_other_content_is_refused(
    hub, stage: StageRunner, tmp_path, file
):
    repo = hub.repos[NAME]
    content = bytearray(repo.files[file])
    content[-2] ^= 1
    repo.served[file] = bytes(content)
    error = stage(SCRIPT, "--model-name", NAME, expect=3).stderr
    assert f"{file} was downloaded twice" in error and "Traceback" not in error
    assert not (tmp_path / TARGET).exists()


@pytest.mark.parametrize("file", [SHARDS[1], "LICENSE"])
@pytest.mark.parametrize("answer", [b"", b"<html>Please sign in</html>"])
def test_short_answers_and_error_pages_are_refused(hub, stage: StageRunner, tmp_path, file, answer):
    hub.repos[NAME].served[file] = answer
    error = stage(SCRIPT, "--model-name", NAME, expect=3).stderr
    assert NAME in error and "finished files are kept" in error and "Traceback" not in error
    assert not (tmp_path / TARGET).exists()
    del hub.repos[NAME].served[file]
    stage(SCRIPT, "--model-name", NAME)
    assert (tmp_path / TARGET / file).read_bytes() == hub.repos[NAME].files[file]


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again(hub, stage: StageRunner, tmp_path):
    repo = hub.repos[NAME]
    repo.files["model.safetensors.index.json"] += b" " * 64  # another version than a kill leaves
    repo.slow = 0.3
    run = subprocess.Popen(
        [sys.executable, ROOT / SCRIPT, "--model-name", NAME],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (
        any(tmp_path.glob(f"{TARGET}.partial-*/*/{SHARDS[1]}"))
        and any(tmp_path.glob(f"{TARGET}.partial-*/*/.{SHARDS[0]}.download"))
    ):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / TARGET).exists()
    repo.slow = 0.0
    repo.files["LICENSE"] += b"Or not.\n"  # main has moved on since
    hub.requests.clear()
    assert "from an earlier run" in stage(SCRIPT, "--model-name", NAME).stdout
    files = {path.name: path.read_bytes() for path in (tmp_path / TARGET).iterdir()}
    assert {name: content for name, content in repo.files.items() if name in files} == {
        name: content for name, content in files.items() if name != "manifest.json"
    }
    assert list_model_dirs(tmp_path) == ["org--tiny-llama"]
    assert hub.paths(SHARDS[0]) and not hub.paths(SHARDS[1])  # a complete file does not come again


def test_gated_without_and_with_a_token(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].gated = True
    hub.repos[NAME].token = TOKEN
    error = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    assert "gated" in error and "HF_TOKEN" in error and "Traceback" not in error
    wrong = stage(SCRIPT, "--model-name", NAME, expect=2, env={"HF_TOKEN": "hf_Wrong"}).stderr
    assert "gated" in wrong and "hf_Wrong" not in wrong and not list_model_dirs(tmp_path)
    hub.requests.clear()
    done = stage(SCRIPT, "--model-name", NAME, "--token", TOKEN)
    assert TOKEN not in done.stdout + done.stderr and not find_files_with(tmp_path, TOKEN)
    stored = json.loads((tmp_path / TARGET / "manifest.json").read_text())
    assert stored["options"]["token"] == "[redacted]"
    by_token = {token: [r for r in hub.requests if r.token == token] for token in (TOKEN, "")}
    assert all(r.from_storage for r in by_token[""]) and by_token[""]  # it stays with the Hub
    assert not any(r.from_storage for r in by_token[TOKEN])


def test_a_private_repository(hub, stage: StageRunner):
    hub.repos[NAME].token = TOKEN
    assert "or it is private" in stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    stage(SCRIPT, "--model-name", NAME, env={"HF_TOKEN": TOKEN})


def test_an_invalid_token_is_not_printed(hub, stage: StageRunner):
    for arguments, env in ((["--token", "hf_a b\n"], {}), ([], {"HF_TOKEN": "hf_ab\u00e9"})):
        done = stage(SCRIPT, "--model-name", NAME, *arguments, env=env, expect=2)
        assert "token contains" in done.stderr and "hf_a" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_missing_models_and_hubs_are_reported(hub, stage: StageRunner, tmp_path):
    assert "no model org/nothing" in stage(SCRIPT, "--model-name", "org/nothing", expect=2).stderr
    assert (
        "no revision 'v9'"
        in stage(SCRIPT, "--model-name", NAME, "--revision", "v9", expect=2).stderr
    )
    down = stage(SCRIPT, "--model-name", NAME, expect=2, env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "unreachable" in down.stderr
    snapshot = tmp_path / f"hub/models--{NAME.replace('/', '--')}/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text("a" * 40)
    for name in ("config.json", "model.safetensors"):
        assert "without stage 03" not in down.stderr
        (snapshot / name).write_text("{}")
        down = stage(
            SCRIPT,
            "--model-name",
            NAME,
            expect=2,
            env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "hub")},
        )
    assert f"without stage 03: -m {NAME}" in down.stderr
    down = stage(
        SCRIPT,
        "--model-name",
        NAME,
        "--revision",
        "v1.0",
        expect=2,
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "hub")},
    )
    assert "unreachable" in down.stderr and "without stage 03" not in down.stderr
    shutil.rmtree(tmp_path / "hub")
    offline = stage(SCRIPT, "--model-name", NAME, expect=2, env={"HF_HUB_OFFLINE": "1"})
    assert "env -u HF_HUB_OFFLINE" in offline.stderr
    assert not list_model_dirs(tmp_path)


@pytest.mark.parametrize(
    "case", ["pickles", "unknown", "no config", "no tokenizer", "encoder", "index"]
)
def test_an_untrainable_model_is_refused_before_weights_are_downloaded(
    hub, stage: StageRunner, tmp_path, case
):
    repo = hub.repos[NAME]
    if case == "pickles":
        repo.files = {
            name: content for name, content in repo.files.items() if "safetensors" not in name
        }
    elif case == "unknown":
        change_config(repo, model_type="novel", auto_map={"AutoConfig": "model.Config"})
    elif case == "no config":
        del repo.files["config.json"]
    elif case == "no tokenizer":
        del repo.files["tokenizer.json"]
    elif case == "encoder":
        change_config(repo, model_type="bert")
    else:
        repo.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../a.safetensors"}}'
    error = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    message = {
        "pickles": "only pickles",
        "unknown": "does not know models of type 'novel'",
        "no config": "no config.json",
        "no tokenizer": "has no tokenizer",
        "encoder": "no causal language model",
        "index": "does not match the files",
    }[case]
    assert message in error and "Traceback" not in error
    assert tempfile.gettempdir() not in error.partition("  run:")[0]
    assert not list_model_dirs(tmp_path) and not hub.paths("-of-")


def test_weights_that_do_not_fit_are_not_published(hub, stage: StageRunner, tmp_path):
    change_config(hub.repos[NAME], num_hidden_layers=3)
    done = stage(SCRIPT, "--model-name", NAME, expect=3)
    assert "model.layers.2.self_attn.q_proj.weight" in done.stderr
    assert f"the files of {NAME} are not" in done.stderr and not (tmp_path / TARGET).exists()
    assert " kept in " in done.stdout and hub.paths("-of-")
    hub.requests.clear()
    stage(SCRIPT, "--model-name", NAME, expect=3)
    assert not hub.paths("-of-")  # what came is not asked for again
    change_config(hub.repos[NAME], num_hidden_layers=2)
    stage(SCRIPT, "--model-name", NAME)
    assert not hub.paths("-of-") and list_model_dirs(tmp_path) == ["org--tiny-llama"]


@pytest.mark.parametrize(
    "fields, code, message",
    [
        ({"vocab_size": 200}, 3, "the tokenizer has 256 tokens"),
        ({"hidden_act": "nope"}, 2, "KeyError: 'nope'"),
        ({"intermediate_size": -4}, 2, "negative"),
        ({"rope_parameters": {"rope_type": "zzz"}}, 2, "zzz"),
        ({"pad_token_id": 9999}, 2, "Padding"),
    ],
)
def test_an_impossible_config_is_refused_before_weights_are_downloaded(
    hub, stage: StageRunner, tmp_path, fields, code, message
):
    change_config(hub.repos[NAME], **fields)
    error = stage(SCRIPT, "--model-name", NAME, expect=code).stderr
    assert message in error and "Traceback" not in error
    assert tempfile.gettempdir() not in error.partition("  run:")[0]
    assert not hub.paths("-of-") and not list_model_dirs(tmp_path)


def treat_all_as_large(_: int) -> None:
    from lib.hub import fetch

    fetch._LARGE = 0


def test_headers_of_large_weights_are_checked_before_the_download(
    hub, stage: StageRunner, tmp_path
):
    large = "tests.test_stage_03:treat_all_as_large"
    change_config(hub.repos[NAME], num_hidden_layers=3, vocab_size=300)
    done = stage(SCRIPT, "--model-name", NAME, expect=3, before=large)
    assert "model.layers.2.self_attn.q_proj.weight" in done.stderr
    requests = [request for request in hub.requests if "-of-" in request.path]
    assert {request.range for request in requests} == {"bytes=0-65535"} and not list_model_dirs(
        tmp_path
    )
    change_config(hub.repos[NAME], num_hidden_layers=2, vocab_size=320)
    stage(SCRIPT, "--model-name", NAME, before=large)
    assert all(
        (tmp_path / TARGET / name).read_bytes() == hub.repos[NAME].files[name] for name in SHARDS
    )


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff"])
def test_a_bad_tokenizer_is_refused_before_weights_are_downloaded(
    hub, stage: StageRunner, tmp_path, content
):
    hub.repos[NAME].files["tokenizer.json"] = content
    error = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    assert f"the tokenizer in {NAME} does not load" in error and "Traceback" not in error
    assert not hub.paths("-of-") and not list_model_dirs(tmp_path)


def test_files_without_a_declared_digest_are_named(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].undeclared = {SHARDS[1]}
    done = stage(SCRIPT, "--model-name", NAME)
    assert f"their size was checked: {SHARDS[1]}\n" in done.stdout
    record = json.loads((tmp_path / TARGET / "manifest.json").read_text())
    assert record["summary"]["size_only"] == [SHARDS[1]]


def test_a_full_disk_is_reported_before_the_download(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].sizes["README.md"] = 10**15
    assert "1000.0 TB free" in stage(SCRIPT, "--model-name", NAME, expect=4).stderr
    assert not list_model_dirs(tmp_path) and not hub.paths("-of-")


def test_all_contradicting_options_are_in_one_error(stage: StageRunner):
    error = stage(SCRIPT, "--from-scratch", "--revision", "x", expect=2).stderr
    assert "3 problems" in error and "--model-size" in error and "tokenizer" in error
    assert (
        "--vocab-size is an option"
        in stage(SCRIPT, "--model-name", NAME, "--vocab-size", 500, expect=2).stderr
    )
    assert "--model-name" in stage(SCRIPT, expect=2).stderr
    assert "not a valid name" in stage(SCRIPT, "--model-name", "../x", expect=2).stderr


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write a dataset with a train and a validation split."""
    import datasets

    texts = [
        f"Document {i}: the cat number {i * i} sat on mat {i % 7}, purring.\n" * 5
        for i in range(300)
    ]
    dataset = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts}),
        validation=datasets.Dataset.from_dict({"text": ["zzzzzzzz" * 99]}),
    )
    dataset.save_to_disk(tmp_path / "hf_datasets/corpus")
    return Path("hf_datasets/corpus")


def scratch(*more: object) -> list[object]:
    return [SCRIPT, "--from-scratch", "--model-size", "tiny", *more]


def test_from_scratch(stage: StageRunner, tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    train = ("--train-tokenizer", corpus, "--vocab-size", 500)
    planned = stage(*scratch(*train, "--dry-run")).stdout
    assert "512 rows for 500" in planned and not list_model_dirs(tmp_path)
    done = stage(*scratch(*train))
    assert "all 300 documents" in done.stdout
    assert f"-e scratch-tiny -d {corpus} -m scratch-tiny" in done.stdout
    target = tmp_path / ".cache/models/scratch-tiny"
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "manifest.json",
    }
    summary = json.loads((target / "manifest.json").read_text())["summary"]
    assert summary["vocabulary"] == 512 and summary["tokens"] == 500
    assert summary["context"] == 2048 and summary["source"] == "scratch"
    assert "already done" in stage(*scratch(*train)).stdout
    again = stage(*scratch(*train), "--model-name", "me/other", "--num-workers", 1)
    assert "-m me/other" in again.stdout
    assert (tmp_path / ".cache/models/me--other/tokenizer.json").read_bytes() == (
        target / "tokenizer.json"
    ).read_bytes()
    differs = stage(*scratch("--train-tokenizer", corpus), expect=2).stderr
    assert "--vocab-size: 500 there, 4096 now" in differs


@pytest.mark.slow
def test_from_scratch_with_the_tokenizer_of_another(stage: StageRunner, tmp_path, corpus):
    done = stage(*scratch("--train-tokenizer", corpus, "--model-name", "small"))
    assert "too little text" in done.stdout
    model_summary = json.loads((tmp_path / ".cache/models/small/manifest.json").read_text())[
        "summary"
    ]
    assert model_summary["vocabulary"] == model_summary["tokens"] == 4096
    options = ("--tokenizer", ".cache/models/small", "--model-name", "big")
    printed = stage(SCRIPT, "--from-scratch", "--model-size", "1B", *options).stdout
    summary = json.loads((tmp_path / ".cache/models/big/manifest.json").read_text())["summary"]
    assert 16 * summary["parameters"] < summary["memory"]["1"] < 20 * summary["parameters"]
    assert "on 1, " in printed and "on 64 GPUs, each with 1 × 1,024 tokens" in printed
    config = json.loads((tmp_path / ".cache/models/big/config.json").read_text())
    limits = json.loads((tmp_path / ".cache/models/big/tokenizer_config.json").read_text())
    assert config["vocab_size"] == 4096 and config["eos_token_id"] == 1
    assert limits["model_max_length"] == config["max_position_embeddings"] == 4096
    small = stage(*scratch(*options, "--vocab-size", 300, "--overwrite"), expect=2).stderr
    assert f"{model_summary['tokens']:,} tokens in .cache/models/small" in small


def test_from_scratch_refuses_bad_inputs(stage: StageRunner, tmp_path, corpus):
    import datasets

    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "untitled")
    (tmp_path / "empty").mkdir()
    for arguments, code, message in (
        (("--train-tokenizer", "untitled"), 2, "no column of strings called `text`"),
        (("--train-tokenizer", "nowhere"), 3, "does not exist"),
        (("--train-tokenizer", "empty"), 2, "not a dataset"),
        (("--tokenizer", "empty"), 2, "contains no tokenizer"),
        (("--tokenizer", "nowhere"), 2, "no such directory"),
        (("--train-tokenizer", corpus, "--vocab-size", 100), 2, "too small"),
    ):
        error = stage(*scratch(*arguments), expect=code).stderr
        assert message in error and "Traceback" not in error
    assert not list_model_dirs(tmp_path)
