"""What the options say about chat datasets: their template, their packing, and where they do not
belong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lib.core import declared, hashing, log
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import Problems, StageError
from lib.tokens.chat import policy as chat_policy
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.columns import CHAT
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.mixture import Corpus
from lib.train.config import DEFAULTS, Config

_OPTIONS = ("chat_template", "train_on", "too_long")
_WITH_BOS = "{{- bos_token }}"


class KeptTemplate(NamedTuple):
    """The template of a run. text: as `path` holds it. source: as the run was begun with."""

    path: Path
    text: str
    source: str


def find_template(
    config: Config, model_dir: Path, corpora: Sequence[Corpus], begun: KeptTemplate | None = None
) -> str:
    """Return the source of the template that conversations are rendered by, "" without any.

    begun: that of the run, which stays where no --chat-template names another.
    Raises UsageError where there is none, or where options of chat datasets are given without one.
    """
    if _have_chats(corpora):
        return _find_for_chats(config, model_dir, begun)
    problems = Problems()
    for name in _OPTIONS:
        if getattr(config, name) != getattr(DEFAULTS, name):
            problems.add(
                f"{declared.flag(name)} belongs to chat datasets, and there is none",
                found=", ".join(config.dataset_name),
                expected="-d with a dataset that stage 02 has made with --format chat",
            )
    problems.raise_if_any()
    return ""


def kept_template(directories: Sequence[Path], fingerprint: str | None) -> KeptTemplate | None:
    """Return the template that a run was begun with, None where its text cannot be told any more.

    directories: where a run keeps the files of its model. fingerprint: of the text that it was
    begun with, which `template_to_keep` may have changed.
    """
    for directory in directories if fingerprint else ():
        path = directory / CHAT_TEMPLATE
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8")
            for source in (text, text.removeprefix(_WITH_BOS)):
                if hashing.fingerprint(source) == fingerprint:
                    return KeptTemplate(path, text, source)
    return None


def _find_for_chats(config: Config, model_dir: Path, begun: KeptTemplate | None) -> str:
    if begun is None:
        return chat_policy.find_template(model_dir, config.chat_template)
    if config.chat_template:
        given = chat_policy.find_template(model_dir, config.chat_template)
        return begun.source if given == begun.text else given
    try:
        is_another = chat_policy.find_template(model_dir, None) != begun.source
    except StageError:  # the model has none, or none that can be read
        is_another = True
    if is_another:
        log.info(
            f"chat template: {begun.path}, with which the run was begun; {model_dir} has "
            "another one now, or none"
        )
    return begun.source


def settle_packing(config: Config, corpora: Sequence[Corpus]) -> Config:
    """Return the options with --packing as the datasets want it, where it is not given."""
    if config.packing is not None:
        return config
    if _have_chats(corpora):
        return config.with_values("a chat dataset", packing="documents")
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
    from lib.tokens.chat import render  # takes time to import

    tokenizer = (encoder := Encoder(model_dir, 1)).tokenizer
    if encoder.bos is None:
        return source
    template = render.Template(source, tokenizer.special_tokens_map)
    # A template may refuse these messages.
    with suppress(render.TemplateError), render.limit_rendering() as restart:
        restart()
        if template.render([{"role": "user", "content": "a"}]).text.startswith(tokenizer.bos_token):
            return source
        return _WITH_BOS + source
    return source if "bos_token" in source else _WITH_BOS + source


def _have_chats(corpora: Sequence[Corpus]) -> bool:
    return any(corpus.dataset.format == CHAT for corpus in corpora)
