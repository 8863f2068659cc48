"""The smallest training script: any Hugging Face Llama, any text of at least 512 tokens, and one
line of liger_ext.

python examples/train.py MODEL_FOLDER TEXT_FILE
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_ext import apply_liger_kernel_to_llama


def main(folder: str, text_file: str, steps: int = 100, batch: int = 4, seq: int = 512) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).train()
    apply_liger_kernel_to_llama(model=model)  # the only line of liger_ext

    tokens = torch.tensor(tokenizer(Path(text_file).read_text())["input_ids"])
    windows = tokens[: tokens.numel() // seq * seq].view(-1, seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    for step in range(1, steps + 1):
        input_ids = windows[torch.randint(len(windows), (batch,))].to(device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained("trained")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a Hugging Face Llama on a text.")
    parser.add_argument("folder", help="folder of the model and its tokenizer")
    parser.add_argument("text_file")
    main(**vars(parser.parse_args()))
