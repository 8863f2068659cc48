"""``python -m liger_ext tune`` and the file that it keeps: what happens without a GPU. test_forced_plans.py shows that
entries reach the plans, and that results stay right."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from liger_ext import _C, _devices, _load, _tuned, doctor, tune
from liger_ext._timing import Timing
from liger_ext.records import Size

H200 = _C.profile("H200")
CALL = _tuned.Call("rms_norm", 8, 8192, 4096)
ENTRY = _tuned.Entry("H200", "NVIDIA 1.2", CALL, {"threads": 256}, 35.0, 33.0)


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The user's file, in a folder of the test's own, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGER_EXT_TUNED", raising=False)
    return _tuned.path()


@pytest.fixture
def installed(monkeypatch):
    """What is handed to a GPU library that is not here, and to one whose driver is ENTRY's."""
    tables = []
    monkeypatch.setattr(_tuned, "install", tables.append)
    monkeypatch.setattr(_load, "gpu_kernels", lambda: object())
    monkeypatch.setattr(_devices, "driver", lambda: ENTRY.driver)
    return tables


def keep(*entries, device="H200", driver="NVIDIA 1.2", measured=(CALL,)):
    _tuned.write(_tuned.path(), device, driver, measured, entries)


def found(table, profile=H200, kernel="rms_norm", vec=8, rows=8192, cols=4096, heads=(0, 0, 0)):
    return _C.find_knobs(table, profile, kernel, vec, rows, cols, heads)


# The table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "hit"),
    [
        ({}, True),
        ({"rows": 8191}, True),
        ({"rows": 4097}, True),
        ({"rows": 4096}, False),
        ({"rows": 8193}, False),
        ({"cols": 4095}, False),
        ({"vec": 4}, False),
        ({"kernel": "layer_norm"}, False),
        ({"heads": (1, 1, 1)}, False),
        ({"profile": _C.profile("H100")}, False),
    ],
)
def test_an_entry_is_for_rows_up_to_a_power_of_two_and_else_exact(call, hit):
    assert found(_tuned.pack([ENTRY]), **call) == _C.Knobs(threads=256 if hit else 0)


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
    every = _tuned.Entry("", "", _tuned.Call("every", 1, 1, 1), {"block": 64}, 0, 0)
    table = _tuned.pack([every, ENTRY])
    assert found(table) == _C.Knobs(threads=256)
    assert found(table, kernel="rope", heads=(32, 8, 128)) == _C.Knobs(block=64)


# The file -------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_read_and_used(file, installed):
    keep(ENTRY)
    assert _tuned.read(file) == [ENTRY]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load()
    assert found(installed[0]) == _C.Knobs(threads=256)


def test_another_drivers_entries_are_kept_but_not_used(file, installed):
    old = replace(ENTRY, driver="NVIDIA 1.1")
    keep(old, driver=old.driver)
    _tuned.load()
    assert _tuned.read(file) == [old] and found(installed[0]) == _C.Knobs()


def test_measuring_again_replaces_what_was_measured_and_nothing_else(file):
    others = [
        replace(ENTRY, device="H100"),
        replace(ENTRY, driver="NVIDIA 1.1"),
        replace(ENTRY, call=replace(CALL, cols=8192)),
    ]
    for entry in (ENTRY, *others):
        keep(entry, device=entry.device, driver=entry.driver, measured=[entry.call])
    better = replace(ENTRY, knobs={"block": 512})
    keep(better, measured=[replace(CALL, rows=5000)])  # of the same class
    assert _tuned.read(file) == [*others, better]
    keep()  # measured, and no plan won
    assert _tuned.read(file) == others


def test_a_failing_write_leaves_the_old_file(file, monkeypatch):
    keep(ENTRY)
    before = file.read_bytes()
    monkeypatch.setattr(_tuned.os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        keep(replace(ENTRY, knobs={"block": 512}))
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


GOOD = {"format": _tuned.FORMAT, "library": _load.cpu_facts.version, "tuned": []}
BAD_FILES = {
    "nothing": b"",
    "no JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "no entries": json.dumps({"format": _tuned.FORMAT, "library": _load.cpu_facts.version}).encode(),
    "an entry without a call": json.dumps(GOOD | {"tuned": [{"device": "H200"}]}).encode(),
    "an unknown kernel": json.dumps(
        GOOD | {"tuned": [vars(ENTRY) | {"call": vars(CALL) | {"kernel": "norm"}}]}
    ).encode(),
    "an unknown knob": json.dumps(GOOD | {"tuned": [vars(ENTRY) | {"call": vars(CALL), "knobs": {"x": 1}}]}).encode(),
    "text for a number": json.dumps(
        GOOD | {"tuned": [vars(ENTRY) | {"call": vars(CALL), "knobs": {"block": "large"}}]}
    ).encode(),
    "another version": json.dumps(GOOD | {"library": "0.0.1"}).encode(),
    "another format": json.dumps(GOOD | {"format": 0}).encode(),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(content, file, installed):
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning) as warned:
        _tuned.load()
    (warning,) = warned
    text = str(warning.message)
    assert "cannot be used: " in dict(doctor.report())["tuned plans"][0]
    assert str(file) in text and "python -m liger_ext tune" in text
    if content == BAD_FILES["another version"]:
        assert "0.0.1" in text and _load.cpu_facts.version in text
    assert installed == []
    keep(ENTRY)  # and tuning makes it anew
    assert _tuned.read(file) == [ENTRY]


def test_it_can_be_turned_off(file, installed, monkeypatch):
    keep(ENTRY)
    monkeypatch.setenv("LIGER_EXT_TUNED", "0")
    _tuned.load()
    assert installed == []


def test_another_value_of_the_variable_is_a_warning(file, installed, monkeypatch):
    keep(ENTRY)
    monkeypatch.setenv("LIGER_EXT_TUNED", "maybe")
    with pytest.warns(RuntimeWarning, match="LIGER_EXT_TUNED is 'maybe', expected 0"):
        _tuned.load()
    assert installed != []


def test_no_library_and_no_file_are_no_trouble(file, installed, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load()
        keep(ENTRY)
        monkeypatch.setattr(_load, "gpu_kernels", lambda: None)
        _tuned.load()
    assert installed == []


def test_a_library_of_another_build_is_a_warning_at_import(file, installed, monkeypatch):
    def install(table):
        raise RuntimeError("different builds")

    keep(ENTRY)
    monkeypatch.setattr(_tuned, "install", install)
    with pytest.warns(RuntimeWarning, match="different builds"):
        _tuned.load()


def test_the_doctor_says_what_is_in_use(file, monkeypatch):
    said = lambda: dict(doctor.report())["tuned plans"][0]  # noqa: E731
    assert said().startswith("none in use") and "does not exist" in said()
    keep(ENTRY)
    assert "has none for this driver" in said()
    monkeypatch.setattr(_tuned, "_in_use", _tuned.pack([ENTRY, ENTRY]))
    assert said() == f"2 in use, from {file}"
    monkeypatch.setenv("LIGER_EXT_TUNED", "0")
    assert "LIGER_EXT_TUNED=0" in said()


# Candidates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", _C.profiles(), ids=lambda device: device.name)
def test_candidates_are_few_and_each_is_another_plan(profile):
    """That they are legal is asked of any knobs in test_plan_properties.py."""
    counts, llama = [], [tune.case_of(op, profile) for op in tune.OPS]
    for case, name, dtype, _ in tune.jobs([*llama, *tune.benchmark_cases()], profile, ["bf16"]):
        of = tune.DTYPES[dtype]
        made = tune.candidates(case, name, profile, of)
        own = case.tunable(name, profile, of)[1]
        plans = [(launch.kernel, *tune._facts(launch).values()) for launch in (own, *(launch for _, launch in made))]
        assert len(plans) == len(set(plans)) <= 1 + tune.MOST_CANDIDATES
        for knobs, launch in made:
            again = case.tunable(name, profile, of, _C.Knobs(**knobs))[1]
            assert tune._facts(again) == tune._facts(launch)
        counts.append(len(made))
    assert len(counts) > 60 and sum(counts) >= 3 * len(counts)


def test_each_class_of_calls_is_measured_once():
    cases = [
        tune.Case("rms_norm", Size(8192, 4096)),
        tune.Case("rms_norm", Size(8000, 4096)),
        tune.Case("rope", Size(64, 64, (4, 2, 64))),
    ]
    made = [(name, dtype) for _, name, dtype, _ in tune.jobs(cases, H200, ["bf16", "fp16", "fp32"])]
    # fp16's plans are bf16's; rope's backward is its forward's kernel.
    kernels = ["rms_norm", "rms_norm_backward"]
    rope = [("rope", "bf16"), ("rope", "fp32")]
    assert made == [(name, dtype) for dtype in ("bf16", "fp32") for name in kernels] + rope


# The command ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_needs_no_gpu():
    command = "-m liger_ext tune --dry-run --profile mi300x --shapes 64x512,8x4096"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "rms_norm_backward 64x512 bf16" in lines and "swiglu 8x4096 bf16" in lines
    assert any(line.startswith("  built-in") for line in lines) and any(line.startswith("  threads=") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(file, capsys):
    assert doctor.main(["tune"]) == 1
    said = capsys.readouterr().err
    assert "needs a GPU" in said and "--dry-run" in said and _load.gpu_status() in said
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "8192"], "expected rows x columns"),
        (["--shapes", "0x4"], "expected rows x columns"),
        (["--shapes", "8192x4000000000"], f"at most {tune.MOST_ELEMENTS} elements"),
        (["--shapes", "99999999999999999999x4"], "at most"),
        (["--dry-run", "--profile", "h200", "--shapes", f"{tune.MOST_ELEMENTS}x1"], "more blocks than one launch"),
        (["--profile", "h200"], "--profile is for --dry-run"),
        (["--dry-run", "--profile", "mi9000"], "known: V100"),
        (["--benchmark", "--shapes", "1x1"], "either"),
        (["--ops", "norm"], "invalid choice"),
    ],
)
def test_wrong_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["tune", *arguments])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


class Clock:
    """In a GPU's place: each plan's time is what ``times`` has for its knobs."""

    def __init__(self, monkeypatch, times):
        self.times, self.knobs, self.captured = times, {}, []
        monkeypatch.setattr(_tuned, "install", self.install)
        monkeypatch.setattr(tune, "captured", self.capture)
        monkeypatch.setattr(tune, "time_graphs", self.time)
        monkeypatch.setattr(_C, "pack_knobs", lambda entries: entries[-1][-1] if entries else b"")

    def install(self, knobs):
        self.knobs = knobs

    def capture(self, call, pool=None):
        call()
        self.captured.append((self.knobs, pool))
        return type("Graph", (), {"pool": lambda _: "pool", "knobs": self.knobs})()

    def time(self, graphs, replays):
        return {name: self.times(graph.knobs) for name, graph in graphs.items()}


@pytest.mark.parametrize("op", tune.OPS)
def test_the_fastest_plan_wins(op, monkeypatch):
    case = tune.case_of(op, H200, 24, 64)
    for _, name, dtype, call in tune.jobs([case], H200, ["bf16"]):
        tried = [knobs for knobs, _ in tune.candidates(case, name, H200, torch.bfloat16)]
        fastest = _C.Knobs(**tried[-1])
        clock = Clock(
            monkeypatch, lambda knobs, best=fastest: Timing(9, 8, 9.5) if knobs == best else Timing(10, 9.6, 11)
        )
        made = tune.measure(case, name, dtype, call, H200, device="cpu")
        assert not made.failed and made.wins and made.knobs == tried[-1] and made.built_in.median == 10
        assert clock.captured == [(_C.Knobs(), None), *((_C.Knobs(**knobs), "pool") for knobs in tried)]


@pytest.mark.parametrize(
    ("best", "wins"), [(Timing(9.9, 9.7, 10.1), False), (Timing(9, 8, 9.7), False), (Timing(9, 8, 9.5), True)]
)
def test_a_winner_is_faster_by_more_than_the_spread(best, wins, monkeypatch):
    case = tune.Case("swiglu", Size(24, 64))
    _, name, dtype, call = next(tune.jobs([case], H200, ["bf16"]))
    Clock(monkeypatch, lambda knobs: Timing(10, 9.6, 11) if knobs == _C.Knobs() else best)
    assert tune.measure(case, name, dtype, call, H200, device="cpu").wins == wins


def test_what_does_not_fit_is_said_and_the_others_are_measured(monkeypatch):
    case = tune.Case("softmax", Size(24, 64))
    _, name, dtype, call = next(tune.jobs([case], H200, ["bf16"]))
    Clock(monkeypatch, lambda knobs: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    assert tune.measure(case, name, dtype, call, H200, device="cpu").failed == "OutOfMemoryError: no room"


def result(name, built_in, best, **fields):
    call = replace(CALL, kernel=name)
    return tune.Result(
        name, "8192x4096", "bf16", call, 9, Timing(built_in, 0, 0), Timing(best, 0, 0), {"threads": 256}, **fields
    )


RESULTS = [
    result("rms_norm", 40.0, 32.0, wins=True),
    result("rms_norm_backward", 50.0, 49.0),
    tune.Result("softmax", "1x1", "bf16", CALL, 3, failed="OutOfMemoryError: no"),
]


def test_the_table():
    lines = tune.table(RESULTS).splitlines()
    assert lines[2:] == [
        "| rms_norm | 8192x4096 | bf16 | 40.0 | 32.0 | 1.250 | threads 256 |",
        "| rms_norm_backward | 8192x4096 | bf16 | 50.0 | 49.0 | 1.020 | none |",
        "| softmax | 1x1 | bf16 | OutOfMemoryError: no | | | |",
    ]
    assert len({line.count("|") for line in lines}) == 1
    assert "another plan won 1 times; 1 could not be measured" in tune.summary(RESULTS)
    assert "25.0 %" in tune.summary(RESULTS)


def test_only_winners_are_kept(file):
    tune.keep(RESULTS, "H200", "NVIDIA 1.2")
    (entry,) = _tuned.read(file)
    assert entry == replace(ENTRY, built_in_us=40.0, tuned_us=32.0)


@pytest.mark.cuda
def test_tuning_on_this_gpu(file, capsys):
    """What wins is in use in the next process, and only there."""
    before = _tuned.in_use()
    assert doctor.main(["tune", "--shapes", "2048x4096", "--ops", "rms_norm", "softmax", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["op"] for r in found["results"]] == ["rms_norm", "rms_norm_backward", "softmax", "softmax_backward"]
    assert all(r["built_in"]["median"] > 0 and r["best"]["median"] > 0 and not r["failed"] for r in found["results"])
    kept = _tuned.read(file)
    assert len(kept) == sum(r["wins"] for r in found["results"]) and _tuned.in_use() == before
    script = "from liger_ext import _tuned; print(_tuned.in_use())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(kept)


@pytest.mark.cuda
def test_a_candidate_is_measured_with_its_own_plan(monkeypatch):
    """The graph of each is captured while its knobs are forced."""
    case = tune.Case("swiglu", Size(8192, 4096))
    profile = _devices.running_profile(0)
    _, name, dtype, call = next(iter(tune.jobs([case], profile, ["bf16"])))
    monkeypatch.setattr(tune, "candidates", lambda *_: [({"block": 64}, None)])
    seen = []
    forced = _tuned.forced
    monkeypatch.setattr(_tuned, "forced", lambda **knobs: seen.append(knobs) or forced(**knobs))
    with tune.on_a_stream_of_its_own("cuda"):
        made = tune.measure(case, name, dtype, call, profile)
    assert not made.failed and made.knobs == {"block": 64} and {"block": 64} in seen and made.best.median > 0
