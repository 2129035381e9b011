# covers: lib/parallel/loss.py
"""The loss of the output layer has the value and the gradients of the loss of the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
)

from lib.optim.guard import StepGuard
from lib.parallel import attention, loss
from lib.parallel.compiling import Compiler
from lib.tokens.batches import MicroBatch
from lib.tokens.samples import IGNORED
from lib.train.config import Config

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
Gradient = Callable[..., tuple[torch.Tensor, torch.Tensor]]
HERE = SimpleNamespace(device=torch.device("cpu"), context=None)


def batch(ignored: bool = False) -> MicroBatch:
    tokens = torch.randint(0, 300, (3, 21), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 4:9] = IGNORED
    return MicroBatch(tokens[:, :-1], torch.full_like(labels, IGNORED) if ignored else labels)


@pytest.mark.parametrize("gradient", [loss._gradient, loss._fused], ids=["eager", "fused"])
@pytest.mark.parametrize("rows", [1000, 7, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_give_the_loss_and_the_gradients(
    monkeypatch: pytest.MonkeyPatch, rows: int, bias: bool, gradient: Gradient
) -> None:
    monkeypatch.setattr(loss, "_MIN_ROWS", 1)
    torch.manual_seed(0)
    parts = [torch.randn(40, 16), torch.randn(50, 16)] + ([torch.randn(50)] if bias else [])
    parts = [part.double().requires_grad_() for part in parts]
    labels = torch.randint(0, 50, (40,))
    labels[::3] = IGNORED
    loss_sum = F.cross_entropy(F.linear(*parts), labels, ignore_index=IGNORED, reduction="sum")
    expected = torch.autograd.grad(loss_sum * 0.3, parts)
    mine = loss._ChunkedLoss.apply(
        *parts, *([None] if not bias else []), labels, 0.6, rows * 50, gradient
    )
    gradients = torch.autograd.grad(mine * 0.5, parts)
    assert mine.item() == pytest.approx(loss_sum.item(), rel=1e-6)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


Z = 0.05  # a larger coefficient than usual, so that a wrong gradient shows


def plain_z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the z-loss summed over the rows with a label, by autograd."""
    return Z * torch.logsumexp(logits, 1).square()[labels != IGNORED].sum()


@pytest.mark.parametrize("gradient", [loss._gradient, loss._fused], ids=["eager", "fused"])
@pytest.mark.parametrize("rows", [1000, 7])
@pytest.mark.parametrize("trained", [True, False])
def test_chunks_add_the_z_loss_to_the_gradients_alone(
    monkeypatch: pytest.MonkeyPatch, rows: int, trained: bool, gradient: Gradient
) -> None:
    """With LoRA, the output layer itself is not trained."""
    monkeypatch.setattr(loss, "_MIN_ROWS", 1)
    torch.manual_seed(0)
    parts = [torch.randn(40, 16), torch.randn(50, 16), torch.randn(50)]
    parts = [part.double().requires_grad_(trained or not at) for at, part in enumerate(parts)]
    wanted = [part for part in parts if part.requires_grad]
    labels = torch.randint(0, 50, (40,))
    labels[::3] = IGNORED
    logits = F.linear(*parts)
    entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    z_sum = plain_z_loss(logits, labels)
    expected = torch.autograd.grad((entropy + z_sum) * 0.3, wanted)
    z_loss = loss.ZLoss(Z, torch.device("cpu"))
    mine = loss._ChunkedLoss.apply(*parts, labels, 0.6, rows * 50, z_loss.add_to(gradient))
    gradients = torch.autograd.grad(mine * 0.5, wanted)
    assert mine.item() == pytest.approx(entropy.item(), rel=1e-6)
    assert z_loss.take_sum().item() == pytest.approx(z_sum.item(), rel=1e-6)
    assert z_loss.take_sum() == 0
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_compiled_gradient_contains_the_z_loss() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    inputs = (torch.randint(0, 50, (40,)), torch.ones(40), torch.full((40,), 0.25), Z)
    expected = loss._gradient(logits.clone(), *inputs)
    compiled = Compiler(required=True).wrap(loss._fused)(logits, *inputs)
    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_without_z_loss_no_bit_changes() -> None:
    """The gradient is softmax minus one-hot, in the operations that older runs used."""
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    target = torch.randint(0, 50, (40,))
    counts = (torch.arange(40) % 3 > 0).float()
    normaliser = torch.logsumexp(logits, 1)
    gradient = (logits - normaliser[:, None]).exp() - F.one_hot(target, 50)
    gradient *= (counts * 0.3)[:, None]
    entropy = ((normaliser - logits[torch.arange(40), target]) * counts).sum()
    for compute in (loss._gradient, loss._fused):
        value, mine = compute(logits.clone(), target, counts, counts * 0.3)
        assert torch.equal(value, entropy) and torch.equal(mine, gradient)
    inputs: dict = {}
    assert Config(z_loss=0.0).identity(inputs, 8) == Config().identity(inputs, 8)
    assert "z_loss" not in Config().identity(inputs, 8)["options"]
    assert Config(z_loss=1e-4).identity(inputs, 8)["options"]["z_loss"] == 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**TINY), Gemma2Config(**TINY, head_dim=8)],  # chunked, and plain
    ids=lambda value: value.model_type,
)
def test_models_are_trained_with_the_z_loss(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """The loss is the cross entropy, which is all that an evaluation sees."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    is_chunked = "by the output layer" in loss.chunk_loss(model, HERE)
    assert is_chunked == (config.model_type == "llama")
    samples = batch()
    labels = samples.labels.flatten()
    logits = model(**attention.make_inputs(model, samples)).logits.flatten(0, 1).float()
    entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    z_sum = plain_z_loss(logits, labels)
    expected = torch.autograd.grad((entropy + z_sum) * 0.5, list(model.parameters()))
    z_loss = loss.ZLoss(Z, torch.device("cpu"))
    with torch.no_grad():
        measured = loss.token_loss_sum(model, samples, z_loss=z_loss)
    assert measured.item() == pytest.approx(entropy.item(), rel=1e-5) and z_loss.take_sum() == 0
    mine = loss.token_loss_sum(model, samples, 0.5, z_loss=z_loss)
    mine.backward()
    assert mine.item() == pytest.approx(entropy.item(), rel=1e-5)
    assert z_loss.take_sum().item() == pytest.approx(z_sum.item(), rel=1e-5)
    for parameter, other in zip(model.parameters(), expected, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-4)
        else:
            difference = (parameter.grad - other).float().norm()
            assert difference < 0.02 * other.float().norm()


def test_evaluation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take two thirds of the products, and memory for a float32 sum."""
    calls: list[str] = []
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    assert "by the output layer" in loss.chunk_loss(model, HERE)
    monkeypatch.setattr(model.lm_head.forward, "_gradient", lambda *_: calls.append("gradient"))
    with torch.no_grad():
        assert loss.token_loss_sum(model, batch()) > 0
    assert not calls


def test_half_precision_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2000, 16).bfloat16()
    weight = torch.randn(300, 16).bfloat16()
    labels = torch.randint(0, 300, (2000,))
    exact = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    loss_sum = loss._ChunkedLoss.apply(hidden, weight, None, labels, 1.0, 1 << 16, loss._gradient)
    assert loss_sum.dtype == torch.float32 and loss_sum.item() == pytest.approx(
        exact.item(), rel=1e-5
    )


def with_gradients(model: torch.nn.Module, ignored: bool) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of all parameters."""
    model.zero_grad()
    value = loss.token_loss_sum(model, batch(ignored))
    value.backward()
    return {"loss": value.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("config", "in_layer"),
    [
        (LlamaConfig(**TINY), True),
        (LlamaConfig(**TINY, tie_word_embeddings=True), True),
        (PhiConfig(**TINY), True),  # its output layer has a bias
        (
            GPT2Config(
                vocab_size=300,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            ),
            True,
        ),
        (Gemma2Config(**TINY, head_dim=8), False),  # caps its logits
        (CohereConfig(**TINY), False),
        (GraniteConfig(**TINY, logits_scaling=3.0), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_each_family_has_the_loss_of_its_logits(config, in_layer: bool) -> None:
    """Loss and gradients equal those of the plain logits, whichever way was chosen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    expected = [with_gradients(model, ignored) for ignored in (False, True)]
    description = loss.chunk_loss(model, HERE)
    assert ("by the output layer" in description) == in_layer, description
    results = [with_gradients(model, ignored) for ignored in (False, True)]
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert model(**{"input_ids": batch().input_ids}).logits.shape == (3, 20, 300)


@pytest.mark.parametrize("in_layer", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_mean_does_not_depend_on_the_number_of_tokens(precision: str, in_layer: bool) -> None:
    """If a step repeats one document, the gradient is that of the document."""
    torch.manual_seed(0)
    masters = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model = copy.deepcopy(masters).to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    if in_layer:
        head = model.get_output_embeddings()
        head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cpu"])
    row = batch(False)
    guard = StepGuard(precision, 0.0, torch.device("cpu"))
    adamw = torch.optim.AdamW(masters.parameters())
    norms = []
    for repeats in (1, 3, 5, 7):
        many = MicroBatch(row.input_ids.repeat(repeats, 1), row.labels.repeat(repeats, 1))
        scaled = guard.scale_for(int((many.labels != IGNORED).sum()))
        model.zero_grad()
        loss.token_loss_sum(model, many, scaled.loss).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        norms.append(guard.clip(adamw, 1.0, scaled).item())
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-3)


@pytest.mark.parametrize(("value", "used"), [(17.0, True), (1.0, False), (None, False)])
def test_in_place_sums_are_tried_before_use(
    monkeypatch: pytest.MonkeyPatch, value: float | None, used: bool
) -> None:
    def addmm(
        total: torch.Tensor, *_: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        assert out is total and out_dtype == total.dtype == torch.float32
        if value is None:
            raise NotImplementedError("no such kernel")
        return out.fill_(value)

    loss._can_add_in_place.cache_clear()
    monkeypatch.setattr(torch, "addmm", addmm)
    assert loss._can_add_in_place(torch.device("cpu"), torch.bfloat16) == used
    loss._can_add_in_place.cache_clear()
