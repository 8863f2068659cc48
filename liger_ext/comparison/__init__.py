"""Trains a model without and with liger_ext, each side in a process of its own, and reports the differences.

``sides.py`` starts and drives the processes, ``child.py`` runs in them, ``report.py`` shows the result. The command
``compare`` and the demo call them.
"""
