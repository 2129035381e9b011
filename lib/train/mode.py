"""Define what the modes of a launch have in common: the options alone choose one of several.

Where samples come from, what a launch leaves behind and what it trains are such modes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from lib.core.errors import Problems
from lib.train.config import Config


class Mode(ABC):
    """One of several ways to do something. The class methods act before any file is opened."""

    @classmethod
    @abstractmethod
    def is_requested(cls, config: Config) -> bool:
        """Return whether the options ask for this mode."""

    @classmethod
    @abstractmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for each option that contradicts this mode."""


AnyMode = TypeVar("AnyMode", bound=Mode)


def list_requested(modes: Sequence[type[AnyMode]], config: Config) -> list[type[AnyMode]]:
    """Return the modes that the options ask for, the one that a launch uses first.

    The last of `modes` is what a launch uses if nothing else is asked for.
    """
    return [mode for mode in modes if mode.is_requested(config)]
