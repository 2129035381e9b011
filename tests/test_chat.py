# covers: 02_build_hf_dataset.py, 04_train_fsdp.py, 05_export_checkpoint.py
"""From conversations to an exported model that answers, and ends its answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lib.models.tokenizer import BOS, EOS, PAD
from lib.tokens.encode import Encoder
from tests.conftest import run_stage

ANIMALS = ("heron", "otter", "lynx", "toad", "wren", "mole", "ibex", "carp", "newt", "stoat")
PLACES = (
    "in the reeds",
    "by a stream",
    "on the ridge",
    "under a stone",
    "in the hedge",
    "below the lawn",
    "above the trees",
    "in the pond",
    "near the spring",
    "in a wall",
)


def ask_about(animal: str) -> str:
    return f"Where does the {animal} live?"


@pytest.mark.slow
def test_an_export_gives_the_trained_answer_and_stops(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "animals.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": ask_about(animal)},
                        {"role": "assistant", "content": f"The {animal} lives {place}."},
                    ]
                }
            )
            + "\n"
            for animal, place in zip(ANIMALS, PLACES, strict=True)
        )
    )
    run_stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        "raw",
        "--save-dir",
        "chat",
        "--format",
        "chat",
        cwd=tmp_path,
    )
    words = [
        "-e",
        "run",
        "-d",
        "chat",
        "--from-scratch",
        "--model-size",
        "1M",
        "--seq-length",
        "64",
    ]
    shown = run_stage("04_train_fsdp.py", *words, "--prepare-only", cwd=tmp_path)
    assert "⟦The heron lives in the reeds.<|im_end|>⟧\n" in shown.stdout
    assert f"<|im_start|>user\n{ask_about('mole')}<|im_end|>\n" in shown.stdout
    assert re.search(r"stop token.*100 %", shown.stdout)

    run_stage(
        "04_train_fsdp.py",
        *words,
        "--max-steps",
        "200",
        "-b",
        "5",
        "--lr",
        "5e-3",
        "--warmup-steps",
        "10",
        "--precision",
        "fp32",
        cwd=tmp_path,
    )
    run_stage("05_export_checkpoint.py", "-e", "run", "--out", "out", cwd=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [stop, tokenizer.eos_token_id]
    assert_other_programs_can_read(tmp_path / "out", [stop, tokenizer.eos_token_id])
    for animal, place in zip(ANIMALS, PLACES, strict=True):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask_about(animal)}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
        answer = ids[inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == f"The {animal} lives {place}.<|im_end|>"


def assert_other_programs_can_read(out: Path, stops: list[int]) -> None:
    """Check what programs look for that read config.json and tokenizer_config.json alone."""
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == stops and config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None and config["torch_dtype"] == config["dtype"] == "bfloat16"
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (out / "chat_template.jinja").read_text()
    encoder = Encoder(out, 1)  # as stage 04 -m out: a document ends as before, not with the turn
    assert encoder.tokenizer.convert_ids_to_tokens([encoder.bos, encoder.eos]) == [BOS, EOS]
    assert encoder.tokenizer.pad_token == PAD
