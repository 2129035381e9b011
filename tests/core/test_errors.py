# covers: lib/core/errors.py
"""Render and combine errors, and check their exit codes."""

from __future__ import annotations

import errno

import pytest

from lib.core import errors
from lib.core.errors import (
    ArtifactError,
    DiskFullError,
    Preempted,
    Problems,
    StageError,
    UsageError,
    from_os_error,
)


def test_exit_codes_are_those_of_the_design() -> None:
    kinds = (StageError, UsageError, ArtifactError, DiskFullError, Preempted)
    assert [kind.code for kind in kinds] == [1, 2, 3, 4, 75]
    assert errors.EXIT_DONE == 0


def test_render_labels_every_known_part_and_indents_its_lines() -> None:
    error = ArtifactError("it is not finished", found="one\ntwo", run="python stage.py")
    assert error.render() == (
        "error: it is not finished\n  found:    one\n            two\n  run:      python stage.py"
    )
    assert UsageError("alone").render() == "error: alone"


def test_no_problem_raises_nothing() -> None:
    Problems().raise_if_any()


def test_a_single_problem_is_raised_as_it_is() -> None:
    problems = Problems()
    error = ArtifactError("broken", run="mend it")
    problems.add(error)
    with pytest.raises(ArtifactError) as caught:
        problems.raise_if_any()
    assert caught.value is error


def test_several_problems_are_reported_at_once() -> None:
    problems = Problems()
    problems.add("first", expected="this", found="that")
    problems.add(ArtifactError("second"))
    with pytest.raises(UsageError) as caught:
        problems.raise_if_any()
    assert caught.value.render() == (
        "error: 2 problems:\n1. first\n  expected: this\n  found:    that\n2. second"
    )


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EFBIG, DiskFullError),
        (errno.EACCES, UsageError),
        (errno.EPERM, UsageError),
        (errno.EROFS, UsageError),
        (errno.ENOTDIR, UsageError),
        (errno.EISDIR, UsageError),
        (errno.ENAMETOOLONG, UsageError),
        (errno.ENOENT, type(None)),
        (errno.EIO, StageError),
    ],
)
def test_os_errors_that_a_person_can_fix_become_stage_errors(number: int, kind: type) -> None:
    error = from_os_error(OSError(number, "why", "/some/file"))
    assert type(error) is kind
    if error:
        assert "/some/file" in error.problem and "why" in error.problem


def test_a_copy_to_a_full_disk_names_the_file_that_was_written() -> None:
    error = from_os_error(OSError(errno.ENOSPC, "why", "/source", None, "/target"))
    assert error and "/target" in error.problem and "/source" not in error.problem
