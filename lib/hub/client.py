"""Talk to the Hugging Face Hub. No other module may open a connection to it.

`huggingface_hub` lists and downloads. It retries what it can, and this module retries the rest. The
token is sent in request headers only.
"""

from __future__ import annotations

import logging
import os
import random
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lib.core import commands, log, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.retry import retry
from lib.hub import cache
from lib.hub.repository import RemoteFile, Repository, redact_urls
from lib.models import hf_cache

Result = TypeVar("Result")

_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}  # HTTP statuses that are retried
_PERMANENT = ("ProxyError", "UnsupportedProtocol", "InvalidURL", "TooManyRedirects")
_PAUSES_S = (1.0, 2.0, 8.0, 16.0)  # before each retry, unless the Hub asks for a longer pause
_LONGEST_PAUSE_S = 600.0  # that the Hub can ask for; then we ask again
_METADATA_TIMEOUT_S = 30
_MAX_HTTP_BYTES = 50 * 10**9  # huggingface_hub downloads larger files only by Xet


class HubUnreachableError(UsageError):
    """The Hub did not answer."""


class Hub:
    """Downloads from the public Hub, or from the one that `HF_ENDPOINT` names.

    token: a user's access token; "" uses `HF_TOKEN` or the login stored on this machine, if any.
    """

    def __init__(self, token: str) -> None:
        # huggingface_hub reads all three at import. Telemetry would send requests of its own, and
        # Xet uses other hosts than HF_ENDPOINT names, without our proxies and certificates.
        _require_endpoint()
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        os.environ["HF_HUB_DISABLE_XET"] = "1"
        from huggingface_hub import HfApi, get_token

        logger = logging.getLogger("huggingface_hub")
        logger.handlers = [_WaitHandler()]
        logger.setLevel(logging.WARNING)
        access_token = token or get_token()
        if access_token and not re.fullmatch(r"[\x21-\x7e]+", access_token):
            raise UsageError(
                "the token contains spaces or characters that a token cannot contain",
                expected="a token exactly as the settings page of your Hub account shows it",
            )
        self._token = access_token or False  # with None, huggingface_hub would look for a login
        self.endpoint = HfApi().endpoint
        _require_settings()

    def find_repository(self, name: str, revision: str, kind: str = "model") -> Repository:
        """Return the file list of a repository at a revision (branch, tag or commit).

        If the Hub is unreachable, returns the files that the Hugging Face cache of this machine
        contains. Raises UsageError if the repository does not exist or may not be read, or if the
        Hub is unreachable and nothing is cached.
        """
        try:
            with self._translate_errors(name, revision, kind):
                return self._retry(
                    lambda: self._request_metadata(name, revision, kind), needs_answer=True
                )
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

    def download(
        self,
        repository: Repository,
        file: RemoteFile,
        directory: Path,
        count: Callable[[int], None],
    ) -> Path:
        """Download a file into an empty directory, and return its path there.

        count: called with the bytes received, and with a negative number if they are dropped. An
        error of it ends the download. Besides the file, huggingface_hub leaves records of its own
        in the directory. The content is not checked.
        """
        from huggingface_hub import hf_hub_download

        if file.size > _MAX_HTTP_BYTES:
            raise _too_large_error(repository, file)

        def request() -> Path:
            counter = _ByteCounter(count)
            try:
                path = hf_hub_download(
                    repository.name,
                    file.path,
                    repo_type=repository.kind,
                    revision=repository.commit,
                    local_dir=directory,
                    # Not from the user's cache, where the file may be damaged. A request for the
                    # size and the digest is sent once instead of for six minutes; `_retry` repeats
                    # it.
                    force_download=True,
                    endpoint=self.endpoint,
                    token=self._token,
                    tqdm_class=cast(Any, lambda **_: counter),
                )
            except BaseException as error:
                count(-counter.received)
                cause = error.__cause__
                if not isinstance(error, ValueError) or not cause:
                    raise
            else:
                return Path(path)
            raise cause  # not in the handler, where the two would refer to each other in a circle

        with self._translate_errors(repository.name, repository.commit, repository.kind):
            return self._retry(request)

    def read_start(self, repository: Repository, file: RemoteFile, size: int) -> bytes:
        """Return the first `size` bytes of a file."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(
            repository.name, file.path, revision=repository.commit, repo_type=repository.kind
        )
        headers = build_hf_headers(token=self._token) | {
            "Accept-Encoding": "identity",
            "Range": f"bytes=0-{size - 1}",
        }

        def request() -> bytes:
            with get_session().stream(
                "GET", url, headers=headers, timeout=_METADATA_TIMEOUT_S
            ) as response:
                hf_raise_for_status(response)
                return next(response.iter_bytes(size), b"")  # some servers ignore ranges

        with self._translate_errors(repository.name, repository.commit, repository.kind):
            return self._retry(request)

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

    def _retry(self, request: Callable[[], Result], *, needs_answer: bool = False) -> Result:
        """Return the result of a request, and repeat it after errors that may pass.

        needs_answer: a request without an answer is not repeated.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import parse_ratelimit_headers

        delay = 0.0  # seconds that the Hub asks us to wait

        def is_transient(error: Exception) -> bool:
            nonlocal delay
            delay = 0.0
            if not isinstance(error, HfHubHTTPError):
                may_pass = isinstance(error, HTTPError) and not _is_permanent(error)
                return may_pass and not needs_answer
            headers = error.response.headers
            limit = parse_ratelimit_headers(headers)
            after = headers.get("Retry-After", "")
            if after.isdecimal():
                delay = min(float(after), _LONGEST_PAUSE_S)
            if limit and not limit.remaining:
                delay = min(float(limit.reset_in_seconds), _LONGEST_PAUSE_S)
            return error.response.status_code in _TRANSIENT_STATUSES

        def pauses() -> Iterator[float]:
            for pause in _PAUSES_S:
                if delay > pause:
                    log.info(f"the Hub asks us to wait {units.duration(delay)}")
                # With jitter, so that refused clients do not all return at once.
                yield max(pause * random.uniform(0.75, 1.25), delay)

        return retry(request, pauses(), is_transient)

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
        except errors.FileMetadataError:
            raise UsageError(
                f"the server at {endpoint} does not describe the files of {name}",
                found="a HEAD request was answered without ETag, X-Repo-Commit or a size",
                expected="HF_ENDPOINT unset, or the URL of a Hub or of a complete mirror",
            ) from None
        except errors.HfHubHTTPError as error:
            raise _refusal_error(error, name, endpoint, bool(self._token)) from None
        except errors.HTTPError as error:
            raise _unreachable_error(error, endpoint) from None
        except OSError as error:
            if type(error) is not OSError or error.errno:
                raise
            raise ArtifactError(  # huggingface_hub has no class for it
                f"{name}: a download ended early",
                found=str(error).partition("\n")[0],
                hint="finished files are kept; try again later:",
                run=commands.as_typed(),
            ) from None


class _WaitHandler(logging.Handler):
    """Prints how long the Hub makes huggingface_hub wait, and nothing else that it logs.

    Its other lines repeat our errors, or contain URLs that are secret.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record about a wait."""
        reason, _, wait = record.getMessage().partition(". ")
        if reason == "Rate limited":
            log.info(f"the Hub limits our requests. {wait}")


class _ByteCounter:
    """Counts the bytes of a download in place of the bar that huggingface_hub would show."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self.received = 0
        self._count = count

    def __enter__(self) -> _ByteCounter:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, amount: int) -> None:
        """Count bytes, before they are written; an error of `count` ends the download."""
        self.received += amount
        self._count(amount)


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
    return type(error).__name__ in _PERMANENT or _is_certificate_error(error)


def _is_certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _too_large_error(repository: Repository, file: RemoteFile) -> UsageError:
    """Return the error for a file that the Hub sends only by Xet."""
    words = ("download", repository.name, file.path, "--repo-type", repository.kind)
    return UsageError(
        f"{file.path} of {repository.name} is too large for a download by HTTP",
        found=units.size(file.size),
        expected=f"at most {units.size(_MAX_HTTP_BYTES)}, or the file in the Hugging Face cache",
        hint="to download it into that cache, where the same command then finds it:",
        run=commands.python(
            "-m", "huggingface_hub.cli.hf", *words, "--revision", repository.commit
        ),
    )


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
        found=f"HTTP status {status}, repeatedly",
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
