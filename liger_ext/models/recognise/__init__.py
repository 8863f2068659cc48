"""Recognises the code of transformers' classes by the text of the functions that they run, whatever names it uses.

`normal_form` writes a function as text in which names are numbers. `reading` does this for a class's `forward` and the
functions that it calls. `known` looks up the text's digest in `known.json`, the table of known code. `python -m
liger_ext.models.recognise` reports which code of the installed transformers is known, changed or new, and prints
entries for the table.
"""
