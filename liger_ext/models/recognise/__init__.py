"""Recognises transformers' code by the text of what a class runs, whatever the names in it are.

`normal_form` writes a function as text in which names are numbers; `reading` does so for a class and for what its
`forward` calls; `known` looks the text's digest up in `known.json`, the table of all code that liger_ext replaces.
`python -m liger_ext.models.recognise` reports what of the installed transformers is known, changed or new, and prints
entries for the table.
"""
