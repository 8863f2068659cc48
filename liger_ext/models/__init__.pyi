# Made by `make stubs`: see tests/stubs.py.
# fmt: off
# ruff: noqa

from torch.nn import Module

from liger_ext.models.auto import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_ext.models.auto import apply_liger_kernel as apply_liger_kernel
from liger_ext.models.auto import apply_liger_kernel_to_instance as apply_liger_kernel_to_instance
from liger_ext.models.modules.loss import LigerCausalLMOutputWithPast as LigerCausalLMOutputWithPast
from liger_ext.models.patching.handle import PatchHandle as PatchHandle

__all__ = [
    "AutoLigerKernelForCausalLM", "LigerCausalLMOutputWithPast", "PatchHandle", "apply_liger_kernel",
    "apply_liger_kernel_to_instance", "apply_liger_kernel_to_llama", "apply_liger_kernel_to_cohere2",
    "apply_liger_kernel_to_deepseek_v3", "apply_liger_kernel_to_deepseek_v4", "apply_liger_kernel_to_ernie4_5",
    "apply_liger_kernel_to_exaone4", "apply_liger_kernel_to_falcon_h1", "apply_liger_kernel_to_glm4",
    "apply_liger_kernel_to_glm4v", "apply_liger_kernel_to_glm4v_moe", "apply_liger_kernel_to_gpt_oss",
    "apply_liger_kernel_to_granite", "apply_liger_kernel_to_hunyuan_v1_dense", "apply_liger_kernel_to_hunyuan_v1_moe",
    "apply_liger_kernel_to_ministral", "apply_liger_kernel_to_ministral3", "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_mixtral", "apply_liger_kernel_to_olmo2", "apply_liger_kernel_to_olmo3",
    "apply_liger_kernel_to_phi3", "apply_liger_kernel_to_qwen2", "apply_liger_kernel_to_qwen2_5_vl",
    "apply_liger_kernel_to_qwen2_moe", "apply_liger_kernel_to_qwen3", "apply_liger_kernel_to_qwen3_5",
    "apply_liger_kernel_to_qwen3_5_moe", "apply_liger_kernel_to_qwen3_moe", "apply_liger_kernel_to_qwen3_next",
    "apply_liger_kernel_to_qwen3_vl", "apply_liger_kernel_to_qwen3_vl_moe", "apply_liger_kernel_to_seed_oss",
    "apply_liger_kernel_to_smollm3", "apply_liger_kernel_to_gemma", "apply_liger_kernel_to_gemma2",
    "apply_liger_kernel_to_gemma3_text", "apply_liger_kernel_to_gemma4_text", "apply_liger_kernel_to_gemma3",
    "apply_liger_kernel_to_gemma4", "apply_liger_kernel_to_paligemma", "apply_liger_kernel_to_mllama",
    "apply_liger_kernel_to_qwen2_vl", "apply_liger_kernel_to_llama4", "apply_liger_kernel_to_internvl",
    "apply_liger_kernel_to_smolvlm", "apply_liger_kernel_to_llava", "apply_liger_kernel_to_nemotron",
    "apply_liger_kernel_to_pixtral",
]

def apply_liger_kernel_to_llama(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_cohere2(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_deepseek_v3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_deepseek_v4(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_ernie4_5(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_exaone4(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_falcon_h1(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_glm4(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_glm4v(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_glm4v_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gpt_oss(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_granite(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_hunyuan_v1_dense(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_hunyuan_v1_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_ministral(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_ministral3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_mistral(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_mixtral(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_olmo2(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_olmo3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_phi3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen2(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen2_5_vl(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen2_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_5(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_5_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_next(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_vl(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen3_vl_moe(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_seed_oss(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_smollm3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    geglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma2(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    geglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma3_text(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    geglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma4_text(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    geglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma3(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True, rms_norm: bool = True, geglu: bool = True, model: Module | None = None, *,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_gemma4(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True, rms_norm: bool = True, geglu: bool = True, model: Module | None = None, *,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_paligemma(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True, rms_norm: bool = True, geglu: bool = True, model: Module | None = None, *,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_mllama(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
    layer_norm: bool = True, rms_norm: bool = True, swiglu: bool = True, model: Module | None = None, *,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_qwen2_vl(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    layer_norm: bool = True, swiglu: bool = True, model: Module | None = None, *, fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_llama4(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, model: Module | None = None, layer_norm: bool = True, *, fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_internvl(
    cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    layer_norm: bool = True, model: Module | None = None, *, rope: bool = True, swiglu: bool = True,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_smolvlm(
    cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    layer_norm: bool = True, model: Module | None = None, *, rope: bool = True, swiglu: bool = True,
    fused_add_rms_norm: bool = True, memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_llava(
    cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, model: Module | None = None, *,
    rope: bool = True, rms_norm: bool = True, swiglu: bool = True, fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_nemotron(
    relu_squared: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
    model: Module | None = None, *, rope: bool = True, rms_norm: bool = True, fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle: ...
def apply_liger_kernel_to_pixtral(
    rope: bool = True, rms_norm: bool = True, swiglu: bool = True, model: Module | None = None, *,
    cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle: ...
