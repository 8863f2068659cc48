"""Tests of the report of `python -m liger_ext`, and of `python -m liger_ext doctor`: the diagnosis, device profiles,
and the plans and memory of a loss."""

import importlib.metadata
import json
import math
import signal
import subprocess
import sys

import pytest
import torch
from cases import python
from op_plans import OPS, WITHOUT_RECORD

import liger_ext
from liger_ext import _C, _devices, _fit, _llama, _load, _loss_report, doctor, functional
from liger_ext.ops._loss_arguments import FusedLossCall
from liger_ext.ops._loss_devices import profile_index
from liger_ext.ops._loss_plan import Choice, Plan, choose


@pytest.fixture
def quick(monkeypatch):
    """Restricts the self-test to one dtype."""
    from liger_ext import testing

    every = testing.examples
    monkeypatch.setattr(testing, "examples", lambda device: every(device, (torch.float32,)))


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"liger_ext {liger_ext.__version__}\n"


def test_report_names_versions_libraries_and_devices(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    versions = torch.__version__, liger_ext.__version__, importlib.metadata.version("transformers")
    assert all(fact in printed for fact in (*versions, "libliger_ext_cpu.so"))
    assert [heading for heading, _ in doctor.report()] == [
        "liger_ext", "torch", "transformers", "CPU library", "GPU library", "tuned plans", "driver", "CPU", "GPU",
    ]  # fmt: skip


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


# The command ----------------------------------------------------------------------------------------------------------


def test_a_healthy_machine_is_ok(capsys):
    assert doctor.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("OK") and "PROBLEM" not in printed
    for op in ("rms_norm", "rope", "fused_linear_cross_entropy"):
        row = next(line for line in printed.splitlines() if line.split()[:1] == [op] and "0." in line)
        assert all(0 < float(ratio) <= 1 for ratio in row.split()[1:])


def test_as_a_command():
    """The command works in its own process."""
    assert "NormBackwardRegisters" in python("-m", "liger_ext", "doctor", "--profile", "mi300x")


def wrong_norm(x, weight, **options):
    return right_norm(x, weight, **options) * 1.01


right_norm = functional.rms_norm


def test_an_op_with_wrong_results_is_found(quick, monkeypatch, capsys):
    monkeypatch.setattr(functional, "rms_norm", wrong_norm)
    assert doctor.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: rms_norm in float32 on cpu gives wrong results" in printed and "TO DO" in printed
    assert printed.rstrip().endswith("NOT OK (exit status 1): an op gives wrong results, or fails")


def test_an_op_that_raises_is_found_and_the_others_run(quick, monkeypatch, capsys):
    def broken(**arguments):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(functional, "swiglu", broken)
    assert doctor.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == 1 and len(found["problems"]) == len({line["device"] for line in found["self_test"]})
    assert "swiglu in float32 on cpu raised RuntimeError: no kernel" in found["problems"][0]["what"]
    assert {line["op"] for line in found["self_test"] if not line["passed"]} == {"swiglu"}
    assert doctor.main(["doctor", "--json", "--profile", "H100"]) == 0
    planned = json.loads(capsys.readouterr().out)["plans"]
    raised = {line["op"]: line["raised"] for line in planned if "raised" in line}
    assert raised == dict.fromkeys(("swiglu", "swiglu_backward"), "RuntimeError: no kernel") and len(planned) > 9
    assert doctor.main(["doctor", "--profile", "H100"]) == 0
    assert "swiglu_backward                     raised RuntimeError: no kernel" in capsys.readouterr().out


def test_json_of_a_wrong_result_is_json(quick, monkeypatch, capsys):
    monkeypatch.setattr(
        functional, "rms_norm", lambda x, weight, **options: right_norm(x, weight, **options) * torch.nan
    )
    assert doctor.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert any(line["ratio"] == "inf" for line in found["self_test"])


def a_device(code, profile=None):
    return _devices.Device(0, "Some GPU", "9.0", code, 2**36, 2**35, profile)


def test_a_gpu_that_the_library_does_not_serve(quick, monkeypatch, capsys):
    monkeypatch.setattr(_devices, "devices", lambda: [a_device("nothing")])
    monkeypatch.setattr(doctor._load, "gpu_available", lambda: True)
    monkeypatch.setattr(_fit, "misfit_reason", lambda *arguments: f"no code for {arguments[-1]}")
    assert doctor.main(["doctor"]) == 3
    assert "PROBLEM: GPU 0 (Some GPU, 9.0) is not used\n  TO DO: no code for 9.0" in capsys.readouterr().out


def test_a_driver_beside_a_torch_for_the_cpu(quick, monkeypatch, capsys):
    machine = _fit.Machine("2.13.0+cpu", None, None, "NVIDIA 580.95")
    monkeypatch.setattr(_fit, "this_machine", lambda: machine)
    monkeypatch.setattr(_devices, "devices", list)
    assert doctor.main(["doctor"]) == 3
    assert "there is a GPU driver (NVIDIA 580.95), and torch does not use GPUs" in capsys.readouterr().out


def test_a_gpu_without_the_gpu_library(quick, monkeypatch, capsys):
    monkeypatch.setattr(_devices, "devices", lambda: [a_device("nothing")])
    monkeypatch.setattr(doctor._load, "gpu_available", lambda: False)
    assert doctor.main(["doctor"]) == 3
    assert "GPU library is not loaded" in capsys.readouterr().out


def test_transformers_that_cannot_be_patched(quick, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_transformers", lambda: "4.40.0: too old, patching a model needs 4.51.3 or newer")
    assert doctor.main(["doctor"]) == 4
    assert "pip install 'transformers>=4.51.3,<6'" in capsys.readouterr().out


def test_a_reader_that_leaves():
    """A closed pipe, as after `| head`, causes no traceback."""
    command = [sys.executable, "-m", "liger_ext", "doctor", "--profile", "h100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == -signal.SIGPIPE


@pytest.mark.parametrize("profile", [device.name for device in _C.profiles()])
def test_every_profile_can_be_shown(profile, capsys):
    assert doctor.main(["doctor", "--profile", profile]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{profile}: {_C.profile(profile).architecture}, ") and "Self-test" not in printed
    assert doctor.main(["doctor", "--profile", profile, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ops = set(OPS) - {*WITHOUT_RECORD}
    assert found["profile"] == profile and {line["op"] for line in found["plans"]} == ops


def test_what_a_profile_says(monkeypatch, capsys):
    """`doctor --profile` describes the device, and whether this build covers it."""
    library = _fit.BuildFacts("0.1.0", "2.11.0", "cuda", "CUDA 13.0.88", "9.0a 7.5+PTX")
    monkeypatch.setattr(_load, "gpu_facts", {"cuda": library})
    expected = {
        "mi250x": ("gfx90a, warps of 64, 110 compute units, native bf16", "NOT covered", "LIGER_EXT_HIP_ARCHS=gfx90a "),
        "rx7900xt": ("gfx1100, warps of 32, 42 pairs of compute units, native bf16", "LIGER_EXT_GPU=hip ", "64 KiB"),
        "t4": (
            "7.5, warps of 32, 40 SMs, no native bf16",
            "covered by this build as PTX",
            "NormBackwardRegisters 80 x",
        ),
        "h200": ("9.0, warps of 32, 132 SMs, native bf16", "covered by this build\n", "8,192 tokens take"),
    }
    for name, words in expected.items():
        assert doctor.main(["doctor", "--profile", name]) == 0
        printed = capsys.readouterr().out
        assert [word for word in words if word not in printed] == [], printed


@pytest.mark.parametrize("reference", [profile.name for profile in _C.profiles()])
def test_the_data_sheet_of_a_gpu_of_another_size(reference):
    """A GPU that differs from its nearest reference GPU in size, such as an RTX 3090, has scaled rates."""
    profile = _C.profile(reference)
    profile.multiprocessors -= 6
    device = _devices.Device(0, profile.name, profile.architecture, "PTX", 2**36, 2**35, profile)
    assert f"rates for the fused loss, from the data sheet of {reference}: " in doctor._gpu_lines([device])[1]


def test_levels_of_memory():
    """A lower level never allocates more memory, and the example's tokens fit at each level."""
    levels = list(_llama.tokens_at_each_level(_C.profile("A100"), 40 << 30).values())
    assert all(0 < found["bytes"] < 15 << 30 for found in levels)
    fast, auto, *_ = levels
    assert auto["bytes"] < 0.8 * fast["bytes"]
    assert [found["tokens"] for found in levels] == sorted(found["tokens"] for found in levels)
    assert all(found["tokens"] > _llama.TOKENS for found in levels)


def test_an_unknown_profile(capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["doctor", "--profile", "mi9000"])
    assert stopped.value.code == 2 and "known: V100, T4" in capsys.readouterr().err


# The fused loss's plans -----------------------------------------------------------------------------------------------


def loss_report(capsys, *arguments):
    assert doctor.main(["doctor", "--loss", *arguments]) == 0
    return capsys.readouterr().out


def test_levels_of_a_loss(capsys):
    """The printed values are those of the chosen plans, and the front contains the levels' plans."""
    arguments = "8192", "2304", "256000", "--profile", "h100"
    found = json.loads(loss_report(capsys, *arguments, "--json"))
    assert (found["device"], found["rates_measured"]) == ("H100", True)
    call = FusedLossCall.uniform(8192, 2304, 256_000, torch.bfloat16, profile_index(_C.profile("H100")))
    for level, facts in found["levels"].items():
        choice = choose(call, level)
        assert facts in found["front"] and (facts["bytes"], facts["ms"]) == (choice.bytes, choice.seconds * 1e3)
    assert [facts["bytes"] for facts in found["front"]] == sorted(facts["bytes"] for facts in found["front"])
    shares = [facts["share"] for facts in found["front"]]
    assert shares == sorted(shares) and 0.5 < shares[0] < 0.9 < shares[-1] < 1
    assert found["matmuls_ms"] == pytest.approx(found["front"][0]["ms"] * shares[0])
    printed = loss_report(capsys, *arguments)
    assert "8,192 rows, hidden size 2,304, vocabulary 256,000, bf16, reduction 'mean'" in printed
    for facts in (*found["levels"].values(), *found["front"]):
        assert f"{math.ceil(facts['bytes'] / 2**20):,}" in printed and facts["plan"] in printed
    assert printed.rstrip().endswith("Times are estimates; the device's rates were measured on a GPU of this kind.")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(int(_C.Gradients.deferred), 8192, 5000), "all gradients of logits stored"),
        (
            Plan(int(_C.Gradients.overlaid), 8192, 5000),
            "all gradients of logits stored, 50 % of them in the memory that becomes dweight",
        ),
        (
            Plan(int(_C.Gradients.overlaid), 8192, 2496),
            "50 % of the gradients of logits stored in the memory that becomes dweight, the rest recomputed",
        ),
        (
            Plan(int(_C.Gradients.overlaid), 8192, 3776),
            "76 % of the gradients of logits stored, the rest recomputed",
        ),
        (Plan(int(_C.Gradients.accumulated), 3000, 5000), "sums over chunks of 2,816 rows"),
        (Plan(int(_C.Gradients.recomputed), 2048, 5000), "chunks of 2,048 rows; logits are computed twice"),
        (
            Plan(int(_C.Gradients.accumulated), 2048, 1024),
            "sums over chunks of 2,048 rows and 1,024 classes; logits are computed twice",
        ),
    ],
)
def test_plans_in_words(plan, words):
    call = FusedLossCall.uniform(8192, 4096, 5000, torch.bfloat16, profile_index(_C.profile("H100")))
    twice = "twice" in words
    assert _loss_report.describe(call, Choice(plan, 1, 1.0, twice)) == words


def test_a_loss_here_and_with_options(monkeypatch, capsys):
    """Without a GPU the estimate is for the CPU, else for the first usable GPU."""
    monkeypatch.setattr(_devices, "devices", list)
    assert "two server cores" in loss_report(capsys, "64", "32", "512")
    devices = [a_device("nothing", _C.profile("T4")), a_device("PTX", _C.profile("A100"))]
    monkeypatch.setattr(_devices, "devices", lambda: devices)
    narrow, wide = (
        json.loads(loss_report(capsys, "8192", "2048", "32000", "--dtype", d, "--json")) for d in ("fp16", "fp32")
    )
    assert narrow["device"] == wide["device"] == "A100" and not narrow["rates_measured"]
    assert wide["matmuls_ms"] > 5 * narrow["matmuls_ms"]
    assert "come from a data sheet" in (rows := loss_report(capsys, "8192", "2048", "32000", "--reduction", "none"))
    assert "sums over" not in rows
    mean, summed = (loss_report(capsys, "8", "64", "100", "--reduction", name).splitlines() for name in ("mean", "sum"))
    assert mean[1:] == summed[1:]
    large = loss_report(capsys, "99999999", "9999999", "1000").splitlines()
    (least,) = (line.split() for line in large if "memory='min'" in line)
    assert all(float(column.replace(",", "")) > 0 for column in least[1:4])  # columns stay separated


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0", "64", "100"], "ROWS is 0, expected 1 to 1,000,000,000"),
        (["8", "-1", "100"], "HIDDEN is -1, expected"),
        (["8", "64", "9999999999"], "VOCAB is 9999999999, expected"),
        (["8", "64", "many"], "invalid int value: 'many'"),
        (["8", "64"], "expected 3 arguments"),
        (["8", "64", "100", "--profile", "mi9000"], "known: V100, T4"),
        (["8", "64", "100", "--profile", ""], "known: V100, T4"),
        (["1000000000", "1000000", "1000000", "--profile", "h100"], "more blocks than one launch can have"),
    ],
)
def test_a_loss_that_cannot_be(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["doctor", "--loss", *arguments])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_options_of_a_loss_without_a_loss(capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["doctor", "--reduction", "none"])
    assert stopped.value.code == 2 and "--loss ROWS HIDDEN VOCAB, which is missing" in capsys.readouterr().err


# The most tokens of the fused loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [1 << 20, 1 << 31, 1 << 33, 1 << 36, 3 << 36])
@pytest.mark.parametrize("memory", ["fast", "auto", "low", "min"])
def test_most_tokens(free, memory):
    call = FusedLossCall.uniform(1, _llama.HIDDEN, _llama.VOCAB, torch.bfloat16, profile_index(_C.profile("H200")))
    most = _llama.most_tokens(call, memory, free)
    assert most == 0 or _llama.fused_loss_bytes(call.resized(rows=most), memory) <= free
    assert _llama.fused_loss_bytes(call.resized(rows=most + 1), memory) > free


@pytest.mark.cuda
@pytest.mark.parametrize("memory", ["fast", "auto", "low", "min"])
@pytest.mark.parametrize("tokens", [400, 1024, 4096])
def test_bytes_of_the_fused_loss_are_what_it_takes(tokens, memory):
    """The predicted bytes equal the allocator's peak of a step: with one chunk, overlaid, and in chunks."""
    hidden, vocab, dtype = 512, 32_000, torch.bfloat16
    call = FusedLossCall.uniform(tokens, hidden, vocab, dtype, profile_index(_devices.running_profile(0)))

    def step():
        x, weight = (torch.randn(n, hidden, device="cuda").to(dtype).requires_grad_() for n in (tokens, vocab))
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        functional.fused_linear_cross_entropy(x, weight, target, memory=memory).backward()

    step()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken == pytest.approx(_llama.fused_loss_bytes(call, memory), rel=0.03)


@pytest.mark.cuda
def test_the_running_device_is_what_torch_says():
    for device in _devices.devices():
        properties = torch.cuda.get_device_properties(device.index)
        assert (
            device.profile.name == properties.name
            and device.profile.multiprocessors == properties.multi_processor_count
        )
        assert device.profile.architecture == device.architecture and device.profile.warp == properties.warp_size
