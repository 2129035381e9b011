"""List the kinds of models that other programs knew when this table was written.

Each list comes from the sources of a release: gguf 0.19 and the converter of llama.cpp, Ollama's
convert.go, mlx-lm 0.32, CTranslate2 4.8, the builder of onnxruntime-genai 0.18. vLLM and SGLang
compute other models through transformers, so they need no list.
"""

from __future__ import annotations

AS_OF = "November 2026"


def _data_names(names: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(names.split())


# Files with a vocabulary beside tokenizer.json.
OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")

# Model types whose RoPE base is 10,000 if the config does not say, in transformers 4 and mlx-lm.
BASE_10000 = _data_names(
    "llama mistral qwen2 qwen3 gemma gemma2 phi phi3 olmo olmo2 stablelm falcon gpt_neox "
    "starcoder2 granite"
)
MLX_READS_ROPE_PARAMETERS = frozenset({"qwen3", "qwen3_moe"})

LLAMA_CPP = _data_names(
    "AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM ArcticForCausalLM BaichuanForCausalLM "
    "BailingMoeForCausalLM BailingMoeV2ForCausalLM BambaForCausalLM BitNetForCausalLM "
    "BloomForCausalLM ChameleonForCausalLM CodeShellForCausalLM CohereForCausalLM "
    "Cohere2ForCausalLM Cohere2MoeForCausalLM DbrxForCausalLM DeciLMForCausalLM "
    "DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM "
    "DeepseekV4ForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_ForCausalLM "
    "Ernie4_5_MoeForCausalLM ExaoneForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM "
    "FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel "
    "GPTBigCodeForCausalLM GPTNeoXForCausalLM GemmaForCausalLM Gemma2ForCausalLM "
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM "
    "GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GptOssForCausalLM "
    "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM "
    "GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM "
    "InternLM2ForCausalLM InternLM3ForCausalLM JambaForCausalLM Lfm2ForCausalLM "
    "Lfm2MoeForCausalLM LlamaForCausalLM Llama4ForCausalLM MPTForCausalLM MambaForCausalLM "
    "Mamba2ForCausalLM MiniCPMForCausalLM MiniCPM3ForCausalLM MiniMaxM2ForCausalLM "
    "MistralForCausalLM MixtralForCausalLM NemotronForCausalLM "
    "NemotronHForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM "
    "OpenELMForCausalLM OrionForCausalLM PhiForCausalLM Phi3ForCausalLM PhiMoEForCausalLM "
    "Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM RWForCausalLM "
    "SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM"
)

OLLAMA = _data_names(
    "LlamaForCausalLM MllamaForConditionalGeneration Llama4ForConditionalGeneration "
    "Mistral3ForConditionalGeneration Ministral3ForCausalLM MixtralForCausalLM GemmaForCausalLM "
    "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration "
    "Gemma3nForConditionalGeneration Phi3ForCausalLM Qwen2ForCausalLM "
    "Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
    "Qwen3VLMoeForConditionalGeneration Olmo3ForCausalLM CohereForCausalLM GptOssForCausalLM "
    "DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM Lfm2ForCausalLM"
)

# By model type, since mlx-lm names its modules after it.
MLX_LM = _data_names(
    "afmoe apertus bailing_moe bitnet cohere cohere2 cohere2_moe dbrx deepseek deepseek_v2 "
    "deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 "
    "gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite "
    "gpt2 gpt_bigcode gpt_neox gpt_oss granite granitemoe granitemoehybrid helium hunyuan "
    "hunyuan_v1_dense internlm2 internlm3 jamba lfm2 lfm2_moe llama llama4 mamba mamba2 minicpm "
    "minicpm3 minimax mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmoe openelm phi phi3 "
    "phimoe plamo qwen qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 "
    "stablelm starcoder2"
)

# By model type, since CTranslate2 chooses by the class of the config.
CTRANSLATE2_LENGTH = 8192  # tokens, with which it computes the scaling of Llama 3.1
CTRANSLATE2 = _data_names(
    "bloom codegen falcon gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gpt2 gpt_bigcode "
    "gpt_neox gptj llama mistral mpt opt phi phi3 qwen2 qwen3"
)

ONNXRUNTIME_GENAI = _data_names(
    "ChatGLMForConditionalGeneration ChatGLMModel Ernie4_5ForCausalLM GemmaForCausalLM "
    "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration "
    "Gemma4ForConditionalGeneration GptOssForCausalLM GraniteForCausalLM "
    "GraniteMoeHybridForCausalLM HunYuanDenseV1ForCausalLM InternLM2ForCausalLM Lfm2ForCausalLM "
    "Lfm2MoeForCausalLM LlamaForCausalLM MistralForCausalLM NemotronForCausalLM OlmoForCausalLM "
    "PhiForCausalLM Phi3ForCausalLM Phi3SmallForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM "
    "Qwen3ForCausalLM SmolLM3ForCausalLM"
)
