"""Kernel instances as (kernel, integer template arguments), so that tests can compare two lists: the instances in the
planner's table (csrc/launch), and the instances in a compiled library, by their demangled names."""

from __future__ import annotations

import re

from liger_ext import _C

Key = tuple[str, tuple[int, ...]]  # a kernel and its integer template arguments


def instance_key(name: str) -> Key:
    """Parses ``liger::gpu::(anonymous namespace)::RopeKernel<float, 4>``, as written by any demangler."""
    name = re.sub(r"\(anonymous namespace\)::|\[abi:\w+\]|liger::|gpu::", "", name)
    kernel, _, arguments = name.partition("<")
    arguments = re.sub(r"\{.*?\}", "", arguments)  # the kind of a norm
    return kernel.rpartition("::")[2], tuple(int(n) for n in re.findall(r"(?<![\w)])\d+(?!\w)", arguments))


def table(*, ahead: bool = True) -> dict[Key, int]:
    """Returns the launch bounds of all instances. ``ahead``: include those that only CUDA's library has."""
    found = ((kernel, *one) for kernel, all_of_it in _C.instances().items() for one in all_of_it)
    return {(kernel, tuple(numbers)): bound for kernel, numbers, bound, only in found if ahead or not only}
