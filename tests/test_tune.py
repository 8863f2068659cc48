"""``python -m liger_ext tune`` and the file that it writes. test_forced_plans.py tests knobs that change plans."""

import contextlib
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from cases import python

from liger_ext import _C, _devices, _load, _timing, _tuned, doctor, tune
from liger_ext._timing import Timing
from liger_ext.ops import _loss_devices, _loss_plan
from liger_ext.records import Size

H200 = _C.profile("H200")
CALL = _tuned.KnobKey("rms_norm", 8, 8192, 4096)
ENTRY = _tuned.Entry("H200", "NVIDIA 1.2", CALL, {"threads": 256}, 35.0, 33.0)
RATES = _tuned.Rates("H200", "NVIDIA 1.2", 7e14, 5e13, 4e12, 10.0)


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The path of the user's file, in a temporary folder; the file does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGER_EXT_TUNED", raising=False)
    return _tuned.path()


@pytest.fixture
def installed(monkeypatch):
    """Records tables for a GPU library, which is a stub here, and for one whose driver is ENTRY's."""
    tables = []
    monkeypatch.setattr(_tuned, "_rates", {})
    monkeypatch.setattr(_tuned, "install", tables.append)
    monkeypatch.setattr(_load, "gpu_kernels", lambda: object())
    monkeypatch.setattr(_devices, "driver", lambda: ENTRY.driver)
    return tables


def keep(*entries, device="H200", driver="NVIDIA 1.2", measured=(CALL,), rates=None):
    _tuned.write(_tuned.path(), device, driver, measured, entries, rates)


def raising(error):
    def call(*arguments):
        raise error

    return call


def found(table, profile=H200, kernel="rms_norm", vec=8, rows=8192, cols=4096, heads=(0, 0, 0)):
    return _C.find_knobs(table, profile, kernel, vec, rows, cols, heads)


# The table ------------------------------------------------------------------------------------------------------------

HITS = [{}, {"rows": 8191}, {"rows": 4097}]
MISSES = [{"rows": 4096}, {"rows": 8193}, {"cols": 4095}, {"vec": 4}, {"kernel": "layer_norm"}, {"heads": (1, 1, 1)}]


@pytest.mark.parametrize(
    "call", [*HITS, *MISSES, {"profile": _C.profile("H100")}], ids=lambda call: " ".join(call) or "same"
)
def test_an_entry_is_for_rows_up_to_a_power_of_two_and_else_exact(call):
    assert found(_tuned.pack([ENTRY]), **call) == _C.Knobs(threads=256 if call in HITS else 0)


def test_of_many_entries_each_call_finds_its_own():
    entries = [
        replace(ENTRY, device=device, call=replace(CALL, cols=cols), knobs={"block": 64 * i + index})
        for i, cols in enumerate((512, 64, 4096, 1024))
        for index, device in enumerate(("H100", "H200"))
    ]
    table = _tuned.pack(entries)
    for entry in entries:
        assert found(table, _C.profile(entry.device), cols=entry.call.cols) == _C.Knobs(**entry.knobs)
    assert found(b"") == _C.Knobs()


def test_forced_knobs_are_for_every_call_but_exact_entries_come_first():
    every = _tuned.Entry("", "", _tuned.KnobKey("every", 1, 1, 1), {"block": 64}, 0, 0)
    table = _tuned.pack([every, ENTRY])
    assert found(table) == _C.Knobs(threads=256)
    assert found(table, kernel="rope", heads=(32, 8, 128)) == _C.Knobs(block=64)


# The file -------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_read_and_used(file, installed, recwarn):
    keep(ENTRY)
    assert _tuned.read(file) == ([ENTRY], [])
    file.write_bytes(a_file(tuned=[JSON_ENTRY]))  # the format before rates were added
    _tuned.load()
    assert not recwarn.list and found(installed[0]) == _C.Knobs(threads=256) and not _tuned.device_rates(H200).measured


def test_what_another_driver_had_is_kept_but_not_used(file, installed):
    old, rates = replace(ENTRY, driver="NVIDIA 1.1"), replace(RATES, driver="NVIDIA 1.1")
    keep(old, driver=old.driver, rates=rates)
    _tuned.load()
    assert _tuned.read(file) == ([old], [rates]) and found(installed[0]) == _C.Knobs()
    assert not _tuned.device_rates(H200).measured


def test_measuring_again_replaces_what_was_measured_and_nothing_else(file):
    other_keys = {"device": "H100"}, {"driver": "NVIDIA 1.1"}, {"call": replace(CALL, cols=8192)}
    others = [replace(ENTRY, **changed) for changed in other_keys]
    for entry in (ENTRY, *others):
        rates = replace(RATES, device=entry.device, driver=entry.driver)
        keep(entry, device=entry.device, driver=entry.driver, measured=[entry.call], rates=rates)
    better, faster = replace(ENTRY, knobs={"block": 512}), replace(RATES, launch=1.0)
    keep(better, measured=[replace(CALL, rows=5000)], rates=faster)  # in the same class of calls
    all_rates = [replace(RATES, device="H100"), replace(RATES, driver="NVIDIA 1.1"), faster]
    assert _tuned.read(file) == ([*others, better], all_rates)
    keep()  # a measurement in which no plan won and rates failed
    assert _tuned.read(file) == (others, all_rates)


def test_a_failing_write_leaves_the_old_file(file, monkeypatch):
    keep(ENTRY)
    before = file.read_bytes()
    monkeypatch.setattr(_tuned.os, "replace", raising(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        keep(replace(ENTRY, knobs={"block": 512}))
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def a_file(**changed):
    return json.dumps({"format": _tuned.FORMAT, "library": _load.cpu_facts.version, "tuned": []} | changed).encode()


JSON_ENTRY, JSON_RATES = asdict(ENTRY), asdict(RATES)
BAD_FILES = {
    "nothing": b"",
    "no JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "no entries": a_file(tuned=None),
    "an entry without a call": a_file(tuned=[{"device": "H200"}]),
    "an unknown kernel": a_file(tuned=[JSON_ENTRY | {"call": vars(CALL) | {"kernel": "norm"}}]),
    "an unknown knob": a_file(tuned=[JSON_ENTRY | {"knobs": {"x": 1}}]),
    "text for a number": a_file(tuned=[JSON_ENTRY | {"knobs": {"block": "large"}}]),
    "rates without a launch": a_file(rates=[{"device": "H200", "driver": "1"}]),
    "no bandwidth": a_file(rates=[JSON_RATES | {"bandwidth": 0}]),
    "text for a rate": a_file(rates=[JSON_RATES | {"matmul_16": "fast"}]),
    "another version": a_file(library="0.0.1"),
    "another format": a_file(format=0),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(content, file, installed):
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning) as warned:
        _tuned.load()
    (text,) = (str(warning.message) for warning in warned)
    assert "cannot be used: " in dict(doctor.report())["tuned plans"][0] and installed == []
    assert str(file) in text and "python -m liger_ext tune" in text
    if content == BAD_FILES["another version"]:
        assert "0.0.1" in text and _load.cpu_facts.version in text
    keep(ENTRY)  # tuning replaces the file
    assert _tuned.read(file) == ([ENTRY], [])


def test_it_can_be_turned_off(file, installed, monkeypatch):
    keep(ENTRY, rates=RATES)
    monkeypatch.setenv("LIGER_EXT_TUNED", "0")
    _tuned.load()
    assert installed == [] and not _tuned.device_rates(H200).measured
    monkeypatch.setenv("LIGER_EXT_TUNED", "maybe")
    with pytest.warns(RuntimeWarning, match="LIGER_EXT_TUNED is 'maybe', expected 0"):
        _tuned.load()
    assert installed != []


def test_no_library_and_no_file_are_no_trouble(file, installed, monkeypatch, recwarn):
    _tuned.load()
    keep(ENTRY)
    monkeypatch.setattr(_load, "gpu_kernels", lambda: None)
    _tuned.load()
    assert installed == [] and not recwarn.list


def test_a_library_of_another_build_is_a_warning_at_import(file, installed, monkeypatch):
    keep(ENTRY)
    monkeypatch.setattr(_tuned, "install", raising(RuntimeError("different builds")))
    with pytest.warns(RuntimeWarning, match="different builds"):
        _tuned.load()


def test_the_doctor_says_what_is_in_use(file, monkeypatch):
    output = lambda: dict(doctor.report())["tuned plans"][0]  # noqa: E731
    assert output().startswith("none in use") and "does not exist" in output()
    keep(ENTRY)
    assert "has none for this driver" in output()
    monkeypatch.setattr(_tuned, "_in_use", _tuned.pack([ENTRY, ENTRY]))
    assert output() == f"2 in use, from {file}"
    monkeypatch.setenv("LIGER_EXT_TUNED", "0")
    assert "LIGER_EXT_TUNED=0" in output()


# Rates ----------------------------------------------------------------------------------------------------------------


def gpu(monkeypatch, profile):
    monkeypatch.setattr(_devices, "running_profile", lambda index: profile)
    return _loss_devices._gpu.__wrapped__(0)


def test_measured_rates_are_the_fused_losss(file, installed, monkeypatch):
    """Only for this GPU; another GPU has the rates of its data sheet."""
    keep(rates=RATES)
    _tuned.load()
    used, others = (gpu(monkeypatch, profile) for profile in (_C.profile("H200"), _C.profile("A100")))
    used_rates, others_rates = (_loss_devices.DEVICES[device].rates for device in (used, others))
    assert all(getattr(used_rates, name) == value for name, value in list(vars(RATES).items())[2:])
    assert used_rates.measured and not others_rates.measured
    calls = [_loss_plan.FusedLossCall.uniform(512, 64, 1000, torch.bfloat16, device) for device in (others, used)]
    others_seconds, seconds = (_loss_plan.choose(call, "fast").seconds for call in calls)
    assert others_seconds < 0.01 < RATES.launch < seconds


def test_each_rate_is_measured_by_its_own_work(monkeypatch):
    """Every call takes a millisecond; meta tensors take no memory."""
    monkeypatch.setattr(_timing, "sustained_seconds", lambda call: 1e-3 if call() is not None else 0)
    operations, moved = 2 * 8192 * 4096 * 32_768 / 1e-3, 2 * 4 * 2**28 / 1e-3
    rates = _tuned.Rates("H200", "1", operations, operations, moved / tune.COPY_REACHES, 1e-3)
    assert tune.measure_rates(H200, "1", device="meta") == rates


@pytest.mark.parametrize("profile", _C.profiles(), ids=lambda device: device.name)
def test_the_doctor_names_the_source_of_rates(profile, file, installed):
    device = _devices.Device(0, profile.name, profile.architecture, "PTX", 2**36, 2**35, profile)
    source = {"H100": "measured"}.get(profile.name, f"from the data sheet of {profile.name}")
    assert f"rates for the fused loss, {source}: matmuls" in doctor._gpu_lines([device])[1]
    keep(rates=replace(RATES, device=profile.name))
    _tuned.load()
    measured = "measured: matmuls 700 Tflop/s in 16 bits and 50 in fp32, memory 4.00 TB/s, "
    assert measured in doctor._gpu_lines([device])[1]


# Candidates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", _C.profiles(), ids=lambda device: device.name)
def test_candidates_are_few_and_each_is_another_plan(profile):
    """test_plan_properties.py tests with any knobs that plans are legal."""
    counts = []
    for case, name, dtype, _ in tune.jobs([tune.tuned_case(op, profile) for op in tune.OPS], profile, ["bf16"]):
        made = tune.candidates(case, name, profile, tune.DTYPES[dtype])
        plans = [case.tunable(name, profile, tune.DTYPES[dtype])[1], *(launch for _, launch in made)]
        assert len({tune._facts(launch) for launch in plans}) == len(plans)
        assert all(len(knobs) == 1 for knobs, _ in made)
        counts.append(len(made))
    assert len(counts) > 20 and 2 * len(counts) <= sum(counts) and max(counts) <= 12


def test_each_class_of_calls_is_measured_once():
    norms = [tune.Case("rms_norm", Size(rows, 4096)) for rows in (8192, 8000)]
    cases = [*norms, tune.Case("rope", Size(64, 64, (4, 2, 64)))]
    made = [(name, dtype) for _, name, dtype, _ in tune.jobs(cases, H200, ["bf16", "fp16", "fp32"])]
    # fp16 has bf16's plans; rope's backward uses its forward's kernel.
    norms = [(name, dtype) for dtype in ("bf16", "fp32") for name in ("rms_norm", "rms_norm_backward")]
    assert made == [*norms, ("rope", "bf16"), ("rope", "fp32")]


# The command ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_needs_no_gpu():
    command = "-m liger_ext tune --dry-run --profile mi300x --shapes 64x512,8x4096"
    lines = python(*command.split()).splitlines()
    assert "rms_norm_backward 64x512 bf16" in lines and "swiglu 8x4096 bf16" in lines
    assert any(line.startswith("  built-in") for line in lines) and any(line.startswith("  threads=") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(file, capsys):
    assert doctor.main(["tune"]) == 1
    output = capsys.readouterr().err
    assert all(words in output for words in ("needs a GPU", "--dry-run", _load.gpu_status())) and not file.exists()


WRONG = {
    "--shapes 8192": "expected rows x columns",
    "--shapes 0x4": "expected rows x columns",
    "--shapes 8192x4000000000": f"at most {tune.MOST_ELEMENTS} elements",
    "--shapes 99999999999999999999x4": "at most",
    f"--dry-run --profile h200 --shapes {tune.MOST_ELEMENTS}x1": "more blocks than one launch",
    "--profile h200": "--profile is for --dry-run",
    "--dry-run --profile mi9000": "known: V100",
    "--ops norm": "invalid choice",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["tune", *arguments.split()])
    assert stopped.value.code == 2 and WRONG[arguments] in capsys.readouterr().err


BUILT_IN = Timing(10, 9.6, 11)  # the built-in plan's timing
JOB = next(tune.jobs([tune.Case("swiglu", Size(24, 64))], H200, ["bf16"]))


@pytest.fixture
def clock(monkeypatch):
    """Replaces the GPU: ``times`` maps a plan's knobs to its time, ``captured`` lists the knobs of captured graphs."""
    made = SimpleNamespace(times=None, knobs=None, captured=[])

    def capture(call, pool=None):
        call()
        made.captured.append((made.knobs, pool))
        return SimpleNamespace(pool=lambda: "pool", knobs=made.knobs)

    monkeypatch.setattr(_C, "pack_knobs", lambda entries: entries[-1][-1] if entries else b"")
    monkeypatch.setattr(_tuned, "install", lambda knobs: setattr(made, "knobs", knobs))
    monkeypatch.setattr(_timing, "capture_graph", capture)
    monkeypatch.setattr(
        _timing, "time_graphs", lambda graphs: {i: made.times(graph.knobs) for i, graph in graphs.items()}
    )
    return made


@pytest.mark.parametrize("op", tune.OPS)
def test_the_fastest_plan_wins(op, clock):
    case = tune.tuned_case(op, H200, 24, 64)
    for job in tune.jobs([case], H200, ["bf16"]):
        tried = [knobs for knobs, _ in tune.candidates(case, job[1], H200, torch.bfloat16)]
        fastest, clock.captured = _C.Knobs(**tried[-1]) if tried else None, []
        clock.times = lambda knobs, fastest=fastest: Timing(9, 8, 9.5) if knobs == fastest else BUILT_IN
        made = tune.measure(*job, H200, device="cpu")
        assert not made.failed and made.built_in == BUILT_IN
        assert (made.wins, made.knobs) == ((True, tried[-1]) if tried else (False, None))
        assert clock.captured == [(_C.Knobs(), None), *((_C.Knobs(**knobs), "pool") for knobs in tried)]


WINS = [Timing(9, 8, 9.5), Timing(9.7, 9.5, 9.55)]
LOSES = [Timing(9, 8, 9.7), Timing(9.75, 9.5, 9.55), BUILT_IN]


@pytest.mark.parametrize("best", [*WINS, *LOSES], ids=str)
def test_a_winner_is_faster_by_more_than_the_spread_and_by_3_percent(best, clock):
    clock.times = lambda knobs: BUILT_IN if knobs == _C.Knobs() else best
    assert tune.measure(*JOB, H200, device="cpu").wins == (best in WINS)


def test_what_does_not_fit_is_said(clock):
    clock.times = raising(torch.OutOfMemoryError("no room"))
    assert tune.measure(*JOB, H200, device="cpu").failed == "OutOfMemoryError: no room"


@pytest.mark.parametrize("failing", [False, True], ids=["rates", "no rates"])
def test_the_command_shows_and_keeps_rates_and_winners(failing, file, monkeypatch, capsys):
    measured = raising(torch.OutOfMemoryError("no room")) if failing else lambda *_: RATES
    here = _devices.Device(0, "H200", "9.0", "PTX", 2**36, 2**35, H200)
    monkeypatch.setattr(_devices, "devices", lambda: [here])
    monkeypatch.setattr(_devices, "driver", lambda: ENTRY.driver)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(_timing, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(tune, "measure_rates", measured)
    norms, knobs = (
        [("rms_norm", "8192x4096", "bf16", CALL), ("rms_norm_backward", "8x4", "bf16", CALL)],
        {"threads": 256},
    )
    made = [
        tune.Result(*norms[0], Timing(40, 0, 0), Timing(32, 0, 0), knobs, wins=True),
        tune.Result(*norms[1], Timing(50, 0, 0), Timing(49, 0, 0), knobs),
        tune.Result("softmax", "1x1", "bf16", replace(CALL, kernel="softmax"), failed="OutOfMemoryError: no"),
    ]
    monkeypatch.setattr(tune, "measure", lambda *job: made.pop(0))
    assert doctor.main(["tune", "--ops", "rms_norm", "rope", "--shapes", "1x64"]) == int(failing)
    assert _tuned.read(file) == ([replace(ENTRY, built_in_us=40.0, tuned_us=32.0)], [] if failing else [RATES])
    output = capsys.readouterr().out
    assert output.splitlines()[2:5] == [
        "| rms_norm | 8192x4096 | bf16 | 40.0 | 32.0 | 1.250 | threads 256 |",
        "| rms_norm_backward | 8x4 | bf16 | 50.0 | 49.0 | 1.020 | none |",
        "| softmax | 1x1 | bf16 | OutOfMemoryError: no | | | |",
    ]
    assert "another plan won 1 times; 1 could not be measured" in output
    assert ("could not be measured: OutOfMemoryError: no room" if failing else "Rates: matmuls 700 Tflop/s") in output


@pytest.mark.cuda
def test_tuning_on_this_gpu(file, capsys):
    """A winner is in use in the next process, and only there."""
    before = _tuned.installed_count()
    assert doctor.main(["tune", "--shapes", "2048x4096", "--ops", "rms_norm", "softmax", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["op"] for r in found["results"]] == ["rms_norm", "rms_norm_backward", "softmax", "softmax_backward"]
    assert all(r["built_in"]["median"] > 0 and r["best"]["median"] > 0 and not r["failed"] for r in found["results"])
    kept, (rates,) = _tuned.read(file)
    assert len(kept) == sum(r["wins"] for r in found["results"]) and _tuned.installed_count() == before
    assert found["rates"] == vars(rates)
    assert int(python("-c", "from liger_ext import _tuned; print(_tuned.installed_count())")) == len(kept)
