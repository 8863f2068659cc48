"""An argument of a public function that is a tensor and requires a gradient gets it, raises an error, or is a constant
by definition: the table lists every argument of every public signature."""

import functools
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from cases import normal, random_targets
from llama_models import VOCAB, build, make_batch, one_thread, patched  # noqa: F401
from torch import nn

from liger_ext import compat, functional, losses, modules
from liger_ext.liger_kernel import chunked_loss
from liger_ext.liger_kernel import ops as liger_kernel_ops
from liger_ext.models.modules.causal_lm import _LOSS_ARGUMENTS, _LOSS_OPTIONS
from liger_ext.ops import glu
from liger_ext.ops._loss_plan import SMALLEST

GETS, RAISES, CONSTANT, NO_NUMBER = "gets its gradient", "raises", "constant", "no number"
TABLE = {
    GETS: """
        x X hidden_states _input input residual R weight W lin_weight bias B gate up gate_up a b y q k logits
        log_q affine_scaling_weight affine_shifting_bias top_k_weights log_probs chosen rejected entropy
        normalizer entropy_normalizer num_items_in_batch alpha
    """,
    RAISES: """
        eps offset gate_multiplier down_multiplier cos sin label_smoothing lse_square_scale softcap ce_weight
        log_p beta gamma temperature logit_scale discopop_tau epsilon_low epsilon_high delta
        sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg
        max_completion_length entropy_coef desirable_weight undesirable_weight share packed absmax absmax_scales
        absmax_code absmax_offset
    """,
    CONSTANT: """
        mask policy_mask attention_mask advantages old_log_probs old_per_token_logps sampling_ratio
        vllm_is_ratio ref_log_probs ref_per_token_logps ref_chosen ref_rejected ref_input ref_weight ref_bias kl
        desirable preference_labels
    """,
    # Classes, rows, sizes, modes and flags, and Liger-Kernel's arguments without effect.
    NO_NUMBER: """
        target labels shift_labels nll_target token_ids selected_token_ids top_k_index position_ids rows
        ignore_index max_rows num_groups num_channels hidden_size intermediate_size layer_idx dim unsqueeze_dim
        rotary_dim config casting_mode approximate layout half_tables reduction size_average reduce
        return_z_loss return_token_accuracy return_predicted_tokens return_entropy accum_dtype logits_dtype
        dtype device use_token_scaling memory process_group mean_logits is_top1 log_sum_sq_probs loss_type
        importance_sampling_level use_bias_correction_kl average every_token compute_nll_loss use_ref_model
        average_log_prob with_bias with_scale affine elementwise_affine init_fn is_shared_mlp compiled
        chunk_size chunk_mem_const in_place row_mode impl mode backend ce_impl ce_mode jsd_impl jsd_mode
        m_tiles_per_cluster return_log_probs shape quant_type blocksize absmax_blocksize
    """,
}
CLASSES = {name: kind for kind, names in TABLE.items() for name in names.split()}
EXCEPTIONS = {
    ("cross_entropy", "weight"): RAISES,
    ("fused_linear_cross_entropy", "normalizer"): RAISES,
    ("liger_cross_entropy", "weight"): RAISES,
    ("liger_fused_linear_cross_entropy", "normalizer"): RAISES,
    ("liger_jsd", "target"): RAISES,
    ("LigerCrossEntropyLoss", "weight"): RAISES,
    ("LigerCrossEntropyFunction", "weight"): RAISES,
    ("LigerJSDFunction", "target"): RAISES,
    ("LigerLayerNorm", "bias"): NO_NUMBER,
    ("LigerGroupNorm", "bias"): NO_NUMBER,
    ("linear_log_probs", "entropy"): NO_NUMBER,
    ("high_entropy_mask", "entropy"): CONSTANT,
    ("a patched model", "num_items_in_batch"): RAISES,
}
HEAD_OPTIONS = "softcap", "logit_scale", "temperature", "memory", "logits_dtype"  # **head_options of the losses


def tensor(*shape, seed=0):
    return normal(*shape, dtype=torch.float64, seed=seed)


def log_p(*shape, seed=0):
    return tensor(*shape, seed=seed).log_softmax(-1)


CONFIG = SimpleNamespace(
    hidden_size=8,
    intermediate_size=8,
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    num_local_experts=3,
    mlp_multipliers=(0.5, 2.0),
)
ROWS, UP = tensor(3, 8), tensor(3, 8, seed=1)
VECTOR, TARGET = tensor(8, seed=2).abs() + 0.5, torch.tensor([1, 3, 5])
NORM = dict.fromkeys(("x", "X", "hidden_states"), ROWS) | dict.fromkeys(("residual", "R", "bias", "B"), UP[0])
NORM |= dict.fromkeys(("residual", "R"), UP) | dict.fromkeys(("weight", "W"), VECTOR)
NORM |= {"eps": 0.1, "offset": 0.5, "hidden_size": 8}
IMAGE = tensor(2, 4, 3)
GROUPS = dict.fromkeys(("x", "X", "hidden_states"), IMAGE) | {"eps": 0.1, "num_groups": 2, "num_channels": 4}
GROUPS |= dict.fromkeys(("weight", "affine_scaling_weight", "bias", "affine_shifting_bias"), VECTOR[:4])
GLU = dict.fromkeys(("gate", "a", "x", "gate_up", "y", "hidden_states"), ROWS) | dict.fromkeys(("up", "b"), UP)
GLU |= {"gate_multiplier": 0.5, "down_multiplier": 2.0, "config": CONFIG}
GLU |= {"top_k_index": torch.tensor([[0], [2], [1]]), "top_k_weights": VECTOR[:3, None]}
ROPE = {
    "q": tensor(1, 2, 3, 4),
    "k": tensor(1, 1, 3, 4, seed=1),
    "cos": tensor(3, 4, seed=2),
    "sin": tensor(3, 4, seed=3),
}
LOSS = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 3.0, "target": TARGET}
CROSS_ENTROPY = dict.fromkeys(("logits", "input", "_input"), ROWS) | {"weight": VECTOR} | LOSS
HEAD = dict.fromkeys(("x", "input", "_input"), ROWS) | dict.fromkeys(("weight", "lin_weight"), tensor(6, 8, seed=3))
HEAD |= {"bias": VECTOR[:6], "ce_weight": VECTOR[:6], "normalizer": 2.5, "logit_scale": 0.7} | LOSS
HEAD |= {"temperature": VECTOR[:3]}
JSD = dict.fromkeys(("log_q", "input", "_input"), log_p(3, 8))
JSD |= dict.fromkeys(("log_p", "target"), log_p(3, 8, seed=1)) | {"beta": 0.3}
PAIRS = {name: -VECTOR[i : i + 3] for i, name in enumerate(("chosen", "rejected", "ref_chosen", "ref_rejected"))}
PAIRS |= {"beta": 0.3, "gamma": 0.4, "label_smoothing": 0.1, "discopop_tau": 0.2}
KTO = {
    "log_probs": -VECTOR[:3],
    "desirable": VECTOR[3:6] - 1,
    "ref_log_probs": -VECTOR[4:7],
    "kl": VECTOR[:3],
    "beta": 0.3,
}
KTO |= {"desirable_weight": 1.5, "undesirable_weight": 0.5}
TOKENS = {
    "log_probs": -tensor(2, 4).abs(), "advantages": tensor(2, seed=1), "mask": torch.ones(2, 4).double(),
    "old_log_probs": -tensor(2, 4, seed=2).abs(), "ref_log_probs": -tensor(2, 4, seed=3).abs(), "beta": 0.2,
    "sampling_ratio": tensor(2, 1, seed=4).exp(), "policy_mask": tensor(2, 4, seed=5).abs(), "delta": 3.0,
    "entropy": tensor(2, 4, seed=6).abs(), "entropy_coef": 0.3, "normalizer": 2.5, "entropy_normalizer": 1.5,
    "epsilon_low": 0.2, "epsilon_high": 0.3, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.1, "share": 0.5,
    "vespo_k_pos": 2.0, "vespo_k_neg": 3.0, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0,
    "max_completion_length": 4, "token_ids": torch.arange(8).view(2, 4),
}  # fmt: skip
ANSWERS = {
    "_input": tensor(4, 3, 8), "target": random_targets(12, 6).view(4, 3), "ref_input": tensor(4, 3, 8, seed=5),
    "ref_weight": tensor(6, 8, seed=6), "ref_bias": VECTOR[1:7], "alpha": 0.5, "kl": VECTOR[:4],
    "preference_labels": VECTOR[4:] - 1, "use_ref_model": True, "compute_nll_loss": True,
    "temperature": tensor(4, 3).exp(),
}  # fmt: skip
ANSWERS = HEAD | PAIRS | ANSWERS
SAMPLES = HEAD | TOKENS | {
    "_input": tensor(2, 4, 8), "selected_token_ids": random_targets(8, 6, ignored=0).view(2, 4),
    "attention_mask": TOKENS["mask"], "ref_per_token_logps": TOKENS["ref_log_probs"], "num_items_in_batch": 3.5,
    "old_per_token_logps": TOKENS["old_log_probs"], "vllm_is_ratio": TOKENS["sampling_ratio"],
    "temperature": tensor(2, 4).exp(), "ref_input": tensor(2, 4, 8, seed=5), "ref_weight": tensor(6, 8, seed=6),
    "ref_bias": VECTOR[1:7],
}  # fmt: skip

# The arguments of the public functions and modules whose name matches a pattern; the first match counts.
CALLS = {
    "experts|mlp|glu|mul": GLU,
    "group_?norm": GROUPS,
    "rmsnormforgemma[34]": NORM | {"dim": 8},
    "norm|softmax|relu": NORM,
    "vision": ROPE | {name: tensor(3, 2, 4, seed=1) for name in ("q", "k")},
    "gpt_oss": ROPE | {name: tensor(3, 2, seed=1) for name in ("cos", "sin")},
    "rope|rotary": ROPE,
    "linear_?(scaled)?_?cross|linear_log_probs": HEAD,
    "cross_?entropy": CROSS_ENTROPY,
    "jsd": JSD,
    "linear_?grpo": SAMPLES,
    "linear_?(dpo|cpo|simpo|orpo|kto)": ANSWERS,
    "grpo|high_entropy|answer": TOKENS,
    "kto": KTO,
    "[dcr]po|simpo": PAIRS,
    "count_rows": {"target": TARGET},
    "dequantize": {"packed": ROWS[0, :1], "shape": (16,), "absmax": VECTOR[:1].float()}
    | {f"absmax_{name}": VECTOR[:1].float() for name in ("code", "scales", "offset")},
    "check_errors": {},
    "patched model": LOSS | {"ce_weight": tensor(VOCAB).abs(), "num_items_in_batch": 3.5, "temperature": 0.7},
}
# The further arguments without which an argument has no effect.
WITH = {
    "sapo_": {"loss_type": "sapo"},
    "vespo_": {"loss_type": "vespo"},
    "ref_(input|weight|bias)": {"ref_per_token_logps": None},
}


def parameters(*functions) -> dict[str, inspect.Parameter]:
    """Returns the arguments by name."""
    found = {}
    for function in functions:
        for p in inspect.signature(function).parameters.values():
            if p.name == "head_options":
                found |= options(*HEAD_OPTIONS)
            elif p.name not in ("self", "args", "kwargs"):
                found[p.name] = p
    return found


def options(*names) -> dict[str, inspect.Parameter]:
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names}


def called(cls, **arguments):
    own = parameters(cls.__init__)
    torch.manual_seed(0)
    module = cls(**{name: value for name, value in arguments.items() if name in own}).double()
    return module(**{name: value for name, value in arguments.items() if name not in own})


class CalledHead(nn.Linear):
    """A head that must be called for its logits, chunk by chunk."""

    def forward(self, x):
        return super().forward(x)


@functools.cache
def small_model(head):
    model = build(dtype=torch.float64)
    if head is not None:
        model.lm_head = head(64, VOCAB, bias=False, dtype=torch.float64)
    return patched(model)


def model_loss(head=None, **arguments):
    return small_model(head)(**make_batch("cpu", rows=5, seq=40), **arguments).loss


def public_callables():
    """Yields (name, arguments, call) of each public function, module and class with ``apply``, and of a patched model,
    whose loss is computed in several ways. A module is called with the arguments of its constructor and forward."""
    for space in (functional, compat, modules, losses, chunked_loss, liger_kernel_ops):
        for name in getattr(space, "__all__", vars(space)):
            found = getattr(space, name)
            if inspect.isfunction(found) and space not in (chunked_loss, liger_kernel_ops):
                yield name, parameters(found), found
            elif inspect.isclass(found) and issubclass(found, nn.Module):
                yield name, parameters(found.__init__, found.forward), functools.partial(called, found)
            elif inspect.isclass(found) and hasattr(found, "apply") and name.startswith("Liger"):
                yield name, parameters(found.apply), found.apply
    loss = options(*_LOSS_ARGUMENTS, *_LOSS_OPTIONS)
    log_probs = options("num_items_in_batch", "return_log_probs", "return_entropy", "temperature")
    yield "a patched model", loss, model_loss
    yield "logits of a patched model", loss, functools.partial(model_loss, skip_logits=False)
    yield "chunks of a patched model", loss, functools.partial(model_loss, CalledHead, memory=SMALLEST)
    yield "log-probs of a patched model", log_probs, functools.partial(model_loss, return_log_probs=True)


PUBLIC = {name: rest for name, *rest in public_callables()}


def grouped_linear(x, weight, ends):
    """Computes ``_grouped_linear`` in float64, which torch's grouped_mm does not take."""
    return torch.cat([x[first:last] @ w.T for first, last, w in zip([0, *ends[:-1]], ends, weight, strict=True)])


def results(result):
    """Returns the results that have a gradient."""
    if isinstance(result, (tuple, list)):
        return tuple(t for part in result for t in results(part))
    return (result,) if isinstance(result, torch.Tensor) and result.requires_grad else ()


def total(result):
    return sum((t * normal(*t.shape, dtype=t.dtype, seed=9)).sum() for t in results(result))


def learned(value):
    return torch.as_tensor(value, dtype=torch.float64).detach().clone().requires_grad_()


@pytest.mark.filterwarnings("ignore:.*ref_input is not used")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_tensor_that_requires_a_gradient(name, monkeypatch):
    monkeypatch.setattr(glu, "_grouped_linear", grouped_linear)
    needed, call = PUBLIC[name]
    values = next(values for pattern, values in CALLS.items() if re.search(pattern, name.lower()))
    classes = {argument: EXCEPTIONS.get((name, argument), CLASSES.get(argument)) for argument in needed}
    assert None not in classes.values(), f"{name} has an argument that is not in the table: {classes}"
    # Tensors that an option may be, such as the temperatures, are only passed as the tested argument.
    chosen = {
        n: values[n]
        for n, p in needed.items()
        if n in values and (p.default is p.empty or classes[n] != RAISES or not isinstance(values[n], torch.Tensor))
    }
    for argument, kind in classes.items():
        if kind == NO_NUMBER:
            assert "float" not in str(needed[argument].annotation), f"{name}: {argument} is a number"
            continue
        more = next((more for pattern, more in WITH.items() if re.match(pattern, argument)), {})
        more = {n: value for n, value in more.items() if n in needed}
        value = learned(values[argument])
        check(
            kind, functools.partial(call, **chosen | more), argument, value, {n for n in chosen if classes[n] == GETS}
        )


def check(kind, call, argument, value, leaves):
    """Calls a function with ``value``, a tensor that requires a gradient, as ``argument`` of this class. ``leaves``:
    the names of the other arguments that can have a gradient."""
    if kind == RAISES:
        text = "log_p" if argument == "target" else argument  # of jsd
        for each in (value, learned(value.flatten()[0])) if argument == "temperature" else (value,):
            with pytest.raises(
                (TypeError, ValueError), match=rf"\b{text}\b.*(detach\(\)|expected.*number|must lie in)"
            ):
                call(**{argument: each})
                pytest.fail(f"{argument} loses its gradient")
    elif kind == CONSTANT:
        found = results(call(**{n: learned(call.keywords[n]) for n in leaves} | {argument: value}))
        assert not found or torch.autograd.grad(total(found), value, allow_unused=True) == (None,), argument
    else:
        assert torch.autograd.grad(total(call(**{argument: value})), value)[0].any(), argument
        assert torch.autograd.gradcheck(lambda t: results(call(**{argument: t})), (value,), fast_mode=True), argument


def test_the_table_has_no_other_names():
    found = {(name, argument) for name, (arguments, _) in PUBLIC.items() for argument in arguments}
    assert CLASSES.keys() == {argument for _, argument in found}
    assert EXCEPTIONS.keys() <= found and len(CLASSES) == sum(len(names.split()) for names in TABLE.values())
