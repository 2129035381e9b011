# covers: lib/hub/client.py, lib/hub/cache.py
"""Check the URL of the Hub, and read the delay that it requests."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from lib.core.errors import UsageError
from lib.hub import client


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hub",
        "ftp://x",
        "http://",
        "http://[::1",
        "http://a b",
        "http://x:99999",
        "http://x:0",
        "http://x/\x7f",
        "http://x?a",
        "http://u:pa55@x\n",
        "http://ü",
    ],
)
def test_an_invalid_url_of_the_hub_is_refused(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        client.Hub("")
    assert "pa55" not in caught.value.render() and "\n" not in caught.value.found


def test_the_delay_that_the_hub_requests_is_read():
    def asked(after: str) -> float:
        return client._read_retry_after({"Retry-After": after})

    assert asked("7") == 7 and asked("") == asked("soon") == asked("²") == 0
    assert 50 < asked(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert asked(formatdate(time.time() - 60, usegmt=True)) == 0
    assert client._read_retry_after({"RateLimit": '"resolvers";r=0;t=2'}) == 2
