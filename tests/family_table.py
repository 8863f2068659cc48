"""Computes the table of `docs/families.md` from a forward and a backward of a small model of each family. Its last two
columns are written here by hand; that of Liger-Kernel describes the source of version 0.8.2. `PYTHONPATH=tests python
-m family_table` prints the table; `test_families.py` compares it with the page."""

import torch
from cases import RecordCalls
from family_models import LAYERS, OPTIONS, build, patched, set_experts
from llama_models import make_batch
from transformers import CONFIG_MAPPING

HEAD = """\
| `model_type` | norms | sum and norm | rope | activation | halves as nodes | loss | not fused | Liger-Kernel |
|---|---|---|---|---|---|---|---|---|"""

# The column "not fused": the code that stays transformers' and the reason.
UNPATCHED = {
    "apertus": "MLP: xIELU, an activation with parameters",
    "bailing_hybrid": "linear attention: no rotary embedding",
    "cohere2": "layer: attention and MLP read the same norm",
    "exaone4": "layer: each norm comes before the addition, not after it",
    "gpt_oss": "experts: the clamps of gate and up",
    "jamba": "attention: no rotary embedding",
    "jetmoe": "experts: the gated activation",
    "kimi_linear": "attention: no rotary embedding",
    "nemotron": "layer: its norms are not RMSNorms",
    "olmo2": "layer: each norm comes before the addition, not after it",
    "olmo3": "layer: each norm comes before the addition, not after it",
    "olmo_hybrid": "layers with attention: each norm comes before the addition, not after it",
}
# Which of (norms, rope, activation, loss) Liger-Kernel's functions patch by default.
_WHOLE = """
    gemma gemma2 gemma3_text hunyuan_v1_dense hunyuan_v1_moe llama llama4_text ministral mistral mixtral olmo2 olmo3
    phi3 qwen2 qwen3 qwen3_moe smollm3 exaone4
"""
UPSTREAM = dict.fromkeys(_WHOLE.split(), "norms, rope, activation, loss") | {
    "falcon_h1": "norms, rope, activation, loss without its factor",
    "gemma4_text": "norms, activation, loss",
    "glm4": "norms, activation, loss",
    "gpt_oss": "norms, rope, loss",
    "granite": "norms, rope, activation, loss from logits",
    "nemotron": "activation, loss",
    "qwen3_5_text": "norms, activation, loss",
    "qwen3_next": "norms, activation, loss",
}
COLUMNS = [
    ("rms_norm", "layer_norm"),
    ("add_rms_norm",),
    ("rope",),
    ("glu", "glu_packed", "relu_squared"),
    ("_NormLinearsBackward", "_NormMLPBackward"),
    ("fused_linear_cross_entropy",),
]
SHOWN = {"_NormLinearsBackward": "attention", "_NormMLPBackward": "MLP"}


def row(family: str) -> str:
    model = patched(build(family, output_router_logits=False))
    set_experts(model, "grouped_mm")
    with RecordCalls() as record:
        loss = model(**make_batch("cpu")).loss
        nodes = _node_names(loss)
        loss.backward()
    found = {name.removesuffix("_backward") for name in record.names} | nodes
    cells = [[SHOWN.get(name, "yes") for name in column if name in found] for column in COLUMNS]
    shown = [", ".join(dict.fromkeys(cell)) for cell in cells]
    return " | ".join([f"| `{family}`", *shown, UNPATCHED.get(family, ""), UPSTREAM.get(family, "no function")]) + " |"


def _node_names(result: torch.Tensor) -> set[str]:
    """Returns the names of the nodes in the autograd graph of a result."""
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


if __name__ == "__main__":
    print(HEAD)
    for each in sorted({**OPTIONS, **LAYERS}):
        if each in CONFIG_MAPPING:
            print(row(each))
