"""Let a model continue prompts or answer questions, without a network.

  python -m lib.generate outputs/exp --prompt 'Once upon a time'
  python -m lib.generate outputs/exp/export/final --prompt 'What is a tensor?' --temperature 0.7
  echo 'def main(' | python -m lib.generate org/name --chat off

A model is a directory with config, safetensors weights and tokenizer, or the name of a model that
stage 03 has prepared. A run stands for its newest checkpoint. A model with a chat template answers
each prompt as the question of a user; a run on plain text continues it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lib.core import log, options, stage
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.evaluate.model_options import add_model_options

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lib.evaluate.open_model import EvaluatedModel
    from lib.tokens.prompts import Prompt

_TOKENS = 200


def main(argv: list[str]) -> None:
    """Load the model, and print what it writes after each prompt."""
    opts = parse(argv)
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise UsageError(
            f"lib.generate runs as one process, not as {processes}",
            hint="run it without torchrun; --device cpu serves a model that no GPU can hold",
        )
    typed = None if opts.prompt else sys.stdin.buffer.read().decode("utf-8", "replace")
    texts = opts.prompt or [(typed or "").removesuffix("\n")]
    if not any(text.strip() for text in texts):
        raise UsageError("there is no prompt", hint="--prompt TEXT, or text on standard input")

    from lib.evaluate import open_model

    source = open_model.find_evaluated_model(opts.model, opts.cache_dir, opts.step, opts.model_name)

    import torch
    from transformers import logging

    from lib.models.architecture import read_config
    from lib.models.tokenizer import load_tokenizer
    from lib.parallel import gpus
    from lib.parallel.layout import ParallelLayout

    logging.set_verbosity_error()
    # The tokenizer comes first, since loading the weights may take minutes.
    tokenizer = load_tokenizer(source.directory)
    config = read_config(source.directory, opts.trust_remote_code).get_text_config()
    context_length = open_model.choose_context_length(config, None)
    prompts = encode_texts(opts, source, texts, context_length)
    gpus.hide_gpus(opts.device)
    with ParallelLayout.start() as layout:
        precision = opts.precision or open_model.choose_precision(layout)
        model = open_model.load_model(source, precision, layout, opts.trust_remote_code)
        settings = make_settings(opts, source, model, tokenizer)
        for text, prompt in zip(texts, prompts, strict=True):
            settings.max_new_tokens = min(opts.max_new_tokens, context_length - len(prompt.ids))
            torch.manual_seed(opts.seed)
            print_continuation(model, tokenizer, settings, text, prompt)


def parse(argv: Sequence[str]) -> Options:
    """Return the options of the command line."""
    parser = options.Parser(__doc__, "MODEL_OR_RUN [options]")
    add_model_options(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue, or question to answer; may be repeated (default: standard input)",
    )
    parser.add_argument(
        "--chat",
        choices=("auto", "on", "off"),
        default="auto",
        help="answer prompts with the chat template; auto: if the model has one and the run, if it "
        "is one, was trained on conversations",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message before each question (default: none)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=options.positive_int,
        default=_TOKENS,
        metavar="N",
        help="the most tokens to write per prompt",
    )
    parser.add_argument(
        "--temperature",
        type=options.non_negative,
        default=0.0,
        metavar="T",
        help="0 takes the most likely token; other values draw tokens, 1 as the model predicts "
        "them",
    )
    parser.add_argument(
        "--top-p",
        type=options.fraction,
        default=1.0,
        metavar="F",
        help="draw from the most likely tokens that have this probability together",
    )
    parser.add_argument(
        "--seed", type=options.seed, default=0, metavar="N", help="seed of the drawn tokens"
    )
    return parser.parse(argv)


def encode_texts(
    opts: Options, source: EvaluatedModel, texts: Sequence[str], context_length: int
) -> list[Prompt]:
    """Return prompts as token IDs. Raises UsageError if one is empty or too long."""
    from lib.tokens.chat.policy import has_template
    from lib.tokens.prompts import RawPrompt, encode_prompts

    is_chat = opts.chat == "on" or (
        opts.chat == "auto" and source.answers_questions and has_template(source.directory)
    )
    if opts.system is not None and not is_chat:
        raise UsageError(
            "--system needs a chat template",
            found="prompts that are continued as plain text",
            hint="--chat on answers them as questions, if the model has a chat template",
        )
    prompts = []
    for number, text in enumerate(texts, 1):
        messages = [{"role": "system", "content": opts.system}] if opts.system else []
        messages.append({"role": "user", "content": text.rstrip("\n")})
        prompts.append(RawPrompt(f"prompt {number}", text, messages if is_chat else None))
    return encode_prompts(
        prompts, source.directory, "", context_length, 1, source.template_variables
    )


def make_settings(
    opts: Options,
    source: EvaluatedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> GenerationConfig:
    """Return the settings of transformers' `generate`, with every token that ends a text."""
    from transformers import GenerationConfig

    ends: set[int] = set()
    try:
        saved = GenerationConfig.from_pretrained(source.directory, local_files_only=True)
    except OSError:
        saved = model.generation_config
    for token in (saved.eos_token_id, tokenizer.eos_token_id):
        ends |= set(token) if isinstance(token, list) else {token} - {None}
    sampling: dict[str, Any] = {"do_sample": False}
    if opts.temperature:
        sampling = {"do_sample": True, "temperature": opts.temperature, "top_p": opts.top_p}
        sampling["top_k"] = 0  # transformers would draw from 50 tokens
    return GenerationConfig(
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
        use_cache=True,
        **sampling,
    )


def print_continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationConfig,
    text: str,
    prompt: Prompt,
) -> None:
    """Print a prompt and, token by token, what the model writes after it."""
    import torch
    from transformers import TextStreamer

    # A rendered question is full of markup. The streamer prints a text together with its
    # continuation, since some tokenizers decode a space only between two tokens.
    is_question = prompt.text != text
    print(f"\n--- {text.strip()}" if is_question else "")
    ids = torch.tensor([prompt.ids], device=model.device)
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            streamer=TextStreamer(tokenizer, skip_prompt=is_question, skip_special_tokens=True),
        )
    new_tokens = output.shape[1] - ids.shape[1]
    if new_tokens == settings.max_new_tokens and output[0, -1] not in (settings.eos_token_id or []):
        log.info(f"(cut after {new_tokens:,} tokens)")


if __name__ == "__main__":
    sys.argv[0] = "lib.generate"
    stage.run_main(main, only_shows=True)
