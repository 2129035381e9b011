# covers: lib/models/lookup.py
"""Models are found by name or path, and incomplete ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lib.core import log, manifest, paths
from lib.core.errors import ArtifactError, UsageError
from lib.models import lookup
from lib.models.lookup import find_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache directory with two prepared models; `org--first` is the older one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    for name, day in (("org--first", 1), ("scratch-tiny", 2)):
        directory = tmp_path / ".cache/models" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        files = [manifest.file_entry(directory, directory / "config.json")]
        manifest.write_manifest(
            directory, kind="model/1", stage="", identity={}, options={}, files=files, summary={}
        )
        path = directory / "manifest.json"
        record = {**json.loads(path.read_text()), "created": f"2025-01-0{day}T00:00:00Z"}
        path.write_text(json.dumps(record))
    return Path(".cache")


@pytest.mark.parametrize("name", ["org/first", "org--first", ".cache/models/org--first"])
def test_a_prepared_model_is_found_by_each_spelling_of_its_name(cache, name):
    assert find_model(name, cache) == cache / "models/org--first"


def test_without_a_name_the_only_model_is_used_and_logged(cache, capsys):
    log.setup()
    with pytest.raises(UsageError, match="2 models are prepared") as caught:
        find_model(None, cache)
    heading, *lines = caught.value.expected.splitlines()
    assert heading == "one of these commands"
    assert [line.split()[-2:] for line in lines] == [["-m", "scratch-tiny"], ["-m", "org--first"]]
    # Those of the Makefile never count, whenever they were made and whatever they are called now.
    record_path = cache / "models/scratch-tiny/manifest.json"
    content = record_path.read_text()
    record_path.write_text(json.dumps({**json.loads(content), "options": {"model_name": "demo"}}))
    assert find_model(None, cache) == cache / "models/org--first"
    record_path.write_text(content)
    (cache / "models/scratch-tiny").rename(cache / "models/demo")
    assert find_model(None, cache) == cache / "models/org--first"
    assert "the only one prepared" in capsys.readouterr().out
    (cache / "models/org--first").rename(cache / "models/test-quick")
    with pytest.raises(ArtifactError, match="no model is prepared") as caught:
        find_model(None, cache)
    assert caught.value.found.startswith("only demo, test-quick, ")
    assert find_model("demo", cache) == cache / "models/demo"


def test_a_directory_without_a_manifest_is_accepted(cache, capsys):
    log.setup()
    Path("saved").mkdir()
    Path("saved/config.json").write_text("{}")
    assert find_model("saved", cache) == Path("saved")
    assert "made elsewhere" in capsys.readouterr().out


def test_the_error_for_an_unknown_name_lists_the_models(cache):
    with pytest.raises(ArtifactError) as caught:
        find_model("org/second", cache)
    message = caught.value.render()
    assert "scratch-tiny, org--first" in message
    assert "03_download_model.py --model-name org/second" in message


def test_an_unfinished_model_is_not_found(cache):
    (cache / "models/org--third.partial-12345678").mkdir()
    (cache / "models/org--third.partial-12345678/config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no finished model") as caught:
        find_model("org/third", cache)
    assert "org--third.partial-12345678" in caught.value.found
    with pytest.raises(ArtifactError, match="not finished"):
        find_model(".cache/models/org--third.partial-12345678", cache)
    (cache / "models/org--third").mkdir()
    (cache / "models/org--third/config.json").write_text("{}")
    with pytest.raises(ArtifactError) as caught:
        find_model("org/third", cache)
    assert "incomplete copy" in caught.value.found


def test_a_model_that_lost_a_file_is_damaged(cache):
    (cache / "models/org--first/config.json").write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        find_model("org/first", cache)


def test_without_models_the_error_names_a_command(tmp_path):
    with pytest.raises(ArtifactError) as caught:
        find_model(None, tmp_path)
    assert "--from-scratch" in caught.value.hint


def test_a_complete_snapshot_in_the_hugging_face_cache_is_found(cache, monkeypatch, capsys):
    log.setup()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "hub"))
    home = cache / "hub/models--org--cached"
    snapshot = home / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ArtifactError) as caught:  # config and no weights
        find_model("org/cached", cache)
    assert "part of org/cached" in caught.value.found
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_model("org/cached", cache) == snapshot
    assert paths.short_name(snapshot) == "org/cached"
    assert paths.short_name(Path("models/a")) == "models/a"
    assert "Hugging Face cache" in capsys.readouterr().out
    with pytest.raises(ArtifactError) as caught:
        find_model("org/other", cache)
    assert f"{cache / 'hub'} (set by HF_HUB_CACHE): org/cached" in caught.value.found
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(cache / "home"))
    with pytest.raises(ArtifactError) as caught:
        find_model("org/other", cache)
    assert f"{cache / 'home/hub'} (set by HF_HOME; it does not exist): nothing" in str(
        caught.value.found
    )
    monkeypatch.delenv("HF_HOME")
    with pytest.raises(ArtifactError) as caught:
        find_model("org/other", cache)
    assert "neither HF_HOME nor HF_HUB_CACHE" in caught.value.found


def test_a_model_with_pickles_does_not_count_as_one_without_weights(cache):
    Path("old").mkdir()
    Path("old/config.json").write_text("{}")
    Path("old/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="pickled weights") as caught:
        find_model("old", cache)
    assert "--allow-pickle" in caught.value.hint
    Path("old/model.safetensors").write_bytes(b"")
    assert find_model("old", cache) == Path("old")


@pytest.mark.parametrize(
    "used, words",
    [
        (
            {
                "from_scratch": True,
                "model_size": "tiny",
                "model_name": "org/first",
                "vocab_size": 500,
                "train_tokenizer": "my data/c",
            },
            "--from-scratch --model-size tiny --model-name org/first "
            "--vocab-size 500 --train-tokenizer 'my data/c'",
        ),
        (
            {"model_name": "org/first", "revision": "v1", "allow_pickle": True},
            "--model-name org/first --revision v1 --allow-pickle",
        ),
    ],
)
def test_the_error_for_a_damaged_model_names_the_command_that_made_it(cache, used, words):
    path = cache / "models/org--first/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "options": used}))
    (cache / "models/org--first/config.json").unlink()
    with pytest.raises(ArtifactError) as caught:
        find_model("org/first", cache)
    command = caught.value.run or caught.value.hint  # words where `my data/c` is not there
    assert f"03_download_model.py {words} --cache-dir {cache} --overwrite" in command
    assert bool(caught.value.run) == ("my data" not in words)


def test_finding_a_model_imports_neither_torch_nor_transformers():
    code = (
        "import sys, lib.models.directory; print([m for m in sys.modules if m in "
        "('torch', 'transformers', 'huggingface_hub', 'datasets', 'tokenizers')])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "stray",
    ["model.safetensors", "modeling.py", "trusted_code.json", "model.safetensors.index.json"],
)
def test_weights_or_code_that_are_not_in_the_manifest_are_refused(cache, stray):
    directory = cache / "models/org--first"
    (directory / "._model.safetensors").write_text("what a Mac leaves")
    find_model("org/first", cache)
    (directory / stray).write_text("")
    for name in ("org/first", str(directory)):
        with pytest.raises(ArtifactError, match="not verified") as caught:
            find_model(name, cache)
        assert stray in caught.value.found


def test_a_printed_command_names_the_only_dataset(cache):
    usual = Path("hf_datasets/corpus")
    assert lookup.guess_dataset() == usual
    for name, expected in (("demo", usual), ("text", Path("hf_datasets/text")), ("more", usual)):
        Path("hf_datasets", name).mkdir(parents=True)
        Path("hf_datasets", name, "manifest.json").write_text("{}")
        assert lookup.guess_dataset() == expected


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 73400320\n"
PAGE = "<!DOCTYPE html><html><head><title>403 Forbidden</title></head></html>"


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        ("model.safetensors", LFS, "git lfs pull"),
        ("model.safetensors.index.json", LFS, "git lfs pull"),
        ("tokenizer.json", LFS, "git lfs pull"),
        ("tokenizer.model", PAGE, "download the file again"),
        ("config.json", '{"error": "Access to model org/m is restricted"}', "download"),
        ("pytorch_model.bin", LFS, "git lfs pull"),
    ],
)
def test_a_pointer_or_a_page_in_place_of_a_file_is_named_with_the_cure(
    cache: Path, name: str, content: str, cure: str
) -> None:
    model = Path("elsewhere")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / name).write_text(content)
    with pytest.raises(ArtifactError, match="1 file without data") as caught:
        find_model("elsewhere", cache)
    assert f"elsewhere/{name} is a" in caught.value.found and cure in caught.value.hint


def test_a_pointer_in_a_prepared_model_is_no_other_content(cache: Path) -> None:
    (cache / "models/org--first/config.json").write_text(LFS)
    with pytest.raises(ArtifactError, match="is damaged") as caught:
        find_model("org/first", cache)
    assert "git lfs pull" in caught.value.found


def test_pointers_in_place_of_files_that_are_not_read_do_not_matter(cache: Path) -> None:
    model = Path("elsewhere")
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    for name in ("consolidated.safetensors", "training_args.bin"):
        (model / name).write_text(LFS)
    assert find_model("elsewhere", cache) == model


def test_a_link_of_git_annex_to_a_missing_file_is_a_pointer(cache: Path) -> None:
    model = Path("elsewhere")
    model.mkdir()
    (model / "config.json").write_text("{}")
    key = "SHA256E-s73400320--4d7a.safetensors"
    (model / "model.safetensors").symlink_to(f"../.git/annex/objects/Xk/2f/{key}/{key}")
    with pytest.raises(ArtifactError) as caught:
        find_model("elsewhere", cache)
    assert "git annex get" in caught.value.hint
