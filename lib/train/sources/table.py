"""List the sources of samples. To add one, write a subclass of SampleSource, and name it here."""

from __future__ import annotations

from lib.train.config import Config
from lib.train.mode import list_requested
from lib.train.source import SampleSource
from lib.train.sources.corpora import CorporaSource
from lib.train.sources.raw_stream import RawStreamSource
from lib.train.sources.synthetic import SyntheticSource

SOURCES: tuple[type[SampleSource], ...] = (SyntheticSource, RawStreamSource, CorporaSource)


def choose_source(config: Config) -> type[SampleSource]:
    """Return the source that a run uses."""
    return list_requested(SOURCES, config)[0]
