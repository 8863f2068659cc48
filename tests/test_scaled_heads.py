"""Heads whose logits are scaled before the loss (Granite, Cohere 2, Falcon-H1), where the head is more than a matmul:
the factor applies to the head's results, after its hooks, its bias and its code."""

import copy
import types

import peft
import pytest
import torch
from family_models import assert_same, build, patched
from llama_models import TRANSFORMERS, make_batch, one_thread, step  # noqa: F401
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from liger_ext.models.modules import loss

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="the families are in the newest")
FAMILIES = "granite", "cohere2", "falcon_h1"


class Deep(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.first, self.head = nn.Linear(head.in_features, head.in_features), head

    def forward(self, hidden_states):
        return self.head(nn.functional.gelu(self.first(hidden_states)))


def bias(model):
    model.lm_head.bias = nn.Parameter(torch.linspace(-3, 9, model.lm_head.out_features))


def hook_that_adds(model):
    model.lm_head.register_forward_hook(lambda head, inputs, logits: logits + torch.linspace(0, 9, logits.shape[-1]))


def hook_before(model):
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0].tanh(),))


def forward_on_the_instance(model):
    of_abs = lambda head, x: nn.functional.linear(x, head.weight).abs()  # noqa: E731
    model.lm_head.forward = types.MethodType(of_abs, model.lm_head)


def replace_head(model):
    model.lm_head = Deep(model.lm_head)


def adapter_with_a_bias(model):
    config = peft.LoraConfig(target_modules=["lm_head"], lora_bias=True, init_lora_weights=False, lora_dropout=0.0)
    peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        next(b for name, b in model.named_parameters() if "lora_B" in name and name.endswith("bias")).normal_()


CALLED_BARE = bias, replace_head, adapter_with_a_bias  # their logits may be computed in chunks
CHANGES = bias, hook_that_adds, hook_before, forward_on_the_instance, replace_head, adapter_with_a_bias


@pytest.mark.parametrize("rows", [None, 4], ids=["at once", "in chunks"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_stock(monkeypatch, family, change, rows):
    if rows and change in CALLED_BARE:
        monkeypatch.setattr(loss, "rows_at_a_time", lambda *_: rows)
    model = build(family).train()
    torch.manual_seed(1)
    change(model)
    ours = patched(model)
    assert_same(step(ours, make_batch("cpu")), step(model, make_batch("cpu")))


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_read_what_the_head_makes(family):
    model, read = build(family).train(), {}
    for name, m in (("stock", model), ("ours", patched(copy.deepcopy(model)))):
        seen = read[name] = {}
        m.lm_head.register_forward_hook(lambda head, inputs, logits, seen=seen: seen.update(x=inputs[0], logits=logits))
        m.lm_head.register_full_backward_hook(lambda head, dx, dy, seen=seen: seen.update(dx=dx[0], dlogits=dy[0]))
        step(m, make_batch("cpu"))
    for name, value in read["stock"].items():
        torch.testing.assert_close(read["ours"][name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


def test_a_step_without_data():
    """On the meta device the test cannot read positions."""
    with torch.device("meta"):
        config = Gemma2Config(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
        model = Gemma2ForCausalLM(config)
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    found = patched(model).train()(input_ids=ids, labels=ids).loss
    found.backward()
    assert found.is_meta
