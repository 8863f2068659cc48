"""Tests of patches together with accelerate, which every Trainer uses. accelerate wraps the `forward` of a model, for
mixed precision and for the placement on devices. Before or after such a wrapper, a patch must take effect, the wrapper
must keep its effect, and the revert must restore the results. A wrapper that cannot be followed prevents the patch."""

import copy

import pytest
import torch
from cases import RecordCalls
from llama_models import build, make_batch, one_thread, ops, tokens  # noqa: F401
from torch import nn
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models import llama

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

OURS = {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}


@pytest.fixture
def accelerator(device, monkeypatch):
    """An accelerator with mixed precision. Its global state outlives it, so the fixture resets that state."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    reset = accelerate.state.AcceleratorState._reset_state
    reset(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    reset(reset_partial_state=True)


def prepare(accelerator, model):
    return accelerator.prepare(model)


def prepare_and_unwrap(accelerator, model):
    """Removes mixed precision, but leaves a `forward` on the instance: the class's, without its decorators."""
    return accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)


def hook_and_prepare(accelerator, model):
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(execution_device=accelerator.device))
    return accelerator.prepare(model)


def prepare_and_hook(accelerator, model):
    prepared = accelerator.prepare(model)
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(execution_device=accelerator.device))
    return prepared


WRAPPERS = (prepare, prepare_and_unwrap, hook_and_prepare, prepare_and_hook)


@pytest.mark.parametrize("order", ["patch, wrap", "wrap, patch"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_patch_and_revert_under_a_wrapper(accelerator, device, wrap, order):
    expected_model = wrap(accelerator, build(device=device).train())
    expected = expected_model(**make_batch(device))
    model = build(device=device).train()
    if order == "patch, wrap":
        handle = apply_liger_kernel_to_llama(model=model)
        model = wrap(accelerator, model)
    else:
        model = wrap(accelerator, model)
        handle = apply_liger_kernel_to_llama(model=model)
    for _ in range(2):
        assert ops(model, **make_batch(device)) == OURS
        output = model(**make_batch(device))
        assert "logits" not in output
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-2, atol=0)
        output = model(**make_batch(device), skip_logits=False)
        assert output.logits.dtype == torch.float32
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0.2)
        handle.revert()
        assert type(model) is modeling_llama.LlamaForCausalLM
        assert not ops(model, **make_batch(device))
        output = model(**make_batch(device))  # the wrapper's effect applies to transformers' forward
        assert torch.equal(output.logits, expected.logits) and torch.equal(output.loss, expected.loss)
        handle = apply_liger_kernel_to_llama(model=model)


def test_mixed_precision_is_removed_from_a_patched_model(accelerator, device):
    """Calls accelerate's method that removes mixed precision after the patch, and then reverts the patch."""
    fp32 = build(device=device).train()(**make_batch(device))
    model = accelerator.prepare(build(device=device).train())
    handle = apply_liger_kernel_to_llama(model=model)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(model(**make_batch(device)).loss, fp32.loss)
    assert ops(model, **make_batch(device)) == OURS
    handle.revert()
    assert torch.equal(model(**make_batch(device)).logits, fp32.logits)
    assert not ops(model, **make_batch(device))


def test_a_copy_has_its_own_wrapper(accelerator, device):
    model = accelerator.prepare(build(device=device).train())
    copied = copy.deepcopy(model)
    handle = apply_liger_kernel_to_llama(model=copied)
    assert ops(copied, **make_batch(device)) == OURS
    assert not ops(model, **make_batch(device))
    assert type(model) is modeling_llama.LlamaForCausalLM
    handle.revert()
    assert not ops(copied, **make_batch(device))


def test_training_with_mixed_precision(tmp_path, device, accelerator):
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            ids = tokens(9, seed=index)
            return dict(input_ids=ids, labels=ids)

    def train(model):
        arguments = TrainingArguments(
            str(tmp_path),
            use_cpu=device.type == "cpu",
            bf16=True,
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        with RecordCalls() as record:
            Trainer(model=model, args=arguments, train_dataset=Rows()).train()
        return set(record.names)

    model = build().train()
    assert not train(model)
    handle = apply_liger_kernel_to_llama(model=model)
    assert train(model) >= OURS
    handle.revert()
    assert not train(model)


def test_a_wrapper_that_hides_what_it_wraps(device):
    """A wrapper whose inner function cannot be found stays as it is, and the module keeps its class: unpatched if the
    wrapper was there first, patched if it came later. Only the other modules are patched or reverted."""

    def hide(module):
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs)

    model = build(device=device).train()
    hide(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM has a forward of its own and is not patched"):
        handle = apply_liger_kernel_to_llama(model=model)
    assert ops(model, **make_batch(device)) == OURS - {"fused_linear_cross_entropy"}
    handle.revert()

    model = build(device=device).train()
    handle = apply_liger_kernel_to_llama(model=model)
    hide(model)
    with pytest.warns(UserWarning, match="wrapped after patching, and keeps the patch"):
        handle.revert()
    assert type(model) is llama.LlamaForCausalLM
    assert ops(model, **make_batch(device)) == {"fused_linear_cross_entropy"}
    assert model.eval()(**make_batch(device)).logits is not None


def test_a_wrapper_that_wraps_itself(device):
    """Models of accelerate's pipelines have such a wrapper; the patch leaves their class unchanged and warns."""
    model = build(device=device).train()

    def forward(*args, **kwargs):
        return None

    forward.__wrapped__ = forward.__get__(model)
    model.forward = forward
    with pytest.warns(UserWarning, match="LlamaForCausalLM has a forward of its own"):
        apply_liger_kernel_to_llama(model=model)
    assert isinstance(model.lm_head, nn.Linear) and type(model) is modeling_llama.LlamaForCausalLM
