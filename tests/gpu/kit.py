"""Make gpu_kit/: all that tests/gpu and benchmarks/gpu.py need on a GPU machine without a network.

  python -m tests.gpu.kit                  # or `make gpu-kit`, on any machine with a network

    gpu_kit/
        data/             a small dataset of stage 02: Python's own library
        .cache/tokens/    its token store
        .cache/wheelhouse/   wheels that an image with torch and transformers may lack
        models/small, models/1b, models/8b-wide     configurations with one tokenizer of bytes

Digests in it are SHA-256, so that it can be checked where xxhash is missing. About 30 MB.
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

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "gpu_kit"
PYTHON, PLATFORM = "3.12", "manylinux_2_28_x86_64"
_WHEELS = ("xxhash", "orjson", "pytest", "torchao")
_LEFT_OUT = ("test", "site-packages", "encodings", "pydoc_data", "distutils", "idlelib", "lib2to3",
             "ensurepip", "tkinter", "turtledemo")
_MOST_BYTES = 40 << 20

# Llama's shapes. The two large ones are those of Llama 3.2 1B and, with 8 of its 32 blocks,
# Llama 3 8B; the small one stands in for both in a rehearsal.
_SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
              "vocab_size": 320, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
           "vocab_size": 128_256, "tie_word_embeddings": True},
    "8b-wide": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 8,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 128_256, "tie_word_embeddings": False},
}

Stage = Callable[..., object]  # the name of a script and its arguments; raises where it fails


def make(kit: Path, stage: Stage, texts: Path, wheels: bool = True) -> None:
    """Make the kit, whole or not at all. texts: raw text for the dataset; stage: runs a stage."""
    made = kit.with_name(f"{kit.name}.partial-kit")
    shutil.rmtree(made, ignore_errors=True)
    for name, shape in _SHAPES.items():
        _save_model(made / "models" / name, shape)
    excluded = [word for name in _LEFT_OUT for word in ("--exclude", name)]
    stage("01_organize_data.py", "--src-dir", texts, "--dst-root", made / "splits", "--num-dirs", 1,
          "--include", "*.py", *excluded)
    stage("02_build_hf_dataset.py", "--data-folder", made / "splits", "--save-dir", made / "data",
          "--validation-percent", 2)
    shutil.rmtree(made / "splits")
    stage("04_train_fsdp.py", "-e", "kit", "-d", made / "data", "-m", made / "models" / "small",
          "--from-scratch", "--cache-dir", made / ".cache", "--prepare-only")
    if wheels:
        _fetch_wheels(made / ".cache")
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    if size > _MOST_BYTES:
        sys.exit(f"error: the kit would take {size:,} bytes, more than {_MOST_BYTES:,}")
    shutil.rmtree(kit, ignore_errors=True)
    made.rename(kit)
    print(f"{kit}: {size / 1e6:.0f} MB; carry it beside the code, then `make test-gpu` and "
          "`make bench-gpu`")


def _save_model(directory: Path, shape: dict[str, int | bool]) -> None:
    from transformers import LlamaConfig

    _tokenizer().save_pretrained(directory)
    LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=8192, rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, dtype="float32",
                bos_token_id=None, eos_token_id=0, **shape).save_pretrained(directory)


def _tokenizer():
    """Return a tokenizer that makes one token of each byte, with an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *alphabet])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")


def _fetch_wheels(cache_dir: Path) -> None:
    """Fetch wheels with what they need, at the versions that requirements name."""
    from launch.bundling import wheelhouse

    pinned = {line.partition("==")[0]: line.partition(";")[0] for path in
              sorted(ROOT.glob("requirements*.txt")) for line in path.read_text().splitlines()
              if re.match(r"[a-z]", line)}
    wanted = "\n".join(pinned[name] for name in _WHEELS)
    wheelhouse.prepare(cache_dir, {"requirements.txt": wanted.encode()},
                       wheelhouse.target(PYTHON, PLATFORM))


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _run(script: str, *arguments: object) -> None:
    """Run a stage that writes SHA-256 in place of xxh3."""
    without = "import runpy, sys; sys.modules['xxhash'] = None; sys.argv = sys.argv[1:]; " \
              "sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')"
    subprocess.run([sys.executable, "-c", without, script, *map(str, arguments)], cwd=ROOT,
                   check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="where to make it")
    make(parser.parse_args().out, _run, _library())
