"""``python -m liger_ext``: what is installed, and what will run on this machine."""

import sys

from .doctor import main

sys.exit(main())
