"""``python -m liger_ext``: what is installed, and what will run on this machine; ``doctor`` and ``tune``."""

import signal
import sys

from .doctor import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
sys.exit(main())
