"""The page docs/writing_a_kernel.md: its C++ files compile with the options of relu_squared's files next to them."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "build/dev/compile_commands.json"
PAGE = (ROOT / "docs/writing_a_kernel.md").read_text()
BLOCK = r"<summary><code>([^<]+)</code>: the whole file</summary>\n\n```\w+\n(.*?)```"
FILES = dict(re.findall(BLOCK, PAGE, re.DOTALL))
COMPILED = [name for name in FILES if re.match(r"csrc/(ops|cpu|gpu|launch)/.*\.(cpp|cu)$", name)]


def test_the_page_has_the_files_of_an_op():
    assert len(FILES) == 15 and len(COMPILED) == 6


@pytest.mark.skipif(not COMMANDS.exists(), reason="needs the compile commands of `make build`")
@pytest.mark.parametrize("name", COMPILED)
def test_a_file_compiles(name, tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    sibling = str(ROOT / name.replace("tanh_rms_norm", "relu_squared"))
    commands = [c["command"] for c in json.loads(COMMANDS.read_text()) if c["file"] == sibling]
    command = next(c for c in commands if "nvcc" not in c.split()[0])  # of a GPU kernel, the host target's command
    arguments = shlex.split(command.replace(sibling, str(tmp_path / name)))
    arguments[arguments.index("-o") + 1] = "/dev/null"
    done = subprocess.run(
        [arguments[0], "-fsyntax-only", f"-I{tmp_path}/csrc", *arguments[1:]],
        cwd=COMMANDS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
