#!/usr/bin/env python3
"""Show the result of a run, and let its exported model write a few lines.

  python tests/demo/show_result.py outputs/exp --model outputs/exp/export/step_00001000

This needs only transformers, and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.runs import run_files
from launch.runs.run_files import RunFiles
from lib.core import options, paths, stage
from lib.core.errors import UsageError
from lib.core.run_records import mean_loss

PROMPTS = ["The", "Once upon a time"]
_NO_REPEAT = 6  # a text contains no sequence of so many tokens twice; small models repeat


def main(argv: list[str]) -> None:
    """Print the losses of a run and texts of its model."""
    parser = options.Parser(__doc__)
    run_files.add_experiment(parser)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="directory written by stage 05"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"beginning of a text; may be repeated (default: {' and '.join(map(repr, PROMPTS))})",
    )
    parser.add_argument(
        "--question",
        action="append",
        default=[],
        metavar="TEXT",
        help="question of a user, answered with the chat template instead; may "
        "be repeated (default: none)",
    )
    parser.add_argument(
        "--tokens",
        type=options.positive_int,
        default=60,
        metavar="N",
        help="tokens to generate per prompt",
    )
    arguments = parser.parse(argv)
    experiment = paths.existing_experiment(arguments.experiment)
    run = RunFiles(experiment.root)
    run.update()
    if not run.rows:
        raise UsageError(f"there is no run {experiment.root}", found=f"no {experiment.metrics}")
    first = run.rows[0]
    last = run.rows[-1]
    print(
        f"\ntraining loss    {first['train/loss']:.3f} at step {first['step']} → "
        f"{mean_loss(last):.3f} at step {last['step']} (mean since the previous row)"
    )
    if run.evaluations:
        first = run.evaluations[0]
        last = run.evaluations[-1]
        print(
            f"validation loss  {first['eval/loss']:.3f} at step {first['step']} → "
            f"{last['eval/loss']:.3f} at step {last['step']}"
        )
    if experiment.plot.is_file():  # not without matplotlib
        print(f"plot             {experiment.plot}")
    if arguments.question:
        show_answers(arguments.model, arguments.question, arguments.tokens)
    else:
        show_texts(arguments.model, arguments.prompt or PROMPTS, arguments.tokens)
    if experiment.report.is_file():
        print(f"\n--- what the run did: {experiment.report}, for any browser")


def show_texts(model_dir: Path, prompts: list[str], tokens: int) -> None:
    """Print each prompt with its continuation, and how to go on."""
    for prompt, text in generate_texts(model_dir, prompts, tokens):
        print(f"\n--- {prompt!r} continued by {model_dir} (transformers)\n{text}")
    print("""
--- your own data
python 01_organize_data.py --src-dir <your files> --dst-root splits
python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/corpus \\
    --validation-percent 1
python 03_download_model.py --model-name <org>/<name>       # or --from-scratch as above
torchrun --nproc-per-node <GPUs> 04_train_fsdp.py -e exp -d hf_datasets/corpus
python 05_export_checkpoint.py -e exp""")


def generate_texts(model_dir: Path, prompts: list[str], tokens: int) -> list[tuple[str, str]]:
    """Return each prompt with its sampled continuation (fixed seed)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False)
    torch.manual_seed(0)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=True,
            top_p=0.8,
            temperature=0.6,
            no_repeat_ngram_size=_NO_REPEAT,
            pad_token_id=tokenizer.eos_token_id,
        )
        texts.append((prompt, tokenizer.decode(ids[0], skip_special_tokens=True)))
    return texts


def show_answers(model_dir: Path, questions: list[str], tokens: int) -> None:
    """Print what the model answers to each question, and whether it ends by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False)
    for question in questions:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )[0, inputs["input_ids"].shape[1] :]
        cut = "" if int(ids[-1]) in model.generation_config.eos_token_id else " … (cut)"
        print(f"\n--- {question}\n{tokenizer.decode(ids, skip_special_tokens=True)}{cut}")


if __name__ == "__main__":
    stage.run_main(main)
