"""The table of known code on the newest transformers of the package index: a report of what its users will miss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import liger_ext


@pytest.mark.slow
def test_report(tmp_path, capsys):
    """Only a report that cannot be made fails. What became unknown is printed."""
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
