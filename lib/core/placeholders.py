"""Recognise files that stand in place of data: pointers of version control, and error pages.

A clone without Git LFS contains pointers of a few lines, and a download that was refused leaves the
answer of the server under the name of the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import units
from lib.core.errors import ArtifactError

POINTER = "pointer"
ERROR_PAGE = "error page"
HEAD_BYTES = 16_384  # bytes at the beginning of a file from which it is recognised
HTML_START = re.compile(
    r"(?:\s|\ufeff|<\?xml[^>]{0,500}\?>|<!--(?:(?!-->).){0,5000}-->)*"
    r"(?:<!doctype\s+html\b|<html\b)",
    re.IGNORECASE | re.DOTALL,
)
_SHOWN = 10  # files in an error
_LARGEST = 4096  # bytes of a pointer or of an answer in XML, JSON or plain text
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_LFS = re.compile(
    r"version https://(?:git-lfs|hawser)\.github\.com/spec/v\d+\n(?:[a-z0-9.-]+ [^\n]*(?:\n|$))*"
)
_LFS_SIZE = re.compile(r"^size (\d{1,18})$", re.MULTILINE)
_ANNEX = re.compile(r"(?:[\w./\\-]*[/\\])?annex[/\\]objects[/\\](?:\S+[/\\])?[A-Z][A-Z0-9_]*-\S+")
_DVC = re.compile(r"(?:[a-z]+: [^\n]*\n)*outs:\n *- (?:[^\n]*\n?)+")
_DVC_DIGEST = re.compile(r"^[ -]*(?:md5|etag|checksum): ['\"]?[0-9a-fA-F-]{16,}", re.MULTILINE)
_XET = re.compile(r"# xet version \d+\n")
_TITLE = re.compile(r"<title[^>]*>\s*([^<]{1,200})", re.IGNORECASE)
_MARKUP = re.compile(
    r"<(?:head|body|title|center|h1|meta|script|style|error|!--|\?xml)\b", re.IGNORECASE
)
_XML_ERROR = re.compile(r"<(?:Code|Message|message)>([^<]{1,200})")
_REFUSAL = re.compile(
    r"(?:http(?:/[\d.]+)? )?(?:error:? )?(?:[45]\d\d\W{0,3})?(?:bad request|unauthori[sz]ed|"
    r"forbidden|access denied|permission denied|(?:\w+ )?not found|too many requests|"
    r"rate limit exceeded|internal server error|bad gateway|service unavailable|"
    r"gateway time-?out|invalid (?:username or password|credentials|user token)|"
    r"no such ?key|access to (?:model|dataset) \S+ is restricted)\b[^\n]{0,400}",
    re.IGNORECASE,
)
_ERROR_KEYS = {
    *("error", "errors", "message", "detail", "details", "status", "statuscode", "status_code"),
    *("code", "error_code", "error_description", "documentation_url", "request_id", "requestid"),
    *("type", "title", "path", "timestamp", "success", "reason", "instance", "trace_id"),
}
_STATUS_KEYS = {"status", "statuscode", "status_code", "code", "error_code"}


class Placeholder(NamedTuple):
    """Describes a file that is not the data: POINTER or ERROR_PAGE, what it is, and the cure."""

    kind: str
    description: str
    cure: str

    def __str__(self) -> str:
        return f"{self.description}; {self.cure}"


def find_placeholder(head: bytes) -> Placeholder | None:
    """Return what stands in place of the data in a file that should contain data.

    head: the first HEAD_BYTES bytes of the file. A page is such a file too, so use `find_pointer`
    for a file that may be any text.
    """
    return find_pointer(head) or find_page(head)


def find_in_file(path: Path) -> Placeholder | None:
    """Return what stands in place of the data in a file, None if that cannot be read.

    A file of git-annex that is not on this machine is a link to a missing file.
    """
    try:
        if not path.is_file():
            return find_pointer(str(path.readlink()).encode()) if path.is_symlink() else None
        with path.open("rb") as file:
            return find_placeholder(file.read(HEAD_BYTES))
    except (OSError, ValueError):
        return None


def require_data(paths: Iterable[Path], subject: str) -> None:
    """Raise ArtifactError with the cause and the cure for all files that are not the data.

    subject: the model or the dataset of the files, in the message. Missing files are skipped.
    """
    found = {path: placeholder for path in paths if (placeholder := find_in_file(path))}
    if found:
        raise ArtifactError(
            f"{subject} contains {units.counted(len(found), 'file')} without data",
            found=units.join_lines(
                [f"{path} is {placeholder.description}" for path, placeholder in found.items()],
                _SHOWN,
            ),
            hint="; ".join(dict.fromkeys(placeholder.cure for placeholder in found.values())),
        )


def find_pointer(head: bytes) -> Placeholder | None:
    """Return the pointer that a file consists of. head: as for `find_placeholder`."""
    if len(head) > _LARGEST:
        return None
    text = decode_head(head).replace("\r\n", "\n").strip()
    if _LFS.fullmatch(text):
        size = _LFS_SIZE.search(text)
        of_size = f" to {units.size(int(size[1]))} of data" if size else ""
        return Placeholder(
            POINTER,
            f"a Git LFS pointer{of_size}, not the data",
            "run `git lfs pull` in the clone (it needs Git LFS), or download the file again",
        )
    if _ANNEX.fullmatch(text):
        return Placeholder(
            POINTER, "a git-annex pointer, not the data", "run `git annex get .` in the clone"
        )
    if _DVC.fullmatch(text) and _DVC_DIGEST.search(text) and "path:" in text:
        return Placeholder(
            POINTER, "a DVC pointer, not the data", "run `dvc pull` in the repository"
        )
    if _XET.match(text):
        return Placeholder(
            POINTER,
            "a Xet pointer, not the data",
            "clone the repository again with git-xet, or download the file",
        )
    return None


def decode_head(head: bytes) -> str:
    """Return the text of the first bytes of a file, without a byte order mark."""
    if head.startswith(_UTF16_BOMS):
        return head.decode("utf-16", "replace")
    return head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")


def find_page(head: bytes) -> Placeholder | None:
    """Return the page, or the answer in XML, JSON or plain text, that a server sent."""
    text = decode_head(head).strip()
    if HTML_START.match(text) or (text[:1] == "<" and _MARKUP.match(text)):
        is_xml = text.startswith(("<?xml", "<Error")) and not HTML_START.match(text)
        title = (_XML_ERROR if is_xml else _TITLE).search(text)
        return _describe_page("an XML document" if is_xml else "an HTML page", title)
    if len(head) > _LARGEST:
        return None
    if text[:1] == "{" and (message := _find_json_error(text)):
        return _describe_page("an error message in JSON", re.match(r".+", message))
    refusal = _REFUSAL.fullmatch(text)
    return _describe_page("an error message", refusal) if refusal else None


def _describe_page(subject: str, title: re.Match[str] | None) -> Placeholder:
    quoted = ""
    if title:
        words = " ".join(title[title.re.groups].split())
        quoted = f' ("{words[:80]}")'
    return Placeholder(
        ERROR_PAGE,
        f"{subject}{quoted}, not the data",
        "download the file again; the server may want a login or another address",
    )


def _find_json_error(text: str) -> str:
    """Return the message of a JSON object in which a server describes an error, or ""."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    names = {key.lower(): value for key, value in content.items()}
    if not names or not names.keys() <= _ERROR_KEYS:
        return ""
    message = next(
        (names[key] for key in ("error", "message", "detail", "errors", "title") if key in names),
        "",
    )
    has_status = any(_is_status(names[key]) for key in _STATUS_KEYS & names.keys())
    is_error = (
        "error" in names
        or "errors" in names
        or "documentation_url" in names
        or (has_status and bool(message))
        or (isinstance(message, str) and bool(_REFUSAL.fullmatch(message.strip())))
    )
    return str(message or "error") if is_error else ""


def _is_status(value: Any) -> bool:
    """Return whether a value is a status of HTTP that means an error, such as 404 or "403"."""
    text = str(value)
    return len(text) == 3 and text.isdecimal() and text[0] in "45"
