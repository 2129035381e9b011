"""Create the model of `--model-size`: its config and its tokenizer.

The directory in `.cache/scratch/` equals a model directory of stage 03. If it was deleted, it is
created again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, log, manifest, paths, publish
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.models import directory, lookup, tokenizer
from lib.models.scratch import PREFIX, Design
from lib.tokens import build
from lib.train.config import Config
from lib.train.output.kinds import OutputKind
from lib.train.source import SampleSource

KIND = "scratch/1"
_PREVIEW_BYTES = 2_000_000  # of text for the tokenizer of a dry run, which takes a second or two


@contextmanager
def model_from_scratch(
    config: Config,
    experiment: Experiment,
    kind: type[OutputKind],
    source: type[SampleSource],
    has_begun: bool,
) -> Iterator[Path | None]:
    """Yield the directory of the model to create; None without --model-size.

    The directory stays in the cache, except after a dry run, or if the launch keeps no files and
    the model needs no tokenizer. Without --tokenizer, a tokenizer is trained on the datasets; a
    resumed run keeps its tokenizer. Raises UsageError if a tokenizer does not load or fit, and the
    errors of `mixture.open_corpora` for datasets.
    """
    if not config.makes_model:
        yield None
        return
    design = _design_model(config, experiment, source, has_begun)
    content = design.identity(design.choose_name())
    name = design.choose_name().removeprefix(PREFIX)
    target = paths.scratch_root(config.cache_dir) / f"{name}-{hashing.fingerprint(content)[:12]}"
    if target.exists():
        lookup.log_model(target, f", {config.makes_model} from scratch")
    else:
        log.info(f"model: {config.makes_model} from scratch{lookup.announce_import()}")
    is_temporary = config.dry_run or not (kind.keeps_files or source.needs_tokenizer)
    if is_temporary and not target.exists():
        with _temporary_directory() as folder:
            _create_model(design, folder / target.name, content, config, _PREVIEW_BYTES)
            yield folder / target.name
        return
    build.build_once(
        target,
        KIND,
        content,
        lambda: _create_model(design, target, content, config),
        lambda existing: manifest.require_intact(
            target,
            existing,
            "the model from scratch",
            deep=True,
            run=commands.delete_and_rerun(target),
        ),
    )
    yield target


def _design_model(
    config: Config, experiment: Experiment, source: type[SampleSource], has_begun: bool
) -> Design:
    """Return the settings of the model to create. has_begun: the run has checkpoints."""
    shape = (config.model_size, None, config.vocab_size)
    if not (source.needs_tokenizer or config.tokenizer):
        return Design(*shape, train_on=(), copy_from=None, has_tokenizer=False)
    keeps_tokenizer = has_begun and (experiment.model / directory.CONFIG).is_file()
    copy_from = config.tokenizer or (experiment.model if keeps_tokenizer else None)
    train_on = () if copy_from else source.list_tokenizer_texts(config)
    return Design(*shape, train_on, copy_from)


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Yield a directory that is deleted afterwards. Raises UsageError if TMPDIR is unusable."""
    try:
        folder = tempfile.TemporaryDirectory()
    except FileNotFoundError as error:
        raise UsageError(
            "there is no directory for temporary files",
            found=str(error.strerror),
            expected="a writable directory with free space, such as TMPDIR=/dev/shm",
        ) from None
    with folder:
        yield Path(folder.name)


def _create_model(
    design: Design,
    target: Path,
    content: dict[str, Any],
    config: Config,
    limit: int = tokenizer.SAMPLE_BYTES,
) -> None:
    """Create the model directory. limit: most bytes of text to train a tokenizer on."""
    from lib.models import check

    vocabulary = design.vocabulary()
    with publish.Build(target, KIND, content, overwrite=False) as building:
        design.write_tokenizer(building.dir, config.num_workers, not config.no_progress, limit)
        config_facts = design.write_configs(building.dir, vocabulary)
        facts = check.check_build(
            building, weights=False, name=config.makes_model, has_tokenizer=design.has_tokenizer
        )
        design.require_same(content, design.choose_name())
        files = [manifest.file_entry(building.dir, path, "sha256") for path in building.files()]
        building.publish(
            stage="04_train_fsdp.py",
            options=config.to_record(),
            files=files,
            summary={"source": "scratch", "parameters": facts.parameters, **config_facts},
        )
    rows = ", ".join(f"{name} {text}" for name, text in design.describe(vocabulary).items())
    log.detail(f"created from scratch: {rows}; tokenizer: {design.describe_tokenizer()}")
