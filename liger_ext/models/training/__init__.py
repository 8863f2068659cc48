"""Autograd nodes and hooks that decide which tensors a training step saves for its backward, and where.

`nodes` has autograd nodes for a norm and the linear layers that read it, if `linear` accepts these layers. `recompute`
saves memory in other layers, and under torch.compile. `checkpoint` counts the runs of a checkpointed layer, and
`offload` keeps its input in host memory. `graph_ops` and `embedding` define ops for graphs of torch.compile.
"""
