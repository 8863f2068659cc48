"""Computes a causal language model's loss from hidden states or logits, as transformers' ForCausalLMLoss defines it."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from liger_ext import functional
from liger_ext.functional import CrossEntropyOutput
from liger_ext.models.modules.called_head import loss_in_chunks, rows_at_a_time, scaled
from liger_ext.models.modules.head import head_device, loss_caller
from liger_ext.models.patching.forwards import describe
from liger_ext.models.patching.names import find_class_by_name, pickle_name
from liger_ext.models.patching.swap import is_plain_tensor
from liger_ext.models.patching.warn import warn
from liger_ext.ops._checks import check_constants, class_targets

# Arguments of a model's forward for the loss: some change its value, some add results, some control the computation.
VALUE_OPTIONS = ("label_smoothing", "lse_square_scale", "ce_weight", "use_token_scaling")
OUTPUT_OPTIONS = ("return_token_accuracy", "return_predicted_tokens", "return_z_loss")
FUSED_OPTIONS = ("accum_dtype", "memory", "max_rows")
MEMORY_LEVELS = ("fast", "auto", "low", "min")


@dataclass
class LigerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with further results of the loss.

    Args:
        token_accuracy: fp32 scalar, the share of correct predictions among the targets that are not ignored; with
            `return_token_accuracy=True`.
        predicted_tokens: int64 [rows], the most likely token of each row of the flattened batch, -1 where the target is
            ignored; with `return_predicted_tokens=True`. Flat, as Liger-Kernel's: `.view(labels.shape)` gives it the
            shape of the targets, which the op's own `predicted_tokens` have.
        log_probs: fp32 (fp64 for float64), in the shape of the labels: at each position the log-probability of the next
            position's label (with `shift_labels`, of its own label), 0 if that is ignored; with
            `return_log_probs=True`.
        entropy: in the same dtype and shape: the entropy of the distribution from which the label's log-probability is
            taken, 0 if the label is ignored; with `return_log_probs=True, return_entropy=True`.
    """

    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


# The fields that `LigerCausalLMOutputWithPast` adds.
RESULTS = tuple(LigerCausalLMOutputWithPast.__annotations__)


@functools.cache
def liger_output(cls: type[ModelOutput]) -> type[ModelOutput]:
    """Returns a transformers head's output class, `cls`, with the added fields of `LigerCausalLMOutputWithPast`."""
    if cls is CausalLMOutputWithPast:
        return LigerCausalLMOutputWithPast
    fields = [(name, torch.Tensor | None, None) for name in RESULTS]
    names = {"__module__": __name__, "__qualname__": pickle_name(cls)}
    return make_dataclass(f"Liger{cls.__name__}", fields, bases=(cls,), namespace=names)


class _Without:
    """Base of the classes of `output_without`, which lack the fields `without`."""

    without: ClassVar[tuple[str, ...]] = ()

    def __getitem__(self, key: str | int | slice) -> object:
        """Returns a field by its name, or entries by their index in the tuple that an unpatched model returns."""
        if isinstance(key, str):
            try:
                return super().__getitem__(key)
            except KeyError as error:
                name = error.args[0]  # for past_key_values: cache, from transformers 5.24 on
                raise KeyError(_MISSING_FIELD_ERRORS[name] if name in self.without else name) from None
        places = [name for name in self.__dataclass_fields__ if name in self.without or name in self.keys()]
        chosen = places[key]
        for name in chosen if isinstance(key, slice) else [chosen]:
            if name not in self.keys():
                raise IndexError(_MISSING_FIELD_ERRORS[name])
        return tuple(self[name] for name in chosen) if isinstance(key, slice) else self[chosen]


@functools.cache
def output_without(cls: type[ModelOutput], *names: str) -> type[ModelOutput]:
    """Returns `liger_output(cls)` for a step that did not compute the values `names` (logits, past_key_values).

    Reading one of them raises an error with a hint how to get it. They are not dataclass fields, so that code that
    iterates over an output's fields (DistributedDataParallel, FSDP, pickle) never reads them.
    """
    namespace = {"__module__": __name__, "__qualname__": pickle_name(cls) + _WITHOUT + _AND.join(names)}
    fields = [(name, ClassVar[None], _missing_field(name)) for name in names]
    return make_dataclass(
        liger_output(cls).__name__,
        fields,
        bases=(_Without, liger_output(cls)),
        namespace={**namespace, "without": names},
    )


CACHES = "past_key_values", "cache"  # names of the cache of keys and values: up to transformers 5.23, from 5.24 on


def cache_in(output: type[ModelOutput]) -> str:
    """Returns the name of the cache of keys and values in this output class."""
    return next((name for name in CACHES if name in output.__dataclass_fields__), CACHES[0])


_WITHOUT, _AND = "__without_", "_and_"
_MISSING_FIELD_ERRORS = {
    "logits": "this output has no logits: with labels, a patched model computes the loss without them in training, and "
    "with return_log_probs=True. For the logits, call model(..., skip_logits=False); where they are optional, use "
    "getattr(output, 'logits', None), which is None",
}
for _name in CACHES:
    _MISSING_FIELD_ERRORS[_name] = (
        f"this output has no {_name}: with labels, a patched model builds no cache of keys and values in training. "
        f"For the cache, call model(..., use_cache=True); where it is optional, use "
        f"getattr(output, {_name!r}, None), which is None"
    )


def _missing_field(name: str) -> property:
    """Returns a property that raises when it is read before it is set. (Users set logits to None after use.)"""

    def read(output: ModelOutput) -> object:
        if name in output.__dict__:
            return output.__dict__[name]
        raise AttributeError(_MISSING_FIELD_ERRORS[name])

    def write(output: ModelOutput, value: object) -> None:
        output.__dict__[name] = value
        if value is not None:
            OrderedDict.__setitem__(output, name, value)

    def delete(output: ModelOutput) -> None:
        output.__dict__.pop(name, None)

    return property(read, write, delete)


def __getattr__(name: str) -> object:
    """Returns the classes of `liger_output` and `output_without` by name, for pickled outputs."""
    base, _, missing = name.partition(_WITHOUT)
    cls = find_class_by_name(base)
    if cls is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return output_without(cls, *missing.split(_AND)) if missing else liger_output(cls)


def fused_causal_lm_loss(
    hidden_states: torch.Tensor,
    lm_head: nn.Module,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    rows: functional.CountedRows | None = None,
    logit_scale: float = 1.0,
    function: Callable = functional.fused_linear_cross_entropy,
    **options,
) -> CrossEntropyOutput:
    """Computes the loss of `lm_head(hidden_states) * logit_scale` against the labels, without keeping logits.

    A head that is more than a linear layer (LoRA, quantised weights) is called chunk by chunk. All logits exist at once
    where chunks are not possible (a user's hook expects them, `ce_weight`, torch.compile, ...), if they are few, or if
    the weight is not a plain tensor inside the head's call.

    Args:
        hidden_states: [..., hidden_size].
        labels: [...] int64, of the positions of `hidden_states`; the target of a position is the next one's label.
        shift_labels: [...] int64, labels that are already shifted; `labels` is then ignored.
        num_items_in_batch: the divisor of the summed loss. None: the number of targets that are not ignored.
        rows: from `counted_rows`.
        function: computes the loss of a head that is a plain linear layer.
        options: of `functional.fused_linear_cross_entropy`.

    Raises:
        ValueError: labels for more or fewer positions than `hidden_states` has.
    """
    call = loss_caller(lm_head)
    if call is None:
        warn_if_replaced(function, "lm_head is more than a linear layer (LoRA, quantised weights, hooks)")
        label_arguments = labels, shift_labels, num_items_in_batch, ignore_index
        return _called_loss(lm_head, hidden_states, *label_arguments, logit_scale, **options)

    def loss(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> CrossEntropyOutput:
        if not is_plain_tensor(weight):
            logits = scaled(nn.functional.linear(hidden_states, weight, bias), logit_scale)
            return causal_lm_loss(logits, labels, shift_labels, num_items_in_batch, ignore_index, **options)
        check_constants("fused_causal_lm_loss", num_items_in_batch=num_items_in_batch)
        return _output(
            function(
                scaled(hidden_states.reshape(-1, hidden_states.shape[-1]), logit_scale),
                weight,
                _targets(labels, shift_labels, ignore_index, hidden_states),
                None if bias is None else scaled(bias, logit_scale),
                ignore_index=ignore_index,
                normalizer=num_items_in_batch,
                rows=rows,
                **options,
            )
        )

    # A plain tuple, because hooks unpack and rebuild tuples.
    return CrossEntropyOutput(*call(hidden_states, loss=lambda *arguments: tuple(loss(*arguments))))


def warn_if_replaced(function: Callable, reason: str) -> None:
    if not getattr(function, "__module__", "").startswith("liger_ext."):
        warn(f"{describe(function)} replaces liger_fused_linear_cross_entropy and is not called: {reason}")


def _called_loss(
    lm_head: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    num_items: int | torch.Tensor | None,
    ignore_index: int,
    logit_scale: float,
    **options,
) -> CrossEntropyOutput:
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    chunk = rows_at_a_time(lm_head, flat, options.get("memory"))
    result = None
    if chunk is not None and options.get("ce_weight") is None and not options.get("use_token_scaling"):
        targets = _targets(labels, shift_labels, ignore_index, hidden_states)
        unused = "memory", "accum_dtype", "use_token_scaling", "ce_weight"
        loss_options = {name: option for name, option in options.items() if name not in unused}
        result = loss_in_chunks(lm_head, flat, targets, chunk, num_items, ignore_index, logit_scale, loss_options)
    if result is None:
        logits = scaled(lm_head(hidden_states), logit_scale)
        return causal_lm_loss(logits, labels, shift_labels, num_items, ignore_index, **options)
    return result


def counted_rows(
    lm_head: nn.Module,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    *,
    max_rows: int | None = None,
    **_,
) -> dict[str, object]:
    """Returns the arguments `shift_labels` and `rows` of `fused_causal_lm_loss`, and starts to count the rows. Returns
    no arguments if that loss cannot use them, or if the labels are on another device or not a plain int64 tensor. In a
    graph of torch.compile `max_rows` is required."""
    given = labels if shift_labels is None else shift_labels
    if max_rows is None and torch.compiler.is_compiling():
        return {}
    if not is_plain_tensor(given) or given.dtype != torch.int64:
        return {}
    if loss_caller(lm_head) is None or type(ignore_index) is not int:
        return {}
    if given.device != head_device(lm_head):
        return {}
    shifted = shift(labels, ignore_index) if shift_labels is None else shift_labels
    return {"shift_labels": shifted, "rows": functional.count_rows(shifted, ignore_index, max_rows)}


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    *,
    ce_weight: torch.Tensor | None = None,
    use_token_scaling: bool = False,
    accum_dtype: torch.dtype | None = None,
    memory: object = None,
    max_rows: object = None,
    **options,
) -> CrossEntropyOutput:
    """Computes the loss of logits [..., vocab_size], without an fp32 copy unless they are sharded; arguments as in
    `fused_causal_lm_loss`.

    Ignores `accum_dtype`, `memory` and `max_rows`. Raises ValueError for `use_token_scaling`, which needs the fused
    loss, and for most options with sharded logits.
    """
    if use_token_scaling:
        raise ValueError("use_token_scaling needs the loss fused with lm_head: a plain nn.Linear, and no logits wanted")
    if not is_plain_tensor(logits):  # sharded by tensor parallelism, which has its own loss (loss_parallel)
        softcap = options.pop("softcap", None)
        if softcap is not None:
            logits = softcapped(logits, softcap)
        if ce_weight is not None or any(options.values()):
            raise ValueError(f"the loss of logits of type {type(logits).__name__} takes no options of liger_ext")
        targets = _targets(labels, shift_labels, ignore_index, logits)
        return _output(fixed_cross_entropy(logits.float().flatten(0, -2), targets, num_items_in_batch, ignore_index))
    output = _output(
        functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            _targets(labels, shift_labels, ignore_index, logits),
            ce_weight,
            ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            **options,
        )
    )
    if num_items_in_batch is None:
        return output
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return output._replace(loss=output.loss / num_items_in_batch)


def causal_lm_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Computes `causal_lm_loss` with the signature of transformers' ForCausalLMLoss, for `model.loss_function`."""
    options = {name: kwargs[name] for name in VALUE_OPTIONS if name in kwargs}
    return causal_lm_loss(logits, labels, shift_labels, num_items_in_batch, ignore_index, **options).loss


def softcapped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Bounds the logits smoothly: softcap * tanh(logits / softcap)."""
    return softcap * torch.tanh(logits / softcap)


def shift(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Shifts labels by one: a position's label becomes the next position's, and the last one's becomes `ignore_index`.

    Raises:
        ValueError: labels have more dimensions than batch and sequence; a shift along the last would be wrong.
    """
    if labels.dim() > 2:
        raise ValueError(f"labels have shape {list(labels.shape)}, expected [batch, sequence]")
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _targets(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int, rows: torch.Tensor
) -> torch.Tensor:
    """Returns the target of each row of the flattened batch: the next position's label, `ignore_index` at the end."""
    return row_targets(shift(labels, ignore_index) if shift_labels is None else shift_labels, rows)


def row_targets(shift_labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the flattened labels, on the device of `rows`.

    Raises:
        ValueError: labels for more or fewer positions than `rows` has.
    """
    positions = rows.numel() // rows.shape[-1]
    if shift_labels.numel() != positions:
        raise ValueError(f"labels for {shift_labels.numel()} positions, but {positions} are kept (see logits_to_keep)")
    return class_targets(shift_labels.reshape(-1).to(rows.device))


def _output(result: torch.Tensor | CrossEntropyOutput) -> CrossEntropyOutput:
    return result if isinstance(result, CrossEntropyOutput) else CrossEntropyOutput(loss=result)
