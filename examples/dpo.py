"""Direct preference optimisation of a pretrained Llama (SmolLM2-135M-Instruct, or --model) on invented preferences:
short answers over long ones.

    python -m examples.dpo            a minute on two cores; dpo.png plots the margin over the steps

The margin is how much more the log-probability of the short answer has grown, since the first step, than that of the
long one. The log-probabilities come from a patched model, which computes no full logits. The reference is the model
before its first step. Only the last layers are trained, to save time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from examples.demo.models import load
from examples.plot import draw
from liger_ext import apply_liger_kernel_to_llama, losses
from liger_ext.comparison.child import cast_parameters

NAMES = ["cat", "dog", "tree", "house", "car", "bird", "fish", "book", "rain", "milk", "bread", "road"]
SEEN, PAIRS, LAYERS = 8, 3, 8  # names to train on, pairs per step, trained layers


def make_batch(names: list[str], encode, device: torch.device) -> dict[str, torch.Tensor]:
    """The chosen answers, then the rejected ones: tokens padded on the right, labels -100 on prompts and padding."""
    rows = []
    for answer in ("Yes.", "I do like the {}."):
        for name in names:
            prompt, tokens = encode(f"Do you like the {name}? "), encode(answer.format(name))
            rows.append((prompt + tokens, [-100] * len(prompt) + tokens))
    longest = max(len(tokens) for tokens, _ in rows)

    def padded(which: int, value: int) -> torch.Tensor:
        return torch.tensor([row[which] + [value] * (longest - len(row[which])) for row in rows], device=device)

    tokens, labels = padded(0, -1), padded(1, -100)
    return {"input_ids": tokens.clamp(min=0), "attention_mask": (tokens >= 0).long(), "labels": labels}


def main(model: str, steps: int, out: Path) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, build, encode = load(model)
    policy = cast_parameters(build(), torch.float32).to(device).train().requires_grad_(False)
    apply_liger_kernel_to_llama(model=policy)
    policy.model.layers[-LAYERS:].requires_grad_(True)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)

    def answers(names: list[str]) -> torch.Tensor:
        """The log-probabilities of the chosen and of the rejected answers: (2, pairs)."""
        output = policy(**make_batch(names, encode, device), return_log_probs=True, use_cache=False)
        return output.log_probs.sum(-1).view(2, -1)

    with torch.no_grad():
        reference = answers(NAMES)  # column i belongs to NAMES[i]

    start, seen, unseen = time.perf_counter(), [], [(0, 0.0)]
    for step in range(1, steps + 1):
        chosen = torch.randperm(SEEN)[:PAIRS]
        found, expected = answers([NAMES[i] for i in chosen]), reference[:, chosen]
        loss = losses.dpo_loss(*found, *expected, beta=0.1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        margin = (found - expected).detach()
        seen.append((step, float((margin[0] - margin[1]).mean())))
        if step % 4 == 0 or step == steps:
            with torch.no_grad():
                margin = answers(NAMES[SEEN:]) - reference[:, SEEN:]
            unseen.append((step, float((margin[0] - margin[1]).mean())))
            print(
                f"step {step} of {steps}: loss {float(loss.detach()):.4f}, margin of pairs that are not trained on "
                f"{unseen[-1][1]:.2f} nats, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    curves = {"pairs that are trained on": seen, "other pairs": unseen}
    draw(out, "DPO: log-probability of the chosen over the rejected answer,\nrelative to the reference", "nats", curves)
    print(f"picture: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder, or random:tiny (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("dpo.png"))
    main(**vars(parser.parse_args()))
