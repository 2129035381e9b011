"""Send files from a pod. `kubernetes.py fetch` runs this text in the pod, so it imports nothing.

Standard input: one line of JSON, {"path": …} to list the files, and also "files": [[name, start],
…] to send them from a byte on. Standard output for a list: one line, {"files": [[name, bytes,
mtime_ns], …]} or {"error": …}. For each file that is sent: a line {"name", "start"}, its bytes, and
a line with the SHA-256 of the whole file. Empty lines before these show that the pod is reading.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

_CHUNK = 4 << 20
_SIGN_OF_LIFE = 64 << 20  # bytes


def list_files(path: Path) -> dict:
    """Return the regular files at a path: names below it, sizes and times. Links are followed."""
    if path.is_file():
        return {"files": [_describe_file(path.parent, path)]}
    if not path.is_dir():
        return {"error": "missing"}
    files = []
    for folder, folders, names in os.walk(path):
        for name in [*names, *folders]:
            place = Path(folder, name)
            if place.is_file():
                files.append(_describe_file(path, place))
            elif place.is_symlink() or not place.is_dir():
                return {"error": f"{place} is neither a file nor a directory"}
    return {"files": sorted(files)}


def _describe_file(root: Path, place: Path) -> list:
    facts = place.stat()
    return [place.relative_to(root).as_posix(), facts.st_size, facts.st_mtime_ns]


def send_file(place: Path, name: str, start: int) -> None:
    """Send a file from an offset on, and the digest of the whole file."""
    out = sys.stdout.buffer
    digest = hashlib.sha256()
    with place.open("rb", buffering=0) as file:
        while (done := file.tell()) < start:
            if not (chunk := file.read(min(_CHUNK, start - done))):
                break  # the file has become shorter; its digest will differ from that of the copy
            digest.update(chunk)
            if done % _SIGN_OF_LIFE == 0:
                out.write(b"\n")
                out.flush()
        out.write(json.dumps({"name": name, "start": start}).encode() + b"\n")
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    out.write(digest.hexdigest().encode() + b"\n")
    out.flush()


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    path = Path(request["path"])
    if "files" not in request:
        print(json.dumps(list_files(path)), flush=True)
        return
    root = path.parent if path.is_file() else path
    for name, start in request["files"]:
        send_file(root / name, name, start)


if __name__ == "__main__":
    main()
