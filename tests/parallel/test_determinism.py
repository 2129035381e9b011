# covers: lib/parallel/experts.py, lib/parallel/attention.py, lib/parallel/determinism.py
"""With --deterministic on, a run gives the same bits each time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, masking_utils

from lib.parallel import attention, determinism, experts
from tests.conftest import run_stage
from tests.models.families import FAMILIES
from tests.training import VOCABULARY, metrics, save_model

# What has no deterministic way on CUDA (torch.use_deterministic_algorithms of torch 2.11 to 2.13);
# the second set is refused for floating-point numbers only.
REFUSED = {
    "aten::put_",
    "aten::median",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss_backward",
    "aten::_embedding_bag",
    "aten::grid_sampler_2d_backward",
}
REFUSED_IF_FLOAT = {"aten::histc", "aten::cumsum", "aten::bincount"}


class Strict(TorchDispatchMode):
    """Fails for each operation that CUDA would refuse with --deterministic on."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        name = function._schema.name
        assert name not in REFUSED, name
        assert name not in REFUSED_IF_FLOAT or not arguments[0].is_floating_point(), name
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_has_no_operation_that_cuda_refuses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations run on meta tensors; experts are computed as in stage 04."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.bfloat16).train()
        tokens = torch.zeros(2, 16, dtype=torch.int64)
    experts.use_own_function(model)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    attention.avoid_device_reads(model, "concat", 16)
    with Strict():
        model(input_ids=tokens, use_cache=False).logits.sum().backward()


@pytest.fixture(autouse=True)
def restore_settings() -> Iterator[None]:
    """Restore the settings of torch after a test."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch._inductor.config.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("setting", [None, ":16:8"])
def test_only_deterministic_algorithms_are_allowed(
    monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {"CUBLAS_WORKSPACE_CONFIG": setting} if setting else {})
    determinism.require_determinism()
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": setting or ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch._inductor.config.deterministic


@pytest.mark.slow
def test_a_run_with_experts_is_deterministic_after_a_resume(
    prepared_once: Path, tmp_path: Path
) -> None:
    """A run that was stopped and resumed has the same figures as one that was not."""
    shutil.copytree(prepared_once / "model", tmp_path / "mixtral")
    save_model(tmp_path / "mixtral", FAMILIES["mixtral"](VOCABULARY))
    common = (
        "-d",
        prepared_once / "hf_datasets" / "corpus",
        "-m",
        tmp_path / "mixtral",
        "--cache-dir",
        tmp_path / ".cache",
        "--precision",
        "fp32",
        "--log-freq",
        1,
        "-s",
        64,
        "--lr-scheduler",
        "constant",
    )
    strict = ("-e", "strict", "--deterministic", "on")
    for more in (
        ("-e", "plain", "--max-steps", 3),
        (*strict, "--max-steps", 2),
        (*strict, "--max-steps", 3),
    ):
        run_stage("04_train_fsdp.py", *common, *more, cwd=tmp_path)
    figures = [
        [
            (row["step"], row["train/loss"], row["train/grad_norm"])
            for row in metrics(tmp_path, name)
        ]
        for name in ("plain", "strict")
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 3
