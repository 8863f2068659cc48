"""Token embedding in a graph of torch.compile, with PyTorch's own backward kernel.

The compiler's generated backward sums a 16-bit weight's gradient in fp32. This takes twice the gradient's memory at the
end of the backward, where a step of a large model needs most. It also sums in any order: the bits differ from run to
run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_ext.models.patching.calls import only_forward_runs
from liger_ext.models.patching.swap import is_plain_tensor
from liger_ext.models.training.graph_ops import graph_op
from liger_ext.models.training.recompute import in_training_graph


def is_one_op(module: nn.Module, training: bool) -> bool:
    """Returns whether a graph is traced that a backward may follow, and `module` is a plain embedding."""
    return (
        in_training_graph(training)
        and type(module) is nn.Embedding
        and only_forward_runs(module)
        and is_plain_tensor(module.weight)
        and module.max_norm is None
        and not (module.sparse or module.scale_grad_by_freq)
    )


def embedding(input_ids: Tensor, module: nn.Embedding) -> Tensor:
    """Computes ``module(input_ids)``: (...) -> (..., embedding_dim)."""
    padding_idx = -1 if module.padding_idx is None else module.padding_idx % module.weight.shape[0]
    return _Embedding.apply(input_ids, module.weight, padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_ids, weight, padding_idx):
        ctx.save_for_backward(input_ids)
        ctx.num_embeddings, ctx.padding_idx = weight.shape[0], padding_idx
        return F.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx, dout):
        (input_ids,) = ctx.saved_tensors
        (dweight,) = _embedding_backward(dout, input_ids, ctx.num_embeddings, ctx.padding_idx)
        return None, dweight, None


@graph_op("Tensor dout, Tensor input_ids, SymInt num_embeddings, int padding_idx")
def _embedding_backward(dout, input_ids, num_embeddings, padding_idx):
    return (torch.ops.aten.embedding_dense_backward(dout, input_ids, num_embeddings, padding_idx, False),)
