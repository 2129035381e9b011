"""An item that compares the gradients of one large block in bf16 to those in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from tests.gpu.kernels import local_part, make_strict_compiler, relative_error
from tests.gpu.place import Place

MAX_ERROR = 2e-2  # relative error that bf16 may cause in the gradient of any parameter


class Setting(NamedTuple):
    """How a block computes.

    attention: sdpa for windows, varlen for packed documents. flash: the name of a FlashAttention
    that replaces torch's own, "" for none.
    """

    attention: str
    precision: str
    compiled: bool = False
    flash: str = ""

    @property
    def packing(self) -> str:
        """Return the packing that this attention is for, as --packing names it."""
        return "documents" if self.attention == "varlen" else "concat"


REFERENCE = Setting("sdpa", "fp32")


def block(place: Place) -> None:
    """In bf16 every kernel gives a block as wide as an 8B the gradients of float32."""
    directory = place.model(
        "8b-wide", num_hidden_layers=1, vocab_size=1024, **place.size({}, {"hidden_size": 256})
    )
    precision = place.size("bf16", "fp32")
    settings = [
        Setting(attention, precision, compiled, flash)
        for attention in ("sdpa", "varlen")
        for compiled in place.size((False, True), (False,))
        for flash in ("", *_find_flash(place, attention))
    ]
    expected = {
        packing: compute_gradients(place, directory, REFERENCE, packing)
        for packing in ("concat", "documents")
    }
    for setting in settings:
        gradients = compute_gradients(place, directory, setting, setting.packing)
        errors = {
            name: relative_error(gradients[name], reference)
            for name, reference in expected[setting.packing].items()
        }
        worst_name = max(errors, key=errors.__getitem__)
        place.note(
            **{
                ", ".join(
                    (
                        setting.attention,
                        "compiled" if setting.compiled else "eager",
                        *filter(None, [setting.flash]),
                    )
                ): {"worst": worst_name, "error": errors[worst_name]}
            }
        )
        assert errors[worst_name] < MAX_ERROR, (setting, worst_name, errors[worst_name])


def _find_flash(place: Place, attention: str) -> list[str]:
    """Return the names of the versions of FlashAttention that a run could use here."""
    from lib.parallel import attention_kernel as kernels

    if not place.on_gpu:
        return []
    major = torch.cuda.get_device_capability()[0]
    return [
        kernel.name
        for kernel in (kernels.PACKED_KERNELS if attention == "varlen" else (kernels.FLASH_3,))
        if major in kernel.majors and kernel.find_version() is not None
    ]


def compute_gradients(
    place: Place, directory: Any, setting: Setting, packing: str
) -> dict[str, Tensor]:
    """Return the gradients of the loss by parameter; all calls use the same weights and tokens."""
    from lib.parallel import attention, attention_kernel, loss

    with _sharded_model(directory, setting) as (model, device):
        if setting != REFERENCE:  # the reference needs its mask, and this change cannot be undone
            attention.avoid_device_reads(model, packing, 8192)
        if setting.flash:
            versions = attention_kernel.PACKED_KERNELS
            chosen = tuple(version for version in versions if version.name == setting.flash)
            with mock.patch.object(attention_kernel, "PACKED_KERNELS", chosen):
                kernel = attention_kernel.pick_attention_kernel(
                    model, packing, setting.precision, device, 8192
                )
            assert f"by {setting.flash}" in kernel, kernel
        loss.token_loss_sum(model, _make_batch(place, packing, model.config.vocab_size)).backward()
        gradients = {
            name: local_part(parameter.grad).detach().clone()
            for name, parameter in model.named_parameters()
        }
    attention_kernel.restore_flash_2()
    return gradients


@contextmanager
def _sharded_model(directory: Any, setting: Setting) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield a model that stage 04 would build on one rank, with weights rounded to bf16."""
    from lib.models import architecture
    from lib.models.weights import initialise_model
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    model = architecture.build_on_meta(directory, setting.attention)
    layout = ParallelLayout.start()
    try:
        parallelize.parallelize(
            model,
            layout.fsdp,
            setting.precision,
            compiler=make_strict_compiler() if setting.compiled else None,
        )
        parallelize.materialise_model(model, layout.device, offload=False)
        initialise_model(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                tensor = local_part(parameter)
                tensor.copy_(tensor.bfloat16().float())
        yield model, layout.device
    finally:
        layout.stop()


def _make_batch(place: Place, packing: str, vocabulary: int) -> Any:
    """Return a MicroBatch of two rows of tokens, in documents of several lengths if packed."""
    from lib.parallel.trial import SingleDevice
    from lib.tokens.batches import MicroBatch

    rows = 2
    length = place.size(2048, 64)
    ids = torch.randint(
        0, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0)
    )
    positions = None
    boundaries = None
    if packing == "documents":
        lengths = [length // 2, length // 8, length // 4, length // 8]
        positions = torch.cat([torch.arange(count) for count in lengths]).expand(rows, length)
        boundaries = torch.tensor([0, *lengths * rows]).cumsum(0).int()
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, boundaries).to(
        SingleDevice(torch.device(place.device))
    )
