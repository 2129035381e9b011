"""Continue the prompts of `--sample-prompts` while a run trains, and record the samples.

    samples.jsonl    an object per sample: step, tokens_seen, prompt_index, prompt, kind (greedy or
                     drawn), text, tokens, ended

Like metrics.jsonl, the file is appended to, and rows after the step from which a run continues are
dropped. JSON escapes all control characters, so the file is safe to print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from lib.core import units
from lib.core.paths import Experiment
from lib.parallel import generation
from lib.parallel.layout import ParallelLayout, gather
from lib.runs.row_writer import RowFile
from lib.tokens import readable
from lib.tokens.encode import Encoder
from lib.tokens.prompts import Prompt
from lib.train import estimates
from lib.train.config import Config
from lib.train.data import SAMPLE_TOKENS, Data
from lib.train.estimates import Hardware, ModelCost
from lib.train.plan import Plan

GREEDY, DRAWN = KINDS = ("greedy", "drawn")
_SHOWN = 60  # characters of a text in a line of the log


class PromptSample(NamedTuple):
    """A continuation of a prompt, see the fields of samples.jsonl.

    tokens: number of tokens of the text. ended: the model ended the text or its turn.
    """

    prompt_index: int
    prompt: str
    kind: str
    text: str
    tokens: int
    ended: bool


def describe_cost(
    config: Config, encoded: Sequence[Prompt], cost: ModelCost, hardware: Hardware
) -> str:
    """Return what samples cost each time: forward passes, seconds, and bytes to gather."""
    rows = 2 * len(encoded)
    length = _choose_length(config, encoded)
    every = config.eval_freq
    when = f"every {every:,} steps and at the end" if every else "at the end"
    seconds = estimates.estimate_forward_seconds(SAMPLE_TOKENS * rows * length, cost, hardware)
    shards = min(config.shard_size or hardware.ranks, hardware.ranks)
    weight = 4 if config.precision == "fp32" else 2
    gathered = SAMPLE_TOKENS * cost.parameters * weight * (1 - 1 / shards)
    return (
        f"{when}: {units.counted(SAMPLE_TOKENS, 'forward pass')} over {rows} × {length:,} "
        f"tokens ({units.counted(len(encoded), 'prompt')}, each once greedy and once drawn)"
        + ("" if seconds is None else f", {units.duration(seconds)} of computing by the estimate")
        + (f"; each rank receives {units.size(gathered)} of weights" if shards > 1 else "")
    )


def _choose_length(config: Config, encoded: Sequence[Prompt]) -> int:
    ids = [prompt.ids for prompt in encoded]
    return generation.choose_length(ids, SAMPLE_TOKENS, config.seq_length)


class Sampling:
    """Makes the samples of a run. All ranks must create it.

    data: contains the prompts, of which those of rank 0 are used, and the tokens that end answers.
    """

    def __init__(self, data: Data, model_dir: Path, plan: Plan, layout: ParallelLayout) -> None:
        self._prompts = gather(data.prompts, layout.control)[0]
        self._stops = set(data.stops)
        self._model_dir = model_dir
        self._plan = plan
        self._layout = layout

    def is_due(self, step: int) -> bool:
        """Return whether samples are made after a step."""
        return bool(self._prompts) and self._plan.is_evaluated(step)

    def make_samples(
        self, model: PreTrainedModel, advance: Callable[[], object] = lambda: None
    ) -> list[PromptSample]:
        """Return the samples of all prompts on rank 0, [] on other ranks.

        All ranks must call this. advance: called after each forward pass. The drawn samples use the
        same random numbers at each step, so differences between steps come from the model.
        """
        config = self._plan.config
        uniforms = [
            np.random.default_rng([config.seed, index]).random(SAMPLE_TOKENS)
            for index in range(len(self._prompts))
        ]
        continuations = generation.continue_prompts(
            model,
            self._layout,
            [prompt.ids for prompt in self._prompts],
            np.stack(uniforms),
            _choose_length(config, self._prompts),
            config.packing == "documents",
            advance,
        )
        if self._layout.rank:
            return []
        return [
            self._decode(index, kind, ids[index].tolist())
            for index in range(len(self._prompts))
            for kind, ids in zip(KINDS, continuations, strict=True)
        ]

    def _decode(self, index: int, kind: str, ids: list[int]) -> PromptSample:
        prompt = self._prompts[index]
        stops = self._stops | {self._tokenizer.eos_token_id}
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
        # Decode from the start: some tokenizers drop the leading space of a text decoded alone.
        before, text = (self._decode_ids(part) for part in (prompt.ids, prompt.ids + ids[:end]))
        text = text[len(before) :] if text.startswith(before) else self._decode_ids(ids[:end])
        return PromptSample(index, prompt.text, kind, text, end, end < len(ids))

    def _decode_ids(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return Encoder(self._model_dir, 1).tokenizer


class SampleFile:
    """Appends to samples.jsonl on rank 0, and drops the rows of steps that are repeated."""

    def __init__(self, experiment: Experiment, step: int, is_kept: bool) -> None:
        """Open the file. step: the step after which the run continues. is_kept: rank 0 of a run."""
        self._file = RowFile(experiment.samples)
        self._is_kept = is_kept
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drop the rows after a step."""
        if self._is_kept:
            self._file.rewind(step)

    def write(self, step: int, tokens_seen: int, samples: Iterable[PromptSample]) -> None:
        """Append samples of a step; if the disk is full, they are written with later ones."""
        for sample in samples if self._is_kept else ():
            self._file.write({"step": step, "tokens_seen": tokens_seen, **sample._asdict()})

    def close(self) -> None:
        """Write the waiting samples and close the file."""
        if self._is_kept:
            self._file.close()


def format_texts(samples: Iterable[PromptSample]) -> dict[str, str]:
    """Return the texts for TensorBoard by name, with control characters shown.

    They are code blocks of Markdown, in which no character has a meaning.
    """
    texts: dict[str, str] = {}
    for sample in samples:
        name = f"samples/prompt_{sample.prompt_index}/{sample.kind}"
        lines = [*sample.prompt.split("\n"), "→", *sample.text.split("\n")]
        texts[name] = "\n".join(f"    {readable.escape_controls(line)}" for line in lines)
    return texts


def list_texts(samples: Iterable[PromptSample]) -> list[tuple[str, str, str]]:
    """Return prompt, kind and text of each sample, with control characters shown."""
    return [
        (
            readable.escape_controls(sample.prompt),
            sample.kind,
            readable.escape_controls(sample.text),
        )
        for sample in samples
    ]


def describe_sample(sample: PromptSample) -> str:
    """Return a sample on one line for the log, with both texts shortened."""
    texts = [
        readable.escape_controls(text).replace("\n", "\\n") for text in (sample.prompt, sample.text)
    ]
    prompt = texts[0] if len(texts[0]) <= _SHOWN else f"…{texts[0][-_SHOWN:]}"
    text = texts[1] if len(texts[1]) <= _SHOWN else f"{texts[1][:_SHOWN]}…"
    return f'"{prompt}" → "{text}"'
