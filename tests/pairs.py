"""Few cases of many settings: every two values of two settings meet in one of them (all-pairs testing)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Some of `cases`, in which every pair of values that is in any of `cases` is. The same ones at each call.

    Greedy: always the case with the most pairs that none before it has; of several, the first in the order of `cases`.
    """
    pairs = [pairs_of(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))  # max takes the first
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
