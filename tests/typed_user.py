"""A user's code for mypy --strict, which `make lint` runs; it is never executed. mypy must accept every function except
`mistakes`, and infer the types in `assert_type`. In `mistakes` it must find a type error in every line that has an
ignore comment."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import assert_type

import liger_ext
import liger_ext.functional as LF
from liger_ext import (
    AutoLigerKernelForCausalLM,
    LigerFusedLinearCrossEntropyLoss,
    LigerLayerNorm,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    apply_liger_kernel_to_gemma2,
    apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
    compat,
    functional,
    modules,
)
from liger_ext.models import PatchHandle


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LigerRMSNorm(64, eps=1e-5, dtype=torch.bfloat16)
        self.last = modules.LigerGroupNorm(64, 4, device="cpu")
        self.mlp = LigerSwiGLUMLP(config)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed, stream = functional.add_rms_norm(self.last(x), residual, self.norm.weight)
        assert_type(self.norm(self.mlp(normed)), Tensor)
        gated = LF.swiglu(normed, stream) + LF.geglu(normed, stream, approximate="none")
        return liger_ext.softmax(LF.layer_norm(gated, None), dim=-1)


def losses(x: Tensor, weight: Tensor, target: Tensor, logits: Tensor) -> Tensor:
    loss = LF.cross_entropy(logits, target, label_smoothing=0.1)
    assert_type(loss, Tensor)
    output = LF.cross_entropy(logits, target, return_z_loss=True)
    assert_type(output, LF.CrossEntropyOutput)
    assert output.z_loss is not None
    rows = LF.count_rows(target, -100)
    fused = liger_ext.fused_linear_cross_entropy(x, weight, target, memory="low", rows=rows)
    assert_type(fused, Tensor)
    predicted = compat.liger_fused_linear_cross_entropy(x, weight, target, return_predicted_tokens=True)
    assert_type(predicted.predicted_tokens, Tensor | None)
    assert_type(compat.liger_cross_entropy(logits, target), Tensor)
    assert_type(LF.linear_log_probs(x, weight, target), Tensor)
    found = LF.linear_log_probs(x, weight, target, entropy=True)
    assert_type(found.log_probs, Tensor)
    assert_type(LigerFusedLinearCrossEntropyLoss(reduction="sum", memory=1 << 30)(weight, x, target), Tensor)
    counted = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)(weight, x, target)
    return loss + output.z_loss + fused + counted.loss


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = LF.rope(q, k, cos, sin, layout="interleaved")
    assert_type(LF.rope(q, None, cos, sin), tuple[Tensor, None])
    return q + LF.rope(q, None, cos, sin)[0] + k


def train(name: str) -> None:
    with compat.install(), apply_liger_kernel_to_gemma2(rope=False, geglu=True, memory="low"):
        pass
    model = LlamaForCausalLM(LlamaConfig())
    handle = apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True)
    assert_type(handle, PatchHandle)
    print(handle.summary().parts["norms"].ours, handle.summary(model).losses[0].logits_bytes(8192))
    handle.revert()
    apply_liger_kernel_to_instance(AutoLigerKernelForCausalLM.from_pretrained(name), memory="min").revert()
    AutoLigerKernelForCausalLM.from_pretrained(name, rope=False)
    norm = LigerLayerNorm(64, elementwise_affine=False)
    norm.reset_parameters()
    print(liger_ext.__version__, norm.variance_epsilon)


def mistakes(x: Tensor, model: nn.Module, handle: PatchHandle) -> int:
    """Each line with an ignore comment must be a type error: otherwise mypy reports that the comment is unused."""
    apply_liger_kernel_to_gemma2(swiglu=True)  # type: ignore[call-arg]
    apply_liger_kernel_to_instance(model, rope=x)  # type: ignore[arg-type]
    LF.rms_norm(x, x, epsilon=1e-6)  # type: ignore[call-arg]
    LF.cross_entropy(x, x, return_z_loss=True).backward()  # type: ignore[attr-defined]
    LF.rope(x, None, x, x)[1].sum()  # type: ignore[attr-defined]
    LigerRMSNorm(8)(x, x)  # type: ignore[call-arg]
    handle.undo()  # type: ignore[attr-defined]
    liger_ext.no_such_function(x)  # type: ignore[attr-defined]
    with handle:
        return LF.softmax(x)  # type: ignore[return-value]
