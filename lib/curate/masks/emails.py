"""Find e-mail addresses, with letters of any script, and the spelling `joe [at] example.com`."""

from __future__ import annotations

import re

from lib.curate.masks.finders import LETTER, UNSPACED, Finder

_LONGEST_LOCAL = 64  # characters, by RFC 5321
_LONGEST_DOMAIN = 253
_MOST_BYTES = 4 * (_LONGEST_DOMAIN + 2)  # bytes of a domain and of the characters after it
_URL_BYTES = 256  # bytes before an address to search for the scheme of a URL
_MARKS = "\u0300-\u036f"  # accents that follow their letter, as file systems write them
_LOCAL_BYTES = (
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.!#$%&'*+-/=?^_`{|}~"
    + bytes(range(128, 256))
)
# The characters of a local part that occur in practice; others would swallow code before it.
_LOCAL = re.compile(f"[^\\W{UNSPACED}](?:[^\\W{UNSPACED}]|[.+%'{_MARKS}-])*\\Z")
_LABEL = f"(?:{LETTER}|[{_MARKS}-])"
_DOMAIN = re.compile(f"(?!-)({_LABEL}{{1,63}}(?:\\.{_LABEL}{{1,63}})+)")
_SPELT_DOT = re.compile(r"\s?[\[(]\s?(?:dot|punkt|point|punto)\s?[\])]\s?", re.IGNORECASE)
_SPELT_AT = re.compile(rb"\s?[\[(]\s?at\s?[\])]\s?", re.IGNORECASE)
_SPELT_DOMAIN = re.compile(
    f"(?!-){_LABEL}{{1,63}}(?:(?:\\.|{_SPELT_DOT.pattern}){_LABEL}{{1,63}})+", re.IGNORECASE
)
_TOP_LEVEL = re.compile(f"(?:(?![\\d_]){LETTER}){{2,24}}|xn--[a-z0-9-]{{2,59}}", re.IGNORECASE)
# Suffixes of files and names in code that follow an @ in practice, such as `icon@2x.png`.
_SUFFIXES = (
    "png jpg jpeg gif svg svgz webp avif ico bmp tif tiff psd pdf eps js mjs cjs jsx tsx vue "
    "svelte css scss sass less html htm xhtml xml json jsonl yaml yml toml ini cfg conf lock txt "
    "csv tsv log rst tex bib ipynb py pyc pyi pyx whl egg gz bz2 xz zst tgz rar jar war class "
    "java kt cpp hpp dll exe dylib deb rpm dmg apk iso img bin dat db sqlite wav mp3 mp4 ogg avi "
    "webm woff ttf otf eot map wasm proto sql bat cmd doc docx xls xlsx ppt pptx odt parquet "
    "arrow onnx plist service timer socket mount target"
)
_NO_TOP_LEVEL = frozenset(_SUFFIXES.split())
# Some suffixes of files are countries too, such as py. A name in one of these domains is no file.
_SECOND_LEVEL = "com co org or net ne gov gob gouv go edu ac mil int info coop una"
_KINDS_OF_OWNERS = frozenset(_SECOND_LEVEL.split())
_COUNTRY_LETTERS = 2
_IN_CODE = frozenset(("self", "this"))  # as in `weights@self.inputs`
_IS_VERSION = re.compile(r"\d+\.\d")  # as in `package@1.0.0-alpha.beta`


def find_address(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the e-mail address around an `@`, None if there is none."""
    return _join_parts(text, at, at + 1, low, high, _DOMAIN)


def find_spelt_address(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the address around an `[at]` that ends at an index, or None."""
    opening = max(text.rfind(bracket, max(low, at - 5), at) for bracket in (b"[", b"("))
    if opening < 0:
        return None
    first = opening - (opening > low and text[opening - 1] in b" \t")
    if not (sign := _SPELT_AT.match(text, first, min(high, at + 2))):
        return None
    return _join_parts(text, first, sign.end(), low, high, _SPELT_DOMAIN)


def _join_parts(
    text: bytes, left: int, right: int, low: int, high: int, domains: re.Pattern[str]
) -> tuple[int, int] | None:
    """Return the span of an address: `left` ends its local part, `right` starts its domain."""
    start = _find_local_start(text, left, low)
    end = _find_domain_end(text, right, high, domains) if start is not None else None
    if start is None or end is None:
        return None
    if text[start:left] == b"git" or _is_in_url(text, start, low):
        return None
    return start, end


def _find_local_start(text: bytes, end: int, low: int) -> int | None:
    """Return where the local part begins that ends at an index, None if there is none."""
    run = text[max(low, end - 4 * (_LONGEST_LOCAL + 1)) : end]
    run = run[len(run.rstrip(_LOCAL_BYTES)) :]
    match = _LOCAL.search(run.decode(errors="ignore"))
    if not match:
        return None
    local = match.group()
    if len(local) > _LONGEST_LOCAL or local[-1] in ".'" or ".." in local:
        return None
    start = end - len(local.encode())
    if start > low and text[start - 1] in b"@":
        return None
    return start


def _find_domain_end(text: bytes, start: int, high: int, domains: re.Pattern[str]) -> int | None:
    """Return where the domain ends that begins at an index, None if there is none."""
    rest = text[start : min(high, start + _MOST_BYTES)].decode(errors="ignore")
    match = domains.match(rest)
    if not match:
        return None
    domain = match.group().rstrip("-")
    after = rest[len(domain) : len(domain) + 2]
    # A colon before a word belongs to `host:path`, an opening bracket to a call in code.
    is_longer = after[:1] in ("@", "(") or (after[:1] == ":" and after[1:].strip() != "")
    labels = _SPELT_DOT.sub(".", domain).split(".")
    top_level = labels[-1].lower()
    if _IS_VERSION.match(domain) or labels[0] in _IN_CODE:
        return None
    if is_longer or len(domain) > _LONGEST_DOMAIN or any(label[-1:] == "-" for label in labels):
        return None
    if not _TOP_LEVEL.fullmatch(top_level) or _is_file(labels):
        return None
    return start + len(domain.encode())


def _is_file(labels: list[str]) -> bool:
    """Return whether a name with a dot between its labels is one of a file, such as `setup.py`."""
    *_, second, top_level = map(str.lower, labels)
    is_country = len(top_level) == _COUNTRY_LETTERS and len(labels) > 2
    return top_level in _NO_TOP_LEVEL and not (is_country and second in _KINDS_OF_OWNERS)


def _is_in_url(text: bytes, start: int, low: int) -> bool:
    """Return whether an address is the user and the host of a URL, as in `ftp://joe@host.com`."""
    scheme = text.rfind(b"://", max(low, start - _URL_BYTES), start)
    return scheme >= 0 and not re.search(rb"[\s/?#<>\"']", text[scheme + 3 : start])


FINDERS = (
    Finder(
        re.compile(rb"@(?<=[^\s()<>\[\]{},;:\"@/=]@)(?=[A-Za-z0-9\x80-\xff])"), False, find_address
    ),
    # The closing bracket is rarer than the letter t before it.
    Finder(re.compile(rb"\](?<=[tT ]\])"), False, find_spelt_address),
    Finder(re.compile(rb"\)(?<=[tT ]\))"), False, find_spelt_address),
)
