"""Decoder layers that differ from those of `liger_ext.models.decoder` in names, and a little in what they add."""

import torch

from liger_ext.models.decoder import DecoderLayer, HybridLayer, SandwichLayer, ScaledLayer


class ApertusLayer(DecoderLayer):
    INPUT_NORM, NORM = "attention_layernorm", "feedforward_layernorm"


class VaultGemmaLayer(DecoderLayer):
    NORM = "pre_feedforward_layernorm"


class JetMoeLayer(DecoderLayer):
    ATTENTION = "self_attention"


class IndexedLayer(DecoderLayer):
    """GLM 5's, and Mistral Large 4's: the attention also returns which keys the next layer may look at."""

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[-1]


class AfmoeLayer(SandwichLayer):
    NORM = "pre_mlp_layernorm"
    NORMS_OF_RESULTS = "post_attention_layernorm", "post_mlp_layernorm"


class HyperCLOVAXLayer(ScaledLayer):
    """The results may have norms as well."""

    def _of_attention(self, x: torch.Tensor) -> torch.Tensor:
        return super()._of_attention(self.post_norm1(x))

    def _of_mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super()._of_mlp(self.post_norm2(x), residual)


class MiniCPM3Layer(ScaledLayer):
    FACTOR = "residual_scale"


class GraniteMoeLayer(ScaledLayer):
    FEED_FORWARD = "block_sparse_moe"


class GraniteMoeSharedLayer(GraniteMoeLayer):
    """There may be an MLP beside the experts."""

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        experts = self.block_sparse_moe(normed)
        return experts if self.shared_mlp is None else experts + self.shared_mlp(normed)


class GraniteMoeHybridLayer(ScaledLayer, HybridLayer):
    """Some layers are recurrent, and some have experts beside the MLP."""

    RECURRENT, FEED_FORWARD = "mamba", "shared_mlp"

    def _is_recurrent(self) -> bool:
        return self.mamba is not None

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self.block_sparse_moe(normed) + self.shared_mlp(normed) if self.has_experts else self.shared_mlp(normed)


class JambaLayer(DecoderLayer):
    """Of attention."""

    NORM, FEED_FORWARD = "pre_ff_layernorm", "feed_forward"


class JambaMambaLayer(JambaLayer, HybridLayer):
    def _is_recurrent(self) -> bool:
        return True

    def _recur(self, normed: torch.Tensor, arguments: dict[str, object]) -> torch.Tensor:
        given = dict(cache_params=arguments["past_key_values"], attention_mask=arguments["attention_mask"])
        return self.mamba(hidden_states=normed, **given)


class BambaLayer(JambaLayer, HybridLayer):
    RECURRENT = "mamba"

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[0]


class KimiLayer(HybridLayer):
    """Kimi Linear's, and Bailing's."""

    RECURRENT = "self_attn"


class OlmoHybridLayer(HybridLayer):
    """A recurrent one of OLMo's."""

    def _is_recurrent(self) -> bool:
        return True


class Lfm2Layer(HybridLayer):
    """Some layers are convolutions."""

    INPUT_NORM, NORM, FEED_FORWARD = "operator_norm", "ffn_norm", "feed_forward"

    def _is_recurrent(self) -> bool:
        return not self.is_attention_layer

    def _recur(self, normed: torch.Tensor, arguments: dict[str, object]) -> torch.Tensor:
        options = {name: value for name, value in arguments.items() if name not in self.DEFAULTS}
        given = {name: arguments[name] for name in ("past_key_values", "attention_mask")}
        return self.conv(hidden_states=normed, **given, **options)


class Lfm3Layer(Lfm2Layer, SandwichLayer):
    NORM = Lfm2Layer.NORM
    NORMS_OF_RESULTS = "post_operator_norm", "post_ffn_norm"
