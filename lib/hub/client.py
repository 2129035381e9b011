"""Talk to the Hugging Face Hub. No other module may open a connection.

Requests with a transient error are retried, after the delay that the Hub asks for, if any. A broken
stream continues at the byte where it broke. The token is sent in request headers only.
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
from lib.core.retry import backoff, retry
from lib.hub import cache
from lib.hub.partial import PartialFile
from lib.hub.repository import RemoteFile, Repository, redact_urls
from lib.models import hf_cache

Result = TypeVar("Result")

_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}  # HTTP statuses that are retried
_MAX_RETRIES = 5
_METADATA_TIMEOUT_S = 30
_MAX_BACKOFF_S = 30.0
_MAX_RETRY_AFTER_S = 600.0


class HubUnreachableError(UsageError):
    """The Hub did not answer."""


class Hub:
    """Downloads from the public Hub, or from the one that `HF_ENDPOINT` names.

    When the Hub asks for a delay, all threads wait, because the Hub limits users and not
    connections. token: a user's access token; "" uses `HF_TOKEN` or the login stored on this
    machine, if any.
    """

    def __init__(self, token: str) -> None:
        # huggingface_hub reads both at import; telemetry would send requests of its own.
        _require_endpoint()
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        from huggingface_hub import constants, get_token, logging

        logging.set_verbosity_error()  # it would log each retry again, with its URL
        access_token = token or get_token()
        if access_token and not re.fullmatch(r"[\x21-\x7e]+", access_token):
            raise UsageError(
                "the token contains spaces or characters that a token cannot contain",
                expected="a token exactly as the settings page of your Hub account shows it",
            )
        self._token = access_token or False  # with None, huggingface_hub would look for a login
        self.endpoint = constants.ENDPOINT
        _require_settings()
        self.stopped = threading.Event()  # Transfer sets it to end all waiting after an error
        self._paused_until = 0.0
        self._lock = threading.Lock()

    def find_repository(self, name: str, revision: str, kind: str = "model") -> Repository:
        """Return the file list of a repository at a revision (branch, tag or commit).

        If the Hub is unreachable, returns the files that the Hugging Face cache of this machine
        contains. Raises UsageError if the repository does not exist or may not be read, or if the
        Hub is unreachable and nothing is cached.
        """
        try:
            with self._translate_errors(name, revision, kind):
                return self._retry(lambda: self._request_metadata(name, revision, kind))
        except HubUnreachableError as error:
            cached = cache.find_cached_repository(name, revision, kind)
            if cached is None:
                raise
            log.warn(
                f"{error.problem}; using the copy of {name} at {revision} in the Hugging Face "
                f"cache {hf_cache.find_cache()}. It may be older than the Hub's, and files "
                "that were never downloaded are missing"
            )
            return cached

    def read_range(self, repository: Repository, file: RemoteFile, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (exclusive) of a file."""
        with self._translate_errors(repository.name, repository.commit, repository.kind):
            return self._retry(
                lambda: b"".join(self._stream_range(repository, file, start, end)), lambda: False
            )

    def fetch_piece(
        self, repository: Repository, part: PartialFile, piece: int, advance: Callable[[int], None]
    ) -> None:
        """Download the missing bytes of a piece, continuing where a connection broke.

        Raises ArtifactError if connections keep ending early without progress.
        """

        def count_missing() -> int:
            return len(range(*part.missing_range(piece)))

        missing = [count_missing()]

        def made_progress() -> bool:
            missing.append(count_missing())
            return missing[-1] < missing[-2]

        def continue_stream() -> None:
            with part.open_piece(piece) as append:
                for chunk in self._stream_range(repository, part.file, *part.missing_range(piece)):
                    advance(append(chunk))  # write each chunk at once, so that it survives a kill

        with self._translate_errors(repository.name, repository.commit, repository.kind):
            while count_missing():  # a stream can also end early without an error
                self._retry(continue_stream, made_progress)
                if count_missing() and not made_progress():
                    raise ArtifactError(
                        f"{repository.name}: the download of {part.file.path} is incomplete",
                        expected=f"{part.file.size} bytes, the size that the Hub declares",
                        hint="try again later:",
                        run=commands.as_typed(),
                    )

    def _request_metadata(self, name: str, revision: str, kind: str) -> Repository:
        from huggingface_hub import HfApi

        api = HfApi(token=self._token)
        try:
            if kind == "model":
                info = api.model_info(
                    name, revision=revision, files_metadata=True, timeout=_METADATA_TIMEOUT_S
                )
                listed_files: Any = info.siblings or []
            else:
                # `siblings` is truncated at some thousand files (huggingface_hub 3565); the tree
                # is paginated.
                info = api.dataset_info(name, revision=revision, timeout=_METADATA_TIMEOUT_S)
                listed_files = [
                    entry
                    for entry in api.list_repo_tree(
                        name, recursive=True, revision=info.sha or revision, repo_type=kind
                    )
                    if hasattr(entry, "blob_id")  # folders do not have one
                ]
        except (ValueError, TypeError, KeyError):  # not JSON, or not the Hub's
            raise UsageError(
                f"the server at {redact_urls(self.endpoint)} is not a Hub",
                expected="HF_ENDPOINT unset, or the URL of a Hub",
            ) from None
        files = {
            f.rfilename: RemoteFile(
                f.rfilename,
                f.size or 0,
                f.lfs.sha256 if f.lfs else "",
                (not f.lfs and f.blob_id) or "",
            )
            for f in listed_files
        }
        return Repository(name, info.sha or revision, files, kind)

    def _stream_range(
        self, repository: Repository, file: RemoteFile, start: int, end: int
    ) -> Iterator[bytes]:
        """Yield bytes `start` to `end` of a file, as far as one request delivers them."""
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(
            repository.name, file.path, revision=repository.commit, repo_type=repository.kind
        )
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if (start, end) != (0, file.size):
            last = end - 1 if end < file.size else ""
            headers["Range"] = f"bytes={start}-{last}"
        with get_session().stream(
            "GET",
            url,
            headers=headers,
            follow_redirects=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            hf_raise_for_status(response)
            offset = start if response.status_code == 206 else 0  # some servers ignore ranges
            for chunk in response.iter_bytes():
                if part := chunk[max(0, start - offset) : end - offset]:
                    yield part
                if (offset := offset + len(chunk)) >= end:
                    break

    def _retry(
        self, request: Callable[[], Result], made_progress: Callable[[], bool] | None = None
    ) -> Result:
        """Return the result of a request, and retry it after transient errors.

        made_progress: returns whether bytes have arrived since its last call; progress resets the
        count of failures. Without it (a metadata request), a request without an answer is not
        retried.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        failures = 0
        requested = 0.0  # seconds that the Hub asks for

        def send() -> Result:
            while (delay := self._paused_until - time.monotonic()) > 0:
                if self.stopped.wait(delay):
                    break
            return request()

        def is_transient(error: Exception) -> bool:
            nonlocal failures, requested
            if not isinstance(error, HTTPError):
                return False
            response = error.response if isinstance(error, HfHubHTTPError) else None
            requested = _read_retry_after(getattr(response, "headers", {}))
            failures = 0 if made_progress and made_progress() else failures + 1
            is_final = (
                response.status_code not in _TRANSIENT_STATUSES
                if response is not None
                else not made_progress
            )
            return not (
                is_final or failures > _MAX_RETRIES or _is_permanent(error) or self.stopped.is_set()
            )

        def pauses() -> Iterator[float]:
            while True:
                yield self._choose_pause(requested, failures)

        return retry(send, pauses(), is_transient, wait=self.stopped.wait)

    def _choose_pause(self, requested: float, failures: int) -> float:
        """Return the seconds of a backoff; make all threads wait if the Hub requests seconds."""
        if not requested:  # with jitter, so that refused clients do not all return at once
            return backoff(failures, 1.0, _MAX_BACKOFF_S) * random.uniform(0.75, 1.25)
        seconds = min(requested, _MAX_RETRY_AFTER_S)
        with self._lock:
            if seconds > _MAX_BACKOFF_S:
                log.info(f"the Hub asks us to wait {units.duration(seconds)}")
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)
        return 0.0

    @contextmanager
    def _translate_errors(self, name: str, revision: str, kind: str) -> Iterator[None]:
        """Translate each exception of huggingface_hub into one of ours, without request headers."""
        from huggingface_hub import errors

        endpoint = redact_urls(self.endpoint)
        page = f"{endpoint}/datasets/{name}" if kind == "dataset" else f"{endpoint}/{name}"
        try:
            yield
        except errors.OfflineModeIsEnabled:
            raise HubUnreachableError(
                "the Hub is needed, but HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
                hint="to allow the network for this command:",
                run="env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE " + commands.as_typed(),
            ) from None
        except errors.GatedRepoError:
            raise UsageError(
                f"{name} is gated: its owner grants access to users one by one",
                expected="the token of a user who has access (--token or HF_TOKEN)",
                hint=f"request access at {page}",
            ) from None
        except errors.RevisionNotFoundError:
            raise UsageError(
                f"{name} has no revision {revision!r}",
                expected="a branch, a tag or a full commit hash",
            ) from None
        except errors.RepositoryNotFoundError:
            raise UsageError(
                f"there is no {kind} {name} at {endpoint}, or it is private",
                found=f"{page} does not exist or may not be read",
                expected="ORG/NAME; a private repository also needs --token or HF_TOKEN",
            ) from None
        except errors.HfHubHTTPError as error:
            raise _refusal_error(error, name, endpoint, bool(self._token)) from None
        except errors.HTTPError as error:
            raise _unreachable_error(error, endpoint) from None


def _read_retry_after(headers: Mapping[str, str]) -> float:
    """Return the delay in seconds that the Hub requests, or 0 if it requests none."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    retry_after = headers.get("Retry-After", "").strip()
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:  # it may also be a date: RFC 9110, section 10.2.3
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return limit.reset_in_seconds if limit and not limit.remaining else 0.0


def _require_endpoint() -> None:
    """Raise UsageError if HF_ENDPOINT is set but is not a valid URL."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    try:
        parts = urlsplit(endpoint)
        is_valid = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not parts.query
            and not parts.fragment
            and re.fullmatch(r"[\x21-\x7e]+", endpoint)
        )
    except ValueError:  # unclosed brackets, or a port above 65535
        is_valid = False
    if "HF_ENDPOINT" in os.environ and not is_valid:
        raise UsageError(
            "HF_ENDPOINT is not a valid URL of a Hub",
            found=repr(redact_urls(endpoint)),
            expected="https://HOST or http://HOST:PORT, or HF_ENDPOINT unset",
        )


def _require_settings() -> None:
    """Raise UsageError if the configured proxy or certificate file cannot be used."""
    from huggingface_hub import get_session

    try:
        get_session()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            "the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read",
            found=str(error),
            expected="a PEM file in SSL_CERT_FILE",
        ) from None
    except Exception as error:  # ValueError or InvalidURL from the client's constructor
        raise UsageError(
            "the proxy in HTTPS_PROXY or HTTP_PROXY cannot be used",
            found=redact_urls(str(error)),
            expected="http://HOST:PORT",
        ) from None


def _is_permanent(error: Exception) -> bool:
    """Return whether a retry is pointless: certificates and proxies do not change by waiting."""
    return type(error).__name__ in (
        "ProxyError",
        "UnsupportedProtocol",
        "InvalidURL",
        "TooManyRedirects",
    ) or _is_certificate_error(error)


def _is_certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refusal_error(error: Any, name: str, endpoint: str, has_token: bool) -> UsageError:
    """Return the error for a request that the Hub answered with an error status."""
    status = error.response.status_code
    if status == 401 and has_token:
        return UsageError(
            f"the Hub at {endpoint} does not accept the token",
            found="HTTP status 401",
            expected="a valid token (--token or HF_TOKEN), or none",
        )
    problem = f"the Hub at {endpoint} refused to serve {name}"
    if status not in _TRANSIENT_STATUSES:
        return UsageError(problem, found=f"HTTP status {status}")
    return UsageError(
        problem,
        found=f"HTTP status {status}, {_MAX_RETRIES + 1} times",
        hint="finished files are kept; try again later:",
        run=commands.as_typed(),
    )


def _unreachable_error(error: Exception, endpoint: str) -> HubUnreachableError:
    """Return the error for a request without an answer."""
    found = type(error).__name__
    if "Bearer" not in str(error):  # never print a token
        found += f": {redact_urls(str(error))}"
    if _is_certificate_error(error):
        return HubUnreachableError(
            f"the certificate of {endpoint} is not trusted",
            found=found,
            expected="SSL_CERT_FILE names a PEM file with the certificate authority in use",
        )
    proxy = _find_proxy_variable(endpoint)
    if type(error).__name__ == "ProxyError":
        return HubUnreachableError(
            f"the proxy refused the connection to {endpoint}",
            found=found,
            expected=f"a proxy in {proxy or 'https_proxy'} that allows this host (with user and "
            "password in its URL if it requires them), or the host in no_proxy",
        )
    return HubUnreachableError(
        f"the Hub at {endpoint} is unreachable"
        + (f" through the proxy in {proxy}" if proxy else ""),
        found=found,
        expected="a network connection, or a copy of .cache/ from a connected machine",
        hint="finished files are kept; when the network is back:",
        run=commands.as_typed(),
    )


def _find_proxy_variable(endpoint: str) -> str:
    """Return the name of the environment variable that sets the proxy in use, or ""."""
    scheme, _, rest = endpoint.partition("://")
    names = [
        name
        for name in os.environ
        if os.environ[name] and name.lower() in (f"{scheme}_proxy", "all_proxy")
    ]
    is_used = scheme in getproxies() or "all" in getproxies()
    return names[0] if names and is_used and not proxy_bypass(rest.partition("/")[0]) else ""
