"""Serve a small model on a local Hub, and look at what stage 03 leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer, Repo

SCRIPT = "03_download_model.py"
NAME = "org/tiny-llama"
TOKEN = "hf_SecretSecretSecret"
TARGET = Path(".cache/models/org--tiny-llama")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
USER_VARIABLES = (
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "SSL_CERT_FILE",
)  # a user's login, caches and network settings


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a small random Llama in two shards, by name in its repository."""
    return make_model_files(tmp_path_factory.mktemp("model"))


def make_model_files(directory: Path) -> dict[str, bytes]:
    """Make a small random Llama in an empty directory, and return its files by name."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="500KB")
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (directory / "LICENSE").write_text("Do as you like.\n")
    (directory / "README.md").write_text("# Tiny\n")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def hub(
    model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    """Serve the small model, and point HF_ENDPOINT at it without the user's own login."""
    with HubServer() as server:
        server.repos[NAME] = Repo(
            {
                **model_files,
                "pytorch_model.bin": b"\x80\x04pickle",
                "model.py": b"print()",
                "consolidated.safetensors": b"the same again",
                "original/params.json": b"{}",
            }
        )
        for variable in USER_VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in hub_variables(server, tmp_path / "hf_home").items():
            monkeypatch.setenv(variable, value)
        yield server


def hub_variables(server: HubServer, home: Path) -> dict[str, str]:
    """Return the environment variables that make a server the Hub, with an empty cache."""
    return {"no_proxy": "127.0.0.1", "HF_ENDPOINT": server.url, "HF_HOME": str(home)}


def list_model_dirs(directory: Path) -> list[str]:
    """Return the names in .cache/models, sorted."""
    models = directory / ".cache/models"
    return sorted(path.name for path in models.iterdir()) if models.exists() else []


def find_files_with(directory: Path, secret: str) -> list[Path]:
    """Return the files under a directory that contain a secret."""
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def change_config(repo: Repo, **fields: object) -> None:
    repo.files["config.json"] = json.dumps(
        {**json.loads(repo.files["config.json"]), **fields}
    ).encode()
