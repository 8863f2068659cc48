"""TRL's trainers with linear_log_probs as their loss head: losses, metrics and parameters equal those without it."""

import contextlib
import copy
import warnings

import pytest
import torch
from cases import RecordCalls
from llama_models import build, one_thread  # noqa: F401
from test_trl import TEXTS, ignores_trl_warnings, tokenizer, trained  # noqa: F401

import liger_ext

trl = pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
install = pytest.importorskip("liger_ext.trl").install
utils = pytest.importorskip("trl.trainer.utils")
STOCK = utils._ChunkedLogProbFunction


def rewards(completions, **_):
    return [float(len(text) % 7) for text in completions]


def lora():
    return pytest.importorskip("peft").LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])


def halves(text, other):
    return {"prompt": text[: len(text) // 2], "chosen": text[len(text) // 2 :], "rejected": other[len(other) // 3 :]}


def dataset_rows(kind):
    others = TEXTS[1:] + TEXTS[:1]
    pairs = [halves(text, other) for text, other in zip(TEXTS, others, strict=True)]
    if kind == "SFT":
        return [{"text": text} for text in TEXTS]
    if kind == "KTO":
        judged = [("chosen", True), ("rejected", False)]
        return [{"prompt": p["prompt"], "completion": p[name], "label": label} for p in pairs for name, label in judged]
    return pairs if kind == "DPO" else [{"prompt": p["prompt"]} for p in pairs]


def config(kind, folder, **options):
    made = getattr(trl, f"{kind}Config")
    given = dict(
        output_dir=str(folder), use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        max_steps=5, per_device_train_batch_size=4, learning_rate=1e-3, adam_epsilon=1e-4, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
    )  # fmt: skip
    if kind in ("GRPO", "RLOO"):
        given.update(num_generations=4, max_completion_length=8)
    return made(**{**given, **options})


@pytest.fixture
def run(tmp_path, tokenizer):  # noqa: F811
    reset = accelerate.state.AcceleratorState._reset_state

    def run(kind, model, ours, peft=False, **options):
        reset(reset_partial_state=True)
        torch.manual_seed(7)
        model.save_pretrained(tmp_path / "reference")  # trainers load it as their reference
        model.config._name_or_path = str(tmp_path / "reference")
        data = datasets.Dataset.from_list(dataset_rows(kind))
        given = {"reward_funcs": rewards} if kind in ("GRPO", "RLOO") else {}
        given.update({"peft_config": lora()} if peft else {})
        with install() if ours else contextlib.nullcontext(), RecordCalls() as calls:
            trainer = getattr(trl, f"{kind}Trainer")(
                model, args=config(kind, tmp_path, **options), train_dataset=data, processing_class=tokenizer, **given
            )
            start = trained(trainer.model)
            trainer.train()
        logged = [line for line in trainer.state.log_history if "loss" in line]
        return logged, start, trained(trainer.model), set(calls.names)

    yield run
    reset(reset_partial_state=True)


TRAINERS = {
    "SFT": ("SFT", {}),
    "DPO": ("DPO", {}),
    "DPO, adapters": ("DPO", {"peft": True}),
    "KTO": ("KTO", {}),
    "GRPO": ("GRPO", {"beta": 0.04}),
    "GRPO, adapters": ("GRPO", {"peft": True}),
    "GRPO, entropy": ("GRPO", {"entropy_coef": 0.1, "temperature": 0.9}),
    "RLOO": ("RLOO", {}),
}


@ignores_trl_warnings
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer(run, device, name):
    kind, options = TRAINERS[name]
    stock = build(device=device).train()
    model = copy.deepcopy(stock)
    found, expected = run(kind, model, True, **options), run(kind, stock, False, **options)
    assert "fused_linear_cross_entropy" in found[3] and "fused_linear_cross_entropy" not in expected[3]
    assert len(expected[0]) == 5 and torch.equal(found[1], expected[1])
    ignored = {"epoch", "step_time", "train_runtime"}
    for ours, theirs in zip(found[0], expected[0], strict=True):
        for metric in theirs.keys() - ignored:
            if isinstance(theirs[metric], float) and "time" not in metric:
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-5), metric
    moved = (expected[2] - expected[1]).norm()
    assert moved > 0 and (found[2] - expected[2]).norm() <= 1e-3 * moved


def test_installed_and_reverted():
    first = install()
    assert utils._ChunkedLogProbFunction is not STOCK
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = install()
    second.revert()
    assert utils._ChunkedLogProbFunction is not STOCK, "reverting the second call must change nothing"
    first.revert()
    first.revert()
    assert utils._ChunkedLogProbFunction is STOCK


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(utils, "_ChunkedLogProbFunction", object()), "was replaced by <object"),
        (lambda patch: patch.delattr(utils, "_ChunkedLogProbFunction"), "has no trl.trainer.utils._ChunkedLogProb"),
        (
            lambda patch: patch.setattr(STOCK, "forward", staticmethod(lambda ctx, x: x)),
            "takes ctx, x, expected ctx",
        ),
        (lambda patch: patch.setattr(STOCK, "apply", lambda *a: 1 / 0), "small example .* failed .ZeroDivisionError"),
    ],
)
def test_another_trl_runs_as_it_is(monkeypatch, change, reason):
    change(monkeypatch)
    before = getattr(utils, "_ChunkedLogProbFunction", None)
    with pytest.warns(UserWarning, match=f"{reason}.*; TRL runs unchanged"):
        install().revert()
    assert getattr(utils, "_ChunkedLogProbFunction", None) is before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode, lambda: torch.device("meta")])
def test_installed_under_other_defaults(dtype, context):
    torch.set_default_dtype(dtype)
    try:
        with context(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with install():
                assert utils._ChunkedLogProbFunction is not STOCK
    finally:
        torch.set_default_dtype(torch.float32)


def test_values_that_trl_alone_takes():
    x, w, y = torch.randn(4, 8), torch.randn(11, 8), torch.tensor([0, 3, 10, 5])
    for temperature, softcap, scale in ((-1.0, None, 1.0), (torch.tensor(0.5), None, 1.0), (1.0, None, 0.0)):
        given = temperature, 32, softcap, scale, ()
        with install():
            found = utils._ChunkedLogProbFunction.apply(x, w, None, y, *given)[0]
        torch.testing.assert_close(found, STOCK.apply(x, w, None, y, *given)[0])
    with install():
        narrow = utils._ChunkedLogProbFunction.apply(x, w, None, y.int(), 1.0, 32)
    torch.testing.assert_close(narrow, STOCK.apply(x, w, None, y, 1.0, 32))


def test_another_result_is_found(monkeypatch):
    ours = liger_ext.trl.linear_log_probs
    monkeypatch.setattr(
        liger_ext.trl, "linear_log_probs", lambda *a, **k: ours(*a, **k)._replace(mean_logits=torch.zeros(5))
    )
    with pytest.warns(UserWarning, match="disagree on a small example; TRL runs unchanged"):
        install()
    assert utils._ChunkedLogProbFunction is STOCK


@pytest.mark.parametrize(
    "outputs", [(), ("entropy",), ("mean_logits", "is_top1"), ("log_sum_sq_probs", "entropy")], ids=str
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_results_are_trls(device, outputs, autocast, softcap):
    torch.manual_seed(0)
    x, w = torch.randn(40, 16, device=device), torch.randn(90, 16, device=device)
    y = torch.randint(90, (40,), device=device)

    def results(function):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found = function.apply(*leaves, None, y, 0.9, 32, softcap, 1.5, outputs)
        total = found[0].sum() + (0 if found[1] is None else found[1].square().sum())
        return found, torch.autograd.grad(total, leaves)

    expected = results(STOCK)
    with install():
        found = results(utils._ChunkedLogProbFunction)
    tolerance = {"rtol": 0.05, "atol": 0.5} if autocast else {"rtol": 1e-3, "atol": 1e-3}
    for a, b in zip(found[0], expected[0], strict=True):
        assert (a is None) == (b is None)
        if a is not None and not (autocast and a.dtype == torch.bool):
            torch.testing.assert_close(a, b, **tolerance)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("frozen", ["nothing", "weight", "both"])
@pytest.mark.parametrize("use_entropy", [False, True])
def test_zero_3_gathers_the_head_again(device, monkeypatch, frozen, use_entropy):
    """The weight is empty outside of TRL's context manager, inside which the forward runs."""
    torch.manual_seed(0)
    x = torch.randn(30, 16, device=device, requires_grad=True)
    full, y = torch.randn(50, 16, device=device), torch.randint(50, (30,), device=device)
    weight = torch.nn.Parameter(full.clone(), requires_grad=frozen == "nothing")
    bias = torch.randn(50, device=device, requires_grad=frozen != "both")
    gathered = []

    @contextlib.contextmanager
    def gather(*parameters):
        gathered.append([p is weight for p in parameters if p is not None])
        weight.data = full.clone()
        yield
        weight.data = full.new_empty(0)

    def step(function, weight):
        found = function.apply(x, weight, bias, y, 1.0, 32, None, 1.0, ("entropy",))
        return found[0].sum() + found[1].sum() * use_entropy if use_entropy else found[0].sum()

    wanted = [t for t in (x, weight, bias) if t.requires_grad]
    expected = torch.autograd.grad(step(STOCK, weight), wanted)
    weight.ds_id = 0
    with install():
        monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
        with gather(weight, bias):
            total = step(utils._ChunkedLogProbFunction, weight)
        assert weight.numel() == 0
        found = torch.autograd.grad(total, wanted)
    assert gathered == [[True, False]] * (1 if frozen == "both" and not use_entropy else 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
