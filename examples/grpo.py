"""Group relative policy optimisation of a pretrained Llama, which learns to answer in capital letters.

    python -m examples.grpo           two and a half minutes on two cores; grpo.png plots the reward over the steps

Each step samples a group of answers to one prompt. The reward of an answer is the share of capitals among its letters;
its advantage is the distance from the group's mean in standard deviations. The log-probabilities come from a patched
model, which computes no full logits. Only the last layers are trained, to save time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from examples.demo.models import load, load_tokenizer
from examples.plot import draw
from liger_ext import apply_liger_kernel_to_llama, losses
from liger_ext.comparison.child import cast_parameters

PROMPTS = ["THE TITLE OF A BOOK: The", "A WARNING: Do not", "THE NAME OF A SONG: My", "A SIGN AT A DOOR: Please"]
GROUP, TOKENS, LAYERS = 12, 10, 8  # answers per prompt, tokens per answer, trained layers


def capital_share(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter.isupper() for letter in letters) / max(1, len(letters))


def main(model: str, steps: int, out: Path) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, build, encode = load(model)
    decode = load_tokenizer(model).decode
    policy = cast_parameters(build(), torch.float32).to(device).train().requires_grad_(False)
    apply_liger_kernel_to_llama(model=policy)
    policy.model.layers[-LAYERS:].requires_grad_(True)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    start, mean, best = time.perf_counter(), [], []
    for step in range(1, steps + 1):
        prompt = torch.tensor([encode(PROMPTS[step % len(PROMPTS)])], device=device)
        options = {"do_sample": True, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "top_k": 0, "pad_token_id": 0}
        with torch.no_grad():
            tokens = policy.generate(prompt.repeat(GROUP, 1), attention_mask=None, **options)
        rewards = torch.tensor([capital_share(decode(row)) for row in tokens[:, prompt.shape[1] :]], device=device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

        # The target is each position's next token; the head's matmul skips prompts, and answers with advantage 0.
        mask = torch.zeros_like(tokens)
        mask[:, prompt.shape[1] - 1 : -1] = 1
        targets = losses.grpo_targets(tokens.roll(-1, 1), mask, advantages)
        output = policy(input_ids=tokens, shift_labels=targets, return_log_probs=True, use_cache=False)
        loss = losses.grpo_loss(output.log_probs, advantages, mask).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.append((step, float(rewards.mean())))
        best.append((step, float(rewards.max())))
        if step % 4 == 0 or step == steps:
            recent = sum(reward for _, reward in mean[-4:]) / len(mean[-4:])
            print(f"step {step} of {steps}: mean reward {recent:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    draw(out, "GRPO: share of capital letters", "reward", {"mean of a group": mean, "best of a group": best})
    print(f"picture: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder with a tokenizer (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("grpo.png"))
    main(**vars(parser.parse_args()))
