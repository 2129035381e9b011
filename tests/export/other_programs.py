"""Run other programs on an export: a script for environments of their own.

usage: other_programs.py ctranslate2 DIR…    writes DIR/ctranslate2.json: 16 greedy tokens
       other_programs.py gguf FILE PROMPT N  prints 16 greedy tokens from N on of a GGUF file
DIR/prompt.json: token IDs. PROMPT: text. The N first tokens are bytes and special ones, of which
llama.cpp does not report each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNT = 16


def run_ctranslate2(directory: Path) -> list[int]:
    """Convert a model as CTranslate2 does, and return greedy tokens."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.convert_ids_to_tokens(json.loads((directory / "prompt.json").read_text()))
    with tempfile.TemporaryDirectory() as root:
        converted = Path(root) / "converted"
        TransformersConverter(str(directory)).convert(str(converted), quantization="float32")
        generator = ctranslate2.Generator(str(converted), compute_type="float32", intra_threads=1)
        (generation,) = generator.generate_batch(
            [prompt],
            max_length=COUNT,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
    return generation.sequences_ids[0]


def run_gguf(path: Path, prompt: str, first: int) -> dict[str, Any]:
    """Return the greedy continuation of a text, as llama.cpp computes it from a GGUF file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 128
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    request = {"prompt": prompt, "n_predict": COUNT, "temperature": 0.0, "top_k": 1}
    request |= {"cache_prompt": False, "logprobs": 1}
    request["logit_bias"] = [[token, False] for token in range(first)]
    answer = server.handle_completions(request)
    chosen = answer["choices"][0]["logprobs"]["content"]
    return {
        "tokens": [token["id"] for token in chosen],
        "prompt": answer["usage"]["prompt_tokens"],
    }


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "gguf":
        print(json.dumps(run_gguf(Path(arguments[0]), arguments[1], int(arguments[2]))))
    for name in arguments if kind == "ctranslate2" else []:
        try:
            result: object = run_ctranslate2(Path(name))
        except Exception as error:  # of one model; the tests of the others go on
            result = repr(error)
        (Path(name) / "ctranslate2.json").write_text(json.dumps(result))
