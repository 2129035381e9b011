"""Pack an air-gap bundle: code, wheels, models, data and tasks, each file hashed.

  python launch/airgap.py pack --out bundle --dataset corpus --model org/name --tokens corpus
  python launch/airgap.py pack --out bundle --dataset corpus --model org/name --volume-size 20GB

--dataset and --model take the same names as -d and -m of stage 04. Files are hashed while they are
copied, and compared with the digests that their stage wrote. A bundle appears under its name when
it is complete. A killed run continues where it was, and --overwrite reuses equal files of the
existing bundle.
"""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from launch.bundles import contents as bundle_contents
from launch.bundles import unpacking, wheelhouse
from launch.bundles.contents import Payload
from launch.bundles.writer import Writer
from lib.core import declared, hashing, log, options, publish, units
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.parallel import torch_builds
from lib.parallel.torch_builds import Torch

_MAX_VOLUMES = 999


def parse(argv: list[str]) -> Options:
    """Return the options of `airgap.py pack`."""
    parser = options.Parser(__doc__)
    parser.prog = "airgap.py pack"
    _add_artifact_options(parser)
    _add_wheel_options(parser)
    parser.add_argument(
        "--volume-size",
        type=options.positive_size,
        metavar="SIZE",
        help="largest size of a volume, such as 20GB or 4GiB (default: one volume)",
    )
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="pack the last commit although files differ from it; the changes "
        "are not packed, and the manifest names these files",
    )
    parser.add_common(workers="copy and hash")
    return parser.parse(argv)


def _add_artifact_options(parser: options.Parser) -> None:
    """Add the options that name the bundle and the artifacts to pack."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="the bundle to write (required)")
    parser.add_argument(
        "--dataset",
        action="append",
        default=[],
        metavar="NAME|PATH",
        help="dataset, a value of -d of stage 04; may be repeated (default: none)",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME|DIR",
        help="model, a value of -m of stage 04; may be repeated (default: none)",
    )
    parser.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="NAME|DIR",
        help="token store under .cache/tokens/, or a dataset (a value of -d of stage 04) to pack "
        "all its token stores; may be repeated (default: none)",
    )
    parser.add_argument(
        "--eval-suite",
        action="append",
        default=[],
        metavar="NAME|DIR",
        help="suite of tasks, a value of --eval-suite of stage 04; may be repeated (default: none)",
    )
    parser.add_argument(
        "--classifier",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="fastText model, a value of --language-model or --quality-model of lib.curate; may be "
        "repeated (default: none)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="directory of models, token stores and downloaded wheels",
    )


def _add_wheel_options(parser: options.Parser) -> None:
    """Add the options that choose the wheels for the machines without a network."""
    parser.add_argument(
        "--python",
        default=f"{sys.version_info[0]}.{sys.version_info[1]}",
        metavar="X.Y",
        help="Python version of the far side (default: that of this Python)",
    )
    parser.add_argument(
        "--platform",
        default=f"manylinux_2_28_{platform.machine()}",
        metavar="TAG",
        help="architecture and oldest glibc of the far side",
    )
    parser.add_argument(
        "--driver-version",
        type=torch_builds.parse_driver,
        default="",
        metavar="V",
        help="NVIDIA driver of the far side, such as 535, to pack a build of torch that runs "
        "with it (default: the build in requirements.txt)",
    )
    parser.add_argument(
        "--cuda",
        type=torch_builds.parse_cuda,
        default="",
        metavar="cuXYZ",
        help="build of torch to pack: cu126 or 12.6, or cpu (default: as in requirements.txt)",
    )
    parser.add_argument(
        "--dev", action="store_true", help="also pack the wheels of requirements-dev.txt, for tests"
    )
    parser.add_argument(
        "--optional",
        action="store_true",
        help="also pack the wheels of requirements-optional.txt, for --wandb, --ckpt-copy-to, "
        "--ckpt-local-dir hyperpod:…, --language, --quality-model, --extract, --precision fp8 and "
        "FlashAttention 4",
    )
    parser.add_argument("--no-wheels", action="store_true", help="pack no wheelhouse")


def main(argv: list[str]) -> None:
    """Pack a bundle as the options say."""
    opts = parse(argv)
    if opts.out is None:
        raise UsageError(
            "--out is missing: the directory of the bundle to write",
            expected="for example --out bundle --dataset CORPUS --model NAME",
        )
    for name in ("driver_version", "cuda", "optional") if opts.no_wheels else ():
        if getattr(opts, name):
            raise UsageError(f"{declared.flag(name)} chooses wheels, but --no-wheels packs none")
    target = None if opts.no_wheels else wheelhouse.parse_target(opts.python, opts.platform)
    code = bundle_contents.read_commit(opts.allow_dirty)
    artifacts = bundle_contents.find_artifacts(opts)
    lists = code.requirements(*(kind for kind in ("dev", "optional") if getattr(opts, kind)))
    builds = wheelhouse.choose_builds(lists, opts.cuda, opts.driver_version) if target else []
    wheel_options = {
        name: value
        for name in ("cuda", "driver_version", "optional")
        if (value := getattr(opts, name))
    }  # not in bundles of earlier versions
    identity = {
        "options": {
            "python": target and target.python,
            "dev": opts.dev,
            "platform": target and target.platform,
            "volume_size": opts.volume_size,
            **wheel_options,
        },
        "inputs": {
            "commit": code.commit,
            **{artifact.to: artifact.fingerprint for artifact in artifacts},
        },
    }
    _print_plan(opts, code, artifacts, target, lists, builds)
    if publish.is_done(opts.out, unpacking.KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(
            f"already done: {opts.out}, "
            f"SHA-256 of its manifest {unpacking.manifest_digest(opts.out)}"
        )
        return
    if opts.dry_run:
        return
    payloads = list(code.payloads)
    if target:
        wheelhouse_dir = wheelhouse.prepare_wheelhouse(opts.cache_dir, lists, target, builds)
        payloads += bundle_contents.list_directory(wheelhouse_dir, "wheelhouse").payloads
    payloads += [payload for artifact in artifacts for payload in artifact.payloads]
    summary = {
        "commit": code.commit,
        "changed_files_left_behind": code.changed,
        "python": target and target.python,
        "platform": target and target.platform,
        "installed_bytes": wheelhouse.count_installed_bytes(wheelhouse_dir) if target else 0,
        "torch": _describe_torch(wheelhouse.find_torch(wheelhouse_dir)) if target else None,
        "next": bundle_contents.list_next_commands(artifacts),
    }
    _write_bundle(opts, identity, payloads, code, summary)


def _describe_torch(torch: Torch | None) -> dict[str, str] | None:
    """Print which torch is packed, and return its facts for the manifest; None without a wheel."""
    if torch is None:
        return None
    driver = torch.oldest_driver
    log.info(
        f"wheels of torch {torch}, "
        + (
            f"for NVIDIA driver {driver} or newer on the far side "
            "(--driver-version packs a build for an older one)"
            if driver
            else "for CPUs only"
        )
    )
    if torch.cuda == torch_builds.WITHOUT_BLACKWELL:
        log.info(
            f"  they contain no code for Blackwell GPUs (B200, RTX 50); --cuda "
            f"{torch_builds.BLACKWELL} packs a build that does"
        )
    return {"version": str(torch), "cuda": torch.cuda, "driver": driver}


def _write_bundle(
    opts: Options,
    identity: dict[str, Any],
    payloads: list[Payload],
    code: bundle_contents.Commit,
    summary: dict[str, Any],
) -> None:
    total = sum(payload.bytes for payload in payloads)
    if opts.volume_size and total > _MAX_VOLUMES * opts.volume_size:
        raise UsageError(
            f"--volume-size is too small for {units.size(total)}",
            expected=f"at most {_MAX_VOLUMES} volumes",
        )
    with publish.Build(opts.out, unpacking.KIND, identity, opts.overwrite, resumable=True) as build:
        writer = Writer(build.dir, build.target, payloads, opts.volume_size)
        publish.require_space(build.dir, writer.missing_bytes, "the bundle")
        entries = writer.write(opts.num_workers, not opts.no_progress)
        script = build.dir / "airgap.py"
        script.write_bytes(code.content("launch/bundles/unpacking.py"))
        entries.append(
            {
                "path": script.name,
                "to": None,
                "bytes": script.stat().st_size,
                "digest": hashing.file_digest(script, "sha256"),
            }
        )
        writer.delete_journal()
        volumes = len({entry["path"].partition("/")[0] for entry in entries}) - 1
        summary |= {"bytes": total, "volumes": volumes}
        summary["digest"] = unpacking.content_digest(entries, summary)
        build.publish(
            stage="launch/airgap.py pack",
            options=options.to_plain_values(opts),
            files=entries,
            summary=summary,
        )
    log.info(
        f"{opts.out}: {len(payloads):,} files, {units.size(total)} in "
        f"{units.counted(volumes, 'volume')}; {writer.summary()}"
    )
    log.info(
        f"SHA-256 of {unpacking.MANIFEST}: {unpacking.manifest_digest(opts.out)}\n"
        "  (compare it with what `verify` prints on the far side)"
    )
    python, install = ("python3", "") if opts.no_wheels else (f"python{opts.python}", " --install")
    name = shlex.quote(opts.out.name)
    log.info(
        f"next, on the far side: {python} {name}/airgap.py unpack {name} --to project" + install
    )


def _print_plan(
    opts: Options,
    code: bundle_contents.Commit,
    artifacts: list[Any],
    target: wheelhouse.Target | None,
    lists: dict[str, bytes],
    builds: list[Torch],
) -> None:
    log.info(f"bundle {opts.out}")
    if code.changed:
        log.warn(f"these changes are not packed: {units.join_names(code.changed, 5)}")
    rows = {"code": f"commit {code.commit[:12]}, {len(code.payloads)} files"}
    if target:
        torch = f", torch {builds[0]}" if builds else ""
        rows["wheelhouse"] = f"Python {target.python}, {target.platform}, {', '.join(lists)}{torch}"
    rows |= {
        artifact.to: (
            f"{units.size(sum(payload.bytes for payload in artifact.payloads))} from "
            f"{artifact.source}"
        )
        for artifact in artifacts
    }
    log.table(rows)
    for line in bundle_contents.describe_missing(opts, artifacts):
        log.warn(line)
