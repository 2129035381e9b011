"""Answer unknown options: the nearest names, and what replaces an option that is gone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from lib.core.errors import StageError, UsageError, combine_errors

SIMILAR = 0.66  # the lowest ratio of difflib for a suggestion: below, names share only some letters
OTHER_TRAINERS = "docs/how-to/coming-from.md says what to type instead of options of other trainers"
_ON = ("true", "on", "yes", "1")
_FLAG = re.compile(r"--?[A-Za-z]")


class Gone(NamedTuple):
    """An option of earlier versions.

    default: the value that a run recorded if nobody set the option. advice: what to type instead.
    is_needed: a file that sets the option is refused, because the result would differ without it.
    """

    default: Any
    advice: str
    is_needed: bool = False


_PLANS = "leave it out: --dry-run --plan-gpus N prints memory and time, and no interval of saves"
_SAMPLES = "--eval-freq N: samples and tasks follow it"
_SUITES = "lm-eval scores an export with published tasks: docs/how-to/other-programs.md"
_END = "the launchers have it, before their `--`: launch/single_node.sh --on-end COMMAND -- …"
GONE = {
    "resume_from_foreign": Gone(
        None,
        "stage 05 takes the weights over: 05_export_checkpoint.py --from-dcp DIR -m MODEL "
        "--out NEW; then -m NEW",
    ),
    "plan_mtbf_hours": Gone(45566, _PLANS),
    "plan_write_gbps": Gone(2.0, _PLANS),
    "plan_step_seconds": Gone(None, _PLANS),
    "plan_gpu_tflops": Gone(
        None, "leave it out: --plan-gpus plans for an H100; scale its time by the peaks of the GPUs"
    ),
    "plan_gpu_memory": Gone(80.0, "GiB of each GPU behind a colon: --plan-gpus 8,64:141"),
    "sample_freq": Gone(500, _SAMPLES),
    "suite_freq": Gone(0, _SAMPLES),
    "eval_wheel": Gone(None, _SUITES),
    "suite_name": Gone(None, _SUITES),
    "compare": Gone(None, "the report of several runs compares them: docs/how-to/report.md"),
    "show_samples": Gone(0, "--prepare-only: it prints two samples of each dataset"),
    "rollback_after": Gone(20, "leave it out: a run returns to a checkpoint after 20 bad steps"),
    "keep_gathered": Gone(None, "leave it out: weights stay gathered if the memory suffices"),
    "token_reads": Gone(
        "mmap", "leave it out, or put the cache on a local disk; pread is used where mmap fails"
    ),
    "ckpt_copy_wait": Gone(
        30.0,
        "leave it out: a complete run waits up to 30 minutes for its last copy, and Ctrl-C ends "
        "the wait",
    ),
    "config_json": Gone(
        None,
        "-m DIR, a directory with this config.json (stage 03 makes one with a tokenizer by "
        "--from-scratch --config-json FILE); a run that has begun keeps its model by "
        "--from-scratch without -m",
        is_needed=True,
    ),
    "fp8_recipe": Gone("tensorwise", "--precision fp8-rowwise", is_needed=True),
    "sample_tokens": Gone(64, "leave it out: a sample has 64 tokens"),
    "suite_limit": Gone(None, "behind the name of the suite: --eval-suite small:100"),
    "text_field": Gone(None, "--streaming FIELD names the field", is_needed=True),
    "include": Gone([], "in stage 04, a glob behind the name: -d ORG/NAME/GLOB", is_needed=True),
    "ckpt_hyperpod": Gone(None, "--ckpt-local-dir hyperpod:auto, or hyperpod:URL"),
    "ckpt_local_freq": Gone(None, "leave it out: it is a tenth of --ckpt-freq"),
    "ckpt_keep_every": Gone(
        None, "--ckpt-keep 0 keeps all checkpoints; delete those that nobody needs after the run"
    ),
    "ckpt_copy_keep": Gone(
        0, "leave it out: all copies are kept; delete old ones by hand or by a rule of the bucket"
    ),
    "on_end": Gone("", _END),
    "on_end_seconds": Gone(20.0, _END),
}

# Options of stage 02 that curated a dataset while it was built, and the values that it recorded.
_MOVED = {
    "language": [],
    "language_model": ".cache/classifiers/lid.176.ftz",
    "language_score": 0.65,
    "quality_model": None,
    "quality_label": None,
    "quality_score": None,
    "keep_top": None,
    "near_threshold": 0.8,
    "near_words": 5,
    "near_bands": 20,
    "near_band_size": 8,
    "near_candidates": 32,
    "near_members": 1000,
    "near_keep": "1",
    "near_against": [],
    "near_within": "corpus",
    "mask": [],
    "mask_phone_country": [],
    "mask_with": "constant",
    "mask_key": None,
    "quality": [],
    "quality_set": [],
    "quality_words": None,
    "quality_except": [],
    "decontaminate": [],
    "decontaminate_share": 0.5,
    "decontaminate_report_only": False,
    "sample_dropped": 0,
}


def move_to_curate(option: str) -> str:
    """Return what to type instead of an option that curated a dataset while it was built."""
    return f"curate the built dataset: python -m lib.curate DATASET --save-dir NEW {option}"


GONE |= {
    name: Gone(default, move_to_curate(f"--{name.replace('_', '-')} …"), is_needed=True)
    for name, default in _MOVED.items()
}


def update_values(options: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """Return options that a file contains, with those of earlier versions as they are now.

    ours: the options of this script, which stay as they are. An option that became part of another
    one's value moves there. If that is not possible, such as with several globs of files, it stays,
    and is reported as an option that is gone.
    """
    spelled = {str(name).replace("-", "_"): name for name in options}
    updated = dict(options)

    def get(name: str) -> Any:
        return updated.get(spelled.get(name, name))

    def get_gone(name: str) -> Any:
        return None if name in ours else get(name)

    def move(gone: str, name: str, value: Any) -> None:
        del updated[spelled[gone]]
        updated[spelled.get(name, name)] = value

    recipe = get_gone("fp8_recipe")
    if recipe and (get("precision") == "fp8" or recipe == "tensorwise"):
        move("fp8_recipe", "precision", "fp8-rowwise" if recipe == "rowwise" else get("precision"))
    if get_gone("ckpt_keep_every"):
        move("ckpt_keep_every", "ckpt_keep", 0)  # or they would be deleted
    if url := get_gone("ckpt_hyperpod"):
        move("ckpt_hyperpod", "ckpt_local_dir", f"hyperpod:{url}")
    if (limit := get_gone("suite_limit")) and (suite := get("eval_suite")):
        move("suite_limit", "eval_suite", f"{suite}:{limit}")
    if (memory := get_gone("plan_gpu_memory")) and (gpus := get("plan_gpus")):
        counts = ",".join(map(str, gpus)) if isinstance(gpus, list) else gpus
        move("plan_gpu_memory", "plan_gpus", f"{counts}:{memory}")
    if (field := get_gone("text_field")) and str(get("streaming")).lower() in _ON:
        move("text_field", "streaming", field)
    globs = get_gone("include")
    names = get("dataset_name")
    names = names if isinstance(names, list) else [names]
    if isinstance(globs, list) and len(globs) == len(names) == 1 and names[0]:
        move("include", "dataset_name", [f"{names[0]}/{globs[0]}"])
    return updated


def find_gone(name: str) -> Gone | None:
    """Return the option of earlier versions that has this name, with or without dashes."""
    return GONE.get(name.lstrip("-").replace("-", "_"))


def suggest_option(flag: str, ours: Collection[str]) -> tuple[str, str]:
    """Return the text after `unknown option FLAG` in an error, and a hint; either may be empty.

    ours: all names of the options of the parser. The hint says what replaces an option that is
    gone.
    """
    if gone := find_gone(flag):
        return "", gone.advice
    options = {option.lstrip("-"): option for option in ours if option.startswith("--")}
    words = set(flag.lstrip("-").split("-"))
    near = [name for name in options if words <= set(name.split("-"))]  # --epochs
    if len(near) != 1:
        near = difflib.get_close_matches(flag.lstrip("-"), options, n=1, cutoff=SIMILAR)
    return f"; the nearest is {options[near[0]]}" if near else "", ""


def unknown_options_error(words: Sequence[str], ours: Collection[str]) -> StageError:
    """Return the error about the options among the words that a parser did not know.

    If the first word is not an option, the error is about that word.
    """
    if not _FLAG.match(words[0]):
        return UsageError(f"unexpected argument {words[0]!r}")
    errors: list[StageError] = []
    flags = [word.partition("=")[0] for word in words if _FLAG.match(word)]
    for flag in dict.fromkeys(flags):
        near, hint = suggest_option(flag, ours)
        errors.append(UsageError(f"unknown option {flag}{near}", hint=hint))
    error = combine_errors(errors)
    error.hint = error.hint or OTHER_TRAINERS
    return error
