"""The command ``python -m liger_ext``: a report of the installation and this machine, and ``doctor`` and ``tune``."""

import signal
import sys

from .doctor import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
sys.exit(main())
