"""List the sources of samples. To add one, write a subclass of SampleSource, and name it here."""

from __future__ import annotations

from lib.train.config import Config
from lib.train.source import SampleSource
from lib.train.sources.corpora import CorporaSource
from lib.train.sources.raw_stream import RawStreamSource
from lib.train.sources.synthetic import SyntheticSource

SOURCES: tuple[type[SampleSource], ...] = (SyntheticSource, RawStreamSource, CorporaSource)


def list_requested(config: Config) -> list[type[SampleSource]]:
    """Return the sources that the options ask for, the one that a run uses first.

    The last one is what a run uses if nothing else is asked for.
    """
    return [source for source in SOURCES if source.is_requested(config)]


def choose_source(config: Config) -> type[SampleSource]:
    """Return the source that a run uses."""
    return list_requested(config)[0]
