# covers: lib/hub/client.py, lib/hub/cache.py
"""Check the URL of the Hub, and download from one that answers wrongly, or not at all."""

from __future__ import annotations

import socket
import time

import pytest

from lib.core.errors import UsageError
from lib.hub import client
from lib.hub.repository import RemoteFile, Repository
from tests.hub_server import HubServer, Repo

TEXT = b"a line\n"


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
        "http://u:pa55/w@x",
        "http://u:x@pa55@x:0",
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """Return a client of a server that does not answer requests for the size and the digest."""
    from huggingface_hub import constants

    class Silent(HubServer):
        def answer(self, http, request) -> None:
            if request.method == "HEAD":
                time.sleep(3)
            else:
                super().answer(http, request)

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(client, "_PAUSES_S", (0.01, 0.01))
    hub = object.__new__(client.Hub)
    hub._token = False
    with Silent() as hub.server:
        hub.server.repos["org/text"] = Repo({"a.txt": TEXT}, kind="dataset")
        hub.endpoint = hub.server.url
        yield hub


def fetch(hub, tmp_path) -> list[int]:
    repo = hub.server.repos["org/text"]
    counts: list[int] = []
    file = RemoteFile("a.txt", len(TEXT), "", "")
    hub.download(Repository("org/text", repo.commit, {}, "dataset"), file, tmp_path, counts.append)
    return counts


def test_requests_that_are_never_answered_end_in_an_error(hub, tmp_path):
    with pytest.raises(client.HubUnreachableError, match="unreachable") as caught:
        fetch(hub, tmp_path)
    assert "Timeout" in caught.value.found
    assert [request.method for request in hub.server.requests] == ["HEAD"] * 3


def test_a_refused_connection_ends_in_an_error(hub, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub.endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(client.HubUnreachableError, match="unreachable"):
            fetch(hub, tmp_path)
