"""The loss of a head that must be called for its logits (LoRA, quantised weights, its own code), chunk by chunk.

The forward computes a chunk's gradients of the hidden states and of the head's parameters before it computes the logits
of the next chunk. The backward only scales these gradients by the upstream gradient. A head may also read a tensor
that requires a gradient and is not a parameter of the head. In chunks this tensor would get no gradient, so the loss is
then computed from all logits at once.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from liger_ext import functional
from liger_ext.functional import CrossEntropyOutput
from liger_ext.models.patching.calls import is_called_bare
from liger_ext.ops._checks import accumulator
from liger_ext.ops._loss_arguments import FusedLossCall
from liger_ext.ops._loss_devices import device_index
from liger_ext.ops._loss_plan import head_chunk_rows

# The folders of PEFT's adapters that process each row of hidden states independently. Other adapters get all rows: Lily
# averages the rows of a call, and Poly needs the rows of a sequence together.
_TUNERS = "peft.tuners."
_ROW_TUNERS = """
    _buffer_dict adalora adamss beft boft c3a deft delora fourierft frod glora gralora hira hra ia3 ln_tuning loha lokr
    lora lycoris_utils miss osf oft peanut psoft pvera randlora road shira supertuning tinylora trainable_tokens
    tuners_utils unilora vblora vera waveft
"""
_ROW_FOLDERS = frozenset(_ROW_TUNERS.split())


def vocabulary(head: nn.Module) -> int | None:
    """Returns the number of columns of the logits of a head, or of a head inside a wrapper of PEFT; None: not known."""
    found = getattr(getattr(head, "original_module", head), "out_features", None)
    return found if isinstance(found, int) else None


def all_rows_reason(head: nn.Module) -> str | None:
    """Returns why `head` must compute the logits of all rows by one call; None: of some rows at a time."""
    if vocabulary(head) is None:
        return "the head has no out_features"
    if not all(map(is_called_bare, head.modules())):
        return "the head has a hook, which must receive all logits"
    if any(hasattr(parameter, "placements") for parameter in head.parameters()):
        return "the head's weights are sharded"
    modules = {cls.__module__ for m in head.modules() for cls in type(m).__mro__ if cls.__module__.startswith(_TUNERS)}
    tuners = sorted({module.split(".")[2] for module in modules} - _ROW_FOLDERS)
    return f"PEFT's {tuners[0]} needs all rows" if tuners else None


def rows_at_a_time(head: nn.Module, hidden_states: Tensor, memory: str | int | None) -> int | None:
    """Returns the number of rows of a chunk of logits; None if all rows must exist at once, or fit."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    vocab = vocabulary(head)
    if all_rows_reason(head) is not None:
        return None
    rows, hidden = hidden_states.shape
    dtype, device = hidden_states.dtype, device_index(hidden_states.device)
    chunk = head_chunk_rows(
        FusedLossCall.uniform(rows, hidden, vocab, dtype, device), "auto" if memory is None else memory
    )
    return chunk if chunk < rows else None


def loss_in_chunks(
    head: nn.Module,
    hidden_states: Tensor,
    targets: Tensor,
    chunk: int,
    num_items: int | Tensor | None,
    ignore_index: int,
    logit_scale: float,
    options: dict[str, object],
) -> CrossEntropyOutput | None:
    """Computes `functional.cross_entropy` of `head(hidden_states) * logit_scale`, `chunk` rows at a time.
    hidden_states: [rows, hidden_size]; targets: [rows].

    Returns None if the head differentiates tensors that are not its parameters.
    """
    parameters = [p for p in head.parameters() if p.requires_grad]
    learns = torch.is_grad_enabled()
    try:
        fixed = head, chunk, ignore_index, logit_scale, options, learns
        made = _Chunks.apply(*fixed, hidden_states, targets, *parameters)
    except _OthersWeights:
        return None
    loss, z_loss, accurate, predicted = made
    count = (targets != ignore_index).sum().clamp(min=1)
    total = count if num_items is None else num_items
    if isinstance(total, Tensor):
        total = total.to(loss.device)
    return CrossEntropyOutput(
        loss / total,
        None if z_loss is None else z_loss / total,
        None if accurate is None else accurate / count,
        predicted,
    )


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


class _OthersWeights(Exception):
    pass


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, chunk, ignore_index, logit_scale, options, learns, hidden_states, targets, *parameters):
        needs_hidden = learns and ctx.needs_input_grad[6]
        wanted = [p for p, needed in zip(parameters, ctx.needs_input_grad[8:], strict=True) if learns and needed]
        dhidden = torch.empty_like(hidden_states) if needs_hidden else None
        # Plain tensors, even if a parameter is not.
        sums = [torch.zeros(p.shape, dtype=accumulator(p.dtype), device=p.device) for p in wanted]
        outputs = []
        device = hidden_states.device.type
        casts = torch.is_autocast_enabled(device)
        for first in range(0, hidden_states.shape[0], chunk):
            rows = slice(first, first + chunk)
            x = hidden_states[rows].detach().requires_grad_(needs_hidden)
            # A cached cast of a weight would belong to the graph of the first chunk.
            cast = torch.autocast(device, torch.get_autocast_dtype(device), casts, cache_enabled=False)
            with torch.set_grad_enabled(learns), cast:
                logits = scaled(head(x), logit_scale)
                made = functional.cross_entropy(logits, targets[rows], None, ignore_index, reduction="sum", **options)
            made = made if isinstance(made, CrossEntropyOutput) else CrossEntropyOutput(made)
            if first == 0 and _differentiates_more_than(made.loss, {id(t) for t in (x, *wanted)}):
                raise _OthersWeights
            if needs_hidden or wanted:
                inputs = [x] * needs_hidden + wanted
                found = torch.autograd.grad(made.loss, inputs, allow_unused=True)
                if needs_hidden:
                    dhidden[rows] = 0 if found[0] is None else found[0]
                for total, gradient in zip(sums, found[needs_hidden:], strict=True):
                    if gradient is not None:
                        total += gradient
            accurate = made.token_accuracy
            if accurate is not None:
                accurate = accurate * (targets[rows] != ignore_index).sum()
            outputs.append((made.loss.detach(), made.z_loss, accurate, made.predicted_tokens))
        ctx.save_for_backward(dhidden, *sums)
        ctx.dtypes = [p.dtype for p in wanted]
        ctx.set_materialize_grads(False)
        loss, z_loss, accurate, predicted = zip(*outputs, strict=True)
        others = (*map(_total, (z_loss, accurate)), None if predicted[0] is None else torch.cat(predicted))
        ctx.mark_non_differentiable(*(t for t in others if t is not None))
        return _total(loss), *others

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * len(ctx.needs_input_grad)
        dhidden, *sums = ctx.saved_tensors
        hidden_gradient = None if dhidden is None else (dhidden * dloss).to(dhidden.dtype)
        scaled = ((total * dloss).to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True))
        parameter_gradients = (next(scaled) if need else None for need in ctx.needs_input_grad[8:])
        return None, None, None, None, None, None, hidden_gradient, None, *parameter_gradients


def _differentiates_more_than(loss: Tensor, known: set[int]) -> bool:
    """Returns whether the graph of `loss` has leaves other than the tensors with these ids."""
    found = {loss.grad_fn} - {None}
    nodes = list(found)
    for node in nodes:
        if hasattr(node, "variable") and id(node.variable) not in known:
            return True
        following = {n for n, _ in node.next_functions} - found - {None}
        found |= following
        nodes.extend(following)
    return False


def _total(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.stack(parts).sum(0)
