"""Hugging Face's Trainer with a patched model: every scenario is compared with an unpatched copy of the model."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from cases import RecordCalls
from llama_models import build, lora, one_thread, patched, tokens  # noqa: F401
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from liger_ext import apply_liger_kernel_to_llama, compat
from liger_ext.models import llama

accelerate = pytest.importorskip("accelerate")

LAYERS = {"rms_norm", "add_rms_norm", "glu", "rope"}
SMOOTHED = dict(label_smoothing_factor=0.1)
LOSS = {"fused_linear_cross_entropy"}


def row(index):
    """A document of 6 to 14 tokens, some of which are labels; the Trainer must drop the unused column."""
    ids = tokens(6 + index * 5 % 9, seed=index)
    labels = ids.clone()
    labels[: index * 7 % len(ids)] = -100
    return dict(input_ids=ids, labels=labels, extra=index)


ROWS = [row(index) for index in range(24)]


def padded(rows):
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], True, 0)
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], True, -100)
    return dict(input_ids=ids, labels=labels, attention_mask=(ids != 0).long())


@pytest.fixture
def run(tmp_path, device, monkeypatch):
    """Trains and evaluates: returns the log, the final parameters, and the names of our ops in training and
    evaluation."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    reset = accelerate.state.AcceleratorState._reset_state  # the state, with its autocast, outlives a Trainer

    def run(model, cls=Trainer, resume=None, collate=padded, trainer_options=None, record=True, **options):
        reset(reset_partial_state=True)
        # With Adam's default eps, 1e-8, a parameter with almost no gradient moves by the sign of a rounding error.
        defaults = dict(
            output_dir=str(tmp_path), use_cpu=device.type == "cpu", max_steps=3, gradient_accumulation_steps=2,
            per_device_train_batch_size=2, per_device_eval_batch_size=5, learning_rate=2e-3, adam_epsilon=1e-4,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = cls(
            model, TrainingArguments(**{**defaults, **options}), train_dataset=ROWS, eval_dataset=ROWS,
            data_collator=collate, **(trainer_options or {}),
        )  # fmt: skip
        training, evaluation = RecordCalls(), RecordCalls()  # recording calls keeps models from being compiled
        with training if record else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=resume)
        with evaluation if record else contextlib.nullcontext():
            evaluated = trainer.evaluate()
        history = trainer.state.log_history
        return SimpleNamespace(
            logged={name: [line[name] for line in history if name in line] for name in ("loss", "grad_norm")},
            evaluated={name: evaluated[name] for name in ("eval_loss", "eval_accuracy") if name in evaluated},
            end=parameters(model),
            predictions=trainer.predict(ROWS).predictions,
            ops=set(training.names),
            evaluation_ops=set(evaluation.names),
            trainer=trainer,
        )

    yield run
    reset(reset_partial_state=True)


def parameters(model):
    return torch.cat([p.detach().cpu().double().flatten() for p in model.parameters()])


def assert_same(found, expected, start, tolerance=1e-4):
    """Compares logs, and final parameters relative to how far they moved from the start."""
    assert len(expected.logged["loss"]) >= 3
    for name, values in expected.logged.items():
        assert found.logged[name] == pytest.approx(values, rel=tolerance), name
    assert found.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
    moved = (expected.end - start).norm()
    assert moved > 0
    assert (found.end - expected.end).norm() <= 3 * tolerance * moved
    assert (found.predictions is None) is (expected.predictions is None)
    if expected.predictions is not None:
        assert found.predictions.shape == expected.predictions.shape
        assert abs(found.predictions - expected.predictions).max() <= 10 * tolerance * abs(expected.predictions).max()


@pytest.fixture
def compare(run):
    """Runs a patched copy and the model itself with the same settings, and compares."""

    def compare(stock, tolerance=1e-4, **options):
        start, model = parameters(stock), copy.deepcopy(stock)
        with apply_liger_kernel_to_llama(model=model):
            found = run(model, **options)
        assert not any(isinstance(module, llama.LlamaForCausalLM) for module in model.modules())
        expected = run(stock, **options)
        assert_same(found, expected, start, tolerance)
        assert not expected.ops and (found.ops >= LAYERS or not options.get("record", True))
        return found, expected

    return compare


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(average_tokens_across_devices=False),
        dict(gradient_accumulation_steps=3, max_grad_norm=0.1),
        dict(gradient_checkpointing=True),
        dict(prediction_loss_only=True),
        dict(neftune_noise_alpha=5.0),
        dict(train_sampling_strategy="group_by_length"),
        SMOOTHED,
        dict(bf16=True),
        dict(adapted=True),
        pytest.param(dict(fp16=True), marks=pytest.mark.cuda),  # accelerate has no fp16 on a CPU
    ],
    ids=lambda options: ",".join(options) or "fp32",
)
def test_settings(compare, device, options):
    model = build(device=device)
    if options.get("adapted"):
        model, options = lora(model), {}
    if options.get("fp16") and device.type == "cpu":
        pytest.skip("accelerate has no fp16 on a CPU")
    # In 16 bits the two models round at other places: in each step by 2^-8 in bf16.
    tolerance = 3e-2 if options.keys() & {"bf16", "fp16"} else 1e-4
    found, _ = compare(model.train(), tolerance, **options)
    # Trainer's label smoothing removes the labels and reads logits.
    assert (found.ops >= LOSS) is ("label_smoothing_factor" not in options)
    assert not found.evaluation_ops & LOSS


class InFullPrecision(Trainer):
    """In transformers 5.17, TrainingArguments with torch_compile=True leaves TF32 on for any value of `tf32`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if torch.cuda.is_available():  # builds of torch without CUDA have no such setting
            torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.fixture
def precision_put_back():
    before = torch.backends.cuda.matmul.fp32_precision if torch.cuda.is_available() else None
    yield
    if before is not None:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.slow
@pytest.mark.usefixtures("precision_put_back")
def test_compiled(compare, device):
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    options = dict(torch_compile=True, torch_compile_backend="aot_eager", tf32=False)  # torch_compile would enable TF32
    compare(build(device=device).train(), record=False, cls=InFullPrecision, **options)
    assert graphs["unique_graphs"] >= before + 2


@pytest.mark.parametrize("options", [{}, dict(return_flash_attn_kwargs=True, return_seq_idx=True)], ids=["", "kwargs"])
def test_packed_documents(compare, run, device, options):
    """Positions that restart separate documents: the losses equal those of padded rows."""
    stock = build(device=device).train()
    alone = run(copy.deepcopy(stock), gradient_accumulation_steps=1)
    found, _ = compare(stock, collate=DataCollatorWithFlattening(**options), gradient_accumulation_steps=1)
    assert found.ops >= LOSS
    assert found.logged["loss"] == pytest.approx(alone.logged["loss"], rel=1e-4)
    assert found.evaluated == pytest.approx(alone.evaluated, rel=1e-4)


def accuracy(prediction):
    guesses, labels = prediction.predictions, prediction.label_ids
    if guesses.ndim == 3:
        guesses = guesses.argmax(-1)
    asked = labels[:, 1:] != -100
    return {"accuracy": (guesses[:, :-1] == labels[:, 1:])[asked].mean()}


@pytest.mark.parametrize("preprocess", [None, lambda logits, labels: logits.argmax(-1)], ids=["logits", "guesses"])
def test_metrics(compare, device, preprocess):
    options = dict(compute_metrics=accuracy, preprocess_logits_for_metrics=preprocess)
    found, _ = compare(learner(device), trainer_options=options, learning_rate=5e-3)
    assert found.evaluated["eval_accuracy"] > 0
    assert found.ops >= LOSS


def learner(device):
    """A model that predicts some tokens correctly after three steps."""
    return build(device=device, initializer_range=0.05).train()


class CountsRight(Trainer):
    """Reads the accuracy from the fused loss, and for a stock model from its logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        fused = isinstance(model, llama.LlamaForCausalLM)
        asked = dict(inputs, return_token_accuracy=True) if fused else inputs
        loss, outputs = super().compute_loss(model, asked, True, num_items_in_batch)
        if fused:
            assert ("logits" in outputs) is not model.training
            share = outputs.token_accuracy
            outputs = {name: outputs[name] for name in ("loss", "logits") if name in outputs}
        else:
            targets = inputs["labels"][:, 1:]
            share = (outputs.logits[:, :-1].argmax(-1) == targets)[targets != -100].float().mean()
        self.__dict__.setdefault("shares", []).append(share.item())
        return (loss, outputs) if return_outputs else loss


def test_accuracy_without_logits(compare, device):
    found, expected = compare(learner(device), cls=CountsRight, learning_rate=5e-3)
    assert found.ops >= LOSS
    assert found.trainer.shares == pytest.approx(expected.trainer.shares)
    assert any(found.trainer.shares) and len(found.trainer.shares) == 6 + 5 + 5


class Guesses(Trainer):
    """Returns the most likely tokens as predictions, -1 at ignored labels, without logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        fused = isinstance(model, llama.LlamaForCausalLM)
        asked = dict(inputs, skip_logits=True, return_predicted_tokens=True) if fused else inputs
        loss, outputs = super().compute_loss(model, asked, True, num_items_in_batch)
        labels = inputs["labels"]
        if fused:
            assert "logits" not in outputs
            guesses = outputs.predicted_tokens.view(labels.shape)
        else:
            ignored = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] == -100
            guesses = outputs.logits.argmax(-1).masked_fill(ignored, -1)
        return (loss, dict(loss=loss, guesses=guesses)) if return_outputs else loss


def test_metrics_without_logits(compare, device):
    found, _ = compare(learner(device), cls=Guesses, trainer_options=dict(compute_metrics=accuracy), learning_rate=5e-3)
    assert found.evaluated["eval_accuracy"] > 0
    assert found.evaluation_ops >= LOSS


class ReadsLogits(Trainer):
    """A user's loss, which adds a penalty on large logits."""

    asks = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.asks and isinstance(model, llama.LlamaForCausalLM):
            inputs = dict(inputs, skip_logits=False)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss


class AsksForLogits(ReadsLogits):
    asks = True


def test_a_trainer_that_reads_logits(compare, run, device):
    with pytest.raises(AttributeError, match="skip_logits=False"):
        run(patched(build(device=device).train()), cls=ReadsLogits)
    found, _ = compare(build(device=device).train(), cls=AsksForLogits)
    assert not found.ops & LOSS


def weighted(outputs, labels, num_items_in_batch=None):
    """A user's loss function: half of the default loss."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 0.5 * nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def test_loss_of_the_users_own(compare, device):
    found, _ = compare(build(device=device).train(), trainer_options=dict(compute_loss_func=weighted))
    assert not found.ops & LOSS


@pytest.mark.parametrize(
    "options, trainer_options",
    [({}, {}), ({}, dict(compute_metrics=accuracy)), (SMOOTHED, {}), ({}, dict(compute_loss_func=weighted))],
    ids=["loss alone", "metrics", "label smoothing", "loss function"],
)
def test_use_liger_kernel(run, device, options, trainer_options):
    """Trainer patches the model, and evaluates with `skip_logits=True` if it needs only the loss."""
    model, stock = learner(device), learner(device)
    start = parameters(stock)
    with compat.install():
        found = run(model, use_liger_kernel=True, trainer_options=trainer_options, learning_rate=5e-3, **options)
    expected = run(stock, trainer_options=trainer_options, learning_rate=5e-3, **options)
    assert_same(found, expected, start)
    keeps_labels = not options and "compute_loss_func" not in trainer_options
    assert (found.ops >= LOSS) is keeps_labels
    assert (found.evaluation_ops >= LOSS) is (keeps_labels and not trainer_options)


@pytest.mark.parametrize("second", ["patched", "stock"])
@pytest.mark.parametrize("first, adapted", [("patched", False), ("stock", False), ("patched", True)])
def test_resume(run, tmp_path, device, first, second, adapted):
    """From a checkpoint into a model with other weights (or adapters): the results equal those of an uninterrupted
    run."""

    def model(kind, seed):
        made = build(device=device, seed=0 if adapted else seed).train()
        made = patched(made) if kind == "patched" else made
        if adapted:
            made = lora(made)
            for parameter in filter(lambda p: p.requires_grad, made.parameters()):
                parameter.data += seed
        return made

    whole = run(model(first, 0), max_steps=4, save_strategy="steps", save_steps=2)
    again = run(model(second, 1), max_steps=4, resume=str(tmp_path / "checkpoint-2"))
    assert_same(again, whole, parameters(model("stock", 0)))
    assert (again.ops >= LAYERS | LOSS) is (second == "patched")


def test_best_model_at_the_end(compare, device):
    """The best model has the largest loss here, so that it is the first one."""
    options = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    options |= dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    found, expected = compare(build(device=device).train(), **options)
    assert found.trainer.state.best_global_step == expected.trainer.state.best_global_step == 1


class RunsOut(Trainer):
    """Runs out of memory with more than two rows."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


def test_batch_size_that_fits(compare, device):
    options = dict(cls=RunsOut, auto_find_batch_size=True, per_device_train_batch_size=4)
    found, _ = compare(build(device=device).train(), **options)
    assert found.trainer._train_batch_size <= 2
