"""All-pairs testing: chooses few cases, in which any two values of two settings occur together at least once."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Returns every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Returns some of `cases` that together contain every pair of values of `cases`; the same ones at each call.

    Greedy: chooses the case with the most pairs that no chosen case has; of equal cases the first in the order of
    `cases`.
    """
    pairs = [value_pairs(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))  # max takes the first
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


def value_pairs(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
