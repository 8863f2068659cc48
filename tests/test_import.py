"""What `import liger_ext` imports beside torch: nothing that takes long."""

from cases import python

# Beside our own: of torch and of Python.
SMALL = "torch.utils.flop_counter", "torch.utils.module_tracker", "sysconfig", "_sysconfigdata", "importlib.metadata"


def test_import_is_light():
    """torch._dynamo, sympy and transformers take 1 to 10 seconds each, and are imported when they are used."""
    said = python(
        "-c",
        "import sys, torch; before = set(sys.modules); import liger_ext; print(*sorted(set(sys.modules) - before))",
    )
    found = [name for name in said.splitlines()[-1].split() if not name.startswith(("liger_ext", *SMALL))]
    assert found == []
    assert "liger_ext.ops.rope" in said.split() and "liger_ext.models.patch" not in said.split()
