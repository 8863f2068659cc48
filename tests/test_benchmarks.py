"""Tests of the benchmark suites rows, flce, plans, log_probs, host and memory, on shapes so small that times mean
nothing: the tables that they print, the files and plots that they write, providers that fail or are wrong, and the
ratios in tables. The last tests check predictions for the fused loss's plans; those of shapes of GPUs run no plan."""

import functools
import json

import pytest
import torch
from test_fused_loss_bytes import recorded_plans

from benchmarks import __main__ as cli
from benchmarks import flce, host, log_probs, log_probs_providers, memory, plans, rows, suite, timing
from liger_ext import _C
from liger_ext._timing import Timing
from liger_ext.ops._loss_devices import profile_index
from liger_ext.ops._loss_plan import LEVELS, choose, costs

PROVIDERS = {
    "rows": ["liger_ext", "torch"],
    "flce": ["liger_ext", "torch"],
    "plans": ["liger_ext", "torch"],
    "log_probs": ["liger_ext", "liger_ext, low"],
    "host": ["liger_ext", "torch"],
    "memory": ["liger_ext", "torch"],
}


@pytest.fixture
def small(monkeypatch):
    quick = functools.partial(timing.time_cpu, least=2)
    for module in (timing, flce, plans, log_probs):
        monkeypatch.setattr(module, "time_cpu", lambda calls, seconds=0: quick(calls, seconds=0))
    every = rows.cases

    def default_examples(dtype, device):
        seen = set()
        for case in every(dtype, device):
            if case.op not in seen:
                seen.add(case.op)
                yield case

    monkeypatch.setattr(rows, "cases", default_examples)
    monkeypatch.setattr(flce, "SHAPES_CPU", [(8, 16, 64, 0), (32, 16, 64, 0.5)])
    monkeypatch.setattr(memory, "SHAPES_CPU", [(8, 16, 64)])
    monkeypatch.setattr(log_probs, "SHAPES_CPU", [log_probs.Shape("tiny", 48, 64, 4096, (16,))])
    monkeypatch.setattr(host, "SAMPLES", 2)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_suite(name, small, tmp_path, capsys):
    arguments = [name, "--device", "cpu", "--out", str(tmp_path), "--providers", *PROVIDERS[name]]
    if name == "rows":
        arguments += ["--ops", "rms_norm", "swiglu", "rope"]
    cli.main(arguments)
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / f"{name}_cpu_fp32.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        assert record["torch"] == torch.__version__ and record["device"].startswith("CPU")
    table = (tmp_path / f"{name}_cpu_fp32.md").read_text()
    for provider in PROVIDERS[name]:
        assert provider in table and provider in printed
    assert "fails" not in table
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == (3 if name == "rows" else 1)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    again = tmp_path / "again"
    cli.main([name, "--redraw", str(tmp_path / f"{name}_cpu_fp32.jsonl"), "--out", str(again)])
    assert {p.name: p.read_bytes() for p in pictures} == {p.name: p.read_bytes() for p in again.glob("*.png")}


def raises(*inputs):
    raise RuntimeError("no such shape")


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        return x.sum()

    backward = staticmethod(raises)


@pytest.mark.parametrize("name", ["rows", "flce", "memory"])
@pytest.mark.parametrize("broken", [raises, RaisesInBackward.apply], ids=["forward", "backward"])
def test_a_peer_that_fails_does_not_end_the_run(name, broken, small, monkeypatch, tmp_path):
    for module, attribute in ((rows, "functions"), (flce, "providers")):
        every = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, lambda *args, f=every, **by: {**f(*args, **by), "broken": broken})
    settings = ["--ops", "softmax", "--providers", "liger_ext", "broken"]
    cli.main([name, "--device", "cpu", "--out", str(tmp_path), *settings])
    records = [json.loads(line) for line in (tmp_path / f"{name}_cpu_fp32.jsonl").read_text().splitlines()]
    assert records and "fails" in (tmp_path / f"{name}_cpu_fp32.md").read_text() and [*tmp_path.glob("*.png")]
    for record in records:
        found = record["peak_mib" if name == "memory" else "times"]
        runs = record.get("direction") == "forward" and broken is not raises
        assert runs or found.pop("broken") == "RuntimeError: no such shape"
        assert found and not any(isinstance(result, str) for result in found.values())


LOG_PROBS = suite.Settings("cpu", "fp32", ops=("trained, entropy with gradient",))


def test_log_probs_of_every_provider_have_small_errors(small, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (result,) = log_probs._merged(list(log_probs.run(LOG_PROBS)))
    ours = {"liger_ext", "liger_ext, fast", "liger_ext, low", "liger_ext, 16 MiB"}
    assert set(result.times) >= ours | {log_probs.COMPILED}
    assert set(result.errors) >= ours | {log_probs.ONE_MATMUL, log_probs.EAGER}
    for errors in result.errors.values():
        assert all(error is None or error < 1e-5 for error in vars(errors).values()), result.errors
    assert all(error is not None for error in vars(result.errors["liger_ext"]).values())


def test_a_provider_of_log_probs_that_fails_or_is_wrong_is_seen(small, monkeypatch):
    def wrong(x, w, t, case):
        log_probs, entropy = log_probs_providers.full_logits(x, w, t, case)
        return log_probs * 1.01, entropy

    def missing():
        raise ImportError("no such library")

    made = {"liger_ext": lambda: log_probs_providers.full_logits, "wrong": lambda: wrong, "missing": missing}
    monkeypatch.setattr(log_probs, "makers", lambda case, sizes: made)
    (result,) = log_probs.run(LOG_PROBS)
    assert result.times["missing"] == "ImportError: no such library"
    right, off = result.errors["liger_ext"], result.errors["wrong"]
    assert off.log_probs > 1e-2 > 1e-5 > right.log_probs and off.dx > 1e-3 and off.dweight > 1e-3
    assert "fails: ImportError: no such library" in log_probs.table([result], LOG_PROBS)[0].markdown()


def test_log_probs_leave_out_what_takes_too_long_and_tables_join_the_records_of_a_case(small):
    shape, case = log_probs.SHAPES_CPU[0], log_probs.CASES[1]
    wanted = {"liger_ext": lambda: log_probs_providers.full_logits}
    late = log_probs._measured(shape, case, LOG_PROBS, {"late": wanted["liger_ext"]}, limit=0)
    assert late.times == {"late": log_probs.LATE}
    on_time = log_probs._measured(shape, case, LOG_PROBS, wanted, limit=float("inf"))
    times, errors = log_probs.table([on_time, late], LOG_PROBS)
    assert [row[0] for row in times.rows] == ["the needed matmuls", "liger_ext", "late"]
    assert times.columns == ["", case.name] and errors.rows


def test_nothing_to_run_is_an_error(small, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["rows", "--device", "cpu", "--out", str(tmp_path), "--ops", "no_such_op"])
    assert ended.value.code == 2
    assert "no rows case matches" in capsys.readouterr().err


def test_efficiency_is_the_copys_time_over_the_ops():
    row = rows.Row("rms_norm", "8x16", "fp32", "forward", 100, Timing(10, 9, 11), {"liger_ext": Timing(20, 19, 21)})
    (line,) = rows.table([row], suite.Settings("cpu", "fp32")).rows
    assert line[-1] == "20.0 us (0.50)"


def test_small_calls_are_drawn_apart_and_a_line_joins_the_largest_call_of_each_length(monkeypatch, tmp_path):
    def row(shape, moved, copy):
        return rows.Row("softmax", shape, "bf16", "forward", moved, Timing(copy, 0, 0), {"liger_ext": Timing(40, 0, 0)})

    measured = [row("8x64", 800, 10), row("16x64", 1600, 20), row("8x128", 1600, 30), row("1x64", 100, 10)]
    drawn = []
    monkeypatch.setattr(suite, "save", lambda figure, path: drawn.append(figure) or path)
    rows.draw(measured, suite.Settings("h200", "bf16"), tmp_path)
    forward, small = drawn[0].axes
    _, joined, others = forward.lines
    assert [list(line.get_ydata()) for line in (joined, others)] == [[0.5, 0.75], [0.25]]
    assert [bar.get_height() for bar in small.patches] == [10, 40]


def test_the_share_of_the_floor_is_of_the_floor_timed_beside_it():
    floors = {"torch": Timing(40, 40, 40), "liger_ext": Timing(30, 30, 30)}
    times = {"torch": Timing(80, 80, 80), "liger_ext": Timing(40, 40, 40)}
    result = flce.Result("1x2x3", "fp32", floors, times, {}, {})
    (line,) = flce.table([result], suite.Settings("cpu", "fp32"))[0].rows
    assert line[2:] == ["80.0 us, 0.50", "40.0 us, 0.75"]


def test_every_row_of_a_loss_is_timed():
    """No target of a timed row is ignored: kernels do not read ignored rows, so the reported bandwidth would be too
    high."""
    inputs = [t for case in rows.cases(torch.float32, "cpu") for t in case.inputs() if isinstance(t, torch.Tensor)]
    labels = [t for t in inputs if t.dtype == torch.int64]
    assert labels and all(t.min() >= 0 for t in labels)


# The fused loss's plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", plans.SHAPES_CPU, ids=str)
def test_the_plan_that_is_predicted_is_the_one_that_runs(shape):
    """The benchmark predicts the plan that the op runs for the same call and the same `memory`."""
    call = plans.plan_call(shape, torch.float32, torch.device("cpu"))
    x, w, t = flce.inputs(shape.rows, shape.hidden, shape.vocab, suite.Settings("cpu", "fp32"))
    points = plans.memory_points(call)
    with recorded_plans() as asked:
        for given, _ in points.values():
            flce.gradients(plans.timed_loss(shape, given), x, w, t)
    assert asked == [(call, choice.plan) for _, choice in points.values()]


@pytest.mark.parametrize("shape", plans.SHAPES_CUDA, ids=str)
def test_points_of_a_shape(shape, monkeypatch):
    """The points of a shape are all levels, and numbers of bytes that select other plans."""
    assert shape.rows * shape.vocab * 2 < 17.2e9
    monkeypatch.setattr(plans, "device_index", lambda device: profile_index(_C.profile("H100")))
    call = plans.plan_call(shape, torch.bfloat16, torch.device("meta"))
    points = plans.memory_points(call)
    named = [level for name in points for level in name.split(", ") if level in LEVELS]
    assert sorted(named) == sorted(LEVELS)
    assert all(choose(call, memory) == choice for memory, choice in points.values())
    assert len({choice.plan for _, choice in points.values()}) == len(points)
    assert all(choice.bytes == costs(call, [choice.plan])[0].bytes for _, choice in points.values())


def a_result(**points):
    """Returns a result with these points, each (predicted ms, predicted MiB, measured ms, measured MiB). The time of
    the three matmuls is predicted as 10 ms and measured as 20 ms."""
    result = plans.Result("model", "1x2x3", False, 10, [])
    for name, (ms, mib, measured_ms, measured_mib) in points.items():
        result.plans[name], result.predicted_ms[name], result.predicted_mib[name] = "a plan", ms, mib
        result.floors[name], result.times[name] = (Timing(1e3 * n, 0, 0) for n in (20, measured_ms))
        result.peak_mib[name] = measured_mib
    return result


def test_errors_of_predictions():
    result = a_result(fast=(11, 100, 20, 80), low=(15, 50, 40, 50))
    result.plans["min"], result.times["min"] = "a plan", "OutOfMemoryError: too large"
    result.predicted_ms["min"], result.predicted_mib["min"] = 20, 10
    relative, absolute, memory = (list(found.values()) for found in plans.errors([result]).values())
    assert relative == pytest.approx([0.1, -0.25])
    assert absolute == pytest.approx([-0.45, -0.625])
    assert memory == pytest.approx([0.25, 0])
    points, errors, _ = plans.table([result], suite.Settings("cuda", "bf16"))
    assert points.rows[0][3:8] == ["20.00 ms", "1.000", "0.909", "80", "100"] and points.rows[2][3:5] == ["fails", ""]
    assert errors.rows[0][1:] == ["2", "10.0%", "25.0%", "-25.0%", "model 1x2x3, low"]


def test_dominated_levels_are_listed():
    points = {"fast": (1, 1, 20, 100), "auto, low": (1, 1, 22, 90), "50 MiB": (1, 1, 21, 50), "min": (1, 1, 22.5, 49)}
    assert plans.dominated(a_result(**points)) == [("auto, low", "50 MiB")]
    assert plans.dominated(a_result(**{**points, "auto, low": (1, 1, 21.5, 90)})) == []
    assert plans.dominated(a_result(**{**points, "auto, low": (1, 1, 25, 50.4)})) == []
    assert plans.dominated(a_result(**{**points, "60 MiB": (1, 1, 30, 110)})) == [("auto, low", "50 MiB")]
    *_, grid = plans.table([a_result(**points)], suite.Settings("cuda", "bf16"))
    assert len(grid.rows) == 1 and "none" not in grid.title
