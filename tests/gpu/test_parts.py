# covers: tests/gpu/*.py
"""Test the parts of the kit whose errors a rehearsal on a CPU would not show."""

from __future__ import annotations

import os
import time
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.parts import torchtitan_trainer
from tests.conftest import ROOT, run_stage
from tests.gpu import (
    attention,
    context,
    eight_ranks,
    float8,
    items,
    kit,
    machine,
    memory,
    peers,
    ready,
    runner,
    several,
    speed,
    traces,
)
from tests.gpu.items import Item
from tests.gpu.place import NotHere, Place, Stage


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a place on the CPU whose kit contains only the models' configurations."""
    for name in ("small", "8b-wide"):
        kit._save_model(tmp_path / "kit/models" / name, *kit._MODELS[name])
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    return Place(tmp_path / "kit", tmp_path / "work", tmp_path / "out", "cpu")


def test_weights_are_initialised_without_this_process_using_the_gpu(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has used the GPU cannot fork stages that use the GPU."""
    log = tmp_path / "initialised"

    def record() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(torch.cuda, "_lazy_init", record)
    place.device = "cuda"
    with pytest.raises(AssertionError, match="small ended with 1"):
        place.with_weights("small")
    pids = set(map(int, log.read_text().split()))
    assert pids and os.getpid() not in pids


def test_weights_depend_on_the_seed_alone_and_can_be_loaded(place: Place) -> None:
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(place.with_weights("small"))
    second = AutoModelForCausalLM.from_pretrained(place.with_weights("small", num_hidden_layers=4))
    assert first.dtype == torch.bfloat16
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_a_process_that_has_used_the_gpu_forks_no_stage(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="has used the GPU"):
        place.train("x")


def test_the_comparison_of_attention_notices_errors_and_leaks(place: Place) -> None:
    """Right results pass. A kernel that sees the document before, or scales wrongly, does not."""
    by_document = attention._attend_by_varlen

    def leak(query, key, value, ends, longest):
        return by_document(query, key, value, torch.cat([ends[:2], ends[3:]]), longest)

    def scale(query, *others):
        return by_document(1.1 * query, *others)

    assert attention._find_error(place, "right", by_document, 16) == ""
    assert attention._find_error(place, "scaled", scale, 16) == attention._WRONG
    assert attention._find_error(place, "leaking", leak, 16) == attention._WRONG
    assert place.figures[f"leaking, {attention._LEAK}"] > 0
    assert sum(attention.make_lengths(8192)) == 8192 and min(attention.make_lengths(8192)) > 0


def test_the_kit_asks_pip_for_pinned_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in replaces the download by pip."""
    from launch.bundles import wheelhouse

    requested = []

    def download(directory: Path, lists: list[str], *_: object, **__: object) -> None:
        requested.extend((directory / name).read_text() for name in lists)
        with zipfile.ZipFile(directory / "xxhash-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("xxhash-1.dist-info/METADATA", "Name: xxhash\nVersion: 1\n")

    monkeypatch.setattr(wheelhouse, "_download_wheels", download)
    commands = []
    monkeypatch.setattr(kit.subprocess, "run", lambda command, **_: commands.append(command))
    kit._fetch_peers(tmp_path / "peers")
    assert "torchtitan==0.2.2" in commands[0] and "--no-deps" in commands[0]
    kit._fetch_wheels(tmp_path)
    assert [line.partition("==")[0] for line in requested[0].splitlines()] == list(kit._WHEELS)
    assert len([*tmp_path.glob("wheelhouse/*/*.whl")]) == 1


def test_the_kit_asks_pip_for_flash_attention_4_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr(kit.subprocess, "run", lambda words, **_: commands.append(words))
    kit._fetch_flash_4(tmp_path)
    (words,) = commands
    pins = (ROOT / "requirements-optional.txt").read_text().replace("[cu13]", "").splitlines()
    pinned = [pin for pin in pins if pin.startswith(("flash-", "nvidia-", "quack-"))]
    assert len(pinned) == 3 and set(pinned) < set(words) and "--no-deps" in words


SPYING_HOOKS = f"""
import multiprocessing.process as process, sys
sys.path.insert(0, "{ROOT}")
from tests.gpu import hooks

def spy():
    from lib.planning import memory_check
    start = process.BaseProcess.start
    def start_and_print(self):
        print("started", self._target.__module__, self._target.__name__, flush=True)
        start(self)
    process.BaseProcess.start = start_and_print
    memory_check._SAFETY = 10**6  # no run fits so clearly that nothing is traced

hooks.spy = spy
hooks.main(*sys.argv[1:])
"""


@pytest.mark.slow
def test_speed_items_start_no_process_that_traces_memory(place: Place, tmp_path: Path) -> None:
    """Without the hook two processes trace: one for the check of memory, one for the estimate."""
    (tmp_path / "spied.py").write_text(SPYING_HOOKS)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("A few words, again and again. " * 200)
    run_stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        tmp_path / "text",
        "--save-dir",
        tmp_path / "data",
        cwd=tmp_path,
    )
    model = place.model("small", vocab_size=80_000)  # more than 20 million parameters
    started = {}
    for hook in ("skip_saves", "skip_saves_and_memory_check"):
        printed = run_stage(
            str(tmp_path / "spied.py"),
            f"{hook}+spy",
            "04_train_fsdp.py",
            "-e",
            hook,
            "-d",
            tmp_path / "data",
            "-m",
            model,
            "--from-scratch",
            "-s",
            16,
            "--max-steps",
            1,
            "--activation-checkpointing",
            "none",
            cwd=tmp_path,
        ).stdout
        started[hook] = [line for line in printed.splitlines() if line.startswith("started")]
    modules = [line.split()[1] for line in started["skip_saves"]]
    assert modules == ["lib.planning.child_process"] * 2
    assert not started["skip_saves_and_memory_check"]


def test_a_hook_that_replaces_a_missing_name_is_an_error() -> None:
    from tests.gpu import hooks

    with pytest.raises(AttributeError):
        hooks._replace_attribute(hooks, "no_such_name", None)


def test_no_compiler_and_no_header_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in machine.describe_missing_compiler()
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"there is no {tmp_path}/Python.h" in machine.describe_missing_compiler()


def test_the_first_item_says_in_one_line_what_is_missing(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This machine has no driver, no compiler, and no GPU to compile for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    place.device = "cuda"
    with pytest.raises(AssertionError) as failure:
        ready.ready(place)
    text = str(failure.value)
    assert "\n" not in text and text.count("; ") == 2
    for part in (
        "no C compiler",
        "nvidia-smi does not answer",
        "torch compiles nothing",
        "items that need it are `not here`",
    ):
        assert part in text


@pytest.mark.parametrize("lacks", [True, False])
def test_a_run_that_fails_without_a_compiler_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    """With a compiler the same error is a failure."""

    class Ended:
        pid = 0
        exitcode = 2

    monkeypatch.setattr(
        machine, "describe_missing_compiler", lambda: "no Python.h" if lacks else ""
    )
    (tmp_path / "log").write_text("error: the model cannot be compiled here\n  found: …")
    with pytest.raises(NotHere if lacks else AssertionError, match=r"no Python\.h|exit code 2"):
        Stage(Ended(), tmp_path, tmp_path / "log").wait_for_end()


def test_an_item_ended_by_the_deadline_counts_as_not_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item has not used up its own limit, so it is not too slow."""
    monkeypatch.setattr(runner, "_MIN_TIME_LEFT_S", 0.0)
    monkeypatch.setattr(items, "ITEMS", [Item("waits", lambda place: time.sleep(60), "rest", 1, 9)])
    session = runner.Session(place, {}, time.monotonic() + 1)
    assert runner.run_items(items.ITEMS, session) == {"not run": 1}
    assert "the deadline came after" in (place.out / "rest.jsonl").read_text()


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ({"passed": 3}, 0),
        ({"passed": 3, "not here": 1}, 0),
        ({"passed": 3, "not run": 1}, 3),
        ({"not run": 1, "failed": 1}, 1),
        ({"too slow": 1}, 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_outcome(outcomes: dict[str, int], code: int) -> None:
    assert runner.choose_exit_code(Counter(outcomes)) == code


def make_kernel(name: str, begin: float, end: float, correlation: int = 0) -> traces.Event:
    return {
        "cat": "kernel",
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": {"correlation": correlation},
    }


def test_communication_is_exposed_where_no_other_kernel_runs() -> None:
    events = [
        make_kernel("ncclDevKernel_AllGather", 0, 1000),
        make_kernel("ncclDevKernel_Reduce", 900, 2000),
        make_kernel("gemm", 500, 800),
        make_kernel("triton_add", 700, 1500),
        make_kernel("gemm", 3000, 4000),
        {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 9000},
    ]
    assert traces.measure_communication(events) == (2.0, 1.0)
    assert traces.measure_communication([make_kernel("gemm", 0, 10)]) == (0.0, 0.0)


def test_only_kernels_launched_within_a_range_are_found() -> None:
    def launch(at: float, correlation: int) -> traces.Event:
        return {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": at,
            "dur": 1,
            "args": {"correlation": correlation},
        }

    events = [
        {"cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 10, "dur": 10},
        launch(5, 1),
        launch(12, 2),
        launch(25, 3),
        make_kernel("before", 6, 7, 1),
        make_kernel("within", 30, 31, 2),
        make_kernel("after", 40, 41, 3),
    ]
    kernels = traces.find_launched_kernels(events, "Optimizer.step")
    assert [event["name"] for event in kernels] == ["within"]
    assert traces.find_slowest(events, 1) == {"before": 0.001}
    parts = traces.sum_by_part(events)
    assert parts["update"] == 0.001 and parts["rest"] == 0.002


def test_each_kernel_counts_for_the_part_of_a_step_that_launched_it() -> None:
    names = {
        "aten::_scaled_mm": "nvjet_qqtst",
        "aten::mm": "nvjet_tst",
        "aten::_cudnn_attention_backward": "cudnn_sdpa_bprop",
        "Optimizer.step#AdamW.step": "multi_tensor_apply",
        "FSDP::post_backward_reduce": "chunk_cat",
        "compiled": "triton_red_fused_abs_max_0",
        "compiled again": "triton_poi_fused__to_copy_clamp_mul_silu_3",
        "anything": "triton_poi_fused_mul_silu_4",
    }
    events = []
    for number, (operation, kernel) in enumerate(names.items()):
        at = 100 * number
        launch = {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": at + 5, "dur": 1}
        events += [
            {"cat": "cpu_op", "name": operation, "ts": at, "dur": 50},
            launch | {"args": {"correlation": number}},
            make_kernel(kernel, at, at + 1000 * (number + 1), number),
        ]
    assert traces.sum_by_part(events) == {
        "products in 8 bits": 1,
        "products in 16 bits": 2,
        "attention": 3,
        "update": 4,
        "FSDP": 5,
        traces.CASTS: 6 + 7,
        "rest": 8,
    }


def test_the_profile_of_fp8_names_what_costs_most() -> None:
    bf16 = {
        "products in 8 bits": 0.0,
        "products in 16 bits": 300.0,
        "attention": 60.0,
        "update": 30.0,
        "FSDP": 25.0,
        traces.CASTS: 0.0,
        "rest": 35.0,
    }
    fp8 = bf16 | {"products in 8 bits": 130.0, "products in 16 bits": 60.0, traces.CASTS: 40.0}
    gain = float8.explain_gain(bf16, fp8)
    assert gain["bf16 ÷ fp8"] == pytest.approx(450 / 380)
    assert gain[f"without {traces.CASTS}"] == pytest.approx(450 / 340)
    assert gain["without slow products in 8 bits"] == pytest.approx(450 / 370)
    limit = float8.gain_limit(bf16, fp8)
    assert limit.startswith(f"{traces.CASTS} (40.0 ms)") and "1.36 × bf16" in limit
    assert "attention" in float8.gain_limit(bf16, fp8 | {"attention": 160.0})


def test_the_profile_of_the_host_names_functions_and_operations() -> None:
    def step(ids: torch.Tensor) -> None:
        for _ in range(200):
            torch.sort(ids.float() @ ids.float())

    profile = eight_ranks.profile_host(step, torch.ones(64, 64))
    assert any("sort" in name for name in profile["python_ms"])
    assert "aten::sort" in profile["operations_ms"] and "aten::mm" in profile["operations_ms"]
    assert len(profile["operations_ms"]) <= eight_ranks._SHOWN


def test_a_trainer_that_cannot_run_is_named_with_its_reason(place: Place) -> None:
    (place.kit / ".cache/tokens/data-chat-0a").mkdir(parents=True)
    (place.kit / ".cache/tokens/data-0a").mkdir()
    place.earlier = {"8b-wide_2x8192_compile_on": {"run": {"perf/tokens_per_sec_per_device": 90.0}}}
    assert peers._find_store(place.kit, "data").name == "data-0a"
    with pytest.raises(NotHere, match=r"torchtitan, compiled could not"):
        peers.compare(place, {"8b-wide": ("torchtitan, compiled",)})
    figures = place.figures["8b-wide"]
    assert figures["tokens/s"] == {"stage 04": 90.0} and not figures["stage 04 ÷"]
    with pytest.raises(RuntimeError, match="no adapters"):
        peers.run_peer(place, "x", peers.SETTINGS["adapters"], "torchtitan, compiled", place.work)


def test_ratios_compare_the_steps_after_the_warm_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = speed.WARMUP_STEPS
    steps = [9.0 if number < warm_up else 2.0 for number in range(3 * warm_up)]
    (place.work / "result.json").write_text(f'{{"seconds": {steps}, "memory_mb": 2048}}')
    trainer = peers.read_trainer_rate(place.work, "", 100)
    assert trainer == {"tokens/s": 50.0, "peak_gib": 2.0}
    log = "\n".join(
        f"[titan] step: {step:2}  loss:  7.5  memory: 67.46GiB(48.26%)  tps: {rate}  mfu: 49.43%"
        for step, rate in ((1, "80"), (5, "2,000"), (10, "35,604"), (15, "36,250"), (20, "35,777"))
    )
    assert peers.read_titan_rate(place.work, log, 100) == {"tokens/s": 35777, "peak_gib": 67.46}
    rates = {"Trainer, compiled": 50.0, "torchtitan, compiled": 100.0}
    monkeypatch.setattr(peers, "_measure_ours", lambda *_: 98.0)
    monkeypatch.setattr(peers, "run_peer", lambda place, name, setting, peer, _: rates[peer])
    peers.compare(place, {"1b": tuple(rates)})
    ratios = place.figures["1b"]["stage 04 ÷"]
    assert ratios == {"Trainer, compiled": 1.96, "torchtitan, compiled": 0.98}
    assert "torchtitan, compiled 0.98" in place.figures["in_one_line"]


def test_figures_of_an_earlier_item_are_used_again(place: Place) -> None:
    place.earlier = {"one": {"run": {"perf/tokens_per_sec_per_device": 7.0}}}
    figures = speed.measure_or_reuse(place, ("one", "run"), "again")
    assert figures["perf/tokens_per_sec_per_device"] == 7.0
    assert place.figures["again"]["measured by"] == "one"
    with pytest.raises(TypeError):  # it would run, and lacks the model
        speed.measure_or_reuse(place, ("other", "run"), "again")


def test_torchtitan_gets_the_sizes_of_a_config() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    sizes = torchtitan_trainer.convert_sizes(config, packed=True)
    hidden = int(sizes["ffn_dim_multiplier"] * int(8 * 4096 / 3))  # as torchtitan computes it
    multiple = sizes["multiple_of"]
    assert multiple * -(-hidden // multiple) == 14_336
    assert sizes["attn_mask_type"] == "block_causal"
    tied = config | {"tie_word_embeddings": True, "hidden_size": 2048, "intermediate_size": 8192}
    assert torchtitan_trainer.choose_family(tied) == "qwen3"
    assert torchtitan_trainer.convert_sizes(tied, packed=False)["qk_norm"] is False


@pytest.mark.parametrize(
    ("ratio", "compiled", "near"),
    [
        (0.89, False, False),
        (1.09, False, True),
        (1.11, False, False),
        (0.89, True, False),
        (0.91, True, True),
        (1.14, True, True),
        (1.16, True, False),
    ],
)
def test_the_estimate_of_a_compiled_run_is_bounded_too(
    place: Place, ratio: float, compiled: bool, near: bool
) -> None:
    place.device = "cuda"
    assert memory.is_estimate_near(place, ratio, compiled) == near


def test_four_ranks_are_also_sharded_in_pairs() -> None:
    assert [*several.sharding_options(2).values()] == [(), ("--shard-size", 1)]
    assert ("--shard-size", 2) in several.sharding_options(4).values()


def test_two_and_four_ranks_share_rows_by_both_methods() -> None:
    assert [*context.sharing_options(2)] == ["ulysses-over-2", "allgather-over-2"]
    assert len(context.sharing_options(8)) == 4
    words = context.sharing_options(4)["allgather-over-4"]
    assert words == ("--context-parallel", 4, "--context-parallel-method", "allgather")


@pytest.mark.parametrize(("part", "difference"), [("loss", 2e-4), ("grad_norm", 2e-3)])
def test_runs_that_differ_from_whole_rows_are_an_error(
    place: Place, part: str, difference: float
) -> None:
    row = {"step": 1, "train/loss": 2.0, "train/grad_norm": 0.5}
    other = row | {f"train/{part}": row[f"train/{part}"] * (1 + difference)}
    whole, same, different = (
        SimpleNamespace(rows=[row, one | {"step": 2}]) for one in (row, row, other)
    )
    context.compare_runs(place, "same", same, whole, 1e-4)
    with pytest.raises(AssertionError, match="different"):
        context.compare_runs(place, "different", different, whole, 1e-4)
    assert max(place.figures["different"].values()) == pytest.approx(difference)


def test_the_speed_of_an_exchange_counts_all_to_all_alone(place: Place) -> None:
    events = [
        make_kernel("ncclDevKernel_AllGather_RING_LL", 0, 9000),
        make_kernel("ncclDevKernel_SendRecv", 9000, 11_000),
        make_kernel("gemm", 0, 9000),
    ]
    assert context.sum_exchanges(events) == 2
    # By hand: 32 heads of queries and outputs, 8 of keys and values, 128 wide, in 8 layers.
    numbers = 16_384 * 128 * (2 * 32 + 2 * 8) // 2
    directory = place.kit / "models/8b-wide"
    assert context.count_sent_bytes(directory, 2, 32_768) == 8 * 2 * 2 * numbers


def test_phases_of_a_start_are_read_from_the_log() -> None:
    log = """2026-11-28 12:25:03,188 INFO model: m, 1B parameters; loading torch and transformers
2026-11-28 12:25:14,440 INFO tokens: .cache/tokens/x, 400,400 for training
2026-11-28 12:25:15,385 INFO sharded: 8 × LlamaDecoderLayer
2026-11-28 12:25:16,070 INFO weights: 1B parameters read
2026-11-28 12:25:17,220 INFO loss: logits are computed in chunks
2026-11-28 12:25:31,331 INFO [rank=0] step 1/2  loss 8.611
2026-11-28 12:25:35,947 INFO [rank=0] step 2/2  loss 7.811
"""
    phases = speed.find_phases(log)
    assert list(phases.values()) == pytest.approx([11.252, 0.945, 0.685, 1.15, 14.111])
    assert list(phases)[-1] == "first step"
