"""Imports from ``liger_kernel`` by code that was written for Liger-Kernel, under `liger_ext.compat`."""

import importlib
import inspect
import operator

import liger_names
import pytest
import torch
from llama_models import build, config, make_batch, one_thread  # noqa: F401

import liger_ext
from liger_ext import compat, liger_kernel

# Names that trainers import, one module per line. (axolotl 0.21, ms-swift 4.6, verl 0.9, TRL 0.17 to 1.9,
# LLaMA-Factory 0.9.5, OpenRLHF 0.11, transformers 5.23)
IMPORTED = {
    "axolotl": """
        ops.fused_linear_cross_entropy: fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward
        ops.utils: calculate_settings compare_version ensure_contiguous
        transformers: apply_liger_kernel_to_granite
        transformers.cross_entropy: LigerCrossEntropyLoss
        transformers.fsdp: _FSDPForwardRedirection
        transformers.functional: liger_cross_entropy liger_fused_linear_cross_entropy
        transformers.fused_linear_cross_entropy: LigerFusedLinearCrossEntropyLoss
        transformers.geglu: LigerGEGLUMLP
        transformers.layer_norm: LigerLayerNorm
        transformers.model.loss_utils: LigerForCausalLMLoss
        transformers.monkey_patch: MODEL_TYPE_TO_APPLY_LIGER_FN
        transformers.rms_norm: LigerRMSNorm LigerRMSNormForGemma2 LigerRMSNormForGemma4
        transformers.rope: liger_rotary_pos_emb
        transformers.swiglu: LigerSwiGLUMLP
        utils: PEFT_AVAILABLE is_npu_available
    """,
    "ms-swift": """
        transformers: apply_liger_kernel_to_gemma apply_liger_kernel_to_llama apply_liger_kernel_to_mistral
        transformers: apply_liger_kernel_to_mixtral apply_liger_kernel_to_mllama apply_liger_kernel_to_phi3
        transformers: apply_liger_kernel_to_qwen2 apply_liger_kernel_to_qwen2_5_vl apply_liger_kernel_to_qwen2_vl
        transformers: apply_liger_kernel_to_qwen3 apply_liger_kernel_to_gemma3_text apply_liger_kernel_to_gemma3
        transformers: apply_liger_kernel_to_qwen3_moe apply_liger_kernel_to_qwen3_next apply_liger_kernel_to_glm4
        transformers: apply_liger_kernel_to_glm4v apply_liger_kernel_to_glm4v_moe apply_liger_kernel_to_internvl
        transformers: apply_liger_kernel_to_llama4 apply_liger_kernel_to_llava apply_liger_kernel_to_paligemma
        transformers.model.loss_utils: LigerForCausalLMLoss
    """,
    "TRL": "chunked_loss: LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss LigerFusedLinearKTOLoss",
    "verl": """
        transformers.monkey_patch: _apply_liger_kernel_to_instance
        ops: LigerFusedLinearScaledCrossEntropyFunction
    """,
    "LLaMA-Factory": """
        transformers: apply_liger_kernel_to_gpt_oss apply_liger_kernel_to_qwen3_5 apply_liger_kernel_to_olmo2
    """,
    "OpenRLHF": "transformers: AutoLigerKernelForCausalLM",
    "transformers": """
        transformers: _apply_liger_kernel_to_instance
        transformers.trainer_integration: _apply_liger_kernel
    """,
}
# Names that trainers also import, but use only with an option.
PLACEHOLDERS = {
    "axolotl": "chunked_loss.fused_linear_distillation: LigerFusedLinearDistillationBase",
    "TRL": "chunked_loss: LigerFusedLinearJSDLoss",
}


def imports(block):
    for line in filter(None, map(str.strip, block.splitlines())):
        module, names = line.split(":")
        yield from ((f"liger_kernel.{module}", name) for name in names.split())


def import_from(module, name):
    """Imports the name with an import statement."""
    scope = {}
    exec(f"from {module} import {name}", scope)
    return scope[name]


@pytest.fixture(autouse=True)
def installed():
    with compat.install() as handle:
        yield handle


@pytest.mark.parametrize("trainer", IMPORTED)
def test_what_trainers_import(trainer):
    for module, name in imports(IMPORTED[trainer]):
        assert import_from(module, name) is not None and liger_names.state(module, name) == "works", (module, name)


@pytest.mark.parametrize("trainer", PLACEHOLDERS)
def test_what_trainers_import_and_may_not_use(trainer):
    for module, name in imports(PLACEHOLDERS[trainer]):
        placeholder = import_from(module, name)
        assert placeholder is import_from(module, name)  # every import returns the same class
        derived = type("Own", (placeholder,), {})
        for call in (placeholder, placeholder.apply, derived, derived.apply):
            with pytest.raises(NotImplementedError, match=rf"has no {name}\. Call PyTorch's function"):
                call(torch.ones(2), beta=0.1)


def test_the_list_of_names():
    modules = liger_names.listed()
    assert len(modules) > 70 and sum(len(names) for of in modules.values() for names in of.values()) > 600
    assert liger_kernel.MODULES - modules.keys() == {"liger_kernel.transformers.model"}  # a package without names
    wrong = [
        (module, name, state, found)
        for module, states in modules.items()
        for state, names in states.items()
        for name in names
        if (found := liger_names.state(module, name)) != state
    ]
    assert wrong == []
    absent = [name for states in modules.values() for name in states.get("absent", ())]
    assert not [name for name in absent if name.startswith(("Liger", "liger_", "apply_"))]


def test_what_is_absent():
    assert len(liger_names.absent_modules()) > 40
    for module in liger_names.absent_modules():
        with pytest.raises(ModuleNotFoundError, match=r"name liger_kernel here .* has no liger_kernel\."):
            importlib.import_module(module)
    utils = importlib.import_module("liger_kernel.ops.utils")
    with pytest.raises(ImportError, match=r"has no liger_kernel\.ops\.utils\.element_mul_kernel\."):
        import_from("liger_kernel.ops.utils", "element_mul_kernel")
    assert not hasattr(utils, "element_mul_kernel") and not hasattr(utils, "__file__")
    # verl checks the error's name to see whether the whole package is missing.
    with pytest.raises(ModuleNotFoundError) as error:
        import_from("liger_kernel.functional", "rms_norm")
    assert error.value.name == "liger_kernel"


def test_stars():
    for module, some in {
        "transformers": {"LigerRMSNorm", "apply_liger_kernel_to_llama", "liger_rms_norm", "AutoLigerKernelForCausalLM"},
        "ops": {"LigerRMSNormFunction", "LigerRopeFunction"},
        "utils": {"infer_device", "PEFT_AVAILABLE"},
    }.items():
        assert some <= {*import_from(f"liger_kernel.{module}", "__all__")} <= {*star(f"liger_kernel.{module}")}


def star(module):
    scope = {}
    exec(f"from {module} import *", scope)
    return scope


def test_a_patch_that_is_not_there():
    with pytest.raises(NotImplementedError, match=r"has no apply_liger_kernel_to_x\. liger_ext\.apply_liger_k"):
        import_from("liger_kernel.transformers", "apply_liger_kernel_to_x")()
    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llama\(\) got an unexpected keyword argument 'geglu'"):
        import_from("liger_kernel.transformers", "apply_liger_kernel_to_llama")(geglu=True)


def test_our_own_under_its_names():
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, functional, liger_rms_norm, rms_norm

    assert inspect.ismodule(functional) and inspect.ismodule(rms_norm)
    assert rms_norm.LigerRMSNorm is LigerRMSNorm is liger_ext.LigerRMSNorm
    assert (functional.liger_rms_norm, LigerSwiGLUMLP) == (liger_ext.liger_rms_norm, liger_ext.LigerSwiGLUMLP)
    assert liger_rms_norm is liger_ext.liger_rms_norm and "LigerRMSNorm" in dir(functional)


def same(found, expected):
    found, expected = (t if isinstance(t, tuple) else (t,) for t in (found, expected))
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_functions():
    ops = importlib.import_module("liger_kernel.ops")
    x, y, w, b = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8), torch.randn(8), torch.randn(8)
    target, head = torch.randint(8, (6,)), torch.randn(11, 8)
    cases = (
        (ops.LigerRMSNormFunction, (x, w, 1e-5, 1.0, "gemma", True), liger_ext.rms_norm(x, w, 1e-5, 1.0, "gemma")),
        (ops.LigerFusedAddRMSNormFunction, (x, y, w, 1e-5), liger_ext.add_rms_norm(x, y, w, 1e-5)),
        (ops.LigerLayerNormFunction, (x, w, b, 1e-5), liger_ext.layer_norm(x, w, b, 1e-5)),
        (ops.LigerGroupNormFunction, (x, w, b, 8, 4, 1e-5), liger_ext.group_norm(x, 4, w, b, 1e-5)),
        (ops.LigerSiLUMulFunction, (x, y, 2.0, 3.0), liger_ext.swiglu(x, y, 2.0, 3.0)),
        (ops.LigerFusedGateUpSiLUMulFunction, (x, True), liger_ext.swiglu_packed(x)),
        (ops.LigerGELUMulFunction, (x, y), liger_ext.geglu(x, y)),
        (ops.LigerSoftmaxFunction, (x,), x.softmax(-1)),
        (ops.LigerReLUSquaredFunction, (x,), liger_ext.relu_squared(x)),
        (ops.LigerJSDFunction, (x.log_softmax(-1), y.log_softmax(-1), target, 0.3, 5, None, None),
         liger_ext.jsd(x.log_softmax(-1), y.log_softmax(-1), target, 0.3, 5)),
        (ops.LigerCrossEntropyFunction, (x, target, None, 5, 0.1, 0.2, "sum", 3.0, True, True),
         (*liger_ext.cross_entropy(x, target, None, 5, "sum", 0.2, 0.1, 3.0, True, True)[:3], None)),
        (ops.LigerFusedLinearCrossEntropyFunction, (x, head, target, None, None, 5, 0.1, 0.2, "sum"),
         (liger_ext.fused_linear_cross_entropy(x, head, target, None, None, 5, 0.1, 0.2, "sum"), None, None, None)),
        (ops.LigerFusedLinearScaledCrossEntropyFunction, (x, head, target, 0.7, 5, 1),
         0 - liger_ext.linear_log_probs(x, head, target, temperature=0.7, ignore_index=5)),
    )  # fmt: skip
    for function, arguments, expected in cases:
        found = function.apply(*arguments)
        if function is ops.LigerSoftmaxFunction:
            torch.testing.assert_close(found, expected)
        else:
            assert same(found, expected), function
        assert (found[0] if isinstance(found, tuple) else found).requires_grad
    q, k = torch.randn(1, 4, 5, 8, requires_grad=True), torch.randn(1, 2, 5, 8)
    cos, sin = torch.randn(2, 1, 5, 8)
    assert same(ops.LigerRopeFunction.apply(q, k, cos, sin, None, 1), liger_ext.rope(q, k, cos, sin))
    assert {cls.__name__ for cls, *_ in cases} | {"LigerRopeFunction"} == {
        name for name, file in liger_kernel._FILE_BY_NAME.items() if file == "ops" and name.endswith("Function")
    }


def test_rotary_embeddings_under_its_names():
    from liger_kernel.transformers.rope import (
        liger_rotary_pos_emb,
        liger_rotary_pos_emb_gpt_oss,
        liger_rotary_pos_emb_vision,
    )

    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    cos, sin = torch.randn(2, 1, 5, 4)
    halves = liger_ext.rope(q, k, cos, sin, half_tables=True)
    assert same(liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=8), halves)
    assert same(liger_rotary_pos_emb_gpt_oss(q, k, cos, sin), halves)
    assert same(liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=4), liger_ext.rope(q, k, cos, sin))
    with pytest.raises(ValueError, match="rotary_dim is 6, expected the columns of cos, 4, or twice as many"):
        liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=6)
    image, tables = torch.randn(5, 4, 8), torch.randn(2, 5, 8)
    found = liger_rotary_pos_emb_vision(image, image, *tables)
    expected = liger_ext.rope(image.transpose(0, 1)[None], None, *tables)[0][0].transpose(0, 1)
    assert same(found, (expected, expected))


def test_helpers():
    from liger_kernel import utils
    from liger_kernel.ops.utils import calculate_settings, compare_version, ensure_contiguous

    assert [calculate_settings(n) for n in (1, 8, 2047, 2049, 8192)] == [
        (1, 4),
        (8, 4),
        (2048, 8),
        (4096, 8),
        (8192, 16),
    ]
    assert calculate_settings(65536) == (65536, 16 if torch.version.hip else 32)
    with pytest.raises(RuntimeError, match="n is 65537"):
        calculate_settings(65537)
    assert compare_version("torch", operator.ge, "2.0") and not compare_version("no_such_package", operator.ge, "0")

    @ensure_contiguous
    def strides(ctx, x, *, y):
        return ctx, x.is_contiguous(), y.is_contiguous()

    assert strides(1, torch.ones(2, 3).T, y=torch.ones(2, 3).T) == (1, True, True)
    assert utils.infer_device() in ("cuda", "cpu") and utils.infer_comm_backend() in ("nccl", "gloo")
    assert utils.is_peft_available() is utils.PEFT_AVAILABLE and not utils.is_npu_available()
    for version, expected in (("4.0", "after"), ("99", "before")):
        found = utils.transformers_version_dispatch(version, lambda x: x, lambda x: x, ("before",), ("after",))
        assert found == expected
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="needs a GPU"):
            utils.get_total_gpu_memory()
    importlib.import_module("liger_kernel.triton").apply_liger_triton_cache_manager()
