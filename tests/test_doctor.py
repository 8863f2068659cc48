"""What `python -m liger_ext` says."""

import importlib.metadata

import pytest
import torch

from liger_ext import _C, doctor


def test_report_names_versions_libraries_and_devices(capsys):
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for fact in (torch.__version__, _C.version, "libliger_ext_cpu.so", importlib.metadata.version("transformers")):
        assert fact in printed
    assert [heading for heading, _ in doctor.report()] == [
        "liger_ext", "torch", "transformers", "CPU library", "GPU library", "CPU", "GPU",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        ("7.5 8.0 9.0a", (8, 0), True),
        ("7.5 8.0 9.0a", (8, 9), True),  # machine code for 8.0 runs on later 8.x
        ("7.5 8.6 9.0a", (8, 0), False),
        ("7.5 9.0a", (9, 0), True),
        ("9.0a", (9, 1), False),
        ("9.0a", (10, 0), False),
        ("9.0a 7.5+PTX", (10, 0), True),
        ("8.0 7.5+PTX", (7, 0), False),
        ("10.0", (12, 0), False),
        ("", (8, 0), False),
    ],
)
def test_gpu_covered(architectures, capability, covered):
    assert doctor.gpu_covered(architectures, *capability) is covered


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("4.46.3", "too old"),
        ("4.51.3", "supported"),
        ("5.17.0", "supported"),
        ("5.23.0", "supported"),
        ("6.0.1", "newer"),
    ],
)
def test_transformers_versions(monkeypatch, version, words):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert words in doctor._transformers()
