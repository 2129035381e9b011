"""Write the files of an export other than the weights: configs, tokenizer and model card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints.commit import Checkpoint
from lib.core import artifacts, hashing, log, manifest, records
from lib.core.errors import ArtifactError
from lib.core.paths import Experiment
from lib.export import card

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"


def require_same_model_files(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Raise ArtifactError if the run's config or tokenizer has changed since the run started."""
    try:
        digests = checkpoint.record().get("model_files", {})
    except (OSError, ValueError):
        return  # the hashing of the checkpoint will report it
    changed = [
        name
        for name, digest in digests.items()
        if not (experiment.model / name).is_file()
        or not hashing.has_digest(experiment.model / name, digest)
    ]
    if links := [path.name for path in experiment.model.iterdir() if path.is_symlink()]:
        raise ArtifactError(
            f"{experiment.model} contains links, which may lead to files of another run",
            found=", ".join(sorted(links)),
            expected="the files that stage 04 copied there",
        )
    if changed:
        raise ArtifactError(
            f"{experiment.model} is damaged",
            found=f"missing or changed: {', '.join(changed)}",
            hint="copy them again from the model that the run was started with "
            f"(model_dir in {experiment.config})",
        )


def write_companions(
    model_dir: Path,
    model: PreTrainedModel,
    out: Path,
    dtype: str,
    trust_code: bool,
    title: str,
    facts: dict[str, Any],
    adapter_of: str = "",
) -> dict[str, Any]:
    """Write the tokenizer, the model card and, unless the export is an adapter, the configs.

    model_dir: the directory with the config and the tokenizer of the model. dtype: dtype of the
    exported weights. title, facts: of the model card, see `card.render_card`. adapter_of: the name
    of the base model if the export is an adapter, else "". Returns the entries about config.json
    for the summary in the manifest.
    """
    from lib.core.artifacts import CHAT_TEMPLATE
    from lib.models.directory import EARLIER_KEYS

    _copy_tokenizer(model_dir, out)
    config_summary: dict[str, Any] = {}
    if not adapter_of:
        config_summary[EARLIER_KEYS] = _write_configs(model_dir, out, model, dtype, trust_code)
    if has_tokenizer(out):
        _make_agree(out)
    base_settings = _find_base_settings(model, facts) if adapter_of else {}
    if base_settings:
        log.info(
            f"the adapter needs the base model with the RoPE settings of the run; {out / card.FILE}"
            " shows how to load it so"
        )
    manifest.write_text(
        out / card.FILE,
        card.render_card(
            title,
            type(model).__name__,
            dtype,
            model.num_parameters(),
            facts,
            chats=(out / CHAT_TEMPLATE).exists(),
            adapter_of=adapter_of,
            base_settings=base_settings,
            has_tokenizer=has_tokenizer(out),
        ),
    )
    return config_summary


def _find_base_settings(model: PreTrainedModel, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings of a run, by their key in config.json; {} if it changed none.

    model: built from the config of the run. facts: of the model card.
    """
    if not facts.keys() & card.ROPE_LABELS:
        return {}
    config = model.config.get_text_config()
    names = ("rope_parameters", "max_position_embeddings")
    return {name: getattr(config, name) for name in names}


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains a tokenizer; a run on synthetic tokens needs none."""
    return bool(artifacts.list_tokenizer_files(directory))


def _copy_tokenizer(model_dir: Path, out: Path) -> None:
    """Copy all files of a tokenizer byte for byte.

    tokenizer_config.json is rewritten if other programs would misread it, or if it describes the
    machine that saved it. The chat template goes into it as well, where more programs look for it.
    """
    from lib.core.artifacts import CHAT_TEMPLATE
    from lib.models import dialects

    # A run's directory contains no other files; that of a base model may contain any.
    templates = artifacts.list_named_templates(model_dir)
    if templates:
        (out / artifacts.NAMED_TEMPLATES).mkdir()
    for name in (*artifacts.TOKENIZER_FILES, *artifacts.OTHER_TOKENIZER_FILES, *templates):
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, out / name)
    settings = records.read_json(out / _TOKENIZER) if (out / _TOKENIZER).exists() else None
    if isinstance(settings, dict):
        template = out / CHAT_TEMPLATE
        text = template.read_text(encoding="utf-8") if template.exists() else ""
        translated = dialects.translate_tokenizer(settings, text)
        if translated != settings:
            manifest.write_json(out / _TOKENIZER, translated)


def _make_agree(out: Path) -> None:
    """Let the files of an export say what its tokenizer does, and let generation stop at its EOS.

    transformers 4 and 5 then add the same tokens to a text, and other programs stop where documents
    ended in training.
    """
    from lib.models import chat_files, tokenizer
    from lib.tokens import framing
    from lib.tokens.encode import Encoder

    try:
        encoder = Encoder(out, 1)
    except ArtifactError as error:
        log.warn(f"{error}; its files are exported as they are")
        return
    framing.write_agreeing(encoder.tokenizer, out, bool(encoder.disagreements))
    for line in encoder.disagreements:
        log.info(f"{out}: {line}")
    if encoder.eos is not None:
        chat_files.add_stop(out, encoder.eos)
    if line := tokenizer.describe_readers(out, encoder.tokenizer.get_vocab()):
        log.info(line)


def _write_configs(
    model_dir: Path, out: Path, model: PreTrainedModel, dtype: str, trust_code: bool
) -> list[str]:
    """Write the configs of a model with the dtype of the export, and its code if that is needed.

    model_dir: the model directory of the run. model: the model built from it. Returns the keys of
    config.json that only transformers 4 needs.
    """
    from transformers import GenerationConfig

    from lib.models import chat_files, dialects, remote_code
    from lib.models.architecture import read_config, read_config_json

    config = read_config_json(model_dir)
    has_code = trust_code and remote_code.is_needed(config)
    if has_code:
        remote_code.copy_code(model_dir, out)
    else:
        config.pop("auto_map", None)  # refers to code that is not part of the export
    text = config.get("text_config")
    if not has_code and isinstance(text, dict) and model.config.model_type != config["model_type"]:
        # The class contains only the text part, so the config must not name other parts.
        log.info(
            f"the export is the text part of a {config['model_type']} model "
            f"({model.config.model_type}), and its config.json describes only that part"
        )
        config = text | {"model_type": model.config.model_type}
        config["tie_word_embeddings"] = bool(getattr(model.config, "tie_word_embeddings", False))
    config = dialects.remove_traces(config)
    config = dialects.set_dtype(config, dtype) | {"architectures": [type(model).__name__]}
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    full = (
        {"tie_word_embeddings": tied, **config}
        if has_code
        else dialects.add_earlier_keys(config, tied)
    )
    manifest.write_json(out / _CONFIG, full)
    if not chat_files.copy_generation(model_dir, out) and model.can_generate():
        GenerationConfig.from_model_config(read_config(model_dir, trust_code)).save_pretrained(out)
    chat_files.copy_stops(out)
    return dialects.list_added_keys(config, full)
