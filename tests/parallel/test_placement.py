# covers: lib/parallel/placement.py, lib/parallel/parallelize.py
"""Any number of ranks shares the experts of a model evenly, with the same results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig

from lib.models.sharded import local_tensor, plain
from lib.optim import registry
from lib.parallel import parallelize, placement
from lib.parallel.placement import FSDP
from lib.planning import trace
from tests.conftest import ROOT, run_stage
from tests.test_stage_04_reference import MIXTRAL
from tests.training import SMALL_RUN, list_saved_steps, metrics, save_model

OPTIMIZERS = ("adamw", "adamw8bit")
FAMILIES = {
    "Mixtral 8x7B": MixtralConfig(num_hidden_layers=1),
    "Qwen 1.5 MoE": AutoConfig.for_model("qwen2_moe", num_hidden_layers=1),
    "gpt-oss 20B": GptOssConfig(num_hidden_layers=1, num_local_experts=32),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_shard_is_much_larger_than_the_mean(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32)
    total = model.num_parameters()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for ranks in range(1, 129):
        most = sum(
            shape.numel() / ranks * placement.place_parameter(name, shape, {FSDP: ranks}).largest
            for name, shape in shapes.items()
        )
        assert most <= 1.15 * total / ranks, ranks
    for ranks in (3, 16, 24, 100):  # as FSDP2 has it
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32)
        with trace.fake_mesh(ranks, ranks) as mesh:
            parallelize.parallelize(model, mesh, "bf16")
            held = sum(local_tensor(p, padded=True).numel() for p in model.parameters())
            assert held <= 1.15 * total / ranks, ranks


def test_parameters_with_few_rows_are_sharded_by_rows() -> None:
    assert [
        placement.place_parameter("weight", shape, {FSDP: 64}).dim
        for shape in ((96, 1, 4), (1, 1, 512), (8, 14336, 4096), (32, 20, 8), (4, 64))
    ] == [0, 0, 1, 0, 0]
    assert placement.place_parameter("weight", (40, 60, 8), {FSDP: 64})[2:4] == (1, 4)


def test_neither_weights_nor_states_have_padding() -> None:
    """All ranks together have the numbers of one rank; padding is zero and in no checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MIXTRAL, dtype=torch.float32)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    with trace.fake_mesh(3, 3) as mesh:
        parallelize.parallelize(model, mesh, "fp32")
        parallelize.materialise_model(model, torch.device("cpu"), offload=False)
        adamw = registry.build_optimizer("adamw", model, 1e-3)
        states = registry.named_states(model, adamw)
        assert {name: plain(p).shape for name, p in model.named_parameters()} == shapes
        assert {name: states[f"exp_avg.{name}"].shape for name in shapes} == shapes
        experts = model.model.layers[0].mlp.experts
        assert experts.down_proj.shape == (4, 33, 48) and experts.rows == {"down_proj": 32}
        assert type(experts).__name__ == "MixtralExperts"


def test_blocks_of_8_bit_moments_are_not_split(project: Path) -> None:
    save_model(project / "moe", MIXTRAL)
    shutil.copytree(
        project / "model",
        project / "moe",
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if "token" not in name],
    )
    result = run_stage(
        "04_train_fsdp.py",
        "-e",
        "run",
        "-d",
        "corpus",
        "-m",
        "moe",
        "--optimizer",
        "adamw8bit",
        "--dry-run",
        "--plan-gpus",
        3,
        cwd=project,
        expect=2,
    )
    assert "sharded over 3 ranks" in result.stderr
    assert "shape 4 × 32 × 48" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_experts_on_several_ranks_train_as_on_one(project: Path, compiled: str) -> None:
    """Losses and exports are equal, also after a resume on another number of ranks."""
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    save_model(project / "model", MIXTRAL)
    common = (*SMALL_RUN, "--max-steps", 6, "--ckpt-freq", 3, "--lr", "1e-2")
    run_stage(
        "04_train_fsdp.py", "-e", "one", "-b", 2, "--grad-accum-steps", 3, *common, cwd=project
    )
    expected = [(row["train/loss"], row["train/grad_norm"]) for row in metrics(project, "one")]
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "three",
        "-b",
        2,
        "--compile",
        compiled,
        "--activation-checkpointing",
        "selective",
        *common,
        cwd=project,
        ranks=3,
    )
    shutil.copytree(project / "outputs" / "three", project / "outputs" / "two")
    shutil.rmtree(project / "outputs" / "two" / "checkpoints" / "step_00000006")
    state = project / "outputs" / "two" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"status": "running"}))
    result = run_stage(
        "04_train_fsdp.py",
        "-e",
        "two",
        "-b",
        3,
        "--ckpt-async",
        "off",
        *common,
        cwd=project,
        ranks=2,
    )
    assert "resumed from" in result.stdout + result.stderr
    for name in ("three", "two"):
        assert list_saved_steps(project, name)[-1] == 6
        rows = [(row["train/loss"], row["train/grad_norm"]) for row in metrics(project, name)]
        for row, other in zip(rows[-6:], expected, strict=True):
            assert row == pytest.approx(other, rel=1e-5)
    exported = []
    for name in ("one", "three", "two"):
        run_stage("05_export_checkpoint.py", "-e", name, "--dtype", "float32", cwd=project)
        exported.append(
            AutoModelForCausalLM.from_pretrained(
                project / "outputs" / name / "export" / "step_00000006"
            )
        )
    for other in exported[1:]:
        for (key, mine), theirs in zip(
            exported[0].named_parameters(), other.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4, msg=key)


def train_on_two_meshes(code: Path, ranks: int, file: Path) -> dict[str, Any]:
    """Return the figures of each optimizer from ranks that run a copy of the code."""
    if code == ROOT:
        run_stage("tests/parallel/two_meshes.py", file, *OPTIMIZERS, cwd=code, ranks=ranks)
        return json.loads(file.read_text("utf-8"))
    words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = str(ROOT / "tests/parallel/two_meshes.py")
    done = subprocess.run(
        [sys.executable, "-m", *words, script, str(file), *OPTIMIZERS],
        cwd=code,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text("utf-8"))


@pytest.mark.slow
def test_parameters_can_be_on_another_mesh(tmp_path: Path) -> None:
    """In a copy of the code, each rank has all experts and shares the other parameters."""
    shutil.copytree(ROOT / "lib", tmp_path / "lib")
    path = tmp_path / "lib/parallel/placement.py"
    text = path.read_text("utf-8")
    for before, after in (
        ("    return {FSDP: mesh}", "    return {FSDP: mesh, 'experts': _replicas(mesh)}"),
        ("    return {FSDP: shard_size}", "    return {FSDP: shard_size, 'experts': 1}"),
        ("    return FSDP\n", "    return 'experts' if '.experts.' in name else FSDP\n"),
        (
            "def shard_sizes(",
            "def _replicas(mesh):\n"
            "    from torch.distributed.device_mesh import init_device_mesh\n"
            "    names = ('replicate', 'shard')\n"
            "    return init_device_mesh('cpu', (mesh.size(), 1), mesh_dim_names=names)\n\n\n"
            "def shard_sizes(",
        ),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text)
    launches = [
        train_on_two_meshes(code, ranks, tmp_path / "found.json")
        for ranks, code in ((1, ROOT), (2, ROOT), (2, tmp_path))
    ]
    for optimizer in OPTIMIZERS:
        one, both, other = (results[optimizer] for results in launches)
        assert both["groups"] == [[2], [2]]
        assert sorted(other["groups"]) == [[2], [2], [2, 1]]
        for results in (both, other):
            for kind in ("weights", "states"):
                assert results[kind] == pytest.approx(one[kind], rel=1e-3)
            for row, expected in zip(results["steps"], one["steps"], strict=True):
                assert row == pytest.approx(expected, rel=1e-4)
