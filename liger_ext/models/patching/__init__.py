"""The mechanics of patching any module. This package imports no other package of `liger_ext.models`.

`swap` replaces a module's class by a subclass, and reverts this (`PatchHandle`). `classes` does the same below classes
that PyTorch creates at run time. `forwards` and `source` find a function's module, its wrappers and its callees.
`calls` checks whether a call of a module runs more than its class's `forward`, such as hooks.
"""
