"""``python -m liger_ext run``: the command line, the environment, and programs that import ``liger_kernel``."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import ROOT, environment, python

from liger_ext import doctor, liger_kernel, run

FOLDER = str(run.FOLDER)
BIN = Path(sys.executable).parent
# sys.path of `python -m liger_ext` in the checkout, if liger_ext is not installed: only the current folder has it.
IN_THE_CHECKOUT = ["", *(path for path in sys.path if path and Path(path) != ROOT)]


@pytest.fixture
def execute(monkeypatch, capsys):
    """Calls the command. Returns what it executes or its exit status, the PYTHONPATH, stdout and stderr."""
    executed = []
    monkeypatch.setattr(os, "execve", lambda file, arguments, env: executed.append((file, arguments, env)))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", IN_THE_CHECKOUT)

    def call(*arguments):
        executed.clear()
        status = doctor.main(["run", *map(str, arguments)])
        printed = capsys.readouterr()
        if executed:
            file, command, env = executed[0]
            assert file == command[0] and {**env, "PYTHONPATH": 0} == {**os.environ, "PYTHONPATH": 0}
            return command, env["PYTHONPATH"], "", printed.err
        return status, None, printed.out, printed.err

    return call


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


# Arguments of the command, and the command line of the program. "train.py" and "bin/tool" exist in the current folder.
COMMANDS = {
    "train.py --steps 3": [sys.executable, "train.py", "--steps", "3"],
    "train.py -m x -- -h --print-env": [sys.executable, "train.py", "-m", "x", "--", "-h", "--print-env"],
    "-m train --print-env -h": [sys.executable, "-m", "train", "--print-env", "-h"],
    "bin/tool a": ["bin/tool", "a"],
    "tool train.py": ["{here}/bin/tool", "train.py"],
    "torchrun --help": [str(BIN / "torchrun"), "--help"],  # the environment's folder is not on PATH
}
# Wrong arguments, and the words of the sentence on stderr.
MISTAKES = {
    "": "expected a program: a Python script, a command, or -m and a Python module",
    "-m": "-m needs the name of a Python module",
    "nothing.py": "the Python script 'nothing.py' does not exist",
    "bin/nothing": "'bin/nothing' is no executable there",
    "nothing --steps 3": "'nothing' is no executable on PATH or in",
    "notes.txt": "'notes.txt' is no executable on PATH",
    "bin": "'bin' is no executable",
    "folder.py": "the Python script 'folder.py' does not exist",
    "bin/empty": "Exec format error",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    write(tmp_path / "train.py", "")
    write(tmp_path / "notes.txt", "")
    write(tmp_path / "bin" / "tool", "#!/bin/sh\n", 0o755)
    write(tmp_path / "bin" / "empty", "", 0o755)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("arguments", COMMANDS)
def test_command_lines(arguments, execute, here):
    command, path, _, said = execute(*arguments.split())
    assert command == [word.format(here=here) for word in COMMANDS[arguments]] and said == ""
    assert path == f"{FOLDER}:{ROOT}"


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_get_one_sentence(arguments, here, capfd):
    assert doctor.main(["run", *arguments.split()]) == 2
    out, said = capfd.readouterr()
    assert said.startswith("liger_ext run: ") and MISTAKES[arguments] in said and said.count("\n") == 1 and out == ""


def test_pythonpath_stays_after_our_folder(monkeypatch):
    assert run.python_path({}) == run.python_path({"PYTHONPATH": ""}) == FOLDER
    once = run.python_path({"PYTHONPATH": "/a:/b"})
    assert once == f"{FOLDER}:/a:/b" == run.python_path({"PYTHONPATH": once})
    monkeypatch.setattr(sys, "path", IN_THE_CHECKOUT)
    once = run.python_path({"PYTHONPATH": "/a"})
    assert once == f"{FOLDER}:{ROOT}:/a" == run.python_path({"PYTHONPATH": once})


def test_print_env(execute, monkeypatch):
    assert execute("--print-env") == (0, None, f"PYTHONPATH={FOLDER}:{ROOT}\n", "")
    monkeypatch.setenv("PYTHONPATH", "/a")
    assert execute("--print-env", "nothing.py") == (0, None, f"PYTHONPATH={FOLDER}:{ROOT}:/a\n", "")


def test_help(capsys):
    for arguments, words in {"--help": ",run", "run -h": "(PROGRAM | -m MODULE)"}.items():
        with pytest.raises(SystemExit) as ended:
            doctor.main(arguments.split())
        assert ended.value.code == 0 and words in capsys.readouterr().out


# Other packages and other Pythons -------------------------------------------------------------------------------------


def fake_liger_kernel(site: Path) -> Path:
    """Writes a package with the name and metadata of Liger-Kernel, and a module that liger_ext does not have."""
    for name in ("__init__", "transformers/__init__", "transformers/rms_norm", "env_report"):
        write(site / f"liger_kernel/{name}.py", f"raise AssertionError('{name} of the installed liger-kernel runs')")
    text = "Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.7.0\n"
    write(site / "liger_kernel-0.7.0.dist-info/METADATA", text)
    write(site / "liger_kernel-0.7.0.dist-info/top_level.txt", "liger_kernel\n")
    return site


def test_an_installed_one_is_named(execute, here, monkeypatch):
    site = fake_liger_kernel(here / "site")
    monkeypatch.setattr(sys, "path", ["", FOLDER, *IN_THE_CHECKOUT[1:], str(site)])
    sentence = (
        f"liger_ext run: liger_ext replaces the installed liger_kernel 0.7.0 ({site}/liger_kernel/__init__.py).\n"
    )
    assert execute("train.py")[3] == execute("--print-env")[3] == sentence
    (site / "liger_kernel-0.7.0.dist-info").rename(site / "liger_kernel_nightly-0.7.0.dist-info")
    assert "replaces the installed liger_kernel ? (" in execute("train.py")[3]


def test_one_beside_the_script_is_not_replaced(execute, here):
    fake_liger_kernel(here)
    sentence = f"imports {here}/liger_kernel/__init__.py instead of liger_ext: Python searches"
    assert sentence in execute("train.py")[3] and sentence in execute("-m", "train")[3]
    assert execute("tool", "train.py")[3] == ""


# The first line of a command, and whether `run` warns that its Python does not import our package.
INTERPRETERS = {
    "{python}": False,
    "/usr/bin/env {python}": False,
    "{python} -E": True,
    "/usr/bin/env -S {python} -I": True,
}


@pytest.mark.parametrize("line", INTERPRETERS)
def test_a_python_that_ignores_the_folder(line, execute, here):
    interpreter = line.format(python=sys.executable)
    write(here / "bin" / "trainer", f"#!{interpreter}\n", 0o755)
    sentence = f"liger_ext run: {interpreter}, the Python of the program, has no liger_ext or ignores PYTHONPATH.\n"
    assert execute("trainer")[3] == (sentence if INTERPRETERS[line] else "")
    write(here / "bin" / "trainer", "#!/none/python\n", 0o755)
    assert execute("trainer")[0] == 2


def test_a_python_without_liger_ext(tmp_path):
    """The import ends the program with one line, since trainers catch ImportError and train without fused ops."""
    script = "try: import liger_kernel\nexcept ImportError: print('caught')"
    env = {**os.environ, "PYTHONPATH": FOLDER}
    command = [sys.executable, "-S", "-c", script]  # without site-packages
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"{sys.executable} cannot import liger_ext (No module named 'liger_ext'): install it" in done.stderr


def test_metadata():
    (found,) = importlib.metadata.distributions(path=[FOLDER])
    assert (found.name, found.version) == (liger_kernel.NAME, liger_kernel.UPSTREAM_VERSION)
    assert found.files is None  # pip does not uninstall a package without the list RECORD


# Programs -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import importlib, importlib.metadata, importlib.util, json, multiprocessing, os, pickle, sys

HEAVY = {"torch", "liger_ext", "liger_kernel"}
spec = importlib.util.find_spec("liger_kernel")
looked = [spec.origin, importlib.metadata.version("liger_kernel"), importlib.metadata.version("liger-kernel")]
looked.append(importlib.metadata.packages_distributions()["liger_kernel"][0])
looked.append(sorted(HEAVY & {*sys.modules}))

def worker(name):
    import liger_kernel.ops
    return os.getpid(), type(getattr(liger_kernel.ops, name)).__name__, liger_kernel.ops.__spec__.origin

if __name__ == "__main__":
    import transformers
    from transformers.utils import is_liger_kernel_available as in_transformers
    from trl.import_utils import is_liger_kernel_available as in_trl
    available = [in_transformers(), in_trl(), sorted(HEAVY - {"torch"} & {*sys.modules})]

    from liger_kernel.transformers import apply_liger_kernel_to_llama
    import liger_ext, liger_kernel, liger_kernel.ops
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    apply_liger_kernel_to_llama(model=model)

    package = liger_kernel
    liger_ext.compat.install().revert()  # a program may call it, too
    assert sys.modules["liger_kernel"] is package is importlib.reload(package) and package.__spec__ is not None
    assert importlib.util.find_spec("liger_kernel") is package.__spec__ and not package.__path__
    absent = liger_kernel.ops.LigerDyTFunction
    assert pickle.loads(pickle.dumps(absent)) is absent
    try:
        import liger_kernel.env_report
    except ModuleNotFoundError as error:
        missing = str(error)
    modules = {name: module.__spec__.origin for name, module in sys.modules.items() if name.startswith("liger_kernel")}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(worker, ["LigerDyTFunction"])
    print(json.dumps(dict(
        pid=os.getpid(), child=child, looked=looked, available=available, patched=type(model).__module__,
        missing=missing, modules=modules, version=package.__version__, arguments=sys.argv[1:],
    )))
    sys.exit(7)
"""


def start(*arguments, **settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "liger_ext", "run", *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=environment() | settings, **pipes)


def test_a_script_with_liger_kernel_installed(tmp_path):
    site, script = fake_liger_kernel(tmp_path / "site"), write(tmp_path / "train.py", PROGRAM)
    process = start(script, "--steps", "3", PYTHONPATH=f"{environment()['PYTHONPATH']}:{site}")
    out, said = process.communicate(timeout=120)
    assert process.returncode == 7, said
    assert f"replaces the installed liger_kernel 0.7.0 ({site}/liger_kernel/__init__.py)" in said
    found = json.loads(out.splitlines()[-1])
    ours = f"{FOLDER}/liger_kernel/__init__.py"
    version = liger_kernel.UPSTREAM_VERSION
    assert found["pid"] == process.pid and found["arguments"] == ["--steps", "3"] and found["version"] == version
    assert found["looked"] == [ours, version, version, "liger_kernel", []]
    assert found["available"] == [True, True, []]
    assert found["patched"] == "liger_ext.models.llama"
    assert found["modules"].keys() >= {"liger_kernel", "liger_kernel.ops", "liger_kernel.transformers"}
    assert {*found["modules"].values()} == {"liger_ext.compat"}
    assert "has no liger_kernel.env_report" in found["missing"]
    assert found["child"][0] != process.pid and found["child"][1:] == ["type", "liger_ext.compat"]


def test_signals_reach_the_program():
    """SIGINT and SIGPIPE have their default actions, as in a program that a shell starts. Python ignores SIGPIPE."""
    trap = "trap 'echo terminated' TERM; grep -E 'SigBlk|SigIgn' /proc/$$/status; echo $$; while :; do sleep 0.02; done"
    with start("sh", "-c", trap) as process:
        masks = [int(process.stdout.readline().split()[1], 16) for _ in range(2)]
        assert not any(mask >> (number - 1) & 1 for mask in masks for number in (signal.SIGINT, signal.SIGPIPE))
        assert process.stdout.readline() == f"{process.pid}\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "terminated\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == -signal.SIGINT and process.stderr.read() == ""


WORKER = r"""
import importlib.util, os, torch
torch.distributed.init_process_group("gloo")
from liger_kernel.ops import LigerRMSNormFunction
x = torch.full((2, 4), 3.0 + torch.distributed.get_rank())
y = LigerRMSNormFunction.apply(x, torch.ones(4), 0.0)
torch.distributed.all_reduce(y)
os.write(1, f"{LigerRMSNormFunction.__module__} {y.sum().item()} {torch.distributed.get_world_size()}\n".encode())
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    """The module of torchrun: its two processes import liger_ext."""
    script = write(tmp_path / "train.py", WORKER)
    options = ["--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
    process = start("-m", "torch.distributed.run", *options, script, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert out.splitlines() == ["liger_ext.liger_kernel.ops 16.0 2"] * 2


def test_compat_install_before_the_first_import():
    """A program that calls `install` itself also runs under `run`."""
    script = (
        "import sys, liger_ext.compat\nhandle = liger_ext.compat.install()\nhandle.revert()\n"
        "import liger_kernel.transformers; print(liger_kernel.__file__)"
    )
    assert (
        python("-c", script, PYTHONPATH=run.python_path(environment())).strip() == f"{FOLDER}/liger_kernel/__init__.py"
    )
