"""``python -m liger_ext``: what is installed, and what will run on this machine; ``doctor`` and ``tune``."""

import sys

from .doctor import main

sys.exit(main())
