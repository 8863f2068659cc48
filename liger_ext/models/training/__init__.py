"""Autograd nodes and hooks that decide which tensors a training step saves for its backward, and where.

`nodes` has autograd nodes for the two halves of a decoder layer, with the linear layers that `linear` accepts.
`recompute` saves memory in layers that must be called as modules. `checkpoint` counts the runs of a checkpointed layer,
and `offload` keeps its input in host memory. `graph_ops` and `embedding` define ops for graphs of torch.compile.
"""
