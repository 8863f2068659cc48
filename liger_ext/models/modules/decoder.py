"""Mixins for Llama's attention and decoder layer.

`liger_ext.models.llama` uses them for the patches of Llama's classes. `liger_ext.models.patches` uses them for classes
of other models that run the same code.
"""

import ast
import functools
import inspect
import re
from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from liger_ext import functional
from liger_ext.models.modules.mlp import MLP, has_silu, only_activation_runs
from liger_ext.models.modules.norms import RMSNorm, is_plain_rms_norm
from liger_ext.models.modules.stand_in import StandIn, call, find_uses, fused_names, runs_in_nodes, sees_no_module
from liger_ext.models.patching.calls import only_forward_runs
from liger_ext.models.patching.forwards import find_foreign, source_text
from liger_ext.models.patching.source import find_calls
from liger_ext.models.patching.swap import Mixin
from liger_ext.models.training.checkpoint import checkpoint_run, counting_runs
from liger_ext.models.training.linear import fused_linears
from liger_ext.models.training.nodes import norm_linears, norm_mlp
from liger_ext.models.training.recompute import recompute_when_saved, recomputed


class Attention(Mixin):
    """transformers' attention, in whose `forward` our functions apply the rotary embeddings."""

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        cls.USES = find_uses(stock.forward)
        cls.CALLS_PROJECTIONS = _calls_its_projections(stock.forward) and {*_PROJECTIONS} <= {*cls.USES.layers}

    @classmethod
    def wrap_forward(cls, forward: Callable) -> Callable:
        return runs_in_nodes(forward, cls.USES, _PROJECTIONS if cls.CALLS_PROJECTIONS else ())


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


# In transformers 4.53 to 4.57 a checkpoint of a layer includes the layer's hooks.
_HOOKS_ARE_CHECKPOINTED = any(
    "__call__" in vars(c) for c in modeling_llama.LlamaDecoderLayer.__mro__ if c is not nn.Module
)


class DecoderLayer(Mixin):
    """Adds the attention's output to the residual stream and normalises the sum in one op.

    If the linear layers are plain ones or have a LoRA adapter, a training step runs the autograd nodes of
    `models.training.nodes`, which save fewer tensors.
    """

    liger_memory = "auto"
    PATCH_STATE = ("_checkpoint_function",)
    # The names of the layer's modules: attention and MLP, each with the norm before it.
    INPUT_NORM, ATTENTION = "input_layernorm", "self_attn"
    NORM, FEED_FORWARD = "post_attention_layernorm", "mlp"

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        parameters = [*inspect.signature(stock.forward).parameters.values()][2:]
        cls.DEFAULTS = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}  # all but hidden_states
        calls = find_calls(ast.parse(source_text(stock.forward) or ""), f"self.{cls.ATTENTION}")
        given = {keyword.arg for call in calls for keyword in call.keywords}  # empty without source
        cls.WITHHELD = tuple(name for name in cls.DEFAULTS if name not in given) if given else ()
        # Up to 4.53 a layer returns a tuple: the hidden states, and with output_attentions the attention's weights.
        asks = "if output_attentions" in (source_text(stock.forward) or "if output_attentions")
        cls.RETURNS_WEIGHTS = "output_attentions" in cls.DEFAULTS and asks

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        norm = getattr(self, self.NORM)
        if not is_plain_rms_norm(norm):
            return super().forward(hidden_states, *args, **kwargs)
        # The arguments differ between versions of transformers. Most of them are passed on to the attention by name.
        arguments = {**self.DEFAULTS, **dict(zip(self.DEFAULTS, args, strict=False)), **kwargs}
        stream, attention, *others = self._attend(hidden_states, arguments)
        attention = self._attention_summand(attention)
        raises_dtype = norm.raises_dtype(attention, stream)
        linears = self._mlp_linears(stream) if not raises_dtype and isinstance(norm, RMSNorm) else None
        if linears is not None:
            is_read = checkpoint_run(self) < 2
            hidden_states = norm_mlp(attention, stream, norm, linears, self._level(), is_read)
        elif raises_dtype:
            residual = stream + attention
            hidden_states = residual + self._mlp_summand(self._feed_forward(norm(residual)), residual)
        else:
            norm_arguments = norm.liger_arguments()
            normed, residual = recomputed(self, functional.add_rms_norm, attention, stream, *norm_arguments)
            with recompute_when_saved(self, normed, functional.rms_norm, residual, *norm_arguments):
                hidden_states = self._feed_forward(normed)
            hidden_states = residual + self._mlp_summand(hidden_states, residual)
        return self._results(hidden_states, arguments, others)

    def _attention_summand(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the summand for the residual stream, from the attention's result."""
        return x

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor | tuple:
        return call(getattr(self, self.FEED_FORWARD), normed)

    def _mlp_summand(self, x: torch.Tensor | tuple, residual: torch.Tensor) -> torch.Tensor:
        """Returns the summand for `residual`, from the MLP's result. Experts return a tuple with router logits, or
        flattened rows."""
        x = x[0] if isinstance(x, tuple) else x
        return x if x.shape == residual.shape else x.view(residual.shape)

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> object:
        """Returns the layer's output, from the residual stream; `others` are the attention's other results."""
        if self.RETURNS_WEIGHTS:
            return (hidden_states, others[0]) if arguments["output_attentions"] else (hidden_states,)
        return hidden_states

    def _attention_arguments(self, arguments: dict[str, object]) -> dict[str, object]:
        if not self.WITHHELD:
            return arguments
        return {name: value for name, value in arguments.items() if name not in self.WITHHELD}

    def _attend(self, hidden_states: torch.Tensor, arguments: dict[str, object]) -> tuple:
        """Returns the residual stream, the attention's result, and its other results, such as attention weights."""
        norm, attention = getattr(self, self.INPUT_NORM), getattr(self, self.ATTENTION)
        arguments = self._attention_arguments(arguments)
        if not is_plain_rms_norm(norm) or norm.raises_dtype(hidden_states):
            return hidden_states, *call(attention, hidden_states=norm(hidden_states), **arguments)
        projections = [getattr(attention, name, None) for name in _PROJECTIONS]
        cls = type(attention)
        plain = cls.__bases__[0] is Attention and cls.CALLS_PROJECTIONS and only_forward_runs(attention)
        plain = plain and isinstance(norm, RMSNorm)
        one_node = plain and sees_no_module(attention)
        linears = fused_linears(hidden_states, projections, self.training) if one_node else None
        if linears is not None:
            stream, *projected = norm_linears(hidden_states, norm, linears, self._level())
            results = dict(zip(_PROJECTIONS, projected, strict=True))
            stand_in = StandIn(attention, fused_names(attention, cls.USES), results)
            return stream, *cls.forward.__wrapped__(stand_in, hidden_states=hidden_states, **arguments)
        normed = norm(hidden_states)
        with recompute_when_saved(self, normed, functional.rms_norm, hidden_states, *norm.liger_arguments()):
            return hidden_states, *call(attention, hidden_states=normed, **arguments)

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        """The function with which each layer checkpoints itself (transformers 4.53 on)."""
        function = self._checkpoint_function
        as_it_is = torch.compiler.is_compiling() or self.liger_memory == "fast"
        return function if as_it_is else counting_runs(self, function, self._is_forward, self.liger_memory == "min")

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable) -> None:
        """Stores the function under two names: in `__dict__` for the stock class, should the patch be reverted, and as
        `_checkpoint_function` for the getter. If the getter read its own name from `__dict__`, torch.compile (2.11)
        would call the getter again."""
        self.__dict__["_gradient_checkpointing_func"] = self._checkpoint_function = function

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self.__dict__["_gradient_checkpointing_func"], self._checkpoint_function

    def adopt_checkpoint_function(self) -> None:
        """Takes over a checkpoint function that was set before the patch."""
        if "_gradient_checkpointing_func" in self.__dict__:
            self._gradient_checkpointing_func = self.__dict__["_gradient_checkpointing_func"]

    def _is_forward(self, function: Callable) -> bool:
        """Returns whether `function` is the one that transformers passes to a checkpoint, without foreign code: neither
        a subclass's forward nor a hook."""
        if not isinstance(function, functools.partial):
            return False
        if _HOOKS_ARE_CHECKPOINTED:
            called = type(self).forward
            ours = getattr(function.func, "__func__", None) is nn.Module.__call__ and function.func.__self__ is self
            ours = ours and only_forward_runs(self)
        else:
            called = function.func
            ours = len(function.args) == 1 and function.args[0] is self
        return ours and find_foreign(called, __name__, "DecoderLayer.forward", ("transformers", "liger_ext")) is None

    def _level(self) -> str:
        """Returns the level of memory of this call: one with which a checkpoint of the whole layer computes nothing a
        third time."""
        if checkpoint_run(self):
            return "low"
        if self.liger_memory not in ("low", "min"):
            return self.liger_memory
        return "auto" if getattr(self, "gradient_checkpointing", False) and self.training else "low"

    def _mlp_linears(self, stream: torch.Tensor) -> list | None:
        """Returns the linear layers of an MLP that can run in one node with its norm; None for any other MLP."""
        mlp = getattr(self, self.FEED_FORWARD)
        one_node = (
            type(self)._mlp_summand is DecoderLayer._mlp_summand
            and type(mlp).__bases__[0] is MLP
            and mlp.BEFORE_DOWN is mlp.FACTOR is None
            and only_forward_runs(mlp)
            and has_silu(mlp)
            and only_activation_runs(getattr(mlp, mlp.ACTIVATION))
        )
        if not one_node:
            return None
        return fused_linears(stream, [getattr(mlp, name) for name in (mlp.GATE, mlp.UP, mlp.DOWN)], self.training)


def _calls_its_projections(forward: Callable) -> bool:
    """Returns whether an attention's `forward` calls each projection once, on its argument `hidden_states`, and uses
    the projections and the values of `hidden_states` for nothing else."""
    code = source_text(forward)
    if code is None:
        return False
    body = re.sub(r"\bhidden_states\.(shape|device|dtype)\b", "", code.partition("\n")[2])
    texts = [f"self.{name}(hidden_states)" for name in _PROJECTIONS]
    once = all(body.count(text) == 1 for text in texts)
    for text in texts:
        body = body.replace(text, "")
    return once and re.search(r"\bhidden_states\b|\bself\.[qkv]_proj\b", body) is None
