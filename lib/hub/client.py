"""Talks to the Hugging Face Hub; nothing else may open a connection.

A request that fails for a passing reason is made again, after as long as the Hub asks for; a
stream that breaks is taken up where it broke. The token goes into request headers only.
"""

from __future__ import annotations

import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lib.core import commands, log, units
from lib.core.errors import ArtifactError, UsageError
from lib.hub import cache
from lib.hub.partial import PartialFile
from lib.hub.repository import RemoteFile, Repository, redact
from lib.models import hf_cache

Result = TypeVar("Result")

_PASSING = {408, 429, 500, 502, 503, 504}  # HTTP statuses worth another try
_RETRIES = 5
_LOOK_UP_TIMEOUT_S = 30
_LONGEST_S = 30.0
_LONGEST_ASKED_S = 600.0


class OutOfReachError(UsageError):
    """Says that the Hub gave no answer."""


class Hub:
    """Fetches from a Hub; `HF_ENDPOINT` names another than the public one.

    A request to wait holds for all threads: the Hub limits users, not connections. token: of a
    user, or "" for the one in `HF_TOKEN` or of a login on this machine, if any.
    """

    def __init__(self, token: str) -> None:
        # Read when huggingface_hub is imported; telemetry would make requests of its own.
        _require_endpoint()
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        from huggingface_hub import constants, get_token, logging

        logging.set_verbosity_error()  # it would log retries a second time, with addresses
        given = token or get_token()
        if given and not re.fullmatch(r"[\x21-\x7e]+", given):
            raise UsageError(
                "the token holds spaces or characters that no token has",
                expected="a token as the settings page of a Hub account shows it",
            )
        self._token = given or False  # None would look for a login once more
        self.endpoint = constants.ENDPOINT
        _require_settings()
        self.stopped = threading.Event()  # set from outside, it ends all waiting
        self._paused_until = 0.0
        self._lock = threading.Lock()

    def look_up(self, name: str, revision: str, kind: str = "model") -> Repository:
        """Return what a repository holds at a revision (branch, tag or commit).

        When the Hub is out of reach, what the Hugging Face cache of this machine holds of it.
        Raises UsageError when it is not there, not allowed, or neither can be had.
        """
        try:
            with self._explained(name, revision, kind):
                return self._retry(lambda: self._ask(name, revision, kind))
        except OutOfReachError as error:
            cached = cache.look_up(name, revision, kind)
            if cached is None:
                raise
            log.warn(
                f"{error.problem}: taking {name} at {revision} from the Hugging Face cache "
                f"{hf_cache.find()}, as it was when it came there; files that never "
                "came there will be missing"
            )
            return cached

    def read(self, repository: Repository, file: RemoteFile, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to `end`."""
        with self._explained(repository.name, repository.commit, repository.kind):
            return self._retry(
                lambda: b"".join(self._stream(repository, file, start, end)), lambda: False
            )

    def receive(
        self, repository: Repository, part: PartialFile, piece: int, advance: Callable[[int], None]
    ) -> None:
        """Complete a piece of a file, taking up a broken connection where it broke."""

        def left() -> int:
            return len(range(*part.range_left(piece)))

        lefts = [left()]

        def came_further() -> bool:
            lefts.append(left())
            return lefts[-1] < lefts[-2]

        def take_up() -> None:
            with part.appending(piece) as append:
                for chunk in self._stream(repository, part.file, *part.range_left(piece)):
                    advance(append(chunk))  # as it comes: what came survives a kill

        with self._explained(repository.name, repository.commit, repository.kind):
            while left():  # a stream may also end early without an error
                self._retry(take_up, came_further)
                if left() and not came_further():
                    raise ArtifactError(
                        f"{repository.name}: {part.file.path} arrived incomplete",
                        expected=f"{part.file.size} bytes, as the Hub declares",
                        hint="later:",
                        run=commands.as_typed(),
                    )

    def _ask(self, name: str, revision: str, kind: str) -> Repository:
        from huggingface_hub import HfApi

        api = HfApi(token=self._token)
        try:
            if kind == "model":
                info = api.model_info(
                    name, revision=revision, files_metadata=True, timeout=_LOOK_UP_TIMEOUT_S
                )
                found: Any = info.siblings or []
            else:
                # The list that comes with the facts is cut short at some thousand files
                # (huggingface_hub 3565); the tree comes in pages.
                info = api.dataset_info(name, revision=revision, timeout=_LOOK_UP_TIMEOUT_S)
                found = [
                    entry
                    for entry in api.list_repo_tree(
                        name, recursive=True, revision=info.sha or revision, repo_type=kind
                    )
                    if hasattr(entry, "blob_id")
                ]  # no folder
        except (ValueError, TypeError, KeyError):  # no JSON, or JSON of something else
            raise UsageError(
                f"what answers at {redact(self.endpoint)} is not a Hub",
                expected="HF_ENDPOINT unset, or the address of a Hub",
            ) from None
        files = {
            f.rfilename: RemoteFile(
                f.rfilename,
                f.size or 0,
                f.lfs.sha256 if f.lfs else "",
                (not f.lfs and f.blob_id) or "",
            )
            for f in found
        }
        return Repository(name, info.sha or revision, files, kind)

    def _stream(
        self, repository: Repository, file: RemoteFile, start: int, end: int
    ) -> Iterator[bytes]:
        """Yield what one request brings of the bytes of a file from `start` to `end`."""
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(
            repository.name, file.path, revision=repository.commit, repo_type=repository.kind
        )
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if (start, end) != (0, file.size):
            headers["Range"] = f"bytes={start}-" + (str(end - 1) if end < file.size else "")
        with get_session().stream(
            "GET",
            url,
            headers=headers,
            follow_redirects=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            hf_raise_for_status(response)
            at = start if response.status_code == 206 else 0  # not all know ranges
            for chunk in response.iter_bytes():
                if wanted := chunk[max(0, start - at) : end - at]:
                    yield wanted
                if (at := at + len(chunk)) >= end:
                    break

    def _retry(
        self, request: Callable[[], Result], came_further: Callable[[], bool] | None = None
    ) -> Result:
        """Return what a request returns, making it again while it fails for passing reasons.

        came_further: tells whether bytes came since it was last asked; without it, no answer at
        all is final, since nothing is lost then.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        failures = 0
        while True:
            while (left := self._paused_until - time.monotonic()) > 0 and not self.stopped.wait(
                left
            ):
                pass
            try:
                return request()
            except HTTPError as error:
                response = error.response if isinstance(error, HfHubHTTPError) else None
                failures = 0 if came_further and came_further() else failures + 1
                final = (
                    response.status_code not in _PASSING
                    if response is not None
                    else not came_further
                )
                if final or failures > _RETRIES or _is_lasting(error) or self.stopped.is_set():
                    raise
                self._pause(_read_wait_s(getattr(response, "headers", {})), failures)

    def _pause(self, asked: float, failures: int) -> None:
        """Back off after each failure, or let all threads wait the seconds a server asked for."""
        if not asked:  # with chance, so that not all who were refused come back at once
            self.stopped.wait(
                min(_LONGEST_S, 2.0 ** max(0, failures - 1)) * random.uniform(0.75, 1.25)
            )
            return
        seconds = min(asked, _LONGEST_ASKED_S)
        with self._lock:
            if seconds > _LONGEST_S:
                log.info(f"the Hub asks to wait {units.duration(seconds)}")
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    @contextmanager
    def _explained(self, name: str, revision: str, kind: str) -> Iterator[None]:
        """Turn what huggingface_hub raises into one sentence each, never quoting a header."""
        from huggingface_hub import errors

        endpoint = redact(self.endpoint)
        page = f"{endpoint}/datasets/{name}" if kind == "dataset" else f"{endpoint}/{name}"
        try:
            yield
        except errors.OfflineModeIsEnabled:
            raise OutOfReachError(
                "the Hub is needed, but the environment says to stay offline",
                run="env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE " + commands.as_typed(),
            ) from None
        except errors.GatedRepoError:
            raise UsageError(
                f"{name} is gated: its owner grants access to users one by one",
                expected="a token of a user who has access (--token or HF_TOKEN)",
                hint=f"ask for access at {page}",
            ) from None
        except errors.RevisionNotFoundError:
            raise UsageError(
                f"{name} has no revision {revision!r}",
                expected="a branch, a tag or a full commit hash",
            ) from None
        except errors.RepositoryNotFoundError:
            raise UsageError(
                f"there is no {kind} {name} at {endpoint}, or it is private",
                found=f"nothing that you may read at {page}",
                expected="ORG/NAME; for a private one also --token or HF_TOKEN",
            ) from None
        except errors.HfHubHTTPError as error:
            raise _refused(error, name, endpoint, bool(self._token)) from None
        except errors.HTTPError as error:
            raise _out_of_reach(error, endpoint) from None


def _read_wait_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that the Hub asks to wait, 0 when it asks for nothing."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    asked = headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:  # or a date: RFC 9110, section 10.2.3
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return limit.reset_in_seconds if limit and not limit.remaining else 0.0


def _require_endpoint() -> None:
    """Raise UsageError when HF_ENDPOINT is not an address."""
    given = os.environ.get("HF_ENDPOINT", "")
    try:
        parts = urlsplit(given)
        is_good = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not parts.query
            and not parts.fragment
            and re.fullmatch(r"[\x21-\x7e]+", given)
        )
    except ValueError:  # brackets that do not close, a port beyond 65535
        is_good = False
    if "HF_ENDPOINT" in os.environ and not is_good:
        raise UsageError(
            "HF_ENDPOINT is not an address of a Hub",
            found=repr(redact(given)),
            expected="https://HOST or http://HOST:PORT, or HF_ENDPOINT unset",
        )


def _require_settings() -> None:
    """Raise UsageError when the proxy or certificates of the environment cannot be used."""
    from huggingface_hub import get_session

    try:
        get_session()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            "the certificates that the environment names cannot be read",
            found=str(error),
            expected="a PEM file in SSL_CERT_FILE",
        ) from None
    except Exception as error:  # ValueError, InvalidURL: the client checks them when it is made
        raise UsageError(
            "the proxy that the environment names cannot be used",
            found=redact(str(error)),
            expected="http://HOST:PORT in HTTPS_PROXY or HTTP_PROXY",
        ) from None


def _is_lasting(error: Exception) -> bool:
    """Tell whether an error would come again: certificates and proxies do not mend by waiting."""
    return type(error).__name__ in (
        "ProxyError",
        "UnsupportedProtocol",
        "InvalidURL",
        "TooManyRedirects",
    ) or _is_certificate(error)


def _is_certificate(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refused(error: Any, name: str, endpoint: str, has_token: bool) -> UsageError:
    status = error.response.status_code
    if status == 401 and has_token:
        return UsageError(
            f"the Hub at {endpoint} does not accept the token",
            found="HTTP status 401",
            expected="a valid token (--token or HF_TOKEN), or none",
        )
    busy = status in _PASSING
    return UsageError(
        f"the Hub at {endpoint} refused to serve {name}",
        found=f"HTTP status {status}" + (f", {_RETRIES + 1} times" if busy else ""),
        hint="later; finished files are kept:" if busy else "",
        run=commands.as_typed() if busy else "",
    )


def _out_of_reach(error: Exception, endpoint: str) -> OutOfReachError:
    """Return the error for a request that got no answer."""
    found = type(error).__name__ + (f": {redact(str(error))}" if "Bearer" not in str(error) else "")
    if _is_certificate(error):
        return OutOfReachError(
            f"the certificate of {endpoint} is not trusted here",
            found=found,
            expected="the authority of your network in SSL_CERT_FILE (a PEM file)",
        )
    proxy = _find_proxy_variable(endpoint)
    if type(error).__name__ == "ProxyError":
        return OutOfReachError(
            f"the proxy does not let us through to {endpoint}",
            found=found,
            expected=f"a proxy in {proxy or 'https_proxy'} that lets us, with user and password "
            "in its address if it asks for them; or this host in no_proxy",
        )
    return OutOfReachError(
        f"the Hub at {endpoint} is out of reach"
        + (f" through the proxy in {proxy}" if proxy else ""),
        found=found,
        expected="a connection, or a copy of .cache/ from a connected machine",
        hint="finished files are kept:",
        run=commands.as_typed(),
    )


def _find_proxy_variable(endpoint: str) -> str:
    """Return the environment variable of the proxy that requests go through, "" without one."""
    scheme, _, rest = endpoint.partition("://")
    names = [
        name
        for name in os.environ
        if os.environ[name] and name.lower() in (f"{scheme}_proxy", "all_proxy")
    ]
    is_used = scheme in getproxies() or "all" in getproxies()
    return names[0] if names and is_used and not proxy_bypass(rest.partition("/")[0]) else ""
