# covers: launch/cloud/kube/costs.py, lib/train/estimates.py
"""Test the hours and the money that launch/kubernetes.py prints before a job starts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from launch.cloud.kube import cluster_files, costs, job_options
from launch.cloud.kube.job import plan_job
from launch.cloud.kube.job_options import JobOptions
from lib.core import declared
from lib.core.errors import UsageError
from lib.models import scratch
from lib.planning import flops
from lib.train import command_line
from lib.train.output import kinds
from tests.cloud.kube_cluster import JOB_OPTIONS, run_launcher
from tests.conftest import ROOT

RECIPE = ROOT / "recipes" / "scratch-1b-g5.yaml"
PER_HOUR = " per hour = "
EIGHT_B = ("-d", "c4", "-m", "meta-llama/Llama-3.1-8B", "-b", "2", "--global-batch-size", "256")


def cost_of(*train: str, instance_type: str = "g5.8xlarge", **values: Any) -> dict[str, str]:
    """Return the rows about the cost of a job."""
    job = declared.from_values(
        JobOptions, job_name="exp", image="r/i:1", instance_type=instance_type, **values
    )
    return costs.describe_cost(plan_job(job, train))


def seconds_of(rows: dict[str, str]) -> float:
    """Return the seconds of a step."""
    return float(rows["step"].partition(" s")[0])


def test_the_default_job_takes_about_as_long_as_the_one_it_replaces() -> None:
    rows = cost_of(nodes=4)
    minutes, seconds = map(int, re.match(r"(\d+) min (\d+) s for 56 steps", rows["time"]).groups())
    assert 15 < minutes + seconds / 60 < 19, "17 minutes"
    price = job_options.read_instances()["g5.8xlarge"]["price"]  # which users may edit
    dollars = (minutes + seconds / 60) / 60 * 4 * price
    assert rows["money"].startswith(f"${dollars:.2f} = 0.27 hours × 4 nodes × ${price} (")
    assert rows["money"].endswith("(g5.8xlarge in launch/cloud/kube/templates/instances.yaml)")


def test_the_recipe_states_how_its_time_follows() -> None:
    text = " ".join(RECIPE.read_text().split("\n# "))
    config = command_line.parse_options(["-d", "c4", "-e", "e", "--config", str(RECIPE)])
    cost, _ = costs.measure_model(config)
    passes = config.global_batch_size // config.batch_size // 4
    computing = config.batch_size * config.seq_length * cost.flops / (0.4 * 70e12)
    reducing = cost.parameters * 4 * 3 / 4
    network = 25e9 / 8
    one_pass = computing / 3 + max(computing * 2 / 3, reducing / network)
    step = passes * one_pass + cost.parameters * 2 * 3 / 4 / network
    for figure in (
        f"{cost.flops / 1e9:.2f} GFLOP",
        f"{computing:.2f} s at 40 %",
        f"({computing * 2 / 3:.2f} s)",
        f"{reducing / 1e9:.2f} GB: {reducing / network:.2f} s at 25 Gbit/s",
        f"each of the {passes} micro-batches takes {one_pass:.2f} s",
        f"{step:.1f} s for a step, {config.max_steps * step / 60:.1f} minutes for",
        "Time: an estimate.",
    ):
        assert figure in text, figure
    assert seconds_of(cost_of(nodes=4)) == pytest.approx(step, rel=0.01)


def test_the_operations_are_those_that_stage_04_counts() -> None:
    config = command_line.parse_options(["-d", "c4", "-e", "e", "--config", str(RECIPE)])
    cost, _ = costs.measure_model(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scratch.make_config("1B", 32_000, 1, 2))
    assert cost.parameters == model.num_parameters()
    assert cost.flops == flops.count_per_token(model, config.seq_length)


def test_a_slower_network_costs_time_and_a_single_node_needs_none() -> None:
    fast = cost_of(nodes=4, instance_type="g5.16xlarge")
    slow = cost_of(nodes=4, instance_type="g5.2xlarge")
    alone = cost_of(nodes=1, instance_type="g5.2xlarge")
    assert seconds_of(fast) < seconds_of(slow) and "waiting for 5 Gbit/s" in slow["step"]
    assert "waiting" not in alone["step"] and "1 GPU " in alone["step"]
    assert seconds_of(alone) < 4 * seconds_of(fast)


@pytest.mark.parametrize(
    ("train", "values", "time", "money"),
    [
        (("--max-steps", "9"), {"instance_type": "g4dn.12xlarge"}, "no peak of T4", PER_HOUR),
        (("--precision", "fp32"), {}, "A10G is known in fp32", PER_HOUR),
        ((), {"gpus_per_node": 0}, "no estimate for CPUs", PER_HOUR),
        (EIGHT_B, {"nodes": 2}, "(--max-steps)", PER_HOUR),
        (
            ("-d", "c4", "-m", "org/model", "--max-steps", "9"),
            {},
            "(--global-batch-size)",
            PER_HOUR,
        ),
        (
            ("-d", "c4", "-m", "org/mixtral-8x7B", "-b", "2", "--max-steps", "9"),
            {},
            "size of org/mixtral-8x7B",
            PER_HOUR,
        ),
        (
            (),
            {"instance_type": "own.type", "gpus_per_node": 2},
            "GPUs of own.type",
            "unknown: no price",
        ),
    ],
)
def test_what_is_unknown_is_named(
    train: tuple[str, ...], values: dict[str, Any], time: str, money: str
) -> None:
    rows = cost_of(*train, **values)
    assert rows["time"].startswith("unknown: ") and time in rows["time"]
    assert money in rows["money"]


def test_a_model_is_measured_by_its_files_or_its_name(tmp_path: Path) -> None:
    rows = cost_of(*EIGHT_B, "--max-steps", "1000", instance_type="p5.48xlarge", nodes=2)
    assert "the name meta-llama/Llama-3.1-8B" in rows["step"]
    weights = {"w": {"dtype": "BF16", "shape": [123_000_000], "data_offsets": [0, 246_000_000]}}
    header = json.dumps(weights).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # a sparse file
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 246_000_000)
    (tmp_path / "config.json").write_text("{}")
    steps = ("-d", "c4", "-m", str(tmp_path), "-b", "2", "--max-steps", "9")
    assert "0.738 GFLOP (123M parameters)" in cost_of(*steps)["step"]
    assert "0.492 GFLOP" in cost_of(*steps, "--lora-rank", "8")["step"]
    (tmp_path / "config.json").write_text('{"num_local_experts": 8}')
    assert "only some experts" in cost_of(*steps)["time"]


def test_spare_nodes_are_paid_as_well() -> None:
    money = cost_of(nodes=4, spares=1, kind="hyperpod", instance_type="g5.8xlarge")["money"]
    assert "5 nodes (1 spare among them)" in money and "(ml.g5.8xlarge in " in money


def test_a_bench_has_a_known_number_of_steps() -> None:
    words = ("--bench", "-d", "synthetic", "--from-scratch", "--model-size", "7B", "-b", "2")
    assert f"for {kinds.STEPS} steps" in cost_of(*words, instance_type="p5.48xlarge")["time"]


def test_a_user_may_edit_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, Any] = {"g5.8xlarge": {"gpus": 1, "efa": 1, "gpu": "A10G", "price": 1.5}}
    monkeypatch.setattr(job_options, "read_instances", lambda: rows)
    assert cost_of(nodes=4)["money"].startswith("$1.15 = 0.192 hours × 4 nodes × $1.5 (")
    assert "ml.g5.8xlarge" in cost_of(instance_type="ml.g5.8xlarge")["money"]
    assert "no price of ml.g5.8xlarge" in cost_of(kind="hyperpod")["money"]
    for price in ("2,448", math.nan, None):
        rows["g5.8xlarge"]["price"] = price
        with pytest.raises(UsageError, match=f"g5.8xlarge is {price!r}"):
            cost_of()


def test_a_wrong_edit_of_the_prices_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (job_options, cluster_files):
        monkeypatch.setattr(module, "TEMPLATES", tmp_path)
    read_instances = job_options.read_instances.__wrapped__
    instances = tmp_path / "instances.yaml"
    for row, problem in (
        ("{gpus: 1, price: 2,40}", "g5.8xlarge has the unknown entry 40"),
        ("2.40", "g5.8xlarge has the unknown entry 2.4"),
    ):
        instances.write_text(f"g5.8xlarge: {row}\n")
        with pytest.raises(UsageError, match=problem):
            read_instances()
    instances.write_text("g5.8xlarge: {gpus: 1, price: 2.40}\n")
    assert read_instances()["g5.8xlarge"]["price"] == 2.4
    for line, problem in (
        ("nat_hour: 0,045", "the price of nat_hour is '0,045'"),
        ("", "nat_hour is None"),
    ):
        (tmp_path / "prices.yaml").write_text(f"eks_hour: 0.1\n{line}\n")
        with pytest.raises(UsageError, match=problem):
            cluster_files.read_prices()


def test_every_type_has_the_facts_of_the_estimate() -> None:
    types = job_options.read_instances()
    assert all({"gpus", "efa", "gpu", "gbps"} <= set(row) for row in types.values())


@pytest.mark.parametrize("command", ["render", "apply", "deploy"])
def test_the_plan_shows_hours_and_money_beside_the_manifest(command: str) -> None:
    result = run_launcher(command, *JOB_OPTIONS, "--dry-run", "--", *EIGHT_B, "--max-steps", "1000")
    assert re.search(r"time +\d+ min \d+ s for 1,000 steps", result.stderr)
    assert re.search(r"money +\$[\d.]+ = [\d.]+ hours × 2 nodes × \$[\d.]+ \(p5", result.stderr)
    [manifest] = yaml.safe_load_all(result.stdout)
    assert manifest["metadata"]["name"] == "exp"
