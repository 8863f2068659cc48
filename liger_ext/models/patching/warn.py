"""Warnings that name the line of the user's code that led to them."""

import sys
import warnings

_OTHERS = ("liger_ext", "transformers", "torch", "contextlib")


def warn(message: str) -> None:
    """A UserWarning at the innermost line that is neither ours nor of the libraries that call us."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
