"""Warnings that point to the line of the user's code that caused them."""

import sys
import warnings

_OTHERS = ("liger_ext", "transformers", "torch", "contextlib")


def warn(message: str) -> None:
    """Issues a UserWarning at the innermost line outside liger_ext and the libraries that call it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
