# Made by `make stubs`: see tests/stubs.py.
# fmt: off
# ruff: noqa

from liger_ext import compat as compat
from liger_ext import functional as functional
from liger_ext import losses as losses
from liger_ext import modules as modules
from liger_ext.compat import *
from liger_ext.functional import *
from liger_ext.modules import *
from liger_ext.models import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_ext.models import apply_liger_kernel as apply_liger_kernel
from liger_ext.models import apply_liger_kernel_to_instance as apply_liger_kernel_to_instance
from liger_ext.models import apply_liger_kernel_to_llama as apply_liger_kernel_to_llama
from liger_ext.models import apply_liger_kernel_to_cohere2 as apply_liger_kernel_to_cohere2
from liger_ext.models import apply_liger_kernel_to_deepseek_v3 as apply_liger_kernel_to_deepseek_v3
from liger_ext.models import apply_liger_kernel_to_deepseek_v4 as apply_liger_kernel_to_deepseek_v4
from liger_ext.models import apply_liger_kernel_to_ernie4_5 as apply_liger_kernel_to_ernie4_5
from liger_ext.models import apply_liger_kernel_to_exaone4 as apply_liger_kernel_to_exaone4
from liger_ext.models import apply_liger_kernel_to_falcon_h1 as apply_liger_kernel_to_falcon_h1
from liger_ext.models import apply_liger_kernel_to_glm4 as apply_liger_kernel_to_glm4
from liger_ext.models import apply_liger_kernel_to_glm4v as apply_liger_kernel_to_glm4v
from liger_ext.models import apply_liger_kernel_to_glm4v_moe as apply_liger_kernel_to_glm4v_moe
from liger_ext.models import apply_liger_kernel_to_gpt_oss as apply_liger_kernel_to_gpt_oss
from liger_ext.models import apply_liger_kernel_to_granite as apply_liger_kernel_to_granite
from liger_ext.models import apply_liger_kernel_to_hunyuan_v1_dense as apply_liger_kernel_to_hunyuan_v1_dense
from liger_ext.models import apply_liger_kernel_to_hunyuan_v1_moe as apply_liger_kernel_to_hunyuan_v1_moe
from liger_ext.models import apply_liger_kernel_to_ministral as apply_liger_kernel_to_ministral
from liger_ext.models import apply_liger_kernel_to_ministral3 as apply_liger_kernel_to_ministral3
from liger_ext.models import apply_liger_kernel_to_mistral as apply_liger_kernel_to_mistral
from liger_ext.models import apply_liger_kernel_to_mixtral as apply_liger_kernel_to_mixtral
from liger_ext.models import apply_liger_kernel_to_olmo2 as apply_liger_kernel_to_olmo2
from liger_ext.models import apply_liger_kernel_to_olmo3 as apply_liger_kernel_to_olmo3
from liger_ext.models import apply_liger_kernel_to_phi3 as apply_liger_kernel_to_phi3
from liger_ext.models import apply_liger_kernel_to_qwen2 as apply_liger_kernel_to_qwen2
from liger_ext.models import apply_liger_kernel_to_qwen2_5_vl as apply_liger_kernel_to_qwen2_5_vl
from liger_ext.models import apply_liger_kernel_to_qwen2_moe as apply_liger_kernel_to_qwen2_moe
from liger_ext.models import apply_liger_kernel_to_qwen3 as apply_liger_kernel_to_qwen3
from liger_ext.models import apply_liger_kernel_to_qwen3_5 as apply_liger_kernel_to_qwen3_5
from liger_ext.models import apply_liger_kernel_to_qwen3_5_moe as apply_liger_kernel_to_qwen3_5_moe
from liger_ext.models import apply_liger_kernel_to_qwen3_moe as apply_liger_kernel_to_qwen3_moe
from liger_ext.models import apply_liger_kernel_to_qwen3_next as apply_liger_kernel_to_qwen3_next
from liger_ext.models import apply_liger_kernel_to_qwen3_vl as apply_liger_kernel_to_qwen3_vl
from liger_ext.models import apply_liger_kernel_to_qwen3_vl_moe as apply_liger_kernel_to_qwen3_vl_moe
from liger_ext.models import apply_liger_kernel_to_seed_oss as apply_liger_kernel_to_seed_oss
from liger_ext.models import apply_liger_kernel_to_smollm3 as apply_liger_kernel_to_smollm3
from liger_ext.models import apply_liger_kernel_to_gemma as apply_liger_kernel_to_gemma
from liger_ext.models import apply_liger_kernel_to_gemma2 as apply_liger_kernel_to_gemma2
from liger_ext.models import apply_liger_kernel_to_gemma3_text as apply_liger_kernel_to_gemma3_text
from liger_ext.models import apply_liger_kernel_to_gemma4_text as apply_liger_kernel_to_gemma4_text
from liger_ext.models import apply_liger_kernel_to_gemma3 as apply_liger_kernel_to_gemma3
from liger_ext.models import apply_liger_kernel_to_gemma4 as apply_liger_kernel_to_gemma4
from liger_ext.models import apply_liger_kernel_to_paligemma as apply_liger_kernel_to_paligemma
from liger_ext.models import apply_liger_kernel_to_mllama as apply_liger_kernel_to_mllama
from liger_ext.models import apply_liger_kernel_to_qwen2_vl as apply_liger_kernel_to_qwen2_vl
from liger_ext.models import apply_liger_kernel_to_llama4 as apply_liger_kernel_to_llama4
from liger_ext.models import apply_liger_kernel_to_internvl as apply_liger_kernel_to_internvl
from liger_ext.models import apply_liger_kernel_to_smolvlm as apply_liger_kernel_to_smolvlm
from liger_ext.models import apply_liger_kernel_to_llava as apply_liger_kernel_to_llava
from liger_ext.models import apply_liger_kernel_to_nemotron as apply_liger_kernel_to_nemotron
from liger_ext.models import apply_liger_kernel_to_pixtral as apply_liger_kernel_to_pixtral

__all__ = [
    "AutoLigerKernelForCausalLM", "apply_liger_kernel", "apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_llama", "apply_liger_kernel_to_cohere2", "apply_liger_kernel_to_deepseek_v3",
    "apply_liger_kernel_to_deepseek_v4", "apply_liger_kernel_to_ernie4_5", "apply_liger_kernel_to_exaone4",
    "apply_liger_kernel_to_falcon_h1", "apply_liger_kernel_to_glm4", "apply_liger_kernel_to_glm4v",
    "apply_liger_kernel_to_glm4v_moe", "apply_liger_kernel_to_gpt_oss", "apply_liger_kernel_to_granite",
    "apply_liger_kernel_to_hunyuan_v1_dense", "apply_liger_kernel_to_hunyuan_v1_moe",
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
    "apply_liger_kernel_to_pixtral", "liger_cross_entropy", "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy", "liger_geglu", "liger_group_norm", "liger_jsd", "liger_layer_norm",
    "liger_relu_squared", "liger_rms_norm", "liger_rope", "liger_rotary_pos_emb", "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision", "liger_softmax", "liger_swiglu", "CountedRows", "CrossEntropyOutput",
    "LogProbsOutput", "add_rms_norm", "check_errors", "count_rows", "cross_entropy", "dequantize_4bit",
    "fused_linear_cross_entropy", "geglu", "geglu_packed", "group_norm", "jsd", "layer_norm", "linear_log_probs",
    "relu_squared", "rms_norm", "rope", "softmax", "swiglu", "swiglu_packed", "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss", "LigerExperts", "LigerFalconH1SwiGLUMLP", "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss", "LigerGEGLUMLP", "LigerGEGLUMLPForGemma4", "LigerGroupNorm",
    "LigerHunyuanV1SwiGLUMLP", "LigerJSD", "LigerLayerNorm", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3", "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4", "LigerRMSNormForOlmo2", "LigerRMSNormForQwen3Next", "LigerReLUSquared", "LigerSoftmax",
    "LigerSwiGLUMLP",
]
__version__: str
