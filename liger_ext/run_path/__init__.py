"""The folder that ``python -m liger_ext run`` (``run.py``) puts first on PYTHONPATH."""
