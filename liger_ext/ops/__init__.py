"""The list of ops: a line for each file of this folder but the helpers (``_*.py``).

A file is called as its op or family, and has all that is Python of it: the public functions, modules and upstream's
names, which its ``__all__`` names, the fake implementation and the autograd formula. The line here makes them public:
in ``liger_ext``, and in ``liger_ext.functional``, ``liger_ext.modules`` or ``liger_ext.compat``, by what they are.

``liger_ext.ops.jsd`` is then the function; other names of its file are imported from it: ``from liger_ext.ops.jsd ...``
"""
# ruff: noqa: F403

import types as _types

from liger_ext.ops.check_errors import *
from liger_ext.ops.count_rows import *
from liger_ext.ops.cross_entropy import *
from liger_ext.ops.fused_linear_cross_entropy import *
from liger_ext.ops.glu import *
from liger_ext.ops.group_norm import *
from liger_ext.ops.jsd import *
from liger_ext.ops.layer_norm import *
from liger_ext.ops.linear_log_probs import *
from liger_ext.ops.relu_squared import *
from liger_ext.ops.rms_norm import *
from liger_ext.ops.rope import *
from liger_ext.ops.softmax import *
from liger_ext.ops.stream_copy import *

# What these lines brought, by name; Python itself adds the files' names (``liger_ext.ops.glu``).
PUBLIC = {n: v for n, v in sorted(globals().items()) if not (n.startswith("_") or isinstance(v, _types.ModuleType))}
