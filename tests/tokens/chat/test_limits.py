# covers: lib/tokens/chat/render.py, lib/tokens/chat/encode.py, lib/tokens/chat/policy.py
"""The worst that a hostile or faulty template can do is to drop a conversation."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.tokens.chat import render
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.chat.render import Template, TemplateError
from lib.tokens.encode import Encoder
from tests.conftest import ROOT

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BOMBS = {
    "memory": "{{ 'x' | center(4000000000) }}",
    "memory of a list": "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "repetition": "{{ 'x' * 10000000000 }}",
    "width": "{{ '%1000000000d' % 5 }}",
    "given width": "{{ '%*d' % (1000000000, messages | length) }}",
    "width of a format": "{{ '{:4000000000d}'.format(5) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "rounding": "{{ 1.5 | round(1000000000, 'floor') }}",
    "range": "{{ range(1000000000) | list }}",
    "text": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
REACH = {
    "files": "{{ messages.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "functions": "{{ cycler.__init__.__globals__.os }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format of a filter": "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
    "change": "{{ messages.append(1) }}",
    "change of a turn": "{{ messages[0].update({'content': 'x'}) }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
}


@pytest.mark.parametrize("source", REACH.values(), ids=REACH.keys())
def test_a_template_reaches_nothing_of_python(source: str) -> None:
    template = Template(source, {})
    try:
        text = template.render(HELLO).text
    except TemplateError:
        text = ""
    assert "<class" not in text and "module" not in text and "'os'" not in text
    assert HELLO[0] == {"role": "user", "content": "hi"} and len(HELLO) == 2


def test_a_template_has_no_includes_no_clock_and_no_randomness() -> None:
    for source in (
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
    ):
        with pytest.raises(UsageError, match="reads other templates"):
            Template(source, {})
    with pytest.raises(UsageError, match="cannot be compiled"):
        Template("{{ [1, 2] | random }}", {})
    assert Template("{{ strftime_now('%Y') }}", {}).render(HELLO).text == "2024"
    # Macros of its own are no others: gpt-oss writes its tools by some.
    assert (
        Template("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", {}).render(HELLO).text
        == "<a>"
    )


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "SECONDS", 0.1)
    slow = Template(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}
    )
    with render.limit_rendering() as begin:
        begin()
        with pytest.raises(TemplateError, match=r"more than 0\.1 seconds"):
            slow.render(HELLO)


def test_the_time_of_the_process_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may count more time of a process by ticks than its clock shows."""
    monkeypatch.setattr(time, "process_time", lambda: 1.0 - render.SECONDS)
    busy = Template(
        "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}", {}
    )
    with render.limit_rendering() as begin:
        begin()
        assert busy.render(HELLO).text == ""


def test_memory_and_computations_in_c_are_limited() -> None:
    """In a child process, which must survive each of them."""
    script = f"""
import resource, sys, time
from pathlib import Path
from lib.tokens.chat import render
from lib.tokens.chat.render import Template, TemplateError
before, began = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
with render.limit_rendering() as begin:
    for name, source in {BOMBS!r}.items():
        begin()
        try:
            Template(source, {{}}).render({HELLO!r})
            print(name, "was rendered")
        except TemplateError as error:
            print(name, "|", error)
assert resource.getrlimit(resource.RLIMIT_AS) == before
# Not ru_maxrss, which a process inherits from the one that started it.
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
print("peak", peak, "MiB", time.monotonic() - began, "s", file=sys.stderr)
assert peak < 1500
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(BOMBS) and "was rendered" not in done.stdout, done.stdout
    assert lines[0].startswith("memory | ")


def test_a_missing_token_is_not_written_as_text() -> None:
    for source in (
        "{{ bos_token }}",
        "{{ bos_token + 'x' }}",
        "{{ 'x' + bos_token }}",
        "{{ 'x' ~ bos_token }}",
    ):
        with pytest.raises(TemplateError, match="writes bos_token"):
            Template(source, {"eos_token": "</s>"}).render(HELLO)
    asks = "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}x"
    assert Template(asks, {}).render(HELLO).text == "x"


def test_a_shipped_template_explains_what_it_cannot_render() -> None:
    plain = Path(ROOT / "chat_templates/plain.jinja").read_text()
    tool = {"role": "tool", "content": "4"}
    for messages, tools in (([*HELLO, tool], None), (HELLO, [{"name": "f"}])):
        with pytest.raises(TemplateError, match="no place for"):
            Template(plain, {"eos_token": "</s>"}).render(messages, tools)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% if messages %}x{% endif %}" * 30000,
    ],
    ids=["rendering", "compiling"],
)
def test_an_endless_template_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Path
) -> None:
    """Wherever the time ends: in the compiler or at the first trial conversation."""
    monkeypatch.setattr(render, "SECONDS", 0.1)
    with pytest.raises(UsageError, match="chat template") as caught:
        ChatEncoder(ChatPolicy(source, "assistant", "drop", 99), Encoder(tokenizer, 1))
    assert "more than 0.1 seconds" in caught.value.render()
