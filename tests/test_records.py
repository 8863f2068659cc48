"""Tests of liger_ext.records: every public op but two has a record, every file of records has the files
named after it, a record agrees with the op's arguments, results and plans, and a record without one of its required
parts raises an error."""

import dataclasses
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from liger_ext import _C, functional, records
from liger_ext.ops import _loss_devices
from liger_ext.records import RECORDS, InputFactory, Record

ROOT = Path(__file__).parents[1]
EACH = pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))
HELPERS = {"CountedRows", "CrossEntropyOutput", "LogProbsOutput", "check_errors", "count_rows"}
NOT_OPS = HELPERS | {"linear_log_probs", "dequantize_4bit"}  # uses the fused loss's op; has no error and no gradient


def example(record, dtype=torch.float32):
    return record.inputs(InputFactory(dtype), record.example(6, 16, 11))


def test_every_op_has_a_record():
    assert set(functional.__all__) - NOT_OPS == set(RECORDS)


@pytest.mark.parametrize("record", sorted(Path(records.__path__[0]).glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_family_has_its_files(record):
    """Files are named after the record; the build checks those that are only compiled or linked."""
    files = ("tests/test_{}.py", "liger_ext/ops/{}.py", "csrc/ops/{}.cpp")
    missing = [file for of in files if not (ROOT / (file := of.format(record.stem))).exists()]
    assert not missing


@EACH
def test_inputs_are_the_arguments_in_their_order(record):
    arguments, made = inspect.signature(getattr(functional, record.name)).parameters, example(record)
    assert list(made) == [name for name in arguments if name in made]
    assert all(name in made for name, argument in arguments.items() if argument.default is argument.empty)
    assert set(record.parameters) | set(record.computes_in) <= made.keys()
    assert set(record.constants) <= arguments.keys()


@EACH
def test_every_result_has_roundings(record):
    """Also every gradient of an input."""
    tensors = {n: t for n, t in example(record).items() if isinstance(t, torch.Tensor)}
    floating = [n for n, t in tensors.items() if t.is_floating_point() and n not in record.constants]
    assert {*record.outputs, *(f"d{name}" for name in floating)} <= record.roundings.keys()


@EACH
def test_it_runs_as_its_record_says(record):
    outputs = record.run(**example(record))
    assert isinstance(outputs, torch.Tensor) == (len(record.outputs) == 1)


@EACH
def test_what_it_costs(record):
    for size in (record.llama, *(size for timed in record.timed for size in (*timed.sizes, *timed.small))):
        assert min(record.moved(size, 2)) > 0 and record.moved(size, 4) > record.moved(size, 2)
        assert record.plans(_C.profile("H200"), size, torch.bfloat16)


def test_plans_of_other_threads_and_modes():
    """A thread that plans for a GPU changes no plan of another thread; nor does a mode of autograd."""
    h100, fused = _C.profile("H100"), RECORDS["fused_linear_cross_entropy"]
    expected = [str(launch.plan.grid) for launch in fused.plans(h100, fused.llama, torch.bfloat16)]
    cpu = _loss_devices.device_index(torch.device("cpu"))
    with _loss_devices.planned_for(h100), ThreadPoolExecutor() as pool:
        assert pool.submit(_loss_devices.device_index, torch.device("cpu")).result() == cpu
    with torch.no_grad():
        assert [str(launch.plan.grid) for launch in fused.plans(h100, fused.llama, torch.bfloat16)] == expected


PARTS = [field.name for field in dataclasses.fields(Record) if field.default is dataclasses.MISSING]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named(part):
    parts = {field.name: getattr(RECORDS["softmax"], field.name) for field in dataclasses.fields(Record)}
    del parts[part]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        Record(**parts)
