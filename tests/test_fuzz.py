"""Tests of the fuzz test (``make fuzz``): a few thousand calls have no findings, and broken ops and a crashing process
are found."""

import resource

import pytest
import torch
from fuzz import driver, worker
from fuzz.__main__ import arguments
from ops import OPS

from liger_ext import functional


def test_any_call_is_right_or_says_what_is_wrong(device):
    args = arguments(["--calls", "5000", "--seed", "20", "--device", device.type, "--judge-every", "2"])
    report = driver.drive(args, print)
    assert not report.groups, str(report)
    assert report.calls == 5000


def test_a_call_follows_from_its_seed_and_number():
    def drawn():
        return [str(worker.draw_case(3, number, OPS, "cpu").call) for number in range(200)]

    assert drawn() == drawn()


@pytest.mark.slow
def test_the_driver_goes_on_behind_a_crash():
    args = arguments(
        ["--calls", "40", "--jobs", "1", "--crash-at", "12", "--ops", "softmax", "geglu_packed", "--seed", "5"]
    )
    report = driver.drive(args, print)
    crashes = [group for group in report.groups.values() if group.kind == "crash"]
    assert report.calls == 40 and [crash.first["number"] for crash in crashes] == [12]
    assert "Segmentation fault" in crashes[0].text and "--seed 5 --only 12" in str(report)


def softmax_off(x):
    return torch.softmax(x * 1.01, -1)


def softmax_infinite(x):
    return torch.softmax(x, -1) / 0


def softmax_wide(x):
    return torch.softmax(x.double(), -1).unsqueeze(0)


def softmax_writes(x):
    x.detach().zero_()
    return torch.softmax(x, -1)


def softmax_dies(x):
    raise KeyError("rows")


def softmax_takes_anything(x):
    return torch.softmax(torch.as_tensor(x).float(), -1)


BROKEN = {
    softmax_off: "wrong",
    softmax_infinite: "not finite",
    softmax_wide: "shape",
    softmax_writes: "wrote",
    softmax_dies: "refused",
    softmax_takes_anything: "accepted",
}


@pytest.fixture
def limited_memory():
    """Limits memory as the fuzz test's processes do, because calls request more memory than a machine has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    worker.limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_what_is_broken_is_found(broken, monkeypatch):
    monkeypatch.setattr(functional, "softmax", broken)
    found = [worker.one_call(0, number, ("softmax",), "cpu", 1) for number in range(100)]
    assert BROKEN[broken] in {finding["kind"] for finding in found if finding}
