# covers: lib/export/check.py, lib/export/model_facts.py, lib/export/known_models.py
"""`python -m lib.export.check` names what each program will not read, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lib.core.errors import ArtifactError
from lib.export import check, known_models
from lib.models import tokenizer
from tests.export.exports import change_json, run_stage_05, save_run
from tests.models.families import FAMILIES, LLAMA3, make_checkpoint

pytestmark = pytest.mark.usefixtures("group")
CONFIG = "config.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export with a chat template and two stop tokens."""
    root = tmp_path_factory.mktemp("checked")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    make_checkpoint(root / "model", FAMILIES["llama"](300, rope_parameters=rope))
    save_run(root, root / "model")
    model_dir = root / "exp" / "model"
    tokenizer.train_tokenizer([], 300, 128, model_dir, workers=1, show_progress=False)
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    change_json(model_dir / GENERATION, eos_token_id=[1, 2])
    run_stage_05("-e", "exp", "--save-dir", root, "--out", root / "out", "--dtype", "float32")
    return root / "out"


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of that export."""
    for path in sound.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def find_failing(directory: Path) -> dict[str, str]:
    """Return the programs that do not read a directory, with the first reason."""
    return {
        tool: next(remark.problem for remark in remarks if remark.is_certain)
        for tool, remarks in check.check_directory(directory).items()
        if any(remark.is_certain for remark in remarks)
    }


def test_an_export_is_read_by_all_programs_except_for_its_tokenizer(sound: Path) -> None:
    assert list(find_failing(sound)) == ["llama.cpp"]
    assert "stage 03 or 04 trained this tokenizer" in find_failing(sound)["llama.cpp"]


def rename_tensors(directory: Path, rename: Callable[[str], str], **metadata: str) -> None:
    path = directory / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata or None)


def drop_head(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


_ALL = set(check.TOOLS)
BROKEN: dict[str, tuple[Callable[[Path], None], set[str], str]] = {
    "a RoPE base in the new key alone": (
        lambda d: change_json(d / CONFIG, drop="rope_theta"),
        {"transformers 4", "Ollama", "mlx-lm"},
        "rope_theta 500000.0",
    ),
    "a class of transformers 5": (
        lambda d: change_json(d / SETTINGS, tokenizer_class="TokenizersBackend"),
        {"transformers 4", "llama.cpp"},
        "TokenizersBackend",
    ),
    "a list of extra tokens": (
        lambda d: change_json(d / SETTINGS, extra_special_tokens=["<a>"]),
        {"transformers 4", "llama.cpp"},
        "is a list",
    ),
    "a template in its own file alone": (
        lambda d: change_json(d / SETTINGS, drop="chat_template"),
        {"Ollama"},
        "chat_template.jinja",
    ),
    "a short original length": (
        lambda d: change_json(
            d / CONFIG,
            rope_parameters={**LLAMA3, "rope_theta": 5e5},
            rope_scaling={key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        ),
        {"CTranslate2"},
        "8,192 tokens, not 32",
    ),
    "stops in one file alone": (
        lambda d: change_json(d / GENERATION, eos_token_id=2),
        {"vLLM", "SGLang", "Ollama", "mlx-lm"},
        "eos_token_id is [2]",
    ),
    "fewer stops for programs that do not read them": (
        lambda d: change_json(d / CONFIG, eos_token_id=2),
        set(),
        "eos_token_id is [1, 2]",
    ),
    "no class": (lambda d: change_json(d / CONFIG, drop="architectures"), _ALL, "missing"),
    "an unknown class": (
        lambda d: change_json(d / CONFIG, architectures=["NovelForCausalLM"]),
        {"llama.cpp", "Ollama", "onnxruntime-genai"},
        "NovelForCausalLM",
    ),
    "an untied model without its head": (drop_head, _ALL, "there is no lm_head.weight"),
    "names of a wrapper": (
        lambda d: rename_tensors(d, lambda name: f"_orig_mod.{name}", format="pt"),
        _ALL,
        "prefix of a wrapper",
    ),
    "no metadata": (
        lambda d: rename_tensors(d, lambda name: name),
        {"transformers 4"},
        "format: pt",
    ),
    "a small embedding": (lambda d: change_json(d / CONFIG, vocab_size=299), _ALL, "299"),
    "a left quantisation": (
        lambda d: change_json(d / CONFIG, quantization_config={"quant_method": "gptq"}),
        _ALL,
        "quantization_config",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), _ALL, "safetensors"),
    "a cut file": (
        lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64),
        _ALL,
        "damaged",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_named_for_the_programs_that_it_concerns(model: Path, fault: str) -> None:
    breaks, tools, says = BROKEN[fault]
    breaks(model)
    failing = find_failing(model)
    assert set(failing) >= tools and set(failing) <= tools | {"llama.cpp"}
    others = [f.problem for faults in check.check_directory(model).values() for f in faults]
    assert any(says in problem for problem in others), others


def test_experts_in_one_tensor_are_for_transformers_5_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["mixtral"]())
    assert not any("experts" in problem for problem in find_failing(tmp_path).values())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = tensors.pop(
        next(name for name in tensors if ".w1." in name)
    )
    save_file(tensors, path, {"format": "pt"})
    findings = check.check_directory(tmp_path)
    for tool in ("transformers 4", "vLLM", "llama.cpp", "mlx-lm"):
        assert any("experts" in remark.problem for remark in findings[tool]), tool
    assert not any("experts" in remark.problem for remark in findings["transformers 5"])


def test_a_directory_of_transformers_5_is_refused_by_earlier_programs(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    make_checkpoint(tmp_path, FAMILIES["qwen3"](300, rope_parameters=rope))
    tokenizer.train_tokenizer([], 300, 128, tmp_path, workers=1, show_progress=False)
    failing = find_failing(tmp_path)
    assert "rope_theta" in failing["transformers 4"] and "Qwen3" in failing["Ollama"]
    # A family whose base is not 10,000 needs the key in mlx-lm too, unless it reads the new one.
    assert "rope" not in failing.get("mlx-lm", "")


def test_the_report_has_a_line_per_program_and_exit_code_3(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    check.main([str(model), "--tool", "vllm", "--tool", "transformers 5"])
    assert caplog.text.count("reads it") == 2
    change_json(model / CONFIG, drop="rope_theta")
    with pytest.raises(ArtifactError, match="will not read") as error:
        check.main([str(model)])
    assert error.value.code == 3 and "transformers 4, llama.cpp, Ollama" in error.value.found
    assert all(tool in caplog.text for tool in check.TOOLS)
    assert "To do: add these keys" in caplog.text
    with pytest.raises(ArtifactError, match=r"contains no config\.json"):
        check.main([str(model.parent / "nothing")])


def test_the_tables_contain_the_families_that_are_tested() -> None:
    """A misspelt name would make a program seem not to know a family."""
    known = {
        "llama_cpp": known_models.LLAMA_CPP,
        "ollama": known_models.OLLAMA,
        "onnx": known_models.ONNXRUNTIME_GENAI,
    }
    classes = {
        type(AutoModelForCausalLM.from_config(FAMILIES[name](num_hidden_layers=1))).__name__
        for name in ("llama", "mixtral", "gemma", "qwen2", "phi3")
    }
    assert classes <= known["llama_cpp"] and classes <= known["ollama"]
    assert classes - {"MixtralForCausalLM"} <= known["onnx"]
    types = {FAMILIES[name]().model_type for name in ("llama", "gemma", "qwen2", "qwen3", "phi3")}
    assert types <= known_models.MLX_LM and types <= known_models.CTRANSLATE2
