"""What a training step keeps for its backward, and where.

`nodes` are autograd nodes for the two halves of a decoder layer, of linear layers that `linear` knows; `recompute`
does the same for layers that must be called. `checkpoint` counts the runs of a checkpointed layer, `offload` lets its
input wait in host memory. `graph_ops` and `embedding` are ops in graphs of torch.compile.
"""
