"""Searches, in a separate process, for the longest sequence that one provider can train on in the available memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from liger_ext._meter import Meter
from liger_ext.comparison.child import optimizer_for

from . import footprint, models, suite

UNIT = 1024  # tokens


@dataclass
class Search:
    """``tokens``: the longest sequence that fits, a multiple of ``unit``; 0 if none fits."""

    tokens: int
    unit: int
    limit: int  # bytes
    predicted: int  # tokens, by the memory model
    sure: bool  # one unit more was tried and does not fit, or needs more than the remaining memory
    trials: list[tuple[int, int | None]] = field(default_factory=list)  # tokens, peak in bytes (None: does not fit)

    def bytes_per_token(self) -> float | None:
        """The slope between the shortest and the longest sequence that fits."""
        fitted = sorted(trial for trial in self.trials if trial[1] is not None)
        if len(fitted) < 2:
            return None
        return (fitted[-1][1] - fitted[0][1]) / (fitted[-1][0] - fitted[0][0])


def bisect(trial: Callable[[int], int | None], limit: int, guess: int, most: int = 12) -> tuple[int, bool]:
    """The largest number >= 1 whose ``trial`` fits, and whether the next number cannot fit; 0 if 1 does not fit.

    ``trial`` returns the peak in bytes, or None if the number does not fit; it is called at most ``most`` times. The
    peak is linear in the number, except for short sequences, whose peak is at another moment of a step. So two trials,
    at two and three fifths of the guess, predict where the line meets the limit. Each further trial corrects the line
    and narrows the interval, until the remaining memory is less than one more unit needs.
    """
    low, high, fitted = 0, math.inf, {}
    misses = 0  # failures since the last trial that fits
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
        else:  # the line is above a failure: step down from there, in growing steps, or bisect
            step = max(1, high // 50) << (misses - 1 if misses else 0)
            wanted = high - step if misses and step < high - low else (low + high) // 2
    return low, high - low <= 1


def _crossing(fitted: dict[int, int], limit: int) -> int | None:
    """The number at which the line through the two largest fitting trials reaches the limit."""
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

    def measure_peak(count: int) -> int | None:
        tokens, fits = count * unit, True
        meter.reset()
        start = time.perf_counter()
        try:
            step(tokens)
        except RuntimeError as error:
            if not _is_memory_error(error):
                raise
            fits = False
        # Not inside `except`: the exception references the frames and thereby the tensors of the failed step.
        peak = meter.peak() - empty
        fits = fits and peak <= limit
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
        found.trials.append((tokens, peak if fits else None))
        outcome = f"{peak / 2**30:.2f} GiB of {limit / 2**30:.2f}" if fits else "does not fit"
        say(f"{tokens:,} tokens: {outcome} ({time.perf_counter() - start:.0f} s)")
        return peak if fits else None

    predicted = footprint.longest_context(config, kind, limit)
    found = Search(0, unit, limit, predicted, False)
    say(f"{limit / 2**30:.2f} GiB should hold {predicted:,} tokens")
    step(min(unit, 128))  # allocates the optimizer's states
    optimizer.zero_grad(set_to_none=True)
    count, found.sure = bisect(measure_peak, limit, predicted // unit)
    found.tokens = count * unit
    return found


def _is_memory_error(error: RuntimeError) -> bool:
    """Errors of torch, and of libraries that allocate memory themselves."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error)


def _limit(device: torch.device, gib: float | None) -> int:
    """Limit in bytes. On a GPU the allocator enforces it, and 1 GiB is reserved for what libraries load later. On a CPU
    nothing enforces it: a trial that used more memory counts as one that does not fit."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - 2**30
        return min(free, int(gib * 2**30)) if gib else free
    return int((gib or 4.0) * 2**30)
