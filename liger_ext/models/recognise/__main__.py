"""Entry point of `python -m liger_ext.models.recognise`: see `report`."""

import sys

from liger_ext.models.recognise.report import main

sys.exit(main(sys.argv[1:]))
