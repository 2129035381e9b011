"""How conversations become samples, and where the source of their template is found.

Imports nothing that renders: who only looks for a run does not wait for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lib.core import commands, paths, records
from lib.core.errors import ArtifactError, UsageError

ASSISTANT, LAST, ALL = TRAIN_ON = ("assistant", "last", "all")
DROP, SPLIT = TOO_LONG = ("drop", "split")
_OPTION = "--chat-template"
_NAME = "chat_template.jinja"
_CHATML = "chat_templates/chatml.jinja"
_PLAIN = "chat_templates/plain.jinja"


class ChatPolicy(NamedTuple):
    """Says how conversations become samples.

    template: in Jinja. train_on: of TRAIN_ON. too_long: of TOO_LONG, for what has more tokens than
    `longest`.
    """

    template: str
    train_on: str
    too_long: str
    longest: int


def find(model_dir: Path, given: Path | None) -> str:
    """Return the source of the template that a person has given, else of the model's.

    given: a file, or the name of one that ships with the project, such as `chatml`. The model's is
    looked up as transformers does: chat_template.jinja comes before tokenizer_config.json, and of
    several templates the one named `default` counts. Raises UsageError where there is none, and
    ArtifactError where a file of the model cannot be read.
    """
    if given is not None:
        shipped = paths.CHAT_TEMPLATES / f"{given}.jinja"
        given = shipped if shipped.is_file() and not given.exists() else given
        try:
            source = given.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            found = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error})"
            raise UsageError(
                f"{_OPTION} {given} cannot be read",
                found=found or str(error),
                expected="a file that holds a chat template in Jinja, or one of "
                f"{', '.join(shipped_names())}",
            ) from None
        if not source.strip():
            raise UsageError(f"{_OPTION} {given} is empty")
        return source
    templates = _templates_of(model_dir)
    if (source := templates.get("default", "")).strip():
        try:
            source.encode()
        except UnicodeEncodeError as error:  # halves of characters, by escapes in JSON
            raise ArtifactError(
                f"the chat template in {model_dir} is not text", found=str(error)
            ) from error
        return source
    named = sorted(templates.keys() - {"default"})
    found = f"only templates for other purposes: {', '.join(named)}" if named else ""
    beside = sorted({*model_dir.glob("*.jinja"), *model_dir.glob("*/*.jinja")})
    first = _CHATML if _has_turn_tokens(model_dir) else _PLAIN
    ways = [
        *beside,
        *(
            Path(commands.path_of(name))
            for name in sorted((_CHATML, _PLAIN), key=lambda name: name != first)
        ),
    ]
    raise UsageError(
        f"the model in {model_dir} has no chat template",
        found=found,
        hint=f"templates that are here: {', '.join(map(str, ways))}",
        run=commands.as_typed(_OPTION, ways[0]),
    )


def shipped_names() -> list[str]:
    """Return the names of the templates that ship with the project."""
    return sorted(path.stem for path in paths.CHAT_TEMPLATES.glob("*.jinja"))


def _has_turn_tokens(model_dir: Path) -> bool:
    """Tell whether a tokenizer has the tokens of ChatML."""
    files = (model_dir / name for name in ("tokenizer.json", "tokenizer_config.json"))
    return any(b'"<|im_end|>"' in file.read_bytes() for file in files if file.is_file())


def _templates_of(model_dir: Path) -> dict[str, str]:
    """Return the templates of a model by their names."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = model_dir / name
        try:
            content = records.read_json(path) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
        value = content.get("chat_template") if isinstance(content, dict) else None
        several = value if isinstance(value, list) else [{"name": "default", "template": value}]
        found |= {
            each["name"]: each["template"]
            for each in several
            if isinstance(each, dict)
            and isinstance(each.get("name"), str)
            and isinstance(each.get("template"), str)
        }
    files = {path.stem: path for path in (model_dir / "additional_chat_templates").glob("*.jinja")}
    if (model_dir / _NAME).is_file():
        files["default"] = model_dir / _NAME
    for name, path in files.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
    return found
