"""Tests of the benchmark of training steps: exact counts, the search for the longest context, and each option on models
that train in milliseconds, in the same child processes as a real run."""

import itertools
import json
import types

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import __main__ as cli
from benchmarks import children, context, context_one, footprint, models, saved, step_time, suite, train
from liger_ext.comparison import child

CPU = torch.device("cpu")
SIZES = dict(hidden_size=32, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
TINY = dict(SIZES, num_hidden_layers=2, tie_word_embeddings=True)
BATCH, SEQ = 2, 16


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(train, "MODELS_CPU", {"tiny a": (TINY, BATCH, SEQ), "tiny b": (TINY, 1, SEQ)})
    monkeypatch.setattr(train, "STEPS", 4)


def run(tmp_path, *arguments, name="train"):
    cli.main(["train", "--device", "cpu", "--out", str(tmp_path), *arguments])
    lines = (tmp_path / f"{name}_cpu_fp32.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], (tmp_path / f"{name}_cpu_fp32.md").read_text()


# Saved tensors of the forward ---------------------------------------------------------------------------------------


def counted(provider, dtype=torch.float32, **changes):
    config = TINY | changes
    model = models.providers("cpu")[provider](models.build(config, CPU, dtype))
    tokens = torch.randint(config["vocab_size"], (BATCH, SEQ))
    forward = lambda: model(input_ids=tokens, labels=tokens).loss  # noqa: E731
    kinds = saved.saved_by_kind(model, forward)
    assert sum(kinds.values()) == saved.saved_bytes(model, forward)
    return kinds


@pytest.mark.parametrize("provider", ["Hugging Face", "liger_ext"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_kept_bytes_by_kind(provider, dtype, tied):
    """Each kind that every implementation saves has the size of its tensors, and "other" is small."""
    layers = TINY["num_hidden_layers"]
    kinds = counted(provider, dtype, tie_word_embeddings=tied)
    hidden, mlp = (BATCH * SEQ * TINY[of] * dtype.itemsize for of in ("hidden_size", "intermediate_size"))
    stock = provider == "Hugging Face"
    assert list(kinds) == list(saved.KINDS)
    assert kinds["gate and up"] == 2 * layers * mlp
    # Keys and values have two heads each, queries four; older versions of transformers repeat the two heads to four.
    assert kinds["q, k, v"] in (layers * 2 * hidden, layers * 3 * hidden)
    if stock:
        assert kinds["act(gate)"] == kinds["h"] == layers * mlp
        assert kinds["norm outputs"] == (2 * layers + 1) * hidden
    logits = BATCH * SEQ * TINY["vocab_size"]
    assert kinds["logits"] <= (4 + dtype.itemsize if stock else dtype.itemsize) * logits * 1.1
    outputs = kinds["attention output"] / (hidden * layers)
    assert 1 <= outputs <= 1.6 or 2 <= outputs <= 2.6  # with logsumexps; a contiguous copy in older versions
    assert kinds["other"] < hidden


def test_kept_bytes_grow_with_the_layers_and_not_with_the_parameters():
    two, three = counted("liger_ext"), counted("liger_ext", num_hidden_layers=3)
    assert two["gate and up"] * 3 == three["gate and up"] * 2
    assert three["logits"] == two["logits"]


def test_memory_that_is_used_again_is_not_taken_for_what_was_there_before():
    x = torch.randn(64, 64)
    first = saved._storage(x)
    address = x.untyped_storage().data_ptr()
    del x
    others = [torch.randn(64, 64) for _ in range(4)]
    assert all(saved._storage(t) != first for t in others)
    assert address  # which one of the others may reuse


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bx_coopA_NTN", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("aten::addmm", "matmul"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "elementwise"),
        ("aten::silu_backward", "elementwise"),
        ("liger::gpu::entry<NormForwardRegisters>", "fused"),
        ("liger_ext::swiglu", "fused"),
        ("triton_red_fused_add_mul_3", "fused"),
        ("_rms_norm_forward_kernel", "fused"),
        ("at::native::indexSelectLargeIndex", "other"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert step_time.kernel_kind(kernel) == kind


def test_idle_time_is_the_sum_of_the_gaps():
    assert step_time.idle_time([]) == 0
    assert step_time.idle_time([(5, 6), (0, 1), (2, 4)]) == 2
    assert step_time.idle_time([(0, 9), (1, 2), (10, 11)]) == 1  # the second overlaps the first


def test_time_of_a_trace():
    def event(name, start, end, device=torch.autograd.DeviceType.CUDA, **more):
        return types.SimpleNamespace(
            name=name, time_range=types.SimpleNamespace(start=start, end=end), device_type=device, **more
        )

    events = [
        event("cudaLaunchKernel", 0, 9000, torch.autograd.DeviceType.CPU),
        event("Optimizer.step#AdamW.step", 0, 9000, is_user_annotation=True),
        event("nvjet_tst", 1000, 3000, is_user_annotation=False),
        event("nvjet_tst", 4000, 5000),
        event("liger::gpu::entry<Glu>", 5000, 5500),
    ]
    assert step_time.kernel_times(events) == {"matmul": 3.0, "fused": 0.5, "idle": 1.0}


def test_time_by_kind_of_a_step():
    x = torch.randn(64, 64)
    spent = step_time.time_by_kind(lambda: torch.nn.functional.silu(x @ x), "cpu")
    assert spent["matmul"] > 0 and spent["elementwise"] > 0 and spent["attention"] == 0 and "idle" not in spent


# The memory model and the search -------------------------------------------------------------------------------------


def test_footprint():
    of = footprint.Footprint(parameters=10, gradients=10, states=20, saved=30, workspace=5, tied=4)
    assert of.peak == 10 + 20 + 30 + 5
    of.saved = 1
    assert of.peak == 10 + 20 + 10 + 4
    of.workspace = None
    assert of.peak is None
    parameters = footprint.count_parameters(TINY)
    assert parameters == sum(p.numel() for p in models.build(TINY, CPU, torch.float32).parameters())
    each, head = footprint.checkpointed_bytes_per_token(TINY, torch.bfloat16), TINY["vocab_size"] * 32
    assert each == 2 * (2 * 32 + 6 * 80)
    begins, ends = 2 * (3 * parameters + head), 8 * parameters
    assert begins < ends  # the peak of a short sequence is at the end
    assert footprint.longest_context(TINY, torch.bfloat16, ends + 10 * 2 * 6 * 80) == 10
    assert footprint.longest_context(TINY, torch.bfloat16, begins + 10_000 * each) == 10_000
    assert footprint.longest_context(TINY, torch.bfloat16, begins - 1) == 0


@pytest.mark.parametrize("guess", [0, 1, 7, 150, 199, 200, 201, 300, 10_000])
@pytest.mark.parametrize("short", [0, 5])  # units within the limit that the allocator cannot provide
@pytest.mark.parametrize("steeper", [0, 50, 300])  # additional bytes per unit from 40 on
def test_the_search_finds_the_largest(guess, short, steeper):
    limit, asked = 60_000 + 400 * 200 + 399, []

    def peak(number):
        return 60_000 + 400 * number + steeper * max(0, number - 40)

    def trial(number):
        assert number not in asked and number >= 1
        asked.append(number)
        return peak(number) if peak(number) <= limit - 400 * short else None

    found, sure = context_one.bisect(trial, limit, guess, most=40)
    assert sure and peak(found) <= limit - 400 * short < peak(found + 1)
    if 100 <= guess <= 300:
        assert len(asked) <= (12 if short or steeper else 3)


def test_a_search_that_may_not_go_on_says_so():
    assert context_one.bisect(lambda n: 100 * n, 10**6, 40, most=2) == (24, False)
    assert context_one.bisect(lambda n: None, 10**6, 40) == (0, True)
    assert context_one.bisect(lambda n: None if n > 1 else 5, 10**6, 40) == (1, True)


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_steps(small, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(train, "CURVE_STEPS", 6)
    records, table = run(tmp_path, "--curves", "--providers", "liger_ext", "--models", "Tiny A")
    assert [(r["model"], r["provider"]) for r in records] == [("tiny a", "Hugging Face"), ("tiny a", "liger_ext")]
    stock, ours = records
    weights = footprint.count_parameters(TINY) * 4 / 2**20
    for record in records:
        assert record["error"] == ""
        assert len(record["losses"]) == 6 and record["step"]["median"] > 0
        parts = record["parts_mib"]
        assert parts["parameters"] == parts["gradients"] == pytest.approx(weights)
        assert parts["states"] == pytest.approx(2 * weights, rel=1e-3)  # plus the step counters
        assert parts["saved"] == pytest.approx(sum(record["saved_mib"].values()))
        assert record["explained_mib"] >= parts["parameters"] + parts["states"] + parts["gradients"]
        assert record["time_ms"]["matmul"] > 0
    assert ours["losses"] != stock["losses"] and stock["curve"] is None
    largest = max(abs(a - b) for a, b in zip(stock["losses"], ours["losses"], strict=True))
    assert ours["curve"]["difference"] == largest < 1e-4
    assert ours["parts_mib"]["saved"] < stock["parts_mib"]["saved"]
    assert stock["time_ms"]["fused"] == 0 < ours["time_ms"]["fused"]
    assert "passes" in table and "FAILS" not in table and table.count("| tiny a | liger_ext |") == 2
    pictures = {"train_cpu_fp32.png", "train_kept_cpu_fp32.png", "train_curves_cpu_fp32.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == pictures
    assert "tiny a, liger_ext, " in capfd.readouterr().err  # progress


@pytest.fixture
def fake_answers(monkeypatch):
    """Replaces child processes: each request receives the next answer, an error text or a result with these losses."""

    def use(*answers):
        result = dict(step=dict(median=1.0, low=1.0, high=1.0), peak=1, time={}, saved=None)
        result["footprint"] = dict(parameters=1, gradients=1, states=2, saved=1, workspace=None, tied=0)

        def ask_each(requests, ahead):
            for _, answer in zip(requests, itertools.cycle(answers), strict=False):
                yield {"error": answer} if isinstance(answer, str) else {"result": result | {"losses": answer}}

        monkeypatch.setattr(train, "ask_each", ask_each)

    return use


def test_a_curve_that_differs_ends_with_status_1(small, tmp_path, fake_answers, capsys):
    fake_answers([5.0, 4.0], [5.0, 4.1], [5.0, float("nan")])
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--curves", "--models", "tiny a", "--providers", "liger_ext", "torch.compile")
    assert ended.value.code == 1
    assert (tmp_path / "train_cpu_fp32.md").read_text().count("FAILS: ") == 2


def test_a_provider_that_fails_does_not_end_the_run(small, tmp_path, fake_answers):
    fake_answers("OutOfMemoryError: too large", [5.0, 4.0])
    records, table = run(tmp_path, "--providers", "Hugging Face", "liger_ext")
    assert [r["error"] for r in records] == ["OutOfMemoryError: too large", ""] * 2
    assert all(r["curve"] is None for r in records)
    assert table.count("fails: OutOfMemoryError: too large") == 2
    fake_answers("all fail")
    assert len(run(tmp_path, "--curves")[0]) == 2 * len(models.providers("cpu"))  # without results to draw or compare


@pytest.mark.slow
def test_a_child_that_dies_is_an_error_and_none_is_left(monkeypatch, capfd):
    started = []

    class Remembered(children.Child):
        def __init__(self):
            super().__init__()
            started.append(self._process)

    monkeypatch.setattr(children, "Child", Remembered)
    requests = [("no task", {"task": "none"}), ("never reached", {})]
    answers = children.ask_each(requests, ahead=True)
    assert next(answers)["error"] == "KeyError: 'none'"
    answers.close()
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    child = children.Child()
    child._process.kill()
    assert child.ask("killed", {})["error"] == "ended with status -9"
    child.end()


@pytest.mark.slow
def test_the_longest_context(tmp_path, monkeypatch, capfd):
    wide = TINY | {"intermediate_size": 8192, "num_hidden_layers": 1}  # much memory and little time per token
    monkeypatch.setattr(context, "CONTEXT_CPU", {"wide": wide, "not asked for": TINY})
    monkeypatch.setattr(context, "UNIT_CPU", 64)
    (record,), table = run(tmp_path, "--context", "--limit-gib", "0.3", "--providers", "liger_ext", name="context")
    assert record["error"] == "" and record["limit_gib"] == pytest.approx(0.3)
    assert record["model"] == "wide" and record["sure"]
    assert 64 <= record["tokens"] <= 1.2 * record["predicted"]
    assert record["tokens"] % 64 == 0 and f"| {record['tokens']:,} |" in table
    for tokens, peak in record["trials"]:
        assert (peak is not None and peak <= 0.3) == (tokens <= record["tokens"])
    assert "tokens: " in capfd.readouterr().err


def test_a_provider_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match="unknown provider Lyger; expected one of Hugging Face, liger_ext"):
        run(tmp_path, "--providers", "Lyger")


@pytest.mark.slow
def test_a_compiled_provider(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "MODELS_CPU", {"tiny a": (TINY | {"num_hidden_layers": 1}, BATCH, SEQ)})
    (record,), _ = run(tmp_path, "--models", "tiny a", "--providers", "liger_ext + torch.compile")
    assert record["provider"] == "liger_ext + torch.compile"
    assert record["error"] == "" and record["saved_mib"] is None and record["parts_mib"]["saved"] > 0


def test_memory_levels_run_only_where_they_are_asked_for(monkeypatch):
    class Levels:
        def __call__(self, model, memory="auto"):
            self.asked = memory

    levels = Levels()
    monkeypatch.setattr(models, "apply_liger_kernel_to_instance", levels)
    settings = suite.Settings("cpu", "fp32", ("liger_ext memory=low",))
    assert train.chosen_providers(settings) == ["liger_ext memory=low"]
    models.on_request("cpu")["liger_ext memory=low"](torch.nn.Identity())
    assert levels.asked == "low"
    assert not any("memory" in name for name in train.chosen_providers(suite.Settings("cpu", "fp32")))


def test_the_cache_is_as_users_have_it():
    assert models.build(TINY, CPU, torch.float32).config.use_cache == LlamaConfig().use_cache


def test_warm_up_of_the_learning_rate():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=7.0)
    rates = []
    for step in range(7):
        child.warm_up(optimizer, 1.0, step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])
