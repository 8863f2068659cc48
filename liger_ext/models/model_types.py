"""The model types that have functions of their own: what the functions take, and where transformers has their classes.

The functions are made of this (`liger_ext.models.families.patch_function`); a model's code is told by its classes.
"""

_GATES = "rope cross_entropy fused_linear_cross_entropy rms_norm {} model"

# The arguments, in Liger-Kernel's order, of `apply_liger_kernel_to_` these. What others take can be given by name.
_FUNCTIONS = {
    _GATES.format("swiglu"): """
        llama cohere2 deepseek_v3 deepseek_v4 ernie4_5 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite
        hunyuan_v1_dense hunyuan_v1_moe ministral ministral3 mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_5_vl
        qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe seed_oss smollm3
    """,
    _GATES.format("geglu"): "gemma gemma2 gemma3_text gemma4_text",
    "rope cross_entropy fused_linear_cross_entropy layer_norm rms_norm geglu model": "gemma3 gemma4 paligemma",
    "rope cross_entropy fused_linear_cross_entropy layer_norm rms_norm swiglu model": "mllama",
    "rope cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu model": "qwen2_vl",
    _GATES.format("swiglu") + " layer_norm": "llama4",
    "cross_entropy fused_linear_cross_entropy rms_norm layer_norm model": "internvl smolvlm",
    "cross_entropy fused_linear_cross_entropy model": "llava",
    "relu_squared cross_entropy fused_linear_cross_entropy model": "nemotron",
    "rope rms_norm swiglu model": "pixtral",
}
FAMILIES = {name: tuple(taken.split()) for taken, names in _FUNCTIONS.items() for name in names.split()}

# Of the arguments, those that say `swiglu` of MLPs with another activation.
UNITS = ("swiglu", "geglu", "relu_squared")

# `config.model_type` of parts of a model: the function of the whole.
_PARTS = {
    "llama4_text": "llama4",
    "mllama_text_model": "mllama",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
}
FUNCTION_OF = {name: name for name in FAMILIES} | _PARTS

# The folder in transformers.models, where it is not called as the function.
_FOLDERS = {"gemma3_text": "gemma3", "gemma4_text": "gemma4"}


def folder_of(family: str) -> str:
    return _FOLDERS.get(family, family)
