"""Models that code written for Liger-Kernel patches under that name, and the loss for heads that a caller defines."""

import copy
import functools
import importlib
import inspect
import pickle

import pytest
import torch
from llama_models import build, config, make_batch, one_thread  # noqa: F401
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import liger_ext
from liger_ext import compat
from liger_ext.models.model_types import FAMILIES, FUNCTION_TYPES


@pytest.fixture(autouse=True)
def installed():
    with compat.install() as handle:
        yield handle


def test_patch_functions_have_upstreams_signatures():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions

    assert functions.keys() == FUNCTION_TYPES.keys()
    for model_type, function in functions.items():
        family = FUNCTION_TYPES[model_type]
        assert function is getattr(
            importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}"
        )
        assert tuple(inspect.signature(function).parameters) == FAMILIES[family]  # in upstream's order
        assert function.__name__ == f"apply_liger_kernel_to_{family}"


def test_switches_that_are_not_set():
    """axolotl passes None for switches that its configuration does not set."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_kernel.transformers.trainer_integration import _apply_liger_kernel

    stock = build()
    for patch in (apply_liger_kernel_to_llama, functools.partial(_apply_liger_kernel, "llama")):
        with patch(rope=None, cross_entropy=None, fused_linear_cross_entropy=None, rms_norm=True, swiglu=None):
            model = build()
            types = {type(module) for module in model.modules()}
            of_liger = {cls.__name__ for cls in types if cls.__module__.startswith("liger_ext.")}
            assert "LlamaRMSNorm" in of_liger and not of_liger & {"LlamaMLP", "LlamaAttention", "LlamaForCausalLM"}
            assert (model(**make_batch("cpu")).logits - stock(**make_batch("cpu")).logits).abs().max() < 1e-4
    with apply_liger_kernel_to_llama(None, None, None, None, None, build()):
        pass
    with pytest.raises(TypeError, match="rope is None"):
        liger_ext.apply_liger_kernel_to_llama(rope=None)
    with pytest.raises(TypeError, match="swiglu is 1"):
        apply_liger_kernel_to_llama(swiglu=1)


def test_logits_of_a_training_step_are_none():
    """As ms-swift requires after each step."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    batch = make_batch("cpu")
    expected = build()(**batch).loss
    with apply_liger_kernel_to_llama():
        model = build().train()
    for trained in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = trained(**batch)
        torch.testing.assert_close(output.loss, expected)
        assert output.logits is None and output.past_key_values is None
        assert "logits" not in output and output.to_tuple() == (output.loss,)
        assert trained(**batch, skip_logits=False).logits is not None and trained.eval()(**batch).logits is not None
        trained.train()
    # After a patch under our own names the access raises; after one under Liger-Kernel's, logits are None.
    model = build().train()
    with apply_liger_kernel_to_llama(model=model):
        assert model(**batch).logits is None
    with liger_ext.apply_liger_kernel_to_llama(model=model), pytest.raises(AttributeError, match="no logits"):
        model(**batch).logits  # noqa: B018


@pytest.mark.slow
def test_logits_are_none_in_a_graph():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model, batch = build().train(), make_batch("cpu")
    expected = model(**batch).loss
    apply_liger_kernel_to_llama(model=model)
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    torch.testing.assert_close(output.loss, expected)
    assert output.logits is None


def test_every_way_to_a_patched_model(tmp_path):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM, _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    batch = make_batch("cpu")
    sizes = {
        name: value for name, value in config().to_dict().items() if name in inspect.signature(Qwen2Config).parameters
    }
    with MODEL_TYPE_TO_APPLY_LIGER_FN["qwen2"]():
        assert Qwen2ForCausalLM(Qwen2Config(**sizes)).train()(**batch).logits is None
    model = build().train()
    with _apply_liger_kernel_to_instance(model=model, memory="low", layer_norm=None):
        assert model(**batch).logits is None and model.liger_memory == "low"
    build().save_pretrained(tmp_path)
    for model in (
        AutoLigerKernelForCausalLM.from_pretrained(tmp_path),
        AutoLigerKernelForCausalLM.from_config(config()),
    ):
        assert isinstance(model, LlamaForCausalLM) and model.train()(**batch).logits is None


def test_functions_that_others_add(monkeypatch):
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    calls = []

    def patch(model=None, rope=True):
        calls.append((model, rope))

    for model_type in ("own", "llama"):
        monkeypatch.setitem(MODEL_TYPE_TO_APPLY_LIGER_FN, model_type, patch)
    model, other = build(), build()
    other.config.model_type = "own"
    with pytest.warns(UserWarning, match=r"ignored: swiglu"):
        _apply_liger_kernel_to_instance(model, rope=False, swiglu=True, rms_norm=None)
    _apply_liger_kernel_to_instance(other)
    assert calls == [(model, False), (other, True)]


def test_what_axolotl_replaces():
    """axolotl replaces both halves of the fused loss, to exclude them from graphs, and its function, to set an
    option."""
    import liger_kernel.ops.fused_linear_cross_entropy as steps
    from liger_kernel.transformers import apply_liger_kernel_to_llama, functional

    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        original = getattr(steps, name)
        assert original.__name__ == name
        setattr(steps, name, functools.wraps(original)(torch.compiler.disable(original)))
        with pytest.raises(NotImplementedError, match=rf"{name} exists only to be replaced"):
            getattr(steps, name)(torch.ones(1))

    batch, model = make_batch("cpu"), build().train()
    plain = copy.deepcopy(model)
    apply_liger_kernel_to_llama(model=model)
    liger_ext.apply_liger_kernel_to_llama(model=plain)
    original = functional.liger_fused_linear_cross_entropy

    def scaled(*args, **kwargs):
        kwargs["use_token_scaling"] = True
        return original(*args, **kwargs)

    without = model(**batch).loss
    functional.liger_fused_linear_cross_entropy = scaled
    expected = plain(**batch, use_token_scaling=True).loss
    assert torch.equal(model(**batch).loss, expected) and not torch.equal(without, expected)
    hidden = torch.randn(6, 8)
    weight, target = torch.randn(11, 8), torch.randint(11, (6,))
    loss = importlib.import_module("liger_kernel.transformers.model.loss_utils").LigerForCausalLMLoss
    found = loss(hidden, weight, None, 8, shift_labels=target)
    assert torch.equal(found, liger_ext.fused_linear_cross_entropy(hidden, weight, target, use_token_scaling=True))
    # A new installation starts with the original functions.
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"scaled .* replaces liger_fused_linear_cross_entropy and is not called"):
        assert torch.isfinite(model(**batch).loss)


def test_replacements_end_with_the_installation(installed):
    importlib.import_module("liger_kernel").transformers.functional.liger_fused_linear_cross_entropy = None
    installed.revert()
    with compat.install():
        found = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        assert found is liger_ext.liger_fused_linear_cross_entropy


def test_the_loss_outlives_the_installation(installed):
    loss = importlib.import_module("liger_kernel.transformers.model.loss_utils").LigerForCausalLMLoss
    installed.revert()
    hidden, weight, target = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    found = loss(hidden, weight, None, 8, shift_labels=target)
    assert torch.equal(found, liger_ext.fused_linear_cross_entropy(hidden, weight, target))


def test_the_loss_of_heads_of_others():
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    labels[0, 2] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    logits = (hidden @ weight.T).flatten(0, 1)
    found = LigerForCausalLMLoss(hidden, weight, labels, 8, cu_seq_lens_q=None, output_attentions=False)
    torch.testing.assert_close(found, F.cross_entropy(logits, shifted.flatten()))
    found.backward()
    assert hidden.grad is not None and weight.grad is not None
    total = F.cross_entropy(logits, shifted.flatten(), reduction="sum")
    found = LigerForCausalLMLoss(hidden.transpose(0, 1), weight, None, 8, torch.tensor(20), shift_labels=shifted.T)
    torch.testing.assert_close(found, total / 20)
    capped = F.cross_entropy(3 * torch.tanh(logits / 3), shifted.flatten(), label_smoothing=0.1)
    options = dict(final_logit_softcapping=3.0, label_smoothing=0.1)
    torch.testing.assert_close(LigerForCausalLMLoss(hidden, weight, labels, 8, **options), capped)
    output = LigerForCausalLMLoss(hidden, weight, labels, 8, return_token_accuracy=True, return_predicted_tokens=True)
    torch.testing.assert_close(output.loss, F.cross_entropy(logits, shifted.flatten()))
    assert output.predicted_tokens.shape == (10,) and 0 <= output.token_accuracy <= 1
    plain = LigerForCausalLMLoss(hidden, weight, labels, 8, return_z_loss=True, lse_square_scale=0.1)
    assert plain.shape == () and plain > output.loss


def test_calls_inside_of_fsdp():
    from liger_kernel.transformers.fsdp import _FSDPForwardRedirection

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.gathered = module, False

        def forward(self, *args, **kwargs):
            self.gathered = True
            try:
                return self.module(*args, **kwargs)
            finally:
                self.gathered = False

    head = FullyShardedDataParallel(nn.Linear(3, 4))
    x = torch.randn(2, 3)

    def method(x, scale):
        assert head.gathered
        return head.module(x) * scale  # the module's original forward

    assert torch.equal(_FSDPForwardRedirection()(head, method, x, scale=2), head(x) * 2)
    with pytest.raises(TypeError, match="scale"):
        _FSDPForwardRedirection()(head, method, x)
    assert "forward" not in vars(head.module) and not head.gathered
    with pytest.raises(TypeError, match=r"wrapper_module is of .*Linear"):
        _FSDPForwardRedirection()(head.module, method, x)
