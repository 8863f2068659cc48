"""Batches of tokens from text that every Python installation contains, or from a file."""

from __future__ import annotations

import random
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def standard_library_text() -> Iterator[str]:
    """English and code in turn: the language reference in `pydoc_data.topics`, and the standard library's source."""
    from pydoc_data.topics import topics

    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(path for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern))
    sources = [path for path in sources if path.parent.name != "site-packages"]
    pages = [topics[name] for name in sorted(topics)]
    order = random.Random(0)
    order.shuffle(sources)
    order.shuffle(pages)
    for number, source in enumerate(sources):
        if number < len(pages):
            yield pages[number]
        yield source.read_text(encoding="utf-8", errors="replace")


def hashed_words(vocab_size: int) -> Callable[[str], list[int]]:
    """A tokenizer without a vocabulary, for models that have none: the hash of each word, space or sign is its
    token."""
    pieces = re.compile(r"\w+|\s+|[^\w\s]")
    return lambda text: [zlib.crc32(piece.encode()) % vocab_size for piece in pieces.findall(text)]


def batches(
    encode: Callable[[str], list[int]], count: int, batch: int, seq: int, text: Path | None
) -> list[torch.Tensor]:
    """`count` different batches of `batch` x `seq` tokens; fewer if the text is too short.

    Raises ValueError if the text does not fill one batch.
    """
    wanted = count * batch * seq
    tokens: list[int] = []
    for piece in [text.read_text(encoding="utf-8", errors="replace")] if text else standard_library_text():
        tokens += encode(piece)
        if len(tokens) >= wanted:
            break
    full = min(count, len(tokens) // (batch * seq))
    if full == 0:
        name = text or "the standard library"
        raise ValueError(f"{name} has {len(tokens)} tokens, but one batch of {batch} x {seq} needs {batch * seq}")
    return list(torch.tensor(tokens[: full * batch * seq]).view(full, batch, seq))
