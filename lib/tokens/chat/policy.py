"""Define how conversations become samples, and find the source of the chat template.

This module does not import Jinja, so a command that only looks up a run starts fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import commands, hashing, paths, records
from lib.core.artifacts import CHAT_TEMPLATE, OLD_CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from lib.core.errors import ArtifactError, UsageError

ASSISTANT, LAST, ALL = TRAIN_ON = ("assistant", "last", "all")
DROP, SPLIT = TOO_LONG = ("drop", "split")
TEMPLATE_INPUT = "chat template"  # its name in the identity of a run on conversations
_OPTION = "--chat-template"
_CHATML = "chat_templates/chatml.jinja"
_PLAIN = "chat_templates/plain.jinja"


class ChatPolicy(NamedTuple):
    """Holds the options that turn conversations into samples.

    template: the Jinja source. train_on: one of TRAIN_ON. too_long: one of TOO_LONG, for
    conversations with more than `longest` tokens. variables: JSON of further variables of the
    template, "" for none; those of a conversation replace them.
    """

    template: str
    train_on: str
    too_long: str
    longest: int
    variables: str = ""

    def parse_variables(self) -> dict[str, Any]:
        """Return the variables as values."""
        variables: dict[str, Any] = json.loads(self.variables) if self.variables else {}
        return variables

    def identity(self) -> dict[str, Any]:
        """Return the values that, besides dataset and tokenizer, decide the content of a store."""
        return {
            TEMPLATE_INPUT: hashing.fingerprint(self.template),
            "train_on": self.train_on,
            "too_long": self.too_long,
            "seq_length": self.longest,
            **({"chat_template_kwargs": self.variables} if self.variables else {}),
        }


def find_template(model_dir: Path, chosen: Path | None) -> str:
    """Return the source of the chosen chat template, or if none is chosen, of the model's.

    chosen: a file, or the name of a template that ships with the project, such as `chatml`. The
    model's template is looked up as transformers does: chat_template.jinja comes before
    tokenizer_config.json. Among several templates, `tool_use` renders conversations with tools, and
    `default` all others; the source contains both. Raises
    UsageError if there is no template, and ArtifactError if a file of the model cannot be read.
    """
    if chosen is not None:
        shipped = paths.CHAT_TEMPLATES / f"{chosen}.jinja"
        chosen = shipped if shipped.is_file() and not chosen.exists() else chosen
        try:
            source = chosen.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            found = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error})"
            raise UsageError(
                f"{_OPTION} {chosen} cannot be read",
                found=found or str(error),
                expected="a file with a Jinja chat template, or one of "
                f"{', '.join(list_shipped_templates())}",
            ) from None
        if not source.strip():
            raise UsageError(f"{_OPTION} {chosen} is empty")
        return source
    templates = _read_templates(model_dir)
    if (source := _join_templates(templates)).strip():
        try:
            source.encode()
        except UnicodeEncodeError as error:  # JSON escapes can spell lone surrogates
            raise ArtifactError(
                f"the chat template in {model_dir} is not valid Unicode text", found=str(error)
            ) from error
        return source
    named = sorted(templates.keys() - {"default"})
    found = f"only templates for other purposes: {', '.join(named)}" if named else ""
    nearby = sorted({*model_dir.glob("*.jinja"), *model_dir.glob("*/*.jinja")})
    first = _CHATML if _has_turn_tokens(model_dir) else _PLAIN
    templates_here = [
        *nearby,
        *(
            Path(commands.path_of(name))
            for name in sorted((_CHATML, _PLAIN), key=lambda name: name != first)
        ),
    ]
    raise UsageError(
        f"the model in {model_dir} has no chat template",
        found=found,
        hint=f"templates on this machine: {', '.join(map(str, templates_here))}",
        run=commands.as_typed(_OPTION, templates_here[0]),
    )


def has_template(model_dir: Path) -> bool:
    """Return whether a model has a chat template."""
    try:
        return bool(find_template(model_dir, None))
    except UsageError:
        return False


def list_shipped_templates() -> list[str]:
    """Return the names of the templates that ship with the project."""
    return sorted(path.stem for path in paths.CHAT_TEMPLATES.glob("*.jinja"))


def _join_templates(templates: dict[str, str]) -> str:
    """Return one source for a model's templates: `tool_use` if there are tools, else `default`."""
    default = templates.get("default", "")
    tool_use = templates.get("tool_use", "")
    if not default.strip() or not tool_use.strip() or default == tool_use:
        return default
    # Jinja drops a newline at the end of each source; `+` keeps white space beside a tag.
    sources = [source.removesuffix("\n") for source in (tool_use, default)]
    return f"{{% if tools +%}}{sources[0]}{{%+ else +%}}{sources[1]}{{%+ endif %}}"


def _has_turn_tokens(model_dir: Path) -> bool:
    """Return whether a tokenizer contains the tokens of ChatML."""
    files = (model_dir / name for name in (TOKENIZER, TOKENIZER_CONFIG))
    return any(b'"<|im_end|>"' in file.read_bytes() for file in files if file.is_file())


def _read_templates(model_dir: Path) -> dict[str, str]:
    """Return the chat templates of a model by name."""
    templates: dict[str, str] = {}
    for name in (TOKENIZER_CONFIG, OLD_CHAT_TEMPLATE):
        path = model_dir / name
        try:
            content = records.read_json(path) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
        value = content.get("chat_template") if isinstance(content, dict) else None
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        templates |= {
            entry["name"]: entry["template"]
            for entry in entries
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
    files = {path.stem: path for path in (model_dir / "additional_chat_templates").glob("*.jinja")}
    if (model_dir / CHAT_TEMPLATE).is_file():
        files["default"] = model_dir / CHAT_TEMPLATE
    if files:  # they replace all templates of the config, except a missing default
        templates = {name: text for name, text in templates.items() if name == "default"}
    for name, path in files.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
    return templates
