"""How a module is patched, whatever it is: the bottom floor, which imports nothing of the others.

`swap` gives a module a subclass of its class, and takes it back (`PatchHandle`); `classes` does so below classes that
PyTorch makes at run time. `forwards` and `source` read functions: whose they are, what wraps them, what they call.
`calls` looks whether a call of a module runs more than its class's `forward`, such as hooks.
"""
