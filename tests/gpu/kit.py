"""Make gpu_kit/, which tests/gpu and benchmarks/gpu.py need on a GPU machine without a network.

  python -m tests.gpu.kit                  # or `make gpu-kit`, on any machine with a network

    gpu_kit/
        data/             a small dataset of stage 02: Python's own library
        data-chat/        a small dataset of conversations about Python's functions
        .cache/tokens/    the token stores of both; data-chat has one for each of two lengths
        .cache/wheelhouse/   wheels that an image with torch and transformers may lack
        .cache/peers/     wheels of other trainers, for the items that compare speed
        models/…          configurations (_MODELS), all with the same byte tokenizer

The kit takes about 33 MB, or 135 MB with --flash-4, which adds FlashAttention 4. Its digests are
SHA-256, so a machine without xxhash can check them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "gpu_kit"
PYTHON = "3.12"
PLATFORM = "manylinux_2_28_x86_64"
_WHEELS = ("xxhash", "orjson", "pytest", "torchao")
# Other trainers, and the packages that they need and that images with torch and transformers lack.
# torchtitan 0.3.0 does not work with torch 2.11. The wheels contain only Python code.
_PEERS = (
    "torchtitan==0.2.2",
    "torchdata==0.11.0",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "typeguard==4.6.1",
    "datasets==4.7.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "liger-kernel==0.8.5",
)
_EXCLUDED = (
    "test",
    "site-packages",
    "encodings",
    "pydoc_data",
    "distutils",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtledemo",
)
# FlashAttention 4 and what it needs beside torch. pip would add torch itself.
_FLASH_4_WHEELS = (
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "apache-tvm-ffi<0.2",
    "torch-c-dlpack-ext",
    "einops",
    "protobuf",
)
_FLASH_4_LIBRARIES = ("base", "core", "cu13")  # of nvidia-cutlass-dsl, with its version
_MAX_BYTES = 40 << 20  # without FlashAttention 4
CHAT_LENGTHS = (256, 8192)  # a token store of conversations is for one --seq-length

_LLAMA = {
    "rms_norm_eps": 1e-5,
    "architectures": ["LlamaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# The class and the values of each model's configuration, by name. `1b` is Llama 3.2 1B. `8b-wide`
# is Llama 3 8B with 8 of its 32 blocks, and `moe` is Qwen3 30B-A3B with 4 of its 48 blocks. `gemma`
# alternates sliding and full attention as Gemma 3 does. In a rehearsal `small` and `moe-small`
# replace the large ones.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": (
        "LlamaConfig",
        _LLAMA
        | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 320,
            "tie_word_embeddings": True,
        },
    ),
    "1b": (
        "LlamaConfig",
        _LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128_256,
            "tie_word_embeddings": True,
        },
    ),
    "8b-wide": (
        "LlamaConfig",
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "tie_word_embeddings": False,
        },
    ),
    "moe-small": (
        "Qwen3MoeConfig",
        _MOE
        | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 320,
            "tie_word_embeddings": True,
        },
    ),
    "moe": (
        "Qwen3MoeConfig",
        _MOE
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": (
        "Gemma3TextConfig",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 64,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
            "vocab_size": 320,
            "architectures": ["Gemma3ForCausalLM"],
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
}

Stage = Callable[..., object]  # runs a script with arguments; raises an error if it fails


def make_kit(
    kit: Path, stage: Stage, texts: Path, wheels: bool = True, flash_4: bool = False
) -> None:
    """Make the kit; its directory appears once it is complete.

    texts: raw text for the dataset. flash_4: add the wheels of FlashAttention 4.
    """
    partial = kit.with_name(f"{kit.name}.partial-kit")
    shutil.rmtree(partial, ignore_errors=True)
    for name, (config, sizes) in _MODELS.items():
        _save_model(partial / "models" / name, config, sizes)
    _make_datasets(partial, stage, texts)
    for name, length in (
        ("data", 1024),
        *(("data-chat", seq_length) for seq_length in CHAT_LENGTHS),
    ):
        stage(
            "04_train_fsdp.py",
            "-e",
            "kit",
            "-d",
            partial / name,
            "-m",
            partial / "models" / "small",
            "--from-scratch",
            "--cache-dir",
            partial / ".cache",
            "-s",
            length,
            "--prepare-only",
        )
    if wheels:
        _fetch_wheels(partial / ".cache")
        _fetch_peers(partial / ".cache/peers")
    size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    if size > _MAX_BYTES:
        sys.exit(f"error: the kit would take {size:,} bytes, more than {_MAX_BYTES:,}")
    if flash_4:
        _fetch_flash_4(partial / ".cache/wheelhouse/flash-4")
    shutil.rmtree(kit, ignore_errors=True)
    partial.rename(kit)
    print(
        f"{kit}: {size / 1e6:.0f} MB; copy it into the checkout on the GPU machine, then run "
        "`make test-gpu` and `make bench-gpu` there"
    )


def _make_datasets(kit: Path, stage: Stage, texts: Path) -> None:
    """Make one dataset of text and one of conversations."""
    excluded = [word for name in _EXCLUDED for word in ("--exclude", name)]
    stage(
        "01_organize_data.py",
        "--src-dir",
        texts,
        "--dst-root",
        kit / "splits",
        "--num-dirs",
        1,
        "--include",
        "*.py",
        *excluded,
    )
    stage("tests/demo/conversations.py", kit / "chats")
    stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        kit / "splits",
        "--save-dir",
        kit / "data",
        "--validation-percent",
        2,
    )
    stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        kit / "chats",
        "--save-dir",
        kit / "data-chat",
        "--format",
        "chat",
        "--validation-percent",
        2,
    )
    for name in ("splits", "chats"):
        shutil.rmtree(kit / name)


def _save_model(directory: Path, config: str, sizes: dict[str, Any]) -> None:
    import transformers

    _make_tokenizer().save_pretrained(directory)
    options = {
        "max_position_embeddings": 8192,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    } | sizes
    getattr(transformers, config)(**options).save_pretrained(directory)


def _make_tokenizer():
    """Return a tokenizer with one token per byte, an EOS token and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *alphabet])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")
    tokenizer.chat_template = (ROOT / "chat_templates/plain.jinja").read_text(encoding="utf-8")
    return tokenizer


def _fetch_wheels(cache_dir: Path) -> None:
    """Fetch wheels and their dependencies, at the versions that the requirements pin."""
    from launch.bundles import wheelhouse

    pinned = _read_pins()
    requirements = "\n".join(pinned[name] for name in _WHEELS)
    wheelhouse.prepare_wheelhouse(
        cache_dir,
        {"requirements.txt": requirements.encode()},
        wheelhouse.parse_target(PYTHON, PLATFORM),
        [],
    )


def _read_pins() -> dict[str, str]:
    """Return the pinned requirement of each package, without extras and conditions."""
    return {
        (
            name := re.split(r"[\[=]", line)[0]
        ): f"{name}=={line.partition('==')[2].partition(';')[0]}"
        for path in sorted(ROOT.glob("requirements*.txt"))
        for line in path.read_text().splitlines()
        if re.match(r"[a-z]", line)
    }


def _fetch_flash_4(directory: Path) -> None:
    """Fetch the wheels of FlashAttention 4 and of the packages that it needs beside torch."""
    pins = _read_pins()
    version = pins["nvidia-cutlass-dsl"].partition("==")[2]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--python-version", PYTHON),
            *("--platform", PLATFORM, "--platform", "manylinux2014_x86_64"),
            *("--dest", str(directory)),
            *(pins.get(name, name) for name in _FLASH_4_WHEELS),
            *(f"nvidia-cutlass-dsl-libs-{name}=={version}" for name in _FLASH_4_LIBRARIES),
        ],
        check=True,
    )


def _fetch_peers(directory: Path) -> None:
    """Fetch the wheels of other trainers, without their dependencies, which include torch."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "--python-version", PYTHON),
        *("--dest", str(directory), *_PEERS),
    ]
    subprocess.run(command, check=True)


def _find_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _run_stage(script: str, *arguments: object) -> None:
    """Run a stage without xxhash, so that it writes SHA-256 digests."""
    code = (
        "import runpy, sys; sys.modules['xxhash'] = None; sys.argv = sys.argv[1:]; "
        "sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code, script, *map(str, arguments)], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="where to make it")
    parser.add_argument(
        "--flash-4", action="store_true", help="add FlashAttention 4 for CUDA 13, 100 MB"
    )
    args = parser.parse_args()
    make_kit(args.out, _run_stage, _find_library(), flash_4=args.flash_4)
