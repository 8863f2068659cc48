"""The language-model head of a patched model: wrappers and hooks around it, and heads that are called for logits."""

import copy
import pickle
import sys
import threading
import warnings

import pytest
import torch
from llama_models import VOCAB, build, compare, lora, make_batch, one_thread, ops, patched  # noqa: F401
from test_zero3 import deepspeed_hook
from torch import nn

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.modules.head import Linear, loss_caller
from liger_ext.ops._loss_plan import SMALLEST


def test_hooks_on_the_head(device):
    """Hooks that may read logits run; without hooks the loss stays fused. A call without a loss behaves as before."""
    model = patched(build(device=device).train())
    assert type(model.lm_head) is nn.Linear
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert "cross_entropy" in ops(model, **make_batch(device))
    assert seen[0][-1] == VOCAB
    hook.remove()
    assert "fused_linear_cross_entropy" in ops(model, **make_batch(device))
    hidden_states = torch.randn(2, 64, device=device)
    expected = nn.functional.linear(hidden_states, model.lm_head.weight)
    torch.testing.assert_close(model.lm_head(hidden_states), expected, rtol=0, atol=0)
    model.resize_token_embeddings(VOCAB + 24)  # builds a new head
    assert "fused_linear_cross_entropy" in ops(model, **make_batch(device))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_call_with_hooks_changes_the_class(copied):
    model = build(tie_word_embeddings=False).train()
    handle = apply_liger_kernel_to_llama(model=model)
    hook = model.lm_head.register_forward_pre_hook(deepspeed_hook(lambda module, args: None))
    assert type(model.lm_head) is nn.Linear
    with torch.no_grad():
        expected = model(**make_batch("cpu"), skip_logits=False).loss
    assert type(model.lm_head) is nn.Linear
    assert "fused_linear_cross_entropy" in ops(model, **make_batch("cpu"))
    assert type(model.lm_head) is Linear
    hook.remove()
    other = copied(model)
    handle.revert()
    assert type(model.lm_head) is nn.Linear
    torch.testing.assert_close(model(**make_batch("cpu")).loss, expected)
    torch.testing.assert_close(other(**make_batch("cpu")).loss, expected)
    assert "fused_linear_cross_entropy" in ops(other, **make_batch("cpu"))


def test_simultaneous_first_calls():
    hooks, interval, failed = pytest.importorskip("accelerate.hooks"), sys.getswitchinterval(), []

    def call(head, barrier):
        barrier.wait()
        try:
            caller = loss_caller(head)
            assert caller is None or caller(torch.ones(2, 4), loss=lambda x, weight, bias: (x.sum(),)) == (8,)
        except Exception as error:
            failed.append(error)

    sys.setswitchinterval(1e-6)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(100):
                head, barrier = nn.Linear(4, 8), threading.Barrier(4)
                hooks.add_hook_to_module(head, hooks.AlignDevicesHook(execution_device="cpu"))
                threads = [threading.Thread(target=call, args=(head, barrier)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert isinstance(head, Linear)
    finally:
        sys.setswitchinterval(interval)
    assert not failed


def test_what_is_no_linear_head():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    assert loss_caller(Scaled(4, 8)) is None
    assert loss_caller(nn.Sequential(nn.Linear(4, 8))) is None
    model = build(tie_word_embeddings=False).train()
    model.lm_head = Scaled(64, VOCAB, bias=False)
    compared = patched(model)
    assert type(compared.lm_head) is Scaled
    torch.testing.assert_close(compared(**make_batch("cpu")).loss, model(**make_batch("cpu")).loss)


def test_parametrized_head(device):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return weight

    model = build(device=device, tie_word_embeddings=False).train()
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Counted())
    compared = patched(model)
    assert "fused_linear_cross_entropy" in ops(compared, **make_batch(device))
    torch.testing.assert_close(compared(**make_batch(device)).loss, model(**make_batch(device)).loss)
    Counted.calls = 0
    compared(**make_batch(device))
    assert Counted.calls == 1


ADAPTERS = {
    "lora": {},
    "dropout 0": dict(lora_dropout=0.0, use_rslora=True),
    "dora": dict(use_dora=True),
    "base, too": dict(bias="all"),
}


@pytest.mark.parametrize("memory", [SMALLEST, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_a_head_with_an_adapter_in_chunks(device, dtype, options, memory):
    """Loss, further outputs and every gradient, from logits that never exist as a whole."""
    model = lora(build(tie_word_embeddings=False), target_modules=["lm_head"], **options).to(device, dtype).train()
    batch = make_batch(device, rows=6, seq=50)
    extra = dict(memory=memory, num_items_in_batch=torch.tensor(77), label_smoothing=0.1, return_token_accuracy=True)
    sizes = []
    head = model.base_model.model.lm_head
    forward = type(head).forward

    def counted(self, x, *args, **kwargs):
        sizes.append(x.shape[:-1].numel())
        return forward(self, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(head), "forward", counted)
        compared = compare(model, batch)
        compared.zero_grad()
        sizes.clear()
        first = compared(**batch, **extra)
    assert sizes == ([128, 128, 44] if memory == SMALLEST else [300])
    first.loss.backward()
    found = {n: p.grad.clone() for n, p in compared.named_parameters() if p.grad is not None}
    compared.zero_grad()
    whole = compared(**batch, **extra | {"memory": 1 << 40})
    whole.loss.backward()
    tolerance = dict(rtol=1e-4, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(first.loss, whole.loss, **tolerance)
    torch.testing.assert_close(first.token_accuracy, whole.token_accuracy)
    expected = {n: p.grad for n, p in compared.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("casts", [False, True], ids=["", "autocast"])
def test_chunks_of_a_called_head(device, casts):
    """A second backward, a checkpoint around the call, no gradient at all, and a head of a user's class."""

    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = patched(build(tie_word_embeddings=False).train())
    model.lm_head = Scaled(64, VOCAB)
    model.to(device)
    batch = make_batch(device, rows=6, seq=50)

    def run(memory):
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            return model(**batch, memory=memory).loss

    def gradients(loss, **options):
        return torch.autograd.grad(loss, list(model.parameters()), **options)

    tolerance = dict(rtol=3e-2, atol=3e-3) if casts else dict(rtol=1e-4, atol=1e-6)
    whole, chunked = run(1 << 40), run(1)
    torch.testing.assert_close(chunked, whole, **tolerance)
    expected, found = gradients(whole), gradients(chunked, retain_graph=True)
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(gradients(chunked), found, rtol=0, atol=0)
    again = torch.utils.checkpoint.checkpoint(run, 1, use_reentrant=False)
    torch.testing.assert_close(gradients(again), found, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(run(1), chunked, rtol=0, atol=0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert run(1) == 0 and not any(g.any() for g in gradients(run(1)))
    assert model(**batch, memory=SMALLEST, return_token_accuracy=True).token_accuracy == 0
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    run(1)
    assert seen == [300]
