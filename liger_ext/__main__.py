"""The command ``python -m liger_ext``: reports the installation and this machine. Its subcommands are ``doctor``, which
also tests every op; ``tune``, which measures this machine's GPU; ``run``, which starts a program with liger_ext in
place of Liger-Kernel; ``inspect``, which describes a patch before a model is loaded; and ``compare``, which trains a
model without and with a patch."""

import signal
import sys

from .doctor import main
from .inspection import Failed, Impossible

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
try:
    sys.exit(main())
except KeyboardInterrupt:
    sys.exit(130)
except (Failed, Impossible) as error:
    print(f"liger_ext {sys.argv[1]}: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, Impossible) else 1)
