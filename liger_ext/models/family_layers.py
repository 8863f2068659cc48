"""Decoder layers that differ from those of `liger_ext.models.decoder` in what they add, or return."""

import torch

from liger_ext.models.decoder import DecoderLayer, HybridLayer, SandwichLayer, ScaledLayer


class IndexedLayer(DecoderLayer):
    """GLM 5's, and Mistral Large 4's: the attention also returns which keys the next layer may look at."""

    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[-1]


class HyperCLOVAXLayer(ScaledLayer):
    """The results may have norms as well."""

    def _of_attention(self, x: torch.Tensor) -> torch.Tensor:
        return super()._of_attention(self.post_norm1(x))

    def _of_mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super()._of_mlp(self.post_norm2(x), residual)


class GraniteMoeSharedLayer(ScaledLayer):
    """There may be an MLP beside the experts."""

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        experts = super()._feed_forward(normed)
        return experts if self.shared_mlp is None else experts + self.shared_mlp(normed)


class GraniteMoeHybridLayer(ScaledLayer, HybridLayer):
    """Some layers are recurrent, and some have experts beside the MLP."""

    def _is_recurrent(self) -> bool:
        return self.mamba is not None

    def _feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        shared = super()._feed_forward(normed)
        return self.block_sparse_moe(normed) + shared if self.has_experts else shared


class OnlyRecurrentLayer(HybridLayer):
    """Jamba's with Mamba, and a recurrent one of OLMo's: there is no attention."""

    def _is_recurrent(self) -> bool:
        return True


class BambaLayer(HybridLayer):
    def _results(self, hidden_states: torch.Tensor, arguments: dict[str, object], others: list) -> tuple:
        return hidden_states, others[0]


class Lfm2Layer(HybridLayer):
    """Some layers are convolutions."""

    def _is_recurrent(self) -> bool:
        return not self.is_attention_layer


class Lfm3Layer(Lfm2Layer, SandwichLayer):
    pass
