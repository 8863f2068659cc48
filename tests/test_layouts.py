"""Results do not depend on strides: every tensor argument of every op with a record, in random layouts, and memory that
no op may touch.

A test draws a layout of layouts.py for each tensor of a call separately: inputs, upstream gradients, and, where it
calls the ops directly, also saved tensors. For each call

* shapes, dtypes and values are bit-identical to those of the same call on contiguous copies, or, where a backward op
  requires a saved tensor exactly as its forward returned it, a ValueError names that tensor;
* the fake implementation predicts shape, dtype and strides of the outputs, or raises the same error;
* no input changes, nothing is written beside an input, and outputs share no memory with inputs.

Equal bits are promised for equal kernels. The GPU's kernels (here the host target's) read single elements where rows
are not aligned to 16 bytes, and sum them in another order than vectors: so each contiguous copy has the alignment of
its tensor's rows. Two exceptions remain. The losses' kernels read the elements before the first aligned address of a
row one by one, so no contiguous copy has the same order of sums. The fused loss's matmuls are a library's, whose order
of sums may depend on strides. Where these results differ in bits, functions are judged by the rule, and ops called
directly, which have no reference, by the tolerances of ``torch.testing``.
"""

import pytest
import torch
from calls import argument_text
from cases import RecordCalls, device_dtypes, host_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import (
    Guarded,
    contiguous,
    draw_layout,
    rows_are_aligned,
    same_bits,
    shares_memory,
    significant_strides,
    unwritten_memory,
)
from ops import OPS, draw_call
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_ext.records import RECORDS
from liger_ext.testing import judge, named_outputs

each_op = pytest.mark.parametrize("op", OPS)
randoms = st.randoms(use_true_random=False)
settings_here = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def place(tensors, choose_layout):
    """The tensors in drawn layouts, and the guards around them."""
    guarded = Guarded()
    return {name: guarded.place(name, t, choose_layout(t.shape)) for name, t in tensors.items()}, guarded


def copies(op, tensors):
    """Contiguous copies for a call of the op. Their rows are aligned if the originals' are, and otherwise start one
    element further."""
    guard = Guarded()
    return {n: guard.place(n, t, contiguous(t.shape, 0 if rows_are_aligned(op, t) else 1)) for n, t in tensors.items()}


def run(call, tensors, gradients_like):
    """Outputs and gradients of the call with these tensors, by name; ``gradients_like`` builds the upstream gradients
    from the differentiable outputs."""
    leaves = {n: t.requires_grad_() if n in call.differentiable() else t for n, t in tensors.items()}
    outputs = named_outputs(call.with_tensors(leaves)())
    wanted = [n for n in leaves if n in call.differentiable()]
    used = {n: t for n, t in outputs.items() if t.requires_grad}
    given = gradients_like(used)
    found = torch.autograd.grad(list(used.values()), [leaves[n] for n in wanted], [given[n] for n in used])
    return outputs | {f"d{n}": g for n, g in zip(wanted, found, strict=True)}


def random_like(outputs):
    values = torch.Generator().manual_seed(0)
    return {n: torch.randn(t.shape, generator=values).to(t.device, t.dtype) for n, t in outputs.items()}


def differing(ours, theirs):
    return [n for n in theirs if not same_bits(ours[n], theirs[n])]


def other_sums(op, device):
    """Returns whether the op may sum in another order where strides differ; see the file's docstring."""
    gpu_kernels = device.type == "cuda" or host_target()
    return op == "fused_linear_cross_entropy" or (RECORDS[op].outputs == ("loss",) and gpu_kernels)


@each_op
@settings_here
@given(rng=randoms)
def test_a_function_and_its_gradients(device, op, rng):
    """Public functions, forward and backward."""
    call = draw_call(rng, op, device_dtypes(device), device)
    tensors, guard = place(call.tensors(), lambda shape: draw_layout(rng, shape))
    gradients, guards = {}, [guard]

    def laid_out_gradients(outputs):
        placed, guard_of_gradients = place(random_like(outputs), lambda shape: draw_layout(rng, shape))
        gradients.update(placed)
        guards.append(guard_of_gradients)
        return placed

    with unwritten_memory(0x81):
        found = run(call, tensors, laid_out_gradients)
    assert [guard.changed() for guard in guards] == [[], []]
    with unwritten_memory(0x7E):
        bad = differing(found, run(call, copies(op, tensors), lambda _: copies(op, gradients)))
    if bad and other_sums(op, device):
        bad = []
        judge_call(call, tensors)
    assert bad == [], f"other bits than contiguous copies: {bad} of {call.with_tensors(tensors)}"


def judge_call(call, tensors):
    """Judges by the rule of liger_ext/rule.py, whose references take two dimensions."""
    for name in ("x", "logits"):
        if name in tensors and (tensors[name].dim() != 2 or not tensors[name].numel()):
            return
    judge(call.op, call.with_tensors(tensors).arguments)


def recorded(call):
    """The ops, with arguments, that a function and its backward call on contiguous tensors."""
    with RecordCalls() as mode:
        run(call, copies(call.op, call.tensors()), random_like)
    return mode.calls


def call_op(op, arguments):
    """The op's outputs as a list, or the ValueError that it raises."""
    try:
        with torch.no_grad():
            made = op(*arguments)
    except ValueError as error:
        return error
    return [made] if isinstance(made, torch.Tensor) else list(made)


def with_tensors(arguments, tensors):
    return [tensors.get(i, a) for i, a in enumerate(arguments)]


@each_op
@settings_here
@given(rng=randoms)
def test_an_op_called_directly(device, op, rng):
    """The ops, forward and backward: every tensor argument, including saved tensors and counts."""
    for overload, arguments in recorded(draw_call(rng, op, device_dtypes(device), device)):
        originals = {i: a for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)}
        tensors, guard = place(originals, lambda shape: draw_layout(rng, shape))
        unchanged = copies(op, tensors)
        with unwritten_memory(0x81):
            found = call_op(overload, with_tensors(arguments, tensors))
        what = f"{overload}({', '.join(map(argument_text, tensors.values()))})"
        schema = overload._schema.arguments
        assert [i for i in guard.changed() if not (schema[i].alias_info and schema[i].alias_info.is_write)] == [], what
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {i: mode.from_tensor(t) for i, t in tensors.items()}
            predicted = call_op(overload, with_tensors(arguments, fake))
        if isinstance(found, ValueError):
            assert "not what the forward returned" in str(found), what
            continue
        assert not isinstance(predicted, ValueError), f"fake: {predicted}; {what}"
        assert not shares_memory(found, tensors.values()), f"an output is not memory of its own: {what}"
        for real, expected in zip(found, predicted, strict=True):
            assert (real.shape, real.dtype) == (expected.shape, expected.dtype), what
            assert significant_strides(real) == significant_strides(expected), what
        with unwritten_memory(0x7E):
            expected = call_op(overload, with_tensors(arguments, unchanged))
        for real, like in zip(found, expected, strict=True):
            if not same_bits(real, like):
                assert other_sums(op, device), f"other bits than contiguous copies: {what}"
                torch.testing.assert_close(real, like, equal_nan=True, msg=what)


@pytest.mark.parametrize("reduction", range(3))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_output_of_no_rows_is_written(device, reduction, smoothing):
    found = []
    for byte in (0x81, 0x7E):
        with unwritten_memory(byte):
            logits, target = torch.ones(0, 5, device=device), torch.zeros(0, dtype=torch.int64, device=device)
            options = (None, -100, reduction, smoothing, 0.0, None, True, True, True)
            found.append(torch.ops.liger_ext.cross_entropy(logits, target, *options))
    assert all(map(same_bits, *found))
