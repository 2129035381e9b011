"""A model that stage 04 makes itself: `--from-scratch --model-size SIZE --tokenizer DIR`.

Config and tokenizer are those that stage 03 would make. They lie in `.cache/scratch/`, derived
like tokens: whoever deletes them has them made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.core import hashing, log, manifest, options, paths, publish
from lib.core.errors import Problems
from lib.core.options import Options
from lib.models import prepare, scratch, tokenizer
from lib.models.design import Design
from lib.tokens import build

KIND = "scratch/1"
_BELONG = ("vocab_size", "tokenizer")  # to --model-size


def check_options(opts: Options) -> None:
    """Raise one UsageError that tells all contradictions among the options of a model."""
    problems = Problems()
    if opts.model_size and not opts.from_scratch:
        problems.add("--model-size makes a model without weights",
                     run="the same with --from-scratch")
    if opts.model_size and opts.model_name:
        problems.add(f"give -m {opts.model_name} or --model-size {opts.model_size}, not both")
    if opts.model_size and not opts.tokenizer:
        problems.add("--model-size needs --tokenizer DIR", expected="a directory with a tokenizer, "
                     "such as that of a model of stage 03 (which can also train one)")
    for key in _BELONG:
        if getattr(opts, key) and not opts.model_size:
            problems.add(f"--{key.replace('_', '-')} belongs to --model-size",
                         expected=f"--from-scratch --model-size {'|'.join(scratch.SIZES)}")
    problems.raise_if_any()


@contextmanager
def model(opts: Options) -> Iterator[Path | None]:
    """Make the directory of the model for the while; None without --model-size.

    It stays in the cache, but for a dry run. Raises UsageError when options contradict each other,
    or when the tokenizer does not load or fit.
    """
    check_options(opts)
    if not opts.model_size:
        yield None
        return
    design = Design(opts.model_size, None, opts.vocab_size, None, opts.tokenizer)
    identity = design.identity(design.default_name())
    target = paths.scratch_root(opts.cache_dir) / \
        f"{opts.model_size}-{hashing.fingerprint(identity)[:12]}"
    if opts.dry_run and not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            _make(design, Path(folder) / target.name, identity, opts)
            yield Path(folder) / target.name
        return
    build.once(target, KIND, identity, lambda: _make(design, target, identity, opts))
    yield target


def _make(design: Design, target: Path, identity: dict[str, Any], opts: Options) -> None:
    vocabulary = design.vocabulary()
    with publish.Build(target, KIND, identity, overwrite=False) as building:
        tokenizer.copy(opts.tokenizer, design.context(), building.dir)
        design.write_beside_tokenizer(building.dir, vocabulary)
        prepare.examine(building, weights=False, name=f"--model-size {opts.model_size}")
        files = [manifest.file_entry(building.dir, path, "sha256")
                 for path in sorted(building.dir.iterdir())]
        building.publish(stage="04_train_fsdp.py", options=options.resolved(opts), files=files,
                         summary={"source": "scratch"})
    rows = ", ".join(f"{name} {text}" for name, text in design.described(vocabulary).items())
    log.info(f"made from scratch: {rows}; tokenizer of {opts.tokenizer}")
