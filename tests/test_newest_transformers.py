"""The table of known code on the newest transformers of the package index: reports which of its code is not known."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import liger_ext


@pytest.mark.slow
def test_report(tmp_path, capsys):
    """Fails only if the report cannot be computed. Prints the code that is no longer known."""
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(tmp_path),
        "--no-compile",
        "transformers",
    ]
    subprocess.run(install, check=True)
    root = str(Path(liger_ext.__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(tmp_path)]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "liger_ext.models.recognise"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert int(re.search(r"(\d+) classes are known", first)[1]) > 900
    assert any(re.match(r"llama: \d+ known$", line) for line in lines), "Llama's own code is not known"
    with capsys.disabled():
        print("", first, *(line for line in lines if "not known" in line), sep="\n")
