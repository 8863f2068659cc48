"""Tables of the model types that have a function `apply_liger_kernel_to_<type>`: the function's arguments; the types of
parts of a model (a language model in a model of images and text), which the function of the whole model patches; and
the folders in transformers.models whose name differs from the type.

`liger_ext.models.families.patch_function` builds the functions from these tables. The tables do not decide which
modules are patched: recognition reads the code of a model's classes.
"""

_GATES = "rope cross_entropy fused_linear_cross_entropy rms_norm {} model"

# The arguments of each type's function, in Liger-Kernel's order. Llama's other arguments can be passed by name.
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

# The names of the MLP's switch: `swiglu`, or the name of another activation.
MLP_SWITCHES = ("swiglu", "geglu", "relu_squared")

# `config.model_type` of a part of a model: the type of the whole model, whose function patches the part.
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
FUNCTION_TYPES = {name: name for name in FAMILIES} | _PARTS

# The folders in transformers.models whose name differs from the function's.
_FOLDERS = {"gemma3_text": "gemma3", "gemma4_text": "gemma4"}


def model_folder(family: str) -> str:
    return _FOLDERS.get(family, family)
