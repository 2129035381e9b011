#!/usr/bin/env python3
"""Write conversations about Python's own functions, out of the documentation that they carry.

  python tests/demo/conversations.py raw_chat_demo

A few hundred of them, the same for the same Python: data for `make demo-chat`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.core import log, options, stage

_MODULES = (
    "math",
    "os.path",
    "itertools",
    "random",
    "statistics",
    "textwrap",
    "json",
    "shutil",
    "bisect",
    "heapq",
    "copy",
    "base64",
    "calendar",
    "difflib",
    "functools",
    "glob",
    "inspect",
    "operator",
    "shlex",
    "tempfile",
    "threading",
    "time",
    "unicodedata",
    "urllib.parse",
    "zlib",
    "html",
    "locale",
    "secrets",
    "struct",
    "subprocess",
)
_MOST = 300
_SENTENCE = re.compile(r"[A-Z][^.>]{20,80}\.(?= |$)")


def conversations() -> list[dict]:
    """Return them in the format of `messages`: what a function does, and where it is from."""
    chats = []
    for module in _MODULES:
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
            says = _SENTENCE.match(text)
            if says and not name.startswith("_") and callable(thing) and not inspect.isclass(thing):
                turns = (
                    f"What does {module}.{name} do?",
                    says[0],
                    "Where is it from?",
                    f"It is a function of the module {module}.",
                )
                chats.append(
                    {
                        "messages": [
                            {"role": role, "content": content}
                            for role, content in zip(("user", "assistant") * 2, turns, strict=True)
                        ]
                    }
                )
    return chats[:_MOST]


def main(argv: list[str]) -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them")
    folder = parser.parse(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in conversations()]
    target = folder / "functions.jsonl"
    target.write_text("".join(lines), encoding="utf-8")
    log.info(f"{len(lines)} conversations → {target}")


if __name__ == "__main__":
    stage.run_main(main)
