"""liger_ext under the name of Liger-Kernel, for the programs that ``python -m liger_ext run`` starts."""

import sys

try:
    from liger_ext import liger_kernel as _names
except ImportError as error:  # the program would catch it, and train without fused ops
    sys.exit(
        "liger_ext: `python -m liger_ext run` has put liger_ext's package liger_kernel on PYTHONPATH, but "
        f"{sys.executable} cannot import liger_ext ({error}): install it there, or start the program without `run`."
    )
_names.provide(sys.modules[__name__])
