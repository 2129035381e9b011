"""What is message of a service that does not answer stays short, since each save may say it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from lib.checkpoints import hyperpod
from tests.conftest import free_port


def test_an_error_of_the_network_is_one_short_line() -> None:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{free_port()}", timeout=5)
    except (urllib.error.URLError, http.client.HTTPException) as error:
        pool = f"HTTPConnectionPool(host='h', port=1): Max retries exceeded {'x' * 300} ({error})"
        wrapped = RuntimeError(f"request failed: {pool} " * 3)
        wrapped.__cause__ = ConnectionError(pool)
    message = hyperpod._summarize_error(wrapped)
    assert message == "RuntimeError: [Errno 111] Connection refused"
    long = hyperpod._summarize_error(ValueError("y" * 1000 + "\nsecond line"))
    assert len(long) <= 160 and "\n" not in long
