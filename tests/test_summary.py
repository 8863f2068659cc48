"""`PatchHandle.summary`: its counts are those of the ops that a training step calls, also after hooks, adapters and
reverts, and each part that runs transformers' code has a reason."""

import logging
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from cases import RecordCalls
from family_models import build
from llama_models import lora, make_batch
from test_patch_wrappers import mesh  # noqa: F401
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertModel

import liger_ext
from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

NORMS, GATES = ("rms_norm", "add_rms_norm", "layer_norm"), ("glu", "glu_packed", "relu_squared")
FAMILIES = ("llama", "gemma2", "phi3", "cohere2", "olmo3", "nemotron", "qwen3_moe", "mixtral", "granitemoe")


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def replace_forward(module: nn.Module) -> None:
    stock = next(c for c in type(module).__mro__ if c.__module__.startswith("transformers.")).forward
    module.forward = lambda *args, **kwargs: stock(module, *args, **kwargs)


def replace_loss(model: nn.Module) -> None:
    model.loss_function = lambda logits, labels, **_: logits.sum()


# By name: a change of a patched Llama, and the words of the reason.
CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "hook on the head": (lambda m: hook(m.lm_head), "the head has a hook, which must receive all logits"),
    "hook on an activation": (lambda m: hook(m.model.layers[0].mlp.act_fn), "its activation has a hook"),
    "another activation": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh()), "its activation has no op"),
    "forward of a norm": (lambda m: replace_forward(m.model.norm), "another forward was set on it"),
    "forward of an MLP": (lambda m: replace_forward(m.model.layers[1].mlp), "another forward was set on it"),
    "loss of the user": (replace_loss, "model.loss_function is the user's own"),
    "hook on a layer's norm": (lambda m: hook(m.model.layers[0].post_attention_layernorm), "its norm has a hook"),
    "hook on a norm": (lambda m: hook(m.model.norm), ""),
}


def assert_equals_a_step(model: nn.Module, summary) -> None:
    with RecordCalls() as record:
        model.train()(**make_batch("cpu"))
    calls = Counter(record.names)
    ours = {name: part.ours for name, part in summary.parts.items()}
    assert ours.get("norms", 0) == sum(calls[name] for name in NORMS)
    gates = sum(calls[name] for name in GATES)
    assert (gates > 0) == (ours.get("MLPs", 0) + ours.get("experts", 0) > 0)
    if not ours.get("experts"):
        assert gates == ours.get("MLPs", 0)
    assert (calls["rope"] > 0) == (ours.get("attentions", 0) > 0)
    (loss,) = summary.losses
    assert (loss.how == "fused") == (calls["fused_linear_cross_entropy"] == 1)
    assert (loss.reason is None) == (loss.how == "fused")
    for part in summary.parts.values():
        assert part.ours + sum(map(len, part.stock.values())) == part.total
        assert all(model.get_submodule(name) is not None for names in part.stock.values() for name in names)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_ops(family, experts):
    model = build(family)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = experts
    elif experts != "eager":
        pytest.skip("has no experts")
    handle = apply_liger_kernel_to_instance(model)
    assert_equals_a_step(model, handle.summary())
    handle.revert()
    summary = handle.summary()
    assert not any(part.ours for part in summary.parts.values()) and summary.memory is None
    assert_equals_a_step(model, summary)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_when_it_is_made(change):
    model, (make, words) = build("llama"), CHANGES[change]
    handle = apply_liger_kernel_to_llama(model=model)
    before = handle.summary()
    make(model)
    after = handle.summary()
    assert_equals_a_step(model, after)
    assert (str(after) == str(before)) == (words == "") and words in str(after)


@pytest.mark.parametrize("switch", ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "fused_add_rms_norm"])
def test_options_that_are_off_are_reasons(switch):
    model = build("llama")
    summary = apply_liger_kernel_to_llama(model=model, **{switch: False}).summary()
    assert_equals_a_step(model, summary)
    assert f"{switch}=False" in str(summary)


def test_adapters_and_their_head():
    pytest.importorskip("peft")
    model = build("llama")
    handle = apply_liger_kernel_to_llama(model=model, memory="low")
    adapted = lora(model, target_modules=["q_proj", "down_proj", "lm_head"])
    summary = handle.summary(adapted)
    layers = model.config.num_hidden_layers
    assert summary.parts["adapters"][:2] == (2 * layers, 2 * layers + 1) and summary.memory == "low"
    assert summary.losses[0].how == "in chunks" and "peft.tuners.lora.layer.Linear" in summary.losses[0].reason
    assert_equals_a_step(adapted, summary)
    with adapted.disable_adapter():
        assert "it is disabled or merged" in str(handle.summary(adapted))


def test_a_model_without_known_code():
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.warns(UserWarning, match="runs no code that liger_ext knows"):
        handle = apply_liger_kernel_to_instance(BertModel(BertConfig(vocab_size=8, **sizes)))
    assert "is gone" in repr(handle)  # nobody else holds the model
    model = BertModel(BertConfig(vocab_size=8, **sizes))
    with pytest.warns(UserWarning, match="runs no code that liger_ext knows"):
        summary = apply_liger_kernel_to_instance(model).summary()
    assert summary.memory is None and not any(part.ours for part in summary.parts.values())
    with pytest.raises(TypeError, match=r"model is int, expected an nn\.Module"):
        handle.summary(3)


def test_a_sharded_model(mesh):  # noqa: F811
    """FSDP2 gathers a layer's weights for its call, so the parts run as in one process."""
    model = build("llama")
    handle = apply_liger_kernel_to_llama(model=model)
    before = handle.summary()
    for module in (*model.model.layers, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    after = handle.summary()
    assert after.parts == before.parts and after.losses[0].how == "fused" and after.model == "FSDPLlamaForCausalLM"
    assert_equals_a_step(model, after)


def test_bytes_of_logits():
    model = build("llama").bfloat16()
    hook(model.lm_head)
    loss = apply_liger_kernel_to_llama(model=model).summary().losses[0]
    assert loss.logits_bytes(8192) == 8192 * model.config.vocab_size * 2
    assert loss.text(8192).startswith(
        f"all logits, {8192 * model.config.vocab_size * 2 / 2**20:.3g} MiB in bfloat16 for"
    )


def test_a_head_that_makes_all_logits_is_named_when_it_is_patched():
    model = build("llama")
    hook(model.lm_head)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM trains with all logits, .*because the head has a hook"):
        apply_liger_kernel_to_llama(model=model)


def test_a_handle_is_one_line_and_keeps_no_model_alive():
    model = build("llama")
    handle = apply_liger_kernel_to_llama(model=model)
    layers = model.config.num_hidden_layers
    assert f"{2 * layers + 1} of {2 * layers + 1} norms, {layers} of {layers} MLPs" in repr(handle)
    assert "loss fused, memory='auto'" in repr(handle) and "\n" not in repr(handle)
    del model
    assert "is gone" in repr(handle)
    with pytest.raises(ValueError, match="has no model to describe"):
        handle.summary()
    with apply_liger_kernel_to_llama() as of_class:
        assert "no single model" in repr(of_class)
        assert of_class.summary(build("llama")).losses[0].how == "fused"
    assert not {"push", "enter_context", "callback", "pop_all", "close"} & {*dir(handle)}


@pytest.mark.parametrize("rank, lines", [(None, 1), ("0", 1), ("1", 0)])
def test_the_first_process_logs_the_line(rank, lines, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.INFO, logger="liger_ext"):
        handle = liger_ext.apply_liger_kernel_to_llama(model=build("llama"))
    assert len(caplog.records) == lines
    assert all(record.name == "liger_ext" and "loss fused" in record.getMessage() for record in caplog.records)
    assert torch.is_grad_enabled() and handle is not None
