"""What every op means, in plain differentiable PyTorch, and what PyTorch's own functions make of it.

For each op: ``<op>`` is the formula (called in float64), ``torch_<op>`` a composition of PyTorch's own functions,
and ``<op>_scales`` the sizes of intermediate values, for outputs and gradients that are small differences of large
numbers. ``stored`` names the dtype of a value that the op itself rounds on the way (the sum of add_rms_norm; x *
rstd in casting mode "llama").
"""
