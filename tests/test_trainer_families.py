"""Trainer and TRL's SFTTrainer with features of other families than Llama: softcapped logits, experts whose router adds
to the loss, and scaled logits. A patched model is compared with an unpatched copy."""

import copy

import family_models
import pytest
import test_trainer
import test_trl
from llama_models import one_thread  # noqa: F401
from test_trainer import LOSS, SMOOTHED, accuracy, assert_same, parameters
from test_trl import ignores_trl_warnings, tokenizer  # noqa: F401
from transformers import DataCollatorWithFlattening

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.models.modules.causal_lm import CausalLM

run, run_trl = test_trainer.run, test_trl.run

FAMILIES = ("gemma2", "mixtral", "granite")
families = pytest.mark.parametrize("family", FAMILIES)
LAYERS = {"rms_norm", "rope"}


def build(family, device):
    """Every expert processes each token: rounding does not change the choice of experts."""
    options = family_models.all_experts(family)
    model = family_models.build(family, device, num_hidden_layers=2, initializer_range=0.1, **options)
    assert family != "mixtral" or (model.config.output_router_logits and model.router_aux_loss_coef)
    return model


def flat(predictions):
    """Flattens the predictions of a model with experts: a tuple of logits and router logits of each layer."""
    if isinstance(predictions, (tuple, list)):
        return [part for each in predictions for part in flat(each)]
    return [predictions]


def compare(run, stock, **options):
    start, model = parameters(stock), copy.deepcopy(stock)
    with apply_liger_kernel_to_instance(model):
        found = run(model, **options)
    assert not any(isinstance(module, CausalLM) for module in model.modules())
    expected = run(stock, **options)
    predictions = flat(found.predictions), flat(expected.predictions)
    assert len(predictions[0]) == len(predictions[1])
    for found.predictions, expected.predictions in zip(*predictions, strict=True):
        assert_same(found, expected, start)
    assert found.ops >= LAYERS and not expected.ops
    return found, expected


@families
@pytest.mark.parametrize(
    "options",
    [{}, dict(gradient_accumulation_steps=3, max_grad_norm=0.1), dict(prediction_loss_only=True), SMOOTHED],
    ids=lambda options: ",".join(options) or "accumulated",
)
def test_trainer(run, device, family, options):
    found, _ = compare(run, build(family, device), **options)
    # Trainer's label smoothing removes the labels and reads logits.
    assert (found.ops >= LOSS) is (options != SMOOTHED)
    assert not found.evaluation_ops & LOSS


@families
def test_metrics(run, device, family):
    def logits_alone(outputs, labels):
        return next(part for part in flat(outputs) if part.shape[:2] == labels.shape)

    options = dict(compute_metrics=accuracy, preprocess_logits_for_metrics=logits_alone)
    found, _ = compare(run, build(family, device), trainer_options=options, learning_rate=5e-3)
    assert found.evaluated["eval_accuracy"] > 0


@families
def test_packed_documents(run, device, family):
    stock = build(family, device)
    found, _ = compare(run, stock, collate=DataCollatorWithFlattening(), gradient_accumulation_steps=1)
    assert found.ops >= LOSS


MODES = "nll", "chunked_nll", "label_smoothing", "packed", "metrics"


@pytest.mark.slow
@ignores_trl_warnings
@families
@pytest.mark.parametrize("mode", MODES)
def test_sft(run_trl, device, family, mode):
    stock = build(family, device)
    model = copy.deepcopy(stock)
    apply_liger_kernel_to_instance(model)
    found, expected = (run_trl(m, **test_trl.MODES[mode]) for m in (model, stock))
    test_trl.assert_same(found, expected, layers=LAYERS)
    assert ("aux_loss" in expected.evaluated) is (family == "mixtral")
