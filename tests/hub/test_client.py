# covers: lib/hub/client.py, lib/hub/cache.py
"""Check the URL of the Hub, and refuse files that it does not send over HTTP."""

from __future__ import annotations

import pytest

from lib.core.errors import UsageError
from lib.hub import client
from lib.hub.repository import RemoteFile, Repository


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


def test_a_file_that_needs_xet_is_refused_before_any_request(tmp_path):
    hub = object.__new__(client.Hub)
    file = RemoteFile("data/pile.jsonl", 10**11, "", "")
    with pytest.raises(UsageError, match="too large") as caught:
        hub.download(Repository("org/text", "c", {}, "dataset"), file, tmp_path, print)
    assert caught.value.run.endswith(
        "hf download org/text data/pile.jsonl --repo-type dataset --revision c"
    )
