# covers: 03_download_model.py, lib/models/pickles.py, lib/models/hf_cache.py
# covers: lib/models/recipes.py, lib/core/artifact_checks.py
"""What stage 03 does only when asked to: pickles, code, caches, other architectures, --verify."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.conftest import StageRunner, run_code
from tests.hub_models import NAME, SCRIPT, SHARDS, TARGET, change_config, list_model_dirs
from tests.hub_server import HubServer, Repo

CODE = Path(__file__).parent / "models/novel"


# ------------------------------------------------------------------ pickles


def pickled(content: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.fixture
def weights(hub: HubServer) -> dict[str, torch.Tensor]:
    """Take the safetensors away from the small model, and return what they held."""
    files = hub.repos[NAME].files
    held = {key: tensor for name in SHARDS for key, tensor in load(files[name]).items()}
    for name in [name for name in files if "safetensors" in name or name.endswith(".bin")]:
        del files[name]
    return held


def published(where: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for path in sorted((where / TARGET).glob("*.safetensors"))
        for key, tensor in load(path.read_bytes()).items()
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_converted_when_allowed(hub, weights, stage: StageRunner, tmp_path, legacy):
    change_config(hub.repos[NAME], tie_word_embeddings=True)
    state = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    hub.repos[NAME].files["pytorch_model.bin"] = pickled(
        state, _use_new_zipfile_serialization=not legacy
    )
    refused = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    assert "only pickles" in refused and "--allow-pickle" in refused
    stage(SCRIPT, "--model-name", NAME, "--allow-pickle")
    tensors = published(tmp_path)
    assert tensors.keys() == state.keys() - {"lm_head.weight"}  # the same memory: once
    assert all(torch.equal(tensors[key], state[key]) for key in tensors)
    names = {path.name for path in (tmp_path / TARGET).iterdir()}
    assert "model.safetensors" in names and not [name for name in names if name.endswith(".bin")]
    content = json.loads((tmp_path / TARGET / "manifest.json").read_text())
    assert content["summary"]["converted"] == ["pytorch_model.bin"]
    assert {entry["path"] for entry in content["files"]} == names - {"manifest.json"}
    stage(SCRIPT, "--verify")


@pytest.mark.slow
def test_shards_of_pickles_become_shards(hub, weights, stage: StageRunner, tmp_path):
    files = hub.repos[NAME].files
    keys = sorted(weights)
    parts = {
        f"pytorch_model-0000{i}-of-00002.bin": {key: weights[key] for key in keys[i - 1 :: 2]}
        for i in (1, 2)
    }
    files |= {name: pickled(part) for name, part in parts.items()}
    files["pytorch_model.bin.index.json"] = json.dumps(
        {"weight_map": {key: name for name, part in parts.items() for key in part}}
    ).encode()
    stage(SCRIPT, "--model-name", NAME, "--allow-pickle")
    index = json.loads((tmp_path / TARGET / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(SHARDS)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    tensors = published(tmp_path)
    assert all(torch.equal(tensors[key], weights[key]) for key in weights)
    load_all = (
        "import sys, transformers as t; "
        "m, i = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], "
        "output_loading_info=True); print(not any(i.values()))"
    )
    done = run_code(load_all, tmp_path / TARGET, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert done.stdout.strip() == "True"


class Evil:
    def __reduce__(self) -> tuple:
        return Path.touch, (Path("evil"),)


@pytest.mark.parametrize(
    "content",
    [
        pickled({"a": Evil()}),
        pickle.dumps(Evil()),
        b"garbage",
        pickled({"a": 1}),
        pickled([torch.zeros(1)]),
    ],
)
def test_other_objects_in_a_pickle_are_not_run(hub, weights, stage: StageRunner, tmp_path, content):
    hub.repos[NAME].files["pytorch_model.bin"] = content
    done = stage(SCRIPT, "--model-name", NAME, "--allow-pickle", expect=2)
    assert "pytorch_model.bin" in done.stderr and "Traceback" not in done.stderr
    assert "weights_only" not in done.stderr and "Warning" not in done.stderr
    if content == pickled({"a": Evil()}):
        assert "it calls getattr" in done.stderr
    assert not (tmp_path / "evil").exists() and not (tmp_path / TARGET).exists()


# ------------------------------------------------------------------ code


@pytest.fixture
def novel(hub: HubServer) -> Repo:
    """Serve a model of a type that transformers does not know, with its code."""
    import runpy

    tensors = runpy.run_path(str(CODE / "weights.py"))["tensors"]()
    from safetensors.torch import save

    tiny = hub.repos[NAME].files
    files = {path.name: path.read_bytes() for path in CODE.glob("*_novel.py")}
    files |= {name: tiny[name] for name in ("tokenizer.json", "tokenizer_config.json")}
    files["config.json"] = json.dumps(
        {
            "model_type": "novel",
            "vocab_size": 320,
            "architectures": ["NovelForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_novel.NovelConfig",
                "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM",
            },
        }
    ).encode()
    files["model.safetensors"] = save(tensors, metadata={"format": "pt"})
    files["setup.py"] = b"raise SystemExit('not part of the model')"
    hub.repos["org/novel"] = Repo(files)
    return hub.repos["org/novel"]


def run_novel(stage: StageRunner, *more: object, **settings: object):
    return stage(SCRIPT, "--model-name", "org/novel", *more, **settings)


@pytest.mark.slow
def test_code_is_downloaded_only_when_trusted(hub, novel, stage: StageRunner, tmp_path):
    refused = run_novel(stage, expect=2).stderr
    assert "--trust-remote-code" in refused and not hub.paths(".py")
    run_novel(stage, "--trust-remote-code")
    target = tmp_path / ".cache/models/org--novel"
    code = {path.name for path in target.glob("*.py")}
    assert code == {"configuration_novel.py", "layers_novel.py", "modeling_novel.py"}
    assert not list((tmp_path / "hf_home").rglob("*.py"))
    record = json.loads((target / "manifest.json").read_text())
    assert set(record["summary"]["remote_code"]["org/novel"]) == code
    offline = (
        "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained("
        "sys.argv[1], trust_remote_code=True); print(type(m).__name__)"
    )
    done = run_code(offline, target, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert done.stdout.strip() == "NovelForCausalLM"
    with (target / "layers_novel.py").open("a") as file:
        file.write("#")
    assert "layers_novel.py has" in stage(SCRIPT, "--verify", expect=3).stderr
    from lib.core.errors import ArtifactError
    from lib.models.architecture import build_on_meta

    with pytest.raises(ArtifactError, match="has changed since"):
        build_on_meta(target, trust_code=True)


@pytest.mark.slow
def test_code_of_another_repository_is_downloaded_too(hub, novel, stage: StageRunner, tmp_path):
    change_config(
        novel,
        auto_map={
            "AutoConfig": "org/code--configuration_novel.NovelConfig",
            "AutoModelForCausalLM": "org/code--modeling_novel.NovelForCausalLM",
        },
    )
    hub.repos["org/code"] = Repo(
        {name: novel.files.pop(name) for name in list(novel.files) if name.endswith("_novel.py")}
    )
    run_novel(stage, "--trust-remote-code")
    config = json.loads((tmp_path / ".cache/models/org--novel/config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "configuration_novel.NovelConfig"


@pytest.mark.parametrize(
    "reference",
    [
        "../x.NovelConfig",
        "x",
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in ("/tmp/x.NovelConfig", "org/../code--x.C")
        ),
        *(pytest.param(path, marks=pytest.mark.long) for path in ("sub/x.C", ".C")),
    ],
)
def test_code_outside_of_the_directory_of_the_config_is_refused(
    hub, novel, stage: StageRunner, tmp_path, reference
):
    novel.files |= {path: b"class NovelConfig: pass" for path in ("/tmp/x.py", "../x.py", ".py")}
    change_config(
        novel,
        auto_map={
            "AutoConfig": reference,
            "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM",
        },
    )
    error = run_novel(stage, "--trust-remote-code", expect=2).stderr
    assert "Traceback" not in error and not hub.paths("x.py") and not list_model_dirs(tmp_path)
    assert "same directory" in error or "not a valid name" in error


@pytest.mark.parametrize(
    "code, message",
    [
        (b"import nopackage_x\n", "-m pip install nopackage_x"),
        (b"def (", "is not Python"),
        pytest.param(b"raise RuntimeError('boo')\n", "RuntimeError: boo", marks=pytest.mark.slow),
        pytest.param(b"class Other: pass\n", "NovelForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_code_that_fails_is_reported(hub, novel, stage: StageRunner, tmp_path, code, message):
    novel.files["modeling_novel.py"] = code
    error = run_novel(stage, "--trust-remote-code", expect=2).stderr
    assert message in error and "Traceback" not in error and not list_model_dirs(tmp_path)
    assert not list((tmp_path / "hf_home").rglob("*.py"))


def test_a_tokenizer_with_code_is_refused_before_weights_are_downloaded(
    hub, stage: StageRunner, tmp_path
):
    hub.repos[NAME].files["tokenizer_config.json"] = json.dumps(
        {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tokens.T", None]}}
    ).encode()
    error = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    assert "its own code" in error and not hub.paths("-of-")
    assert not list_model_dirs(tmp_path)


def test_code_for_a_known_type_is_not_downloaded(hub, stage: StageRunner, tmp_path):
    change_config(hub.repos[NAME], auto_map={"AutoModelForCausalLM": "model.Model"})
    stage(SCRIPT, "--model-name", NAME, "--trust-remote-code")
    assert not hub.paths(".py") and not list((tmp_path / TARGET).glob("*.py"))


# ------------------------------------------------------------------ a Hugging Face cache


def fill_cache(where: Path, repo: Repo, leave_out: str = "none") -> Path:
    """Lay out a repository as huggingface_hub does."""
    home = where / "hub/models--org--tiny-llama"
    snapshot = home / "snapshots" / repo.commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs/main").write_text(repo.commit)
    for name, content in repo.files.items():
        if name == leave_out or "/" in name:
            continue
        is_large = name.endswith((".safetensors", ".bin"))
        digest = (
            hashlib.sha256(content).hexdigest()
            if is_large
            else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        )
        (home / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_cached_files_are_not_downloaded(hub, stage: StageRunner, tmp_path, model_files):
    snapshot = fill_cache(tmp_path / "hf_home", hub.repos[NAME], leave_out=SHARDS[1])
    blob = (snapshot / SHARDS[0]).resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)  # the right size, other content
    done = stage(SCRIPT, "--model-name", NAME)
    assert "damaged and not used" in done.stdout and "from this machine" in done.stdout
    assert {name for name in model_files if hub.paths(f"/{name}")} == set(SHARDS)
    for path in (tmp_path / TARGET).iterdir():
        assert path.name == "manifest.json" or path.read_bytes() == hub.repos[NAME].files[path.name]
        assert not path.is_symlink() and path.stat().st_nlink == 1


def test_a_complete_cache_replaces_an_unreachable_hub(hub, stage: StageRunner, tmp_path):
    snapshot = fill_cache(tmp_path / "hf_home", hub.repos[NAME])
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = stage(SCRIPT, "--model-name", NAME, env=away)
    assert "using the copy" in done.stdout
    record = json.loads((tmp_path / TARGET / "manifest.json").read_text())
    assert record["summary"]["commit"] == hub.repos[NAME].commit
    assert record["summary"]["source"] == "Hugging Face cache"
    again = ("--cache-dir", "again")
    stage(SCRIPT, "--model-name", NAME, *again, env={"HF_HUB_OFFLINE": "1"})
    (snapshot / SHARDS[1]).unlink()
    part = stage(SCRIPT, "--model-name", NAME, *again, "--overwrite", env=away, expect=2).stderr
    assert "Hugging Face cache" in part and SHARDS[1] in part
    assert (
        "unreachable"
        in stage(
            SCRIPT, "--model-name", NAME, "--revision", "v2", "--overwrite", env=away, expect=2
        ).stderr
    )


# ------------------------------------------------------------------ from scratch, any architecture

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "pad_token_id": 151000,
    "auto_map": {"AutoConfig": "x.Y"},
}


def test_any_architecture_from_a_config(hub, stage: StageRunner, tmp_path, model_files):
    (tmp_path / "tokens").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokens" / name).write_bytes(model_files[name])
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    make = (SCRIPT, "--from-scratch", "--config-json", "qwen.json", "--tokenizer", "tokens")
    planned = stage(*make, "--dry-run").stdout
    assert "Qwen2ForCausalLM" in planned and "256 rows" in planned
    assert "(qwen.json says 151936)" in planned
    assert not list_model_dirs(tmp_path)
    done = stage(*make)
    target = tmp_path / ".cache/models/scratch-qwen2"
    config = json.loads((target / "config.json").read_text())
    # transformers has a tokenizer class of its own for qwen2, with one token more.
    assert "257 tokens" in done.stdout
    assert config["vocab_size"] == 320 and config["model_type"] == "qwen2"
    assert config["pad_token_id"] == config["eos_token_id"] == 256 and "auto_map" not in config
    assert "parameters" in done.stdout and not hub.requests
    assert json.loads((target / "tokenizer_config.json").read_text())["model_max_length"] == 256
    assert "already done" in stage(*make).stdout
    (tmp_path / "qwen.json").write_text(json.dumps({**QWEN, "hidden_size": 64}))
    assert "config.json content" in stage(*make, expect=2).stderr
    (target / "config.json").unlink()
    printed = stage(
        "04_train_fsdp.py", "-e", "x", "-d", "x", "-m", "scratch-qwen2", expect=3
    ).stderr
    assert "--from-scratch --config-json qwen.json --tokenizer tokens --overwrite" in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("[]", "not the config of a model"),
        ('{"model_type": "novel"}', "'novel'"),
        ('{"model_type": "bert"}', "no causal language model"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers: 0"),
        ('{"model_type": "mixtral", "num_local_experts": 0}', "num_local_experts: 0"),
        ('{"model_type": "llama", "hidden_act": "nope"}', "'nope'"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantization_config"),
    ],
)
def test_an_invalid_config_is_refused(stage: StageRunner, tmp_path, model_files, content, message):
    (tmp_path / "tokenizer.json").write_bytes(model_files["tokenizer.json"])
    (tmp_path / "c.json").write_text(content)
    error = stage(
        SCRIPT, "--from-scratch", "--config-json", "c.json", "--tokenizer", ".", expect=2
    ).stderr
    assert message in error and "Traceback" not in error and not list_model_dirs(tmp_path)
    assert "c.json" in error and "/tmp/" not in error


# ------------------------------------------------------------------ --verify


def test_verify_reports_damage_and_the_command_that_repairs_it(hub, stage: StageRunner, tmp_path):
    assert "no directory .cache" in stage(SCRIPT, "--verify", expect=2).stderr
    (tmp_path / ".cache/models/x--y.partial-0").mkdir(parents=True)
    nothing = stage(SCRIPT, "--verify", expect=3).stderr
    assert "nothing to verify" in nothing and "x--y.partial-0, not finished" in nothing
    stage(SCRIPT, "--model-name", NAME)
    cache = tmp_path / ".cache"
    tokens = cache / "tokens/corpus-0123"
    shutil.copytree(cache / "models/org--tiny-llama", tokens)
    record = json.loads((tokens / "manifest.json").read_text())
    (tokens / "manifest.json").write_text(
        json.dumps({**record, "kind": "tokens/1", "stage": "04_train_fsdp.py"})
    )
    (cache / "models/half").mkdir()
    (cache / "web").mkdir()
    (cache / "web/manifest.json").write_text('{"name": "an app"}')
    hub.requests.clear()
    done = stage(SCRIPT, "--verify", env={"HF_HUB_OFFLINE": "1"}).stdout
    assert "2 artifacts" in done and "no damage" in done
    assert "not verified: .cache/models/half" in done
    assert "pipeline: .cache/web/manifest.json" in done
    stray = cache / "models/org--tiny-llama/model.safetensors"
    stray.write_bytes(b"")
    printed = stage(SCRIPT, "--verify", expect=3).stderr
    assert f"{stray.relative_to(tmp_path)} does not belong" in printed
    stray.unlink()
    path = cache / "models/org--tiny-llama" / SHARDS[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (tokens / "config.json").unlink()
    error = stage(SCRIPT, "--verify", expect=3).stderr
    assert f"{SHARDS[0]} has other content" in error and "config.json is missing" in error
    assert f"03_download_model.py --model-name {NAME} " in error and " --overwrite" in error
    assert "rm -r .cache/tokens/corpus-0123" in error and "--prepare-only" in error
    assert not hub.requests
    stage(SCRIPT, "--model-name", NAME, "--overwrite")
    (tokens / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in stage(SCRIPT, "--verify", expect=3).stderr
