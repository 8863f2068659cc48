"""Trains a model without and with liger_ext, each side in its process, for the command compare and the demo."""
