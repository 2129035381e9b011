# covers: lib/models/peft_adapter.py, lib/models/lora.py, lib/models/lora_targets.py
# covers: lib/models/architecture.py
"""Adapters of PEFT are read as they are, or refused with a reason."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.core.errors import ArtifactError, UsageError
from lib.models import lora, lora_targets, peft_adapter
from lib.models.architecture import decoder_layers
from lib.models.lora import Lora
from tests.models.families import FAMILIES
from tests.models.two_ranks import TOKENS


def build_model(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()


def written_by_peft(model: PreTrainedModel, out: Path, **settings: object) -> torch.Tensor:
    """Save an adapter with random B, and return the logits that PEFT computes with it."""
    adapted = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings}),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(out)
    return adapted.eval()(input_ids=TOKENS).logits


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    written_by_peft(build_model("llama"), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        (
            "llama",
            {
                "use_rslora": True,
                "layers_to_transform": [1],
                "target_modules": ["q_proj", "down_proj"],
            },
        ),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("phi3", {}),
        ("falcon_7b", {}),
        ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    ],
)
def test_an_adapter_gives_the_logits_of_peft(
    tmp_path: Path, family: str, settings: dict[str, object]
) -> None:
    model = build_model(family)
    expected = written_by_peft(model, tmp_path, **settings)
    stored_adapter = peft_adapter.read_adapter(tmp_path)
    lora.require_fits(model, stored_adapter)
    added = Lora(
        stored_adapter.rank,
        stored_adapter.alpha,
        0.0,
        stored_adapter.targets,
        stored_adapter.rslora,
    ).attach(model)
    assert added == {f"{linear}.lora_{part}.weight" for linear, part in stored_adapter.shapes}
    for module in model.modules():
        if isinstance(module, lora.Factor):
            module.to_empty(device="cpu")
    lora.load_adapter(model, stored_adapter)
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_pattern_matches_exactly_the_names() -> None:
    names = [f"model.layers.{i}.attn.{part}" for i in (0, 3, 12) for part in ("q", "k.x")]
    names += ["model.layers.3.mlp.experts.4.w1", "model.top"]
    pattern = peft_adapter.build_pattern(names)
    others = [f"model.layers.{i}.attn.{part}" for i in (1, 2, 30, 120) for part in ("q", "k.x")]
    others += ["model.layers.0.mlp.experts.4.w1", "model.layers.3.attn.kxx", "model_top", "q"]
    assert all(re.fullmatch(pattern, name) for name in names)
    assert not lora_targets.filter_names(pattern, others)
    many = [f"model.layers.{i}.{part}" for i in range(80) for part in ("a.q", "a.k", "b.up")]
    assert len(peft_adapter.build_pattern(many)) < 300


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora: True"),
        ({"bias": "all"}, "bias: all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q": 8}}, "rank_pa"),
        ({"alpha_pattern": {"q": 8}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "may have changed the weights of the base"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"something_new": 7}, "something_new: 7"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    adapter: Path, settings: dict[str, object], says: str
) -> None:
    path = adapter / peft_adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UsageError, match="is not plain LoRA") as refused:
        peft_adapter.read_adapter(adapter)
    assert says in refused.value.render()


def test_damage_is_reported(adapter: Path) -> None:
    config = adapter / peft_adapter.CONFIG
    weights = adapter / peft_adapter.WEIGHTS
    text = config.read_text()
    content = weights.read_bytes()
    tensors = load_file(weights)

    def refused(kind: type[Exception]) -> str:
        with pytest.raises(kind) as error:
            peft_adapter.read_adapter(adapter)
        config.write_text(text)
        weights.write_bytes(content)
        return error.value.render()

    config.write_text(text[:50])
    assert "adapter_config.json is damaged" in refused(ArtifactError)
    for odd in ({"r": "3"}, {"lora_alpha": math.inf}, {"lora_alpha": True}, {"lora_dropout": 1}):
        config.write_text(json.dumps(json.loads(text) | odd))
        assert "whole number r" in refused(ArtifactError)
    weights.write_bytes(content[:-9])
    assert "adapter_model.safetensors is damaged" in refused(ArtifactError)
    weights.write_bytes(b"\0" * 4)
    assert "adapter_model.safetensors is damaged" in refused(ArtifactError)
    first = next(iter(sorted(tensors)))
    save_file({key: value for key, value in tensors.items() if key != first}, weights)
    assert "has no lora_A" in refused(ArtifactError)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, weights)
    assert "base_model.model.lm_head.weight" in refused(UsageError)
    config.write_text(json.dumps(json.loads(text) | {"r": 4}))
    assert "at rank 4" in refused(UsageError)
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    assert "is a pickle" in refused(UsageError)


def test_a_pickled_adapter_of_an_old_version_is_converted_by_the_printed_command(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has the keys of PEFT 0.2, and no others."""
    tensors = load_file(adapter / peft_adapter.WEIGHTS)
    content = json.loads((adapter / peft_adapter.CONFIG).read_text())
    keys = ("r", "lora_alpha", "lora_dropout", "target_modules", "peft_type", "task_type", "bias")
    old = {key: content[key] for key in keys}
    old |= {"fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None}
    old |= {"enable_lora": None, "merge_weights": False, "base_model_name_or_path": "org/name"}
    (adapter / peft_adapter.CONFIG).write_text(json.dumps(old))
    expected = peft_adapter.read_adapter(adapter)
    (adapter / peft_adapter.WEIGHTS).unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "--lora-from", str(adapter)])
    with pytest.raises(UsageError, match="is a pickle") as error:
        peft_adapter.read_adapter(adapter)
    convert, again = error.value.run.splitlines()
    assert again.endswith(f"--lora-from {adapter}")
    subprocess.run(shlex.split(convert), check=True)
    adapter_weights = peft_adapter.read_adapter(adapter)
    assert adapter_weights.shapes == expected.shapes and adapter_weights.modules == expected.modules


def test_weights_that_are_not_finite_are_refused(adapter: Path) -> None:
    weights = adapter / peft_adapter.WEIGHTS
    tensors = load_file(weights)
    first = next(iter(sorted(tensors)))

    save_file(tensors | {first: tensors[first] * math.inf}, weights)
    model = build_model("llama")
    adapter_weights = peft_adapter.read_adapter(adapter)
    Lora(adapter_weights.rank, adapter_weights.alpha, 0.0, adapter_weights.targets).attach(model)
    with pytest.raises(ArtifactError, match="is damaged") as error:
        lora.load_adapter(model, adapter_weights)
    assert "NaN" in error.value.render()


def change_header(path: Path, change: object) -> None:
    """Change the header of a safetensors file in place, by its tensors in order or by its text."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = sorted(header.keys() - {"__metadata__"}, key=lambda key: header[key]["data_offsets"])
    change([header[name] for name in names], header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, _: tensors[1].update(data_offsets=tensors[0]["data_offsets"]),
        lambda tensors, _: tensors[0].update(data_offsets=[-8, tensors[0]["data_offsets"][1]]),
        lambda tensors, _: tensors[1].update(data_offsets=tensors[1]["data_offsets"][::-1]),
        lambda tensors, _: tensors[0].update(data_offsets=[0.0, tensors[0]["data_offsets"][1]]),
        lambda tensors, _: tensors[0].update(data_offsets=[0]),
        lambda tensors, _: tensors[0].update(data_offsets=None),
        lambda tensors, _: tensors[0].update(shape=[*map(float, tensors[0]["shape"])]),
        lambda tensors, _: tensors[0].update(shape=[-3, -32]),
        lambda tensors, _: tensors[0].update(shape=[3, 31]),
        lambda tensors, _: tensors[0].update(shape=[3, True]),
        lambda tensors, _: tensors[0].update(shape="3"),
        lambda tensors, _: tensors[0].pop("shape"),
        lambda tensors, _: tensors[0].update(dtype="F64"),
        lambda tensors, _: tensors[0].pop("dtype"),
        lambda tensors, _: tensors[0].update(dtype=["F32"]),
        lambda _, header: header.update(dict.fromkeys(header, 5)),
        lambda _, header: header.update(
            x={"dtype": "F32", "shape": [10**30], "data_offsets": [10**30, 10**31]}
        ),
    ],
)
def test_a_wrong_header_counts_as_damage(adapter: Path, change: object) -> None:
    change_header(adapter / peft_adapter.WEIGHTS, change)
    with pytest.raises(ArtifactError, match="is damaged"):
        peft_adapter.read_adapter(adapter)


def test_files_that_safetensors_refuses_count_as_damaged(adapter: Path) -> None:
    change_header(
        adapter / peft_adapter.WEIGHTS, lambda _, header: header.update(__metadata__={"format": 5})
    )
    model = build_model("llama")
    adapter_weights = peft_adapter.read_adapter(adapter)
    Lora(adapter_weights.rank, adapter_weights.alpha, 0.0, adapter_weights.targets).attach(model)
    with pytest.raises(ArtifactError, match="is damaged"):
        lora.load_adapter(model, adapter_weights)


def test_numbers_too_large_for_the_dtype_count_as_damage(adapter: Path) -> None:
    weights = adapter / peft_adapter.WEIGHTS
    tensors = {key: tensor.double() for key, tensor in load_file(weights).items()}
    save_file(
        {
            key: tensor + 1e39 if number == 0 else tensor
            for number, (key, tensor) in enumerate(sorted(tensors.items()))
        },
        weights,
    )
    model = build_model("llama")
    adapter_weights = peft_adapter.read_adapter(adapter)
    Lora(adapter_weights.rank, adapter_weights.alpha, 0.0, adapter_weights.targets).attach(model)
    for module in model.modules():
        if isinstance(module, lora.Factor):
            module.to_empty(device="cpu")
    with pytest.raises(ArtifactError) as error:
        lora.load_adapter(model, adapter_weights)
    assert "too large for torch.float32" in error.value.render()


@pytest.mark.parametrize("alpha", [1e300, 10**400, 1e-300, 2e6])
def test_an_alpha_outside_of_the_range_of_dtypes_is_refused(adapter: Path, alpha: float) -> None:
    path = adapter / peft_adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))
    with pytest.raises(UsageError) as refused:
        peft_adapter.read_adapter(adapter)
    assert "between 1e-06 and 1,000,000" in refused.value.render()


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    adapter_weights = peft_adapter.read_adapter(adapter)
    for family in ("gpt2", "mixtral"):
        with pytest.raises(UsageError, match="does not belong"):
            lora.require_fits(build_model(family), adapter_weights)
    written_by_peft(build_model("llama"), tmp_path / "head", target_modules=["q_proj", "lm_head"])
    with pytest.raises(UsageError) as refused:
        peft_adapter.read_adapter(tmp_path / "head")  # which brings the weight along
    assert "lm_head.base_layer.weight" in refused.value.render()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_means_the_same_layers_as_in_peft(family: str) -> None:
    model = build_model(family)
    mine = set(lora_targets.choose_linears(model, lora_targets.ALL))
    attention = set(lora_targets.choose_linears(model, lora_targets.ATTENTION))
    if mine == attention:  # the rest are fused experts
        with pytest.raises(UsageError, match="--lora-targets mlp matches no"):
            lora_targets.choose_linears(model, lora_targets.MLP)
    else:
        assert mine == attention | set(lora_targets.choose_linears(model, lora_targets.MLP))
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    theirs = {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    blocks = tuple(f"{name}." for name in decoder_layers(model))
    others = theirs ^ mine
    # PEFT takes routers and fused experts as well, and linears outside of the blocks.
    assert not [
        name
        for name in others
        if name.startswith(blocks)
        and ".experts" not in name
        and name.rpartition(".")[2] not in ("gate", "router", "shared_expert_gate")
    ]
    assert not mine - theirs
    assert set(lora_targets.choose_linears(model, ".*")) >= mine
    with pytest.raises(UsageError, match=r"--lora-targets .* matches"):
        lora_targets.choose_linears(
            model, "lm_head|embed_out|q_proj|query_key_value|c_attn|qkv_proj"
        )


def test_an_unused_adapter_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("llama")
    Lora(2, 4.0).attach(model)
    for module in model.modules():
        if isinstance(module, lora.Factor):
            module.to_empty(device="cpu")
    past = model.model.layers[0].mlp.up_proj
    for forward in (past.forward, None):  # taken without being called, as remote code may
        if forward is None:
            model.model.layers[0].mlp.__dict__["up_proj"] = lambda x: x @ past.weight.t()
        with lora.warn_about_unused_adapters(model):
            model(input_ids=TOKENS)
        messages = [record.getMessage() for record in caplog.records]
        assert bool(messages) is (forward is None)
    [message] = messages
    assert "1 adapter" in message and message.endswith(": model.layers.0.mlp.up_proj")


def test_an_adapter_without_some_layers_counts_as_damaged(adapter: Path) -> None:
    model = build_model("llama")
    weights = {
        name: tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if ".layers.1." not in name
    }
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(ArtifactError, match="is incomplete") as caught:
        lora.require_fits(model, peft_adapter.read_adapter(adapter))
    assert "model.layers.1." in caught.value.found
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["layers_to_transform"] = [0]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    lora.require_fits(model, peft_adapter.read_adapter(adapter))
