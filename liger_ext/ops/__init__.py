"""The list of ops: imports each file of this folder, except the helpers (``_*.py``).

A file is named after its op or family and has the op's Python code: the public functions, modules and Liger-Kernel's
names (listed in ``__all__``), mostly also the fake implementation and the autograd formula. The import adds the names
of ``__all__`` to ``liger_ext``, and to ``liger_ext.modules`` (``nn.Module`` classes), ``liger_ext.compat``
(``liger_*``) or ``liger_ext.functional`` (the rest).

The import also replaces attributes such as ``liger_ext.ops.jsd``, the file's module, by the function of this name.
Import other names of such a file with ``from liger_ext.ops.jsd import ...``.
"""
# ruff: noqa: F403

import types as _types

from liger_ext.ops.check_errors import *
from liger_ext.ops.count_rows import *
from liger_ext.ops.cross_entropy import *
from liger_ext.ops.dequantize_4bit import *
from liger_ext.ops.fused_linear_cross_entropy import *
from liger_ext.ops.glu import *
from liger_ext.ops.group_norm import *
from liger_ext.ops.jsd import *
from liger_ext.ops.layer_norm import *
from liger_ext.ops.linear_log_probs import *
from liger_ext.ops.relu_squared import *
from liger_ext.ops.rms_norm import *
from liger_ext.ops.rope import *
from liger_ext.ops.seeded_dropout import *
from liger_ext.ops.softmax import *
from liger_ext.ops.stream_copy import *

# The imported names. Python itself adds the files' modules (``liger_ext.ops.glu``), which are left out.
PUBLIC = {n: v for n, v in sorted(globals().items()) if not (n.startswith("_") or isinstance(v, _types.ModuleType))}
