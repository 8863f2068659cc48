"""The replacements of transformers' modules: a mixin for each code.

`norms`, `mlp`, `experts` and `rope` are the small ones; `decoder` is the attention and the layer, `layers` those of
other families; `causal_lm` is the head with its loss (`head`, `called_head`, `loss`, `log_probs`). A mixin reads its
module's attributes by names that recognition finds (`EPS = "variance_epsilon"`). The defaults are Llama's.
"""
