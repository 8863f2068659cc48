"""The command ``python -m liger_ext``: reports the installation and this machine. Its subcommands are ``doctor``, which
also tests every op, and ``tune``, which measures this machine's GPU."""

import signal
import sys

from .doctor import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
sys.exit(main())
