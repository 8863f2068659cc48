"""Mixins that replace the code of transformers' modules: one for each variant of the code.

`norms`, `mlp`, `experts` and `rope` replace single modules and functions, `decoder` Llama's attention and layer,
`layers` the layers of other families. `causal_lm` replaces a head with its loss; `head`, `called_head`, `loss` and
`log_probs` are its parts. A mixin reads its module's attributes by names that recognition finds
(`EPS = "variance_epsilon"`). The defaults are Llama's.
"""
