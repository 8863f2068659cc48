"""Kernels and their instances: the planner's table of them (csrc/launch), and the names that compilers give them."""

from __future__ import annotations

import re

from liger_ext import _C

Key = tuple[str, tuple[int, ...]]  # a kernel and its integer template arguments


def key_of(name: str) -> Key:
    """Of ``liger::gpu::(anonymous namespace)::RopeKernel<float, 4>``, by whichever demangler."""
    name = re.sub(r"\(anonymous namespace\)::|\[abi:\w+\]|liger::|gpu::", "", name)
    kernel, _, arguments = name.partition("<")
    arguments = re.sub(r"\{.*?\}", "", arguments)  # of the norms: what kind of norm it is
    return kernel.rpartition("::")[2], tuple(int(n) for n in re.findall(r"(?<![\w)])\d+(?!\w)", arguments))


def table(*, ahead: bool = True) -> dict[Key, int]:
    """All instances and their launch bounds. ``ahead``: with those that only CUDA's library has."""
    found = ((kernel, *one) for kernel, all_of_it in _C.instances().items() for one in all_of_it)
    return {(kernel, tuple(numbers)): bound for kernel, numbers, bound, only in found if ahead or not only}
