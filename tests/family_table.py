"""Computes the table of `docs/families.md` from a training step of a small model of each family. `PYTHONPATH=tests
python -m family_table` prints it; `test_families.py` compares it with the page. The column of Liger-Kernel describes
the source of its version 0.8.2."""

import torch
from cases import RecordCalls
from family_models import LAYERS, OPTIONS, build, patched, set_experts
from llama_models import make_batch
from transformers import CONFIG_MAPPING

HEAD = """\
| `model_type` | norms | sum and norm | rope | unit | halves as nodes | loss | left as it is | Liger-Kernel |
|---|---|---|---|---|---|---|---|---|"""

# Why classes of a family stay unpatched.
UNPATCHED = {
    "apertus": "MLP: xIELU, an activation with parameters",
    "bailing_hybrid": "linear attention: no rotary embedding",
    "cohere2": "layer: attention and MLP read one norm",
    "exaone4": "layer: what is added is normalised, not the sum",
    "gpt_oss": "experts: the clamps",
    "jamba": "attention: no rotary embedding",
    "jetmoe": "the gate of the experts",
    "kimi_linear": "attention: no rotary embedding",
    "nemotron": "layer: its norms are no RMSNorms",
    "olmo2": "layer: what is added is normalised, not the sum",
    "olmo3": "layer: what is added is normalised, not the sum",
    "olmo_hybrid": "layers of attention: what is added is normalised, not the sum",
}
# Which of (norms, rope, unit, loss) Liger-Kernel's functions patch by default.
_WHOLE = """
    gemma gemma2 gemma3_text hunyuan_v1_dense hunyuan_v1_moe llama llama4_text ministral mistral mixtral olmo2 olmo3
    phi3 qwen2 qwen3 qwen3_moe smollm3 exaone4
"""
UPSTREAM = dict.fromkeys(_WHOLE.split(), "norms, rope, unit, loss") | {
    "falcon_h1": "norms, rope, unit, loss without its factor",
    "gemma4_text": "norms, unit, loss",
    "glm4": "norms, unit, loss",
    "gpt_oss": "norms, rope, loss",
    "granite": "norms, rope, unit, loss from logits",
    "nemotron": "unit, loss",
    "qwen3_5_text": "norms, unit, loss",
    "qwen3_next": "norms, unit, loss",
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
