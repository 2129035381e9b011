# covers: tests/wording.py
"""What the code says to people is as tests/approved/ has it."""

from __future__ import annotations

import ast

import pytest

from tests import wording

ROOMS = wording.list_rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_the_texts_of_a_room_are_approved(room: str) -> None:
    approved = (wording.APPROVED / f"{room}.txt").read_text(encoding="utf-8")
    assert approved == wording.format_room(ROOMS[room]), "run `make wording`"


def test_texts_are_found_but_not_docstrings_help_and_keys() -> None:
    code = """
def say(name):
    'Return what this function returns to people.'
    option(help='this help is on another page')
    log.info(f'the file {name} is not there' if name else 'there is no such file')
    raise UsageError('short text', hint='type it once more')
"""
    assert [*wording.find_texts(ast.parse(code))] == [
        "the file {…} is not there",
        "there is no such file",
        "type it once more",
    ]
