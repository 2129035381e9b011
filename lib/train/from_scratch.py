"""Training from random weights: who asked for it, and the model of `--model-size` itself.

Config and tokenizer of `--from-scratch --model-size SIZE --tokenizer DIR` are those that stage 03
would make. They lie in `.cache/scratch/`, derived like tokens: whoever deletes them has them made
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, log, manifest, paths, publish, units
from lib.core.errors import ArtifactError
from lib.models import directory, tokenizer
from lib.models.design import Design
from lib.tokens import build
from lib.train.config import Config

KIND = "scratch/1"


def is_meant(config: Config, model_dir: Path, has_begun: bool) -> bool:
    """Tell whether the first weights are drawn from the seed.

    That is so when --from-scratch was typed, when stage 03 made the model from scratch, or when the
    run has begun so: then its weights are in its checkpoints. Raises ArtifactError when weights are
    missing and nobody asked for random ones; where nothing is trained, that is only a warning.
    """
    if config.from_scratch or directory.is_made_from_scratch(model_dir):
        return True
    if has_begun:
        return not directory.has_weights(model_dir)
    if missing := directory.list_missing_weights(model_dir):
        error = ArtifactError(
            f"the model {model_dir} has no weights" if not directory.has_weights(model_dir) else
            f"the weights of the model {model_dir} are not whole",
            found=units.join_lines(missing, 5),
            expected=f"{directory.WEIGHTS}, or {directory.INDEX} and the shards that it names",
            hint="copy the missing files to it; with --from-scratch, training would begin with "
                 "random weights")
        if not (config.dry_run or config.prepare_only):
            raise error
        log.warn("training would end here: " + error.render().removeprefix("error: "))
    return False


@contextmanager
def model(config: Config) -> Iterator[Path | None]:
    """Make the directory of the model for the while; None without --model-size.

    It stays in the cache, but for a dry run. Raises UsageError when the tokenizer does not load or
    fit.
    """
    if not config.model_size:
        yield None
        return
    design = Design(config.model_size, None, config.vocab_size, None, config.tokenizer)
    content = design.identity(design.choose_name())
    target = paths.scratch_root(config.cache_dir) / \
        f"{config.model_size}-{hashing.fingerprint(content)[:12]}"
    if config.dry_run and not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            _make(design, Path(folder) / target.name, content, config)
            yield Path(folder) / target.name
        return
    build.once(target, KIND, content, lambda: _make(design, target, content, config),
               lambda made: manifest.check(target, made, "the model from scratch", deep=True,
                                           run=commands.remade(target)))
    yield target


def _make(design: Design, target: Path, content: dict[str, Any], config: Config) -> None:
    from lib.models import check

    vocabulary = design.vocabulary()
    with publish.Build(target, KIND, content, overwrite=False) as building:
        tokenizer.copy(config.tokenizer, design.context(), building.dir)
        design.write_beside_tokenizer(building.dir, vocabulary)
        check.examine_build(building, weights=False, name=f"--model-size {config.model_size}")
        design.require_same(content, design.choose_name())
        files = [manifest.file_entry(building.dir, path, "sha256")
                 for path in building.files()]
        building.publish(stage="04_train_fsdp.py", options=config.recorded(), files=files,
                         summary={"source": "scratch"})
    rows = ", ".join(f"{name} {text}" for name, text in design.describe(vocabulary).items())
    log.info(f"made from scratch: {rows}; tokenizer of {config.tokenizer}")
