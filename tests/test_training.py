"""Training: thirty steps of a patched and an unpatched Llama, and Hugging Face's Trainer."""

import copy

import pytest
import torch
from cases import RecordCalls
from llama_models import FACTOR, build, exact, one_thread, patched, rounding, tokens  # noqa: F401

from liger_ext import apply_liger_kernel_to_llama

STEPS = 30


def train(model, device):
    """Thirty steps on four batches that come again and again; the losses, and all parameters at the end."""
    # Under Adam's usual eps, 1e-8, what has almost no gradient moves by the sign of a rounding error. This one keeps
    # the distance from a more precise run the same from seed to seed (in fp32 within 20%; there a factor of 20).
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        ids = tokens(4, 24, device=device, seed=step % 4)
        loss = model(input_ids=ids, labels=ids.where(ids % 7 != 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), parameters(model)


def parameters(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_thirty_steps(device, dtype):
    """The bound is how far the unpatched run is from the same run in higher precision."""
    stock = build(device=device, dtype=dtype, initializer_range=0.05).train()
    reference = exact(stock) if dtype == torch.float32 else copy.deepcopy(stock).float()
    model = patched(stock)
    start = parameters(stock)
    exact_losses, exact_end = train(reference, device)
    losses, end = train(stock, device)
    our_losses, our_end = train(model, device)
    assert exact_losses[-4:].mean() < 0.75 * exact_losses[:4].mean(), "nothing is learnt: nothing would be proved"

    # At each step, seen against the largest deviation of the unpatched run so far.
    bound = FACTOR * (losses - exact_losses).abs().cummax(0).values + rounding(dtype) * exact_losses
    assert ((our_losses - exact_losses).abs() <= bound).all()
    assert ((our_losses - losses).abs() <= bound).all()

    bound = FACTOR * (end - exact_end).norm() + rounding(dtype) * (exact_end - start).norm()
    assert (our_end - exact_end).norm() <= bound
    assert (our_end - end).norm() <= bound


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = tokens(12 + index % 3, seed=index)
        ids = torch.nn.functional.pad(ids, (0, 14 - len(ids)))
        return dict(input_ids=ids, labels=ids.where(ids != 0, -100), attention_mask=(ids != 0).long(), extra=index)


@pytest.fixture
def run_trainer(tmp_path, device, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it outlives a Trainer, with its autocast

    def run(model, **options):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=device.type == "cpu",
            max_steps=4,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
            **options,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.evaluate()["eval_loss"], trainer.predict(Rows()).predictions

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(bf16=True),
        dict(gradient_checkpointing=True),
        dict(label_smoothing_factor=0.1),
        dict(prediction_loss_only=True),
    ],
    ids=lambda options: "".join(options) or "fp32",
)
def test_trainer(run_trainer, device, options):
    stock = build(device=device).train()
    model = copy.deepcopy(stock)
    with apply_liger_kernel_to_llama(model=model):
        with RecordCalls() as record:
            losses, eval_loss, predictions = run_trainer(model, **options)
        used = set(record.names)
    expected_losses, expected_eval_loss, expected_predictions = run_trainer(stock, **options)
    tolerance = 3e-2 if options.get("bf16") else 1e-4
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    assert eval_loss == pytest.approx(expected_eval_loss, rel=tolerance)
    assert used >= {"rms_norm_backward", "add_rms_norm", "glu", "rope"}
    # Trainer's own label smoothing takes the labels away and wants logits.
    assert ("fused_linear_cross_entropy_backward" in used) is ("label_smoothing_factor" not in options)
    if expected_predictions is None:
        assert predictions is None
    elif not options.get("bf16"):
        assert abs(predictions - expected_predictions).max() < 1e-2


def test_evaluation_without_logits(device):
    """What Trainer asks for in evaluation, when only the loss is wanted."""
    model = patched(build(device=device).eval())
    ids = tokens(2, 9, device=device)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, skip_logits=True, num_items_in_batch=torch.tensor(16, device=device))
        expected = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(16, device=device))
    assert output.logits is None and expected.logits is not None
    torch.testing.assert_close(output.loss, expected.loss)
