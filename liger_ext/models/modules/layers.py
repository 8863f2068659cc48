"""Mixins for decoder layers that differ from Llama's: the results of the attention and of the MLP pass through a norm
or dropout, or have a factor; or a recurrent module runs beside the attention, or in its place."""

import ast

import torch
from torch import nn

from liger_ext import functional
from liger_ext.models.modules.decoder import DecoderLayer
from liger_ext.models.modules.mlp import MLP, only_activation_runs
from liger_ext.models.modules.norms import is_plain_rms_norm
from liger_ext.models.modules.stand_in import call, project
from liger_ext.models.patching.forwards import source_text
from liger_ext.models.patching.source import find_calls
from liger_ext.models.training.recompute import recompute_when_saved, recomputed


class SandwichLayer(DecoderLayer):
    """A layer that passes the results of the attention and of the MLP through norms (Gemma 2) or dropout (Phi 3)."""

    AFTER_ATTENTION, NORM = "post_attention_layernorm", "pre_feedforward_layernorm"
    AFTER_FEED_FORWARD = "post_feedforward_layernorm"

    def _attention_summand(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.AFTER_ATTENTION)(x)

    def _mlp_summand(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.AFTER_FEED_FORWARD)(x)


class ScaledLayer(DecoderLayer):
    """Granite's layer: the results of the attention and of the MLP have a factor."""

    FACTOR = "residual_multiplier"

    def _attention_summand(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, self.FACTOR)

    def _mlp_summand(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, self.FACTOR)


class Gemma4Layer(SandwichLayer):
    """Gemma 4's layer. In some models experts run beside the MLP, or each layer has its own inputs. The result has a
    factor."""

    def _mlp_summand(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if getattr(self, "enable_moe_block", False):
            rows = residual.reshape(-1, residual.shape[-1])
            _, weights, index = self.router(rows)
            expert_result = self.experts(self.pre_feedforward_layernorm_2(rows), index, weights).reshape(residual.shape)
            x = self.post_feedforward_layernorm_1(x) + self.post_feedforward_layernorm_2(expert_result)
        return super()._mlp_summand(x, residual)

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> torch.Tensor:
        if getattr(self, "hidden_size_per_layer_input", 0):
            (gate,), given = project(self, hidden_states, "per_layer_input_gate"), arguments["per_layer_input"]
            op = MLP.ACTIVATION_OPS.get(type(self.act_fn)) if only_activation_runs(self.act_fn) else None
            fits = op and gate.dtype == given.dtype and gate.shape == given.shape
            gated = recomputed(self, op[0], gate, given, *op[1:]) if fits else self.act_fn(gate) * given
            (projected,) = project(self, gated, "per_layer_projection")
            hidden_states = hidden_states + self.post_per_layer_input_norm(projected)
        return hidden_states * self.layer_scalar


class RecurrentLayer(DecoderLayer):
    """A layer with a recurrent module, which receives some of the layer's arguments."""

    RECURRENT = "mamba"

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        super().inspect_stock(stock)
        call, *_ = find_calls(ast.parse(source_text(stock.forward)), f"self.{cls.RECURRENT}")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        cls.MODULE_ARGUMENTS = {name: value for name, value in given.items() if value in cls.DEFAULTS}
        cls.PASSES_REST = None in given

    def _recur(self, normed: torch.Tensor, arguments: dict[str, object]) -> torch.Tensor:
        given = {name: arguments[value] for name, value in self.MODULE_ARGUMENTS.items()}
        rest = {n: v for n, v in arguments.items() if n not in self.DEFAULTS} if self.PASSES_REST else {}
        return call(getattr(self, self.RECURRENT), hidden_states=normed, **given, **rest)


class FalconH1Layer(RecurrentLayer):
    """Falcon-H1's layer: a recurrent module beside the attention. Both read one norm's output, and have factors."""

    def _attend(self, hidden_states: torch.Tensor, arguments: dict[str, object]) -> tuple:
        normed = getattr(self, self.INPUT_NORM)(hidden_states)
        recurrent = self._recur(normed, arguments) * self.ssm_out_multiplier
        given = self._attention_arguments(arguments)
        scaled = normed * self.attention_in_multiplier
        attention, weights = call(getattr(self, self.ATTENTION), hidden_states=scaled, **given)
        return hidden_states, recurrent + attention * self.attn_out_multiplier, weights

    def _results(self, hidden_states: torch.Tensor, *_) -> tuple[torch.Tensor]:
        return (hidden_states,)


class HybridLayer(RecurrentLayer):
    """Qwen3-Next's layer: some layers have linear attention in place of softmax attention; the MLP may be experts."""

    RECURRENT = "linear_attn"

    def _attend(self, hidden_states: torch.Tensor, arguments: dict[str, object]) -> tuple:
        if not self._is_recurrent():
            return super()._attend(hidden_states, arguments)
        norm = getattr(self, self.INPUT_NORM)
        normed = norm(hidden_states)
        if not is_plain_rms_norm(norm) or norm.raises_dtype(hidden_states):
            return hidden_states, self._recur(normed, arguments), None
        with recompute_when_saved(self, normed, functional.rms_norm, hidden_states, *norm.liger_arguments()):
            return hidden_states, self._recur(normed, arguments), None

    def _is_recurrent(self) -> bool:
        return self.block_type == "linear_attention"


class IndexedLayer(DecoderLayer):
    """The layer of GLM 5 and Mistral Large 4: the attention also returns the keys that the next layer may attend to."""

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[-1]


class HyperCLOVAXLayer(ScaledLayer):
    """HyperCLOVA X's layer: norms may follow the attention and the MLP."""

    def _attention_summand(self, x: torch.Tensor) -> torch.Tensor:
        return super()._attention_summand(self.post_norm1(x))

    def _mlp_summand(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super()._mlp_summand(self.post_norm2(x), residual)


class GraniteMoeSharedLayer(ScaledLayer):
    """The layer of Granite MoE Shared: an MLP may run beside the experts."""

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        experts = super()._feed_forward(normed)
        return experts if self.shared_mlp is None else experts + self.shared_mlp(normed)


class GraniteMoeHybridLayer(ScaledLayer, HybridLayer):
    """The layer of Granite MoE Hybrid: some layers are recurrent, and some have experts beside the MLP."""

    def _is_recurrent(self) -> bool:
        return self.mamba is not None

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        shared = super()._feed_forward(normed)
        return call(self.block_sparse_moe, normed) + shared if self.has_experts else shared


class OnlyRecurrentLayer(HybridLayer):
    """A layer without attention: Jamba's layer with Mamba, and OLMo's recurrent layer."""

    def _is_recurrent(self) -> bool:
        return True


class BambaLayer(HybridLayer):
    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[0]


class Lfm2Layer(HybridLayer):
    """LFM 2's layer: some layers have a convolution in place of the attention."""

    def _is_recurrent(self) -> bool:
        return not self.is_attention_layer


class Lfm3Layer(Lfm2Layer, SandwichLayer):
    pass
