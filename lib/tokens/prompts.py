"""Read the prompts of `--sample-prompts`, and encode them as a run sees its text.

A text file contains one prompt per line. JSON Lines contain an object per line: {"prompt": TEXT},
or {"messages": […]} as in a chat dataset, with `tools` if needed. A prompt is text to continue; in
a run on conversations it is the question of a user. Messages are rendered with the chat template,
and end with its generation prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import reading, records
from lib.core.conversation import ROLES, Message
from lib.core.errors import Problems, StageError, UsageError
from lib.tokens.chat.policy import find_template
from lib.tokens.encode import Encoder

MOST_PROMPTS = 64
_LARGEST_FILE = 1 << 20  # bytes
_SUFFIXES = (".jsonl", ".ndjson", ".json")
_EXPECTED = 'a text file with a prompt per line, or JSON Lines with "prompt" or "messages"'


class RawPrompt(NamedTuple):
    """Contains a prompt of the file.

    place: names the prompt in errors. messages: None for a prompt of plain text. tools: the tools
    of the messages.
    """

    place: str
    text: str
    messages: list[Message] | None = None
    tools: list[Message] | None = None


class Prompt(NamedTuple):
    """A prompt as text, with the markup of its template, and as token ids."""

    text: str
    ids: list[int]


def read_prompts(path: Path) -> list[RawPrompt]:
    """Return the prompts of a file. Raises UsageError with all problems of the file."""
    try:
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise UsageError(
                f"--sample-prompts {path} is too large",
                found=f"{path.stat().st_size:,} bytes",
                expected=f"at most {MOST_PROMPTS} prompts, in at most {_LARGEST_FILE:,} bytes",
            )
        content = reading.with_retries(path.read_bytes, path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error})"
        raise UsageError(
            f"--sample-prompts {path} cannot be read",
            found=reason or str(error),
            expected=_EXPECTED,
        ) from None
    is_json = path.suffix.lower() in _SUFFIXES
    problems = Problems()
    prompts: list[RawPrompt] = []
    for number, line in enumerate(content.split("\n"), 1):
        place = f"--sample-prompts {path}, line {number}"
        if line.strip():
            parse = partial(_parse_line, line, place) if is_json else partial(RawPrompt, place)
            prompt = problems.collect(parse if is_json else partial(parse, line.rstrip("\r")))
            prompts += [prompt] if prompt else []
    problems.raise_if_any()
    if not prompts or len(prompts) > MOST_PROMPTS:
        raise UsageError(
            f"--sample-prompts {path} contains {len(prompts)} prompts",
            expected=f"1 to {MOST_PROMPTS} prompts: {_EXPECTED}",
        )
    return prompts


def _parse_line(line: str, place: str) -> RawPrompt:
    """Return the prompt in a line of JSON. Raises UsageError if it contains none."""
    try:
        record = records.parse_json(line)
    except ValueError as error:
        raise UsageError(
            f"{place} is not JSON", found=str(error), expected='{"prompt": "…"}'
        ) from None
    kinds = {"prompt", "messages"} & record.keys() if isinstance(record, dict) else set()
    if kinds == {"prompt"} and isinstance(record["prompt"], str):
        return RawPrompt(place, record["prompt"])
    problem = "neither a prompt nor messages"
    if kinds == {"messages"}:
        problem = _find_problem(record["messages"], record.get("tools"))
        if not problem:
            return RawPrompt(place, "", record["messages"], record.get("tools"))
    elif kinds == {"prompt"}:
        problem = "`prompt` is not a string"
    elif kinds:
        problem = "both a prompt and messages"
    raise UsageError(
        f"{place} cannot be used",
        found=problem,
        expected='{"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}',
    )


def _find_problem(messages: Any, tools: Any) -> str:
    """Return what is wrong with the messages of a prompt, "" if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "`messages` is not a list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {number} has no role of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"the content of message {number} is not a string"
    if messages[-1]["role"] == "assistant":
        return "the last message is an answer; the model writes the answer"
    is_list = tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools))
    return "" if is_list else "`tools` is not a list of objects"


def encode_prompts(
    raw: Sequence[RawPrompt],
    model_dir: Path,
    template: str,
    longest: int,
    sampled: int,
    variables: str = "",
) -> list[Prompt]:
    """Return prompts as token ids, with a BOS if the tokenizer adds one.

    template: the source of the run's chat template; "" for a run on text, whose messages are
    rendered with the model's template. longest, sampled: tokens of a sample in training, and tokens
    to draw, which must fit in it. variables: further variables of the template, as JSON. Raises
    UsageError with all problems.
    """
    if template:
        raw = [
            prompt._replace(messages=prompt.messages or [{"role": "user", "content": prompt.text}])
            for prompt in raw
        ]
    elif any(prompt.messages for prompt in raw):
        template = _find_template_of_model(model_dir)
    encoders = {is_chat: Encoder(model_dir, 1) for is_chat in {bool(p.messages) for p in raw}}
    if True in encoders:
        encoders[True].read_special_tokens()
    problems = Problems()
    prompts = []
    for prompt in raw:
        encoder = encoders[bool(prompt.messages)]
        encoded = problems.collect(partial(_encode_prompt, encoder, prompt, template, variables))
        if encoded is None:
            continue
        prompts.append(encoded)
        if len(encoded.ids) + sampled > longest:
            problems.add(
                f"{prompt.place} is too long",
                found=f"{len(encoded.ids):,} tokens, and {sampled:,} tokens to write",
                expected=f"at most {longest:,} tokens together",
            )
    problems.raise_if_any()
    return prompts


def _find_template_of_model(model_dir: Path) -> str:
    """Return the chat template of a model. Raises UsageError if it has none."""
    try:
        return find_template(model_dir, None)
    except UsageError:
        raise UsageError(
            "the prompts are messages, which need a chat template",
            found=f"the model in {model_dir} has none",
            expected="prompts of text, a model with a chat template, or a run on conversations",
        ) from None


def _encode_prompt(encoder: Encoder, prompt: RawPrompt, template: str, variables: str) -> Prompt:
    text = prompt.text
    if prompt.messages is not None:
        text = _render_prompt(encoder, prompt, template, variables)
    ids = encoder.encode_bare([text.encode("utf-8", "replace")])[0].tolist()
    if encoder.bos is not None and ids[:1] != [encoder.bos]:
        ids = [encoder.bos, *ids]
    if not ids:
        raise UsageError(
            f"{prompt.place} is empty",
            expected="at least one token: the tokenizer adds no BOS to begin with",
        )
    return Prompt(text, ids)


def _render_prompt(encoder: Encoder, prompt: RawPrompt, template: str, variables: str) -> str:
    """Return messages as text that ends with the generation prompt of a chat template."""
    from lib.tokens.chat import render

    try:
        with render.limit_rendering() as restart:
            restart()
            written = render.Template(template, encoder.tokenizer.special_tokens_map)
            values = json.loads(variables or "{}")
            return written.render(prompt.messages or [], prompt.tools, True, values).text
    except (render.TemplateError, MemoryError) as error:
        raise UsageError(
            f"{prompt.place} cannot be rendered by the chat template",
            found=str(error) or "it exceeded the memory limit",
        ) from None
    except StageError as error:
        raise UsageError(f"{prompt.place} cannot be rendered", found=error.render()) from None
