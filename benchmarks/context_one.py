"""The longest sequence that one provider trains on in the memory there is, searched in a process of its own."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from examples.demo.meter import Meter
from examples.demo.training import optimizer_for

from . import footprint, models, suite

UNIT = 1024  # tokens


@dataclass
class Search:
    """``tokens`` is the longest that fits, in units of ``unit``; 0 if none does."""

    tokens: int
    unit: int
    limit: int  # bytes
    predicted: int  # tokens, by the memory model
    sure: bool  # one unit more was tried and did not fit, or takes more than what is left
    trials: list[tuple[int, int | None]] = field(default_factory=list)  # tokens, peak in bytes (None: does not fit)

    def bytes_per_token(self) -> float | None:
        """The slope between the shortest and the longest that fitted."""
        fitted = sorted(trial for trial in self.trials if trial[1] is not None)
        if len(fitted) < 2:
            return None
        return (fitted[-1][1] - fitted[0][1]) / (fitted[-1][0] - fitted[0][0])


def bisect(trial: Callable[[int], int | None], limit: int, guess: int, most: int = 12) -> tuple[int, bool]:
    """The largest number >= 1 whose ``trial`` fits, and whether the next one cannot; 0 if 1 does not fit.

    ``trial`` gives the peak in bytes, or None if it does not fit; it is called ``most`` times at most. Memory is a line
    over the number, but for short sequences, whose peak is at another moment of a step; so two trials, two and three
    fifths of the guess, tell where it meets the limit. From there on every trial corrects the line and narrows the
    interval, until what is left is less than one more takes.
    """
    low, high, fitted = 0, math.inf, {}
    misses = 0  # failures since something fitted
    wanted = max(1, 2 * guess // 5)
    for _ in range(most):
        peak = trial(wanted)
        if peak is None:
            high, misses = wanted, misses + 1
        else:
            low, misses = wanted, 0
            fitted[wanted] = peak
        if high - low <= 1:
            break
        if len(fitted) < 2 and high == math.inf:
            wanted = max(low + 1, 3 * guess // 5)
            continue
        line = _crossing(fitted, limit)
        if line is None:
            wanted = (low + high) // 2
        elif line <= low:
            return low, True
        elif line < high:
            wanted = line
        else:  # below what has failed, in steps that grow, or in the middle
            step = max(1, high // 50) << (misses - 1 if misses else 0)
            wanted = high - step if misses and step < high - low else (low + high) // 2
    return low, high - low <= 1


def _crossing(fitted: dict[int, int], limit: int) -> int | None:
    """Where the line through the two largest that fitted reaches the limit."""
    if len(fitted) < 2:
        return None
    first, last = sorted(fitted)[-2:]
    slope = max(1.0, (fitted[last] - fitted[first]) / (last - first))
    return last + int((limit - fitted[last]) / slope)


def search(
    config: dict, provider: str, device: str, dtype: str, limit_gib: float | None, unit: int, say: Callable
) -> Search:
    """One sequence, gradient checkpointing, weights and states of a fused AdamW in ``dtype``."""
    place, kind = torch.device(device), suite.DTYPES[dtype]
    meter = Meter(place)
    limit = _limit(place, limit_gib)
    if place.type == "cuda":
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    empty = 0 if place.type == "cuda" else meter.reset()
    model = models.build(config, place, kind)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = models.on_request(device)[provider](model)
    optimizer = optimizer_for(model, 1e-5)

    def step(tokens: int) -> None:
        ids = torch.randint(config["vocab_size"], (1, tokens), device=place)
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    def peak_of(count: int) -> int | None:
        tokens, fits = count * unit, True
        meter.reset()
        start = time.perf_counter()
        try:
            step(tokens)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            fits = False
        # Here, and not above: the exception holds the frames, and these the tensors, of what did not fit.
        peak = meter.peak() - empty
        fits = fits and peak <= limit
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
        found.trials.append((tokens, peak if fits else None))
        said = f"{peak / 2**30:.2f} GiB of {limit / 2**30:.2f}" if fits else "does not fit"
        say(f"{tokens:,} tokens: {said} ({time.perf_counter() - start:.0f} s)")
        return peak if fits else None

    predicted = footprint.longest_context(config, kind, limit)
    found = Search(0, unit, limit, predicted, False)
    say(f"{limit / 2**30:.2f} GiB should hold {predicted:,} tokens")
    step(min(unit, 128))  # makes the optimizer's states
    optimizer.zero_grad(set_to_none=True)
    count, found.sure = bisect(peak_of, limit, predicted // unit)
    found.tokens = count * unit
    return found


def _is_out_of_memory(error: RuntimeError) -> bool:
    """torch's own, or that of a library which asks for memory itself."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error)


def _limit(device: torch.device, gib: float | None) -> int:
    """Bytes. A GPU's allocator is held to it: a GiB is left for what libraries load beside it, at different times. On a
    CPU nothing is: a trial that had more in use than this counts as one that does not fit."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - 2**30
        return min(free, int(gib * 2**30)) if gib else free
    return int((gib or 4.0) * 2**30)
