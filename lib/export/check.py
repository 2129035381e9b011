"""Report which other programs can read a model directory.

  python -m lib.export.check outputs/exp/export/step_00001000
  python -m lib.export.check DIR --tool vllm --tool llama.cpp

For each program, one line says whether it reads the directory; the lines below give reasons, and
say what to change. The check only reads files: it loads no weights, runs no code and needs none of
the programs. The exit code is 3 if one of the programs will refuse the directory or misread it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lib.core import log, options, stage, units
from lib.core.errors import ArtifactError
from lib.export import known_models
from lib.export.model_facts import EMBEDDING, HEAD, DirectoryFacts
from lib.models import chat_files
from lib.models.tokenizer import BOS, PAD

_SHOWN = 3
_EXPORT_AGAIN = "export it again with stage 05 and --overwrite"
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_FUSED_BY_DESIGN = {"gpt_oss", "llama4_text"}
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Remark(NamedTuple):
    """A reason why a program will not read a directory as it was meant.

    is_certain: False if the directory alone does not decide it; the exit code is then 0.
    """

    problem: str
    remedy: str
    is_certain: bool = True


Rule = Callable[[DirectoryFacts], Iterator[Remark]]


def _check_weights(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find files of weights that are missing or damaged, and names that no program knows."""
    if facts.problems:
        pickles = any(facts.directory.glob("*.bin"))
        yield Remark(
            units.join_lines(facts.problems, _SHOWN).replace("\n", "; "),
            "-m of stage 04 prints the command that converts pickles" if pickles else _EXPORT_AGAIN,
        )
    names = list(facts.tensors)
    wrapped = [name for name in names if any(part in name for part in _WRAPPERS)]
    doubled = [name for name in names if name.startswith("model.model.")]
    adapters = [name for name in names if ".lora_A." in name or ".base_layer." in name]
    for kind, wrong_names, remedy in (
        ("the prefix of a wrapper", wrapped, "rename the tensors, or " + _EXPORT_AGAIN),
        ("the prefix `model.` twice", doubled, "rename the tensors, or " + _EXPORT_AGAIN),
        ("parts of an adapter", adapters, "merge the adapter first (`merge_and_unload` of PEFT)"),
    ):
        if wrong_names:
            count = units.counted(len(wrong_names), "tensor")
            yield Remark(f"{count} with {kind}, first {wrong_names[0]}", remedy)


def _check_architecture(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a config that names no class of a causal language model."""
    name = facts.architecture
    if not name or name.startswith("Peft") or name.endswith("Model"):
        yield Remark(
            f"architectures in config.json is {name or 'missing'}, not the class of a language "
            "model",
            "write the class that transformers uses, such as LlamaForCausalLM",
        )
    if facts.config.get("auto_map"):
        yield Remark(
            "config.json refers to code that came with the model (auto_map)",
            "the program needs an option such as --trust-remote-code",
            is_certain=False,
        )


def _check_tying(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find an output embedding that contradicts `tie_word_embeddings`."""
    tied = facts.config.get("tie_word_embeddings")
    has_head = HEAD in facts.tensors
    is_usual = any(name.endswith(EMBEDDING) for name in facts.tensors)
    if tied is False and is_usual and not has_head:
        yield Remark(
            f"tie_word_embeddings is false, but there is no {HEAD}",
            "set tie_word_embeddings to true in config.json, or " + _EXPORT_AGAIN,
        )
    if tied is True and has_head:
        yield Remark(
            f"tie_word_embeddings is true, but the files contain {HEAD}, which some models of "
            "some programs refuse",
            f"leave {HEAD} out of the files, or " + _EXPORT_AGAIN,
            is_certain=False,
        )


def _check_tying_is_written(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a missing `tie_word_embeddings`, for programs with another default."""
    if "tie_word_embeddings" not in facts.config and HEAD in facts.tensors:
        yield Remark(
            f"tie_word_embeddings is missing, which means true there, but there is {HEAD}",
            'add "tie_word_embeddings": false to config.json',
        )


def _check_vocabulary(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find tokens without a row in the embedding, and a wrong `vocab_size`."""
    declared = facts.text_config.get("vocab_size")
    rows = next((t.shape[0] for n, t in facts.tensors.items() if n.endswith(EMBEDDING)), declared)
    if declared is not None and rows != declared:
        yield Remark(
            f"vocab_size is {declared}, but the embedding has {rows} rows",
            f"set vocab_size to {rows} in config.json",
        )
    largest = max(facts.tokens.values(), default=-1)
    if isinstance(rows, int) and largest >= rows:
        yield Remark(
            f"the tokenizer has a token {largest}, but the embedding only {rows} rows",
            "enlarge the embedding (`resize_token_embeddings`), or use the tokenizer that belongs "
            "to the model",
        )


def _check_tokenizer(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a directory without a tokenizer."""
    if not facts.tokenizer and not any(map(facts.has_file, known_models.OTHER_VOCABULARIES)):
        yield Remark("there is no tokenizer", "copy the tokenizer files of the base model")


def _check_precision(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a dtype or a quantisation in config.json that the tensors contradict."""
    declared = {facts.text_config.get(key) for key in ("dtype", "torch_dtype")} - {None}
    stored = {tensor.dtype for tensor in facts.tensors.values()}
    expected = {_DTYPES.get(str(name), "") for name in declared} - {""}
    if expected and stored and not expected & stored:
        yield Remark(
            f"config.json says {', '.join(sorted(map(str, declared)))}, but the weights are "
            f"{', '.join(sorted(stored))}, so they are converted when they are loaded",
            "write the dtype of the weights as dtype and torch_dtype in config.json",
            is_certain=False,
        )
    if facts.config.get("quantization_config") and stored <= set(_DTYPES.values()) and stored:
        yield Remark(
            "config.json has a quantization_config, but the weights are not quantised",
            "remove quantization_config from config.json",
        )


def _check_rope(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find RoPE settings that only transformers 5 reads."""
    yield from _find_lost_rope(facts, known_models.BASE_10000)


def _check_rope_of_mlx(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find RoPE settings that mlx-lm does not read; its Qwen2 has another default."""
    if facts.model_type not in known_models.MLX_READS_ROPE_PARAMETERS:
        yield from _find_lost_rope(facts, known_models.BASE_10000 - {"qwen2"})


def _find_lost_rope(facts: DirectoryFacts, defaults: frozenset[str]) -> Iterator[Remark]:
    """Yield a remark if RoPE keys are missing whose default differs. defaults: model types."""
    lost = dict(facts.earlier_keys)
    if facts.model_type in defaults and lost.get("rope_theta") == 1e4:
        del lost["rope_theta"]
    lost = {key: value for key, value in lost.items() if value is not None or key in facts.config}
    if lost:
        pairs = ", ".join(f"{key} {value}" for key, value in lost.items())
        yield Remark(
            f"it does not read rope_parameters, so these are lost: {pairs}; texts become wrong",
            "add these keys to config.json, or " + _EXPORT_AGAIN,
        )


def _check_tokenizer_class(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find names and types in tokenizer_config.json that transformers 4 does not know."""
    if facts.settings.get("tokenizer_class") == "TokenizersBackend":
        yield Remark(
            "tokenizer_class is TokenizersBackend, which only transformers 5 has",
            'write "PreTrainedTokenizerFast" in tokenizer_config.json',
        )
    if isinstance(facts.settings.get("extra_special_tokens"), list):
        yield Remark(
            "extra_special_tokens is a list, where transformers 4 expects a dictionary",
            "rename it to additional_special_tokens in tokenizer_config.json",
        )


def _check_metadata(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find safetensors files without the metadata that transformers 4 requires."""
    if files := facts.list_metadata_problems():
        yield Remark(
            f"the metadata of {', '.join(files[:_SHOWN])} lack `format: pt`",
            'write the files with metadata {"format": "pt"}',
        )


def _check_experts(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find joined weights of experts, which only transformers 5 knows."""
    fused = [name for name in facts.tensors if name.endswith("experts.gate_up_proj")]
    if fused and facts.model_type not in _FUSED_BY_DESIGN:
        yield Remark(
            f"the experts of a layer are one tensor ({fused[0]})",
            "save it with one tensor per expert, as save_pretrained and stage 05 do",
        )


def _check_template(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a model without a chat template."""
    if not facts.has_template:
        yield Remark(
            "there is no chat template, so requests with messages are refused; completions work",
            "none for a base model; else write chat_template.jinja",
            is_certain=False,
        )


def _check_template_place(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a chat template that lies only in a file of its own."""
    if facts.has_template and not facts.settings.get("chat_template"):
        yield Remark(
            "it does not read chat_template.jinja",
            "write the template as chat_template into tokenizer_config.json too",
        )


def _check_stops(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find tokens that end a text in one config, but not in the other.

    These programs read generation_config.json, so they miss only the tokens that it lacks.
    """
    stops = chat_files.list_stops(facts.generation)
    others = chat_files.list_stops(facts.text_config)
    if facts.generation and set(stops) != set(others):
        yield Remark(
            f"eos_token_id is {stops} in generation_config.json, but {others} in config.json; "
            "programs that read only one of them may not stop",
            "write the same list into both files",
            is_certain=not set(others) <= set(stops),
        )


def _check_special_tokens(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find special tokens that are missing from `added_tokens` of tokenizer.json."""
    added = {token.get("content") for token in facts.added_tokens}
    for kind in ("bos_token", "eos_token"):
        token = facts.settings.get(kind)
        text = token.get("content") if isinstance(token, dict) else token
        if facts.tokenizer and text and text not in added:
            yield Remark(
                f"{kind} {text} is missing from added_tokens of tokenizer.json",
                "add it there with `special: true`, or save the tokenizer with transformers",
            )


def _check_file_names(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find weights under names that converters do not look for."""
    others = sorted({t.file for t in facts.tensors.values() if not t.file.startswith("model")})
    if others:
        yield Remark(
            f"it looks for model*.safetensors, not {others[0]}", "rename the files and the index"
        )


def _check_bpe(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find a byte-level BPE, which llama.cpp must know by the token IDs of a fixed text."""
    if not facts.is_byte_level or facts.has_file("tokenizer.model"):
        return
    is_ours = facts.tokens.get(BOS) == 0 and PAD in facts.tokens
    if is_ours:
        yield Remark(
            "stage 03 or 04 trained this tokenizer, which the converter does not recognise "
            '("BPE pre-tokenizer was not recognized")',
            "change one line of the converter, see docs/how-to/faq.md, or train a model whose "
            "tokenizer stage 03 makes with --tokenizer-kind sentencepiece",
        )
    else:
        yield Remark(
            "the converter must know this tokenizer by the token IDs of a fixed text",
            "if it prints that the BPE pre-tokenizer was not recognized, see docs/how-to/faq.md",
            is_certain=False,
        )


def _check_scaling(facts: DirectoryFacts) -> Iterator[Remark]:
    """Find the RoPE scaling of Llama 3.1 with a length that CTranslate2 does not compute."""
    rope = facts.config.get("rope_parameters") or facts.config.get("rope_scaling") or {}
    length = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "llama3" and length != known_models.CTRANSLATE2_LENGTH:
        yield Remark(
            f"it computes RoPE of type llama3 for an original length of "
            f"{known_models.CTRANSLATE2_LENGTH:,} tokens, not {length}",
            "use another program for this model",
        )


def _knows(names: frozenset[str], by_type: bool = False) -> Rule:
    """Return the rule that a program must know the architecture, or the model type if by_type."""

    def check(facts: DirectoryFacts) -> Iterator[Remark]:
        name = facts.model_type if by_type else facts.architecture
        if name not in names:
            yield Remark(
                f"it did not know {name or 'this kind of model'} in {known_models.AS_OF}",
                "look whether a newer version does",
            )

    return check


_ALL: tuple[Rule, ...] = (
    _check_weights,
    _check_architecture,
    _check_tying,
    _check_vocabulary,
    _check_tokenizer,
    _check_precision,
)
_SERVERS = (*_ALL, _check_experts, _check_template, _check_stops)
TOOLS: dict[str, tuple[Rule, ...]] = {
    "transformers 5": _ALL,
    "transformers 4": (
        *_ALL,
        _check_rope,
        _check_tokenizer_class,
        _check_metadata,
        _check_experts,
    ),
    "vLLM": _SERVERS,
    "SGLang": _SERVERS,
    "llama.cpp": (
        _knows(known_models.LLAMA_CPP),
        *_ALL,
        _check_experts,
        _check_file_names,
        _check_tokenizer_class,
        _check_bpe,
    ),
    "Ollama": (
        _knows(known_models.OLLAMA),
        *_ALL,
        _check_rope,
        _check_experts,
        _check_template_place,
        _check_special_tokens,
        _check_stops,
    ),
    "mlx-lm": (
        _knows(known_models.MLX_LM, by_type=True),
        *_ALL,
        _check_rope_of_mlx,
        _check_tying_is_written,
        _check_experts,
        _check_file_names,
        _check_stops,
    ),
    "CTranslate2": (_knows(known_models.CTRANSLATE2, by_type=True), *_ALL, _check_scaling),
    "onnxruntime-genai": (_knows(known_models.ONNXRUNTIME_GENAI), *_ALL, _check_experts),
}


def check_directory(directory: Path) -> dict[str, list[Remark]]:
    """Return the remarks about a model directory by program; an empty list means that it fits.

    Raises ArtifactError if the directory contains no model, or a JSON file in it is damaged.
    """
    facts = DirectoryFacts.read(directory)
    return {
        tool: list(dict.fromkeys(remark for rule in rules for remark in rule(facts)))
        for tool, rules in TOOLS.items()
    }


def _format_verdict(remarks: list[Remark]) -> str:
    if not remarks:
        return "reads it"
    if any(remark.is_certain for remark in remarks):
        return "refuses or misreads it"
    return "reads it, with a remark"


def main(argv: list[str]) -> None:
    """Print for each program whether it reads a directory.

    Raises ArtifactError if one of them will refuse or misread it.
    """
    parser = options.Parser(__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the model directory")
    parser.add_argument(
        "--tool",
        action="append",
        default=[],
        metavar="NAME",
        choices=[*TOOLS, *(name.lower() for name in TOOLS)],
        help=f"check only for this program; may be repeated: {', '.join(TOOLS)} (default: all)",
    )
    opts = parser.parse(argv)
    chosen = {name.lower() for name in opts.tool} or {name.lower() for name in TOOLS}
    remarks_by_tool = check_directory(opts.directory)
    width = max(map(len, TOOLS))
    failed = []
    for tool, remarks in remarks_by_tool.items():
        if tool.lower() not in chosen:
            continue
        log.info(f"{tool:<{width}}  {_format_verdict(remarks)}")
        for remark in remarks:
            log.info(f"{'':<{width}}  {remark.problem}. To do: {remark.remedy}")
        if any(remark.is_certain for remark in remarks):
            failed.append(tool)
    if failed:
        raise ArtifactError(
            f"{units.counted(len(failed), 'program')} will not read {opts.directory} as it is "
            "meant",
            found=", ".join(failed),
        )


if __name__ == "__main__":
    sys.argv[0] = "lib.export.check"
    stage.run_main(main, only_shows=True)
