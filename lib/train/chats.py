"""What the options say about chat datasets: their template, their packing, and where they do not
belong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lib.core import declared
from lib.core.errors import Problems
from lib.tokens.chat import policy as chat_policy
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.columns import CHAT
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.mixture import Corpus
from lib.train.config import DEFAULTS, Config

_OPTIONS = ("chat_template", "train_on", "too_long")


def find_template(config: Config, model_dir: Path, corpora: Sequence[Corpus]) -> str:
    """Return the source of the template that conversations are rendered by, "" without any.

    Raises UsageError where there is none, or where options of chat datasets are given without one.
    """
    if _have_chats(corpora):
        return chat_policy.find(model_dir, config.chat_template)
    problems = Problems()
    for name in _OPTIONS:
        if getattr(config, name) != getattr(DEFAULTS, name):
            problems.add(f"{declared.flag(name)} belongs to chat datasets, and there is none",
                         found=", ".join(config.dataset_name),
                         expected="-d with a dataset that stage 02 has made with --format chat")
    problems.raise_if_any()
    return ""


def settle_packing(config: Config, corpora: Sequence[Corpus]) -> Config:
    """Return the options with --packing as the datasets want it, where it is not given."""
    if config.packing is not None:
        return config
    if _have_chats(corpora):
        return config.settled("a chat dataset", packing="documents")
    return replace(config, packing="concat")


def policy(config: Config, source: str, dataset: Dataset) -> ChatPolicy | None:
    """Return how the conversations of a dataset become samples, None of one of text.

    source: of the template.
    """
    if dataset.format != CHAT:
        return None
    return ChatPolicy(source, config.train_on, config.too_long, config.seq_length)


def template_to_keep(source: str, model_dir: Path) -> str:
    """Return a template that writes BOS itself where samples got it from the tokenizer.

    Who renders a conversation for the model tells the tokenizer to add nothing, as with any other
    template: the text must begin there as it began in training.
    """
    from lib.tokens.chat import sandbox, template  # which takes time to import
    tokenizer = (encoder := Encoder(model_dir, 1)).tokenizer
    if encoder.bos is None:
        return source
    made = template.Template(source, tokenizer.special_tokens_map)
    with suppress(sandbox.TemplateError), sandbox.limited() as begin:  # unless it takes none such
        begin()
        if made.render([{"role": "user", "content": "a"}]).text.startswith(tokenizer.bos_token):
            return source
        return "{{- bos_token }}" + source
    return source if "bos_token" in source else "{{- bos_token }}" + source


def _have_chats(corpora: Sequence[Corpus]) -> bool:
    return any(corpus.dataset.format == CHAT for corpus in corpora)
