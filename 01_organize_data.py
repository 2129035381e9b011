#!/usr/bin/env python3
"""Stage 01: distribute the files of a directory tree over balanced splits.

  python 01_organize_data.py
  python 01_organize_data.py --src-dir raw_text --dst-root splits --num-dirs 20
  python 01_organize_data.py --src-dir /data/crawl --mode symlink --exclude '*.log' --dry-run

Reads any directory tree and never changes it. Writes splits/split_00 … with the files under their
relative paths (as hard links by default, which take no disk space), splits/files.jsonl with one
line per file and the reason if it was skipped, and splits/manifest.json. The splits have equal
numbers of files and similar sizes. This stage needs no network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted  # json.dumps of a string, twice as fast
from pathlib import Path

from lib.core import (
    commands,
    data_names,
    declared,
    log,
    manifest,
    options,
    publish,
    stage,
    units,
)
from lib.core.declared import CommonOptions, option
from lib.core.errors import ArtifactError, UsageError
from lib.corpus import inputs, place, saved
from lib.corpus.scan import (
    PATTERN,
    Rules,
    TreeEntry,
    count_reasons,
    identify_files,
    list_unmatched,
    scan_tree,
    select_taken,
)

STAGE = "01_organize_data.py"
KIND = "splits/1"


@dataclass(frozen=True)
class OrganizeOptions(CommonOptions):
    """Contains the options of this stage."""

    src_dir: Path = option(
        Path("raw_text"), parse=Path, help="directory with the raw files, in any layout"
    )
    dst_root: Path = option(Path("splits"), parse=Path, help="directory to create")
    num_dirs: int = option(
        20, parse=options.positive_int, help="number of splits (fewer if there are fewer files)"
    )
    mode: str = option(
        "hardlink",
        choices=("hardlink", "symlink", "copy"),
        help="how to place a file in its split; hardlink falls back to copy if needed",
    )
    include: list[str] = option(
        [],
        metavar="GLOB",
        help="take only files whose relative path or basename matches; `*` also matches `/`; "
        "may be repeated (default: all)",
    )
    exclude: list[str] = option(
        [],
        metavar="GLOB",
        help="skip files and directories that match; may be repeated (default: none)",
    )
    follow_symlinks: bool = option(
        False,
        help="also take the targets of symbolic links, even targets outside --src-dir "
        "(default: follow no link)",
    )
    num_workers: int = option(1)


def parse(argv: Sequence[str]) -> OrganizeOptions:
    """Return the options of this stage."""
    parser = options.Parser(__doc__)
    declared.add_options(parser, OrganizeOptions)
    parser.add_common("inspect and place files")
    return declared.drop_repeats(declared.read_options(OrganizeOptions, parser.parse(argv)))


def check_paths(src: Path, dst: Path) -> None:
    """Raise UsageError if the source is not a directory of raw files, or is in the destination."""
    if not src.is_dir():
        raise UsageError(
            f"--src-dir {src} {'is a file' if src.exists() else 'does not exist'}",
            expected="a directory with raw text files",
        )
    inputs.require_raw(src, "--src-dir")
    if src.resolve().is_relative_to(dst.resolve()):
        raise UsageError(
            f"--dst-root {dst} is or contains --src-dir {src}",
            expected="a destination outside the source",
        )


def make_identity(opts: OrganizeOptions, entries: Sequence[TreeEntry]) -> dict:
    """Return the identity of the splits: their options and input files.

    It does not depend on the paths of source and destination, except for symbolic links.
    """
    inputs_identity = identify_files(select_taken(entries))
    if opts.mode == "symlink":  # symbolic links contain the path of the source
        inputs_identity["source"] = str(opts.src_dir.resolve())
    return {
        "options": declared.identify_artifact(opts, "src_dir", "dst_root"),
        "inputs": inputs_identity,
    }


def is_done(opts: OrganizeOptions, identity: dict) -> bool:
    """Return whether these splits exist already; the error about others names both sources."""
    try:
        return publish.is_done(opts.dst_root, KIND, identity, opts.overwrite, dry_run=opts.dry_run)
    except UsageError as error:
        content = manifest.read_if_any(opts.dst_root) or {}
        earlier = content.get("options", {}).get("src_dir")
        if earlier and earlier != str(opts.src_dir):
            changed = [line for line in error.found.splitlines() if line.startswith("--")]
            sources = f"--src-dir: {earlier} there, {opts.src_dir} now"
            error.found = "\n".join([sources, *changed])
        raise


def require_all_files(dst: Path) -> None:
    """Raise ArtifactError if existing splits have lost files."""
    splits = manifest.read_manifest(dst, KIND, "the splits")["summary"].get("splits")
    try:
        problems = place.list_missing_files(
            dst, {name: int(split["files"]) for name, split in splits.items()}
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        problems = ["manifest.json does not contain the number of files per split"]
    if problems:
        raise ArtifactError(
            f"the splits {dst} are damaged",
            found="\n".join(problems),
            run=commands.as_typed("--overwrite"),
        )


def require_files(opts: OrganizeOptions, entries: Sequence[TreeEntry]) -> list[TreeEntry]:
    """Return the entries of the files to place; raises UsageError if there are none."""
    if files := select_taken(entries):
        return files
    raise UsageError(
        f"no file to take in {opts.src_dir}",
        expected="files that contain text",
        found=count_reasons(entries) or "an empty directory",
    )


def assign_files(files: Sequence[TreeEntry], num_dirs: int) -> list[tuple[TreeEntry, str]]:
    """Return each file with the name of its split."""
    splits = min(num_dirs, len(files))
    digits = max(2, len(str(splits - 1)))
    numbers = place.assign_to_splits([entry.bytes for entry in files], splits)
    return [
        (entry, f"split_{number:0{digits}}") for entry, number in zip(files, numbers, strict=True)
    ]


def print_plan(
    opts: OrganizeOptions, entries: Sequence[TreeEntry], files: Sequence[tuple[TreeEntry, str]]
) -> tuple[Counter[str], Counter[str]]:
    """Print the planned splits; return the numbers of files and bytes per split."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry, split in files:
        counts[split] += 1
        sizes[split] += entry.bytes
    if len(counts) < opts.num_dirs:
        log.warn(
            f"{units.counted(len(files), 'file')} can fill only "
            f"{units.counted(len(counts), 'split')} of --num-dirs {opts.num_dirs}"
        )
    for sentence in place.explain_faults(opts.src_dir, (entry for entry, _ in files)):
        log.warn(sentence)
    kinds = Counter(entry.kind for entry, _ in files)
    roles = inputs.name_roles(data_names.assign_roles([entry.path for entry, _ in files]))
    named = "; ".join(f"{role}: {names}" for role, names in roles.items())
    log.info(f"organize {opts.src_dir} → {opts.dst_root}")
    log.table(
        {
            "take": f"{units.counted(len(files), 'file')}, {units.size(sum(sizes.values()))} "
            f"({', '.join(f'{n:,} {kind}' for kind, n in kinds.most_common())})",
            "skip": count_reasons(entries) or "nothing",
            "splits": f"{len(counts)}, each with "
            f"{_format_range(min(counts.values()), max(counts.values()))}, "
            f"{units.size(min(sizes.values()))} to {units.size(max(sizes.values()))}",
            "mode": opts.mode,
            **({"named as": f"{named}. Stage 02 keeps them apart"} if named else {}),
        }
    )
    return counts, sizes


def _format_range(low: int, high: int) -> str:
    return f"{'' if low == high else f'{low:,} or '}{units.counted(high, 'file')}"


def write_list(
    path: Path, entries: Sequence[TreeEntry], files: Sequence[tuple[TreeEntry, str]]
) -> None:
    """Write one JSON line per entry, sorted by the bytes of its path.

    Bytes of a name that are not UTF-8 are written as `\\udcXX`; json.loads and os.fsencode convert
    them back.
    """
    splits = (split for _, split in files)  # `files` has the order of the entries that are taken
    with path.open("w", encoding="ascii") as file:
        for entry in entries:
            start = f'{{"path": {quoted(entry.path)}, "bytes": {entry.bytes}'
            if entry.skipped:
                file.write(f'{start}, "skipped": {quoted(entry.skipped)}}}\n')
            else:
                file.write(
                    f'{start}, "kind": {quoted(entry.kind)}, "split": {quoted(next(splits))}}}\n'
                )


def print_summary(opts: OrganizeOptions, summary: dict, seconds: float) -> None:
    """Print the numbers of placed and skipped files, and the throughput."""
    total = summary["files"] + summary["skipped"]
    log.info(f"done in {units.duration(seconds)}, {total / max(seconds, 1e-9):,.0f} files/s")
    log.table(
        {
            "placed": ", ".join(f"{count:,} by {way}" for way, count in summary["placed"].items()),
            "skipped": f"{summary['skipped']:,}, listed in {opts.dst_root}/files.jsonl",
        }
    )


def main(argv: list[str]) -> None:
    """Run the stage."""
    opts = parse(argv)
    began = time.monotonic()
    progress = not opts.no_progress

    # Check the inputs.
    check_paths(opts.src_dir, opts.dst_root)
    rules = Rules(tuple(opts.include), tuple(opts.exclude), opts.follow_symlinks)
    entries = scan_tree(opts.src_dir, rules, opts.dst_root, progress)
    saved.require_readable(opts.src_dir, "--src-dir", entries)
    require_files(opts, entries)
    for glob in list_unmatched(opts.include, entries):
        log.warn(
            f"--include {glob} matches none of the files that stage 01 takes from {opts.src_dir}"
        )
    for glob in list_unmatched(opts.exclude, entries, PATTERN):
        log.warn(f"--exclude {glob} matches nothing in {opts.src_dir}")
    identity = make_identity(opts, entries)
    next_command = commands.script("02_build_hf_dataset.py", "--data-folder", opts.dst_root)
    if is_done(opts, identity):
        require_all_files(opts.dst_root)
        log.info(f"already done: {opts.dst_root} contains these files")
        log.info(f"next: {next_command}")
        return

    # The workers start before the build, so that they do not inherit its lock.
    with place.Workers(opts.num_workers) as workers:
        # Plan.
        place.sniff_files(opts.src_dir, entries, workers, progress)
        files = assign_files(require_files(opts, entries), opts.num_dirs)
        counts, sizes = print_plan(opts, entries, files)
        if opts.dry_run:
            log.info("dry run: nothing was written")
            return

        with publish.Build(opts.dst_root, KIND, identity, opts.overwrite) as build:
            # Place and verify the files.
            total = sum(sizes.values())
            mode = place.choose_mode(opts.src_dir / files[0][0].path, build.dir, opts.mode, total)
            files_by_mode = place.place_files(
                opts.src_dir, build.dir, files, mode, workers, progress
            )
            write_list(build.dir / "files.jsonl", entries, files)

            # Publish.
            splits = {
                name: {"files": counts[name], "bytes": sizes[name]} for name in sorted(counts)
            }
            summary = {
                "files": len(files),
                "bytes": total,
                "skipped": len(entries) - len(files),
                "placed": files_by_mode,
                "splits": splits,
            }
            build.publish(
                stage=STAGE,
                options=options.to_plain_values(opts),
                summary=summary,
                files=[manifest.file_entry(build.dir, build.dir / "files.jsonl")],
            )

    print_summary(opts, summary, time.monotonic() - began)
    log.info(f"next: {next_command}")


if __name__ == "__main__":
    stage.run_main(main)
