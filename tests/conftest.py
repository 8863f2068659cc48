"""Fixtures and settings that all tests share.

A test that takes the ``device`` fixture has the same body on a CPU and on a GPU. Without a GPU its CUDA case, marked
``cuda``, is deselected; with one, ``pytest`` runs both cases and ``pytest -m cuda`` the CUDA case. ``large`` tests need
a GPU with LARGE_BYTES of memory. ``host`` tests need the host target (LIGER_EXT_LIB; test_host_target runs them).
``amd`` tests execute AMD's code objects and need an emulator, which the environment variable LIGER_EXT_AMD_EMULATOR
names (tests/amd/run.py). ``sanitizer`` marks a compact selection for compute-sanitizer: ``compute-sanitizer --tool
memcheck python -m pytest -m "sanitizer and cuda"``. selection.py has the options that select tests.
"""

import gc
import os
import tempfile

# A test must not run a compiled graph that other code left in a shared cache, so each run has a new cache folder, which
# its processes share.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _inductor_cache = tempfile.TemporaryDirectory(prefix="liger_ext_inductor_", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name
    os.environ["TRITON_CACHE_DIR"] = os.path.join(_inductor_cache.name, "triton")

import hypothesis
import pytest
import torch
from cases import host_target

torch.set_num_threads(2)
gc.set_threshold(10_000, *gc.get_threshold()[1:])  # new objects; tracing a graph creates more than the default of 700
hypothesis.settings.register_profile(
    "liger_ext",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("liger_ext")

pytest_plugins = ["selection"]
LARGE_BYTES = 60 << 30  # device memory that the largest of the large tests may take


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: runs on a GPU (CUDA or ROCm)")
    config.addinivalue_line("markers", "large: tensors of more than 2^31 elements; needs a GPU with about 60 GiB")
    config.addinivalue_line("markers", "host: needs the GPU's kernels on the host (LIGER_EXT_LIB)")
    config.addinivalue_line("markers", "amd: executes AMD's code objects; needs an emulator (tests/amd/run.py)")
    config.addinivalue_line("markers", "sanitizer: a compact selection of every kernel, for compute-sanitizer")


def pytest_collection_modifyitems(config, items):
    gpu = torch.cuda.is_available()
    room = gpu and torch.cuda.get_device_properties(0).total_memory >= LARGE_BYTES
    amd = bool(os.environ.get("LIGER_EXT_AMD_EMULATOR"))
    here = {"cuda": gpu, "large": room, "host": host_target(), "amd": amd}
    absent = [name for name, present in here.items() if not present]
    runs = [item for item in items if not any(item.get_closest_marker(name) for name in absent)]
    config.pluginmanager.get_plugin("selection").keep(runs, items, config)


@pytest.fixture(autouse=True)
def restored_environment():
    """Restores the environment after each test.

    PEFT's BOFT leaves ``CXX=gcc`` behind if its own extension fails to build. With that setting no C++ code links:
    neither the code that torch.compile generates nor a wheel.
    """
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True, scope="module")
def frozen_objects():
    """Freezes the objects that exist before a file's first test: later garbage collections skip them.

    transformers' Trainer runs a full collection per training run. Without the freeze it visits all packages and tests
    of the session, which took half of the time of the tests with a Trainer.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
