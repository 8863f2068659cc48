"""The command ``python -m liger_ext run``: starts a program that uses Liger-Kernel, such as a trainer, with liger_ext.

The folder ``run_path`` becomes the first of PYTHONPATH, and the program replaces this process (exec): its process id,
signals and exit status are the command's. The folder contains a package ``liger_kernel``, which loads liger_ext when it
is imported, and the metadata of Liger-Kernel's version for programs that only look for the package. An installed
liger-kernel stays installed and is not imported. The processes that the program starts inherit PYTHONPATH.
"""

import argparse
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "run_path"
NAME = "liger_kernel"
# Exits with 0 if a program of the Python that runs this code imports FOLDER's package, and can import liger_ext.
_PROBE = f"""
import importlib.util as u, sys
sys.path[:] = filter(None, sys.path)
sys.exit(not (u.find_spec("liger_ext") and (spec := u.find_spec({NAME!r})) and {str(FOLDER)!r} in str(spec.origin)))
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        usage="%(prog)s [-h] [--print-env] (PROGRAM | -m MODULE) [ARGUMENT ...]",
        description="Runs a program with liger_ext in place of Liger-Kernel: the program, and all processes that it "
        "starts, import liger_ext under the name liger_kernel. The exit status is the program's.",
    )
    parser.add_argument("--print-env", action="store_true", help="print PYTHONPATH instead, e.g. for Ray's runtime_env")
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE", help="run a Python module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a Python script, or a command")


def python_path(environment: Mapping[str, str]) -> str:
    """Returns the PYTHONPATH under which a program imports liger_ext's ``liger_kernel``."""
    folders = [str(FOLDER)]
    if PathFinder.find_spec("liger_ext", sys.path[1:]) is None:  # found only in the current folder: a checkout
        folders.append(str(FOLDER.parents[1]))
    rest = environment["PYTHONPATH"].split(os.pathsep) if environment.get("PYTHONPATH") else []
    return os.pathsep.join([*folders, *(folder for folder in rest if folder not in folders)])


def _command(program: Sequence[str], module: Sequence[str] | None) -> list[str]:
    """Returns the program's command line.

    Raises:
        ValueError: there is no such program.
    """
    if module is not None:
        if not module:
            raise ValueError("-m needs the name of a Python module")
        return [sys.executable, "-m", *module]
    program = program[1:] if program[:1] == ["--"] else program
    if not program:
        raise ValueError("expected a program: a Python script, a command, or -m and a Python module")
    if program[0].endswith(".py"):
        if not Path(program[0]).is_file():
            raise ValueError(f"the Python script '{program[0]}' does not exist")
        return [sys.executable, *program]
    # Commands of a virtual environment that is not active are not on PATH.
    found = shutil.which(program[0]) or shutil.which(program[0], path=Path(sys.executable).parent)
    if found is None:
        where = "there" if os.sep in program[0] else f"on PATH or in {Path(sys.executable).parent}"
        raise ValueError(f"'{program[0]}' is no executable {where} (and the name of a Python script ends in .py)")
    return [found, *program[1:]]


def _warnings(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for an installed liger-kernel, and for a program that would not import ours."""
    path = [folder for folder in sys.path[1:] if folder != str(FOLDER)]
    if origin := _origin(path):
        version = next((found.version for found in importlib.metadata.distributions(name=NAME, path=path)), "?")
        yield f"liger_ext replaces the installed {NAME} {version} ({origin})"
    if not command:
        return
    if command[0] == sys.executable:  # Python searches the folder of the script, with -m the current one, first
        if origin := _origin([os.getcwd() if command[1] == "-m" else str(Path(command[1]).resolve().parent)]):
            yield f"the program imports {origin} instead of liger_ext: Python searches its folder before PYTHONPATH"
        return
    with open(command[0], "rb") as file:
        line = file.readline(256).decode(errors="replace")
    interpreter = shlex.split(line[2:]) if line.startswith("#!") and "python" in line else []
    if Path(command[0]).name.startswith("python"):
        interpreter = [command[0]]
    if interpreter and subprocess.run([*interpreter, "-c", _PROBE], env=environment, capture_output=True).returncode:
        yield f"{' '.join(interpreter)}, the Python of the program, has no liger_ext or ignores PYTHONPATH"


def _origin(path: Sequence[str]) -> str | None:
    """Returns the file of the package ``liger_kernel`` in the first folder that has one."""
    spec = PathFinder.find_spec(NAME, path)
    return spec and spec.origin


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by the program. Returns an exit status if no program runs."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    try:
        command = [] if arguments.print_env else _command(arguments.program, arguments.module)
        for sentence in _warnings(command, environment):
            print(f"liger_ext run: {sentence}.", file=sys.stderr, flush=True)
        if command:
            os.execve(command[0], command, environment)
        print(f"PYTHONPATH={environment['PYTHONPATH']}")
        return 0
    except (OSError, ValueError) as error:
        print(f"liger_ext run: {error}.", file=sys.stderr)
        return 2
