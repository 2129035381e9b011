# covers: lib/models/directory.py, lib/models/weights.py, lib/models/tensors.py
# covers: lib/models/architecture.py
"""Weights are loaded or initialised correctly, in full and sharded models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedModel,
    Qwen3NextConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lib.core import log
from lib.core.errors import ArtifactError
from lib.models import host_draws, weights
from lib.models.architecture import build_on_meta
from lib.models.directory import INDEX, WEIGHTS, has_weights
from lib.models.tensors import HubTensors
from lib.models.weights import initialise_model, load_pretrained, restore_buffers
from tests.models.families import FAMILIES, make_checkpoint
from tests.models.two_ranks import PIECE, TOKENS, full_weights, spoil_memory

Tensors = dict[str, torch.Tensor]


def _empty(directory: Path) -> PreTrainedModel:
    model = build_on_meta(directory).to_empty(device="cpu")
    with torch.no_grad():
        spoil_memory(model)
    return model


def _loaded(directory: Path) -> PreTrainedModel:
    model = _empty(directory)
    load_pretrained(model, directory)
    return model


def _reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _differences(tensors: Tensors, expected: Tensors) -> list[str]:
    return [
        name
        for name in tensors.keys() | expected.keys()
        if name not in tensors
        or name not in expected
        or not torch.equal(tensors[name], expected[name])
    ]


def _assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert _differences(full_weights(model), full_weights(expected)) == []


@pytest.fixture
def rewrite(tmp_path: Path) -> Callable[[Callable[[Tensors], Any]], Path]:
    """Return a function that saves a tiny Llama with changed tensors."""

    def rewritten(change: Callable[[Tensors], Any], family: str = "llama") -> Path:
        make_checkpoint(tmp_path, FAMILIES[family]())
        tensors = load_file(tmp_path / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
        return tmp_path

    return rewritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_loaded_as_by_from_pretrained(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    make_checkpoint(tmp_path, FAMILIES[name](), dtype=dtype)
    model = _loaded(tmp_path)
    reference = _reference(tmp_path)
    _assert_same(model, reference)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    with torch.no_grad():
        logits = [m.eval()(TOKENS, use_cache=False).logits for m in (model, reference)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt_neox"])
def test_several_files_are_loaded_through_an_index(tmp_path: Path, name: str) -> None:
    assert not has_weights(tmp_path)
    make_checkpoint(tmp_path, FAMILIES[name](), max_shard_size="20KB")
    assert (tmp_path / INDEX).exists() and has_weights(tmp_path)
    _assert_same(_loaded(tmp_path), _reference(tmp_path))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen2"])
def test_names_of_the_base_model_are_accepted(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, FAMILIES[name](tie_word_embeddings=True))
    model.base_model.save_pretrained(tmp_path / "base")
    _assert_same(_loaded(tmp_path / "base"), _reference(tmp_path))


def test_fused_experts_are_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["mixtral"](), save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / WEIGHTS)
    _assert_same(_loaded(tmp_path), _reference(tmp_path))


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="this transformers has no hrm_text")
def test_a_tensor_may_become_several_parameters(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        CONFIG_MAPPING["hrm_text"](
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
        ),
    )
    _assert_same(_loaded(tmp_path), _reference(tmp_path))


def test_buffers_of_old_checkpoints_are_ignored(rewrite: Callable[..., Path]) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    directory = rewrite(lambda tensors: tensors.update(old))
    _assert_same(_loaded(directory), _reference(directory))


def test_a_tied_weight_may_have_both_names(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
        "llama_tied",
    )
    _assert_same(_loaded(directory), _reference(directory))


def test_a_tied_weight_may_have_the_other_name(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
        ),
        "llama_tied",
    )
    _assert_same(_loaded(directory), _reference(directory))


def test_tied_weights_that_differ_are_refused(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        ),
        "llama_tied",
    )
    with pytest.raises(ArtifactError) as error:
        _loaded(directory)
    assert "tie_word_embeddings" in error.value.render()


def test_all_problems_are_reported_at_once(rewrite: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(96, 32)
        tensors["model.layers.9.extra"] = torch.zeros(1)
        tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int8)

    with pytest.raises(ArtifactError) as error:
        _loaded(rewrite(change))
    problems = error.value.found
    assert "missing: model.norm.weight" in problems
    assert "lm_head.weight: expected shape (97, 32), found (96, 32)" in problems
    assert "unexpected: model.layers.9.extra" in problems
    assert "model.layers.1.input_layernorm.weight: " in problems and "found I8" in problems
    assert len(problems.splitlines()) == 4


def test_a_missing_expert_is_named(rewrite: Callable[..., Path]) -> None:
    lost = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    with pytest.raises(ArtifactError) as error:
        _loaded(rewrite(lambda tensors: tensors.pop(lost), "mixtral"))
    assert error.value.found == f"missing: {lost}"


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"](), max_shard_size="20KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-10])
    with pytest.raises(ArtifactError) as error:
        _loaded(tmp_path)
    assert f"missing: the file {files[0].name}" in error.value.found
    assert f"damaged: the file {files[1].name}" in error.value.found


def test_a_wrong_index_is_reported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"](), max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError) as error:
        _loaded(tmp_path)
    assert "missing: ghost" in error.value.found
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        _loaded(tmp_path)


def test_a_directory_without_weights_is_reported(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert not has_weights(tmp_path)
    with pytest.raises(ArtifactError):
        _loaded(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_initialised_by_the_rules_of_the_family(tmp_path: Path, name: str) -> None:
    # Wide enough that the spread of each matrix is known to a few percent.
    FAMILIES[name](
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8
    ).save_pretrained(tmp_path)
    model = _empty(tmp_path)
    initialise_model(model, seed=1)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        std = expected[key].std().item()
        error = 5 * std / parameter.numel() ** 0.5
        assert parameter.mean().item() == pytest.approx(
            expected[key].mean().item(), abs=1.5 * error
        )
        assert parameter.std().item() == pytest.approx(std, abs=error), key
        assert std == 0 or not torch.equal(parameter, expected[key])
    assert _differences(dict(model.named_buffers()), dict(reference.named_buffers())) == []
    zeroed = model.get_input_embeddings()
    assert zeroed.padding_idx is None or not zeroed.weight[zeroed.padding_idx].any()


def test_gpt2_scales_the_residual_projections_by_depth(tmp_path: Path) -> None:
    FAMILIES["gpt2"](hidden_size=64, num_hidden_layers=8).save_pretrained(tmp_path)
    model = _empty(tmp_path)
    initialise_model(model, seed=1)
    assert model.transformer.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert model.transformer.h[3].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_only_the_seed_decides_and_the_global_random_state_stays(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    draws = []
    for seed in (5, 5, 6):
        torch.rand(seed)  # whatever the process drew before
        state = torch.get_rng_state()
        model = _empty(tmp_path)
        initialise_model(model, seed)
        assert torch.equal(torch.get_rng_state(), state)
        draws.append(dict(model.named_parameters()))
    torch.set_rng_state(before)
    assert _differences(draws[0], draws[1]) == []
    assert "model.layers.0.mlp.up_proj.weight" in _differences(draws[0], draws[2])
    layers = [draws[0][f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def test_another_device_gets_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on meta stands in for one on a GPU: its weights are drawn in host memory."""
    FAMILIES["llama"]().save_pretrained(tmp_path)
    expected = _empty(tmp_path)
    initialise_model(expected, seed=1)
    drawn: Tensors = {}
    copy_shards = weights._copy_shards

    def keep(parameters: weights.FullParameters) -> list[str]:
        drawn.update({name: full.detach().clone() for name, (_, full) in parameters.items()})
        return copy_shards(parameters)

    monkeypatch.setattr(weights, "_copy_shards", keep)
    initialise_model(build_on_meta(tmp_path), seed=1)
    assert _differences(drawn, dict(expected.named_parameters())) == []


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
def test_scaled_rope_tables_are_restored(tmp_path: Path, rope: dict[str, Any]) -> None:
    FAMILIES["llama"](rope_parameters={"rope_theta": 10000.0, **rope}).save_pretrained(tmp_path)
    model = _empty(tmp_path)
    restore_buffers(model)
    reference = AutoModelForCausalLM.from_config(model.config)
    assert len(list(model.buffers())) == 2
    assert _differences(dict(model.named_buffers()), dict(reference.named_buffers())) == []


def test_parameters_without_a_rule_get_what_their_constructor_gives(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["openai-gpt"](vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    config.save_pretrained(tmp_path)
    draws = []
    for _ in range(2):
        model = _empty(tmp_path)
        initialise_model(model, seed=1)
        draws.append(dict(model.named_parameters()))
    weight = draws[0]["transformer.h.1.attn.c_attn.weight"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert _differences(*draws) == []


Cases = dict[str, tuple[Any, dict[str, Any]]]


def list_cases(ranks: int) -> Cases:
    """Return config and sharding of each case: all families, and all kinds of shards."""
    usual = {"placement": None, "mesh": [ranks]}
    variants = {name: (config(), usual) for name, config in FAMILIES.items()}
    mixtral = FAMILIES["mixtral"]
    variants["more_ranks_than_experts"] = (
        mixtral(num_local_experts=1, num_experts_per_tok=1),
        usual,
    )
    if ranks == 2:  # FSDP (torch 2.13) divides only the first dimension unevenly
        variants["experts_by_rows"] = (mixtral(), {"placement": 1, "mesh": [ranks]})
        variants["experts_by_columns"] = (mixtral(), {"placement": 2, "mesh": [ranks]})
    variants["tied_head_with_bias"] = (FAMILIES["phi"](tie_word_embeddings=True), usual)
    variants["replicated"] = (FAMILIES["llama_tied"](), {"placement": None, "mesh": [ranks, 1]})
    variants["hybrid"] = (FAMILIES["llama_tied"](), {"placement": None, "mesh": [1, ranks]})
    return variants


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.long)]
)
def test_ranks_get_the_weights_of_one_process(
    tmp_path: Path, stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(host_draws, "PIECE", PIECE)
    cases = list_cases(ranks)
    for name, (config, _) in cases.items():
        make_checkpoint(tmp_path / name, config)
    (tmp_path / "cases.json").write_text(
        json.dumps({name: options for name, (_, options) in cases.items()})
    )
    stage("tests/models/two_ranks.py", tmp_path, ranks=ranks)
    for name in cases:
        reference = _reference(tmp_path / name)
        drawn = _empty(tmp_path / name)
        initialise_model(drawn, seed=3)
        with torch.no_grad():
            logits = reference.eval()(TOKENS, use_cache=False).logits
        for rank in range(ranks):
            result = torch.load(tmp_path / f"{name}.rank{rank}.pt")
            assert _differences(result["loaded"], full_weights(reference)) == [], name
            written = load_file(tmp_path / name / WEIGHTS)
            assert _differences(result["exported"], written) == [], name
            torch.testing.assert_close(result["logits"], logits, rtol=0, atol=1e-5)
            assert _differences(result["drawn"], full_weights(drawn)) == [], name
            assert result["read"] == result["held"], f"{name}: read more than its own part"


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"]())
    weight = load_file(tmp_path / WEIGHTS)["lm_head.weight"]
    with HubTensors(tmp_path) as checkpoint:
        part = checkpoint.read("lm_head.weight", (slice(90, 97), slice(3, 5)))
    assert torch.equal(part, weight[90:97, 3:5])


def _add_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to the weights of a saved model."""
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_layers_for_multi_token_prediction_are_counted(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup()
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    if family == "deepseek_v3":
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        config = DeepseekV3Config(
            **sizes, **heads, **ranks, first_k_dense_replace=1, num_nextn_predict_layers=1
        )
        layer = "model.layers.1"
    else:
        linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
        config = Qwen3NextConfig(**sizes, **heads, **linear, mlp_only_layers=[0])
        layer = "mtp.layers.0"
    make_checkpoint(tmp_path, config)
    _add_tensors(tmp_path, **{f"{layer}.eh_proj.weight": torch.zeros(30, 100)})
    weights.warn_of_unused(build_on_meta(tmp_path), tmp_path)
    printed = capsys.readouterr()
    assert re.search(rf"does not use 3K parameters \({layer}\)", printed.out + printed.err)


def test_a_config_without_tying_and_files_without_a_head_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"](97, tie_word_embeddings=True))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    model = build_on_meta(tmp_path).to_empty(device="cpu")
    with pytest.raises(ArtifactError, match="do not fit") as error:
        load_pretrained(model, tmp_path)
    assert "missing: lm_head.weight (tie_word_embeddings" in error.value.found
