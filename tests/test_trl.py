"""TRL's SFTTrainer on a patched model and on an unpatched copy: equal losses, metrics and parameters.

TRL replaces the model's forward by one that calls the layers below the head and computes log-probabilities from the
head's weight, in chunks of rows. So norms, gated activations and rotary embeddings are ours, and the loss is TRL's.
"""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from cases import RecordCalls
from llama_models import build, make_batch, one_thread, ops  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_llama, compat
from liger_ext.models import llama

trl = pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")

LAYERS = {"rms_norm", "add_rms_norm", "glu", "rope"}
TEXTS = [" ".join(str(word * index % 101) for word in range(1, 6 + index * 5 % 9)) for index in range(1, 25)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ '<s>' + m['content'] }}{% endif %}{% endfor %}"
)


def plain(text):
    return {"text": text}


def completion(text):
    return {"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]}


def conversation(text):
    half = len(text) // 2
    return {"messages": [dict(role="user", content=text[:half]), dict(role="assistant", content=text[half:])]}


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **names)


@pytest.fixture
def run(tmp_path, device, monkeypatch, tokenizer):
    """Trains and evaluates: returns the log, the final parameters, and the names of our ops."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    reset = accelerate.state.AcceleratorState._reset_state  # the state, with its autocast, outlives a Trainer

    def run(model, kind=plain, trainer_options=None, **options):
        reset(reset_partial_state=True)
        torch.manual_seed(7)  # adapters are initialised before a Trainer sets its seed
        data = datasets.Dataset.from_list([kind(text) for text in TEXTS])
        defaults = dict(
            output_dir=str(tmp_path), use_cpu=device.type == "cpu", bf16=False, gradient_checkpointing=False,
            max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=5,
            learning_rate=2e-3, adam_epsilon=1e-4, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, seed=3,
        )  # fmt: skip
        given = {name: value() if value is adapters else value for name, value in (trainer_options or {}).items()}
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(**{**defaults, **options}), train_dataset=data, eval_dataset=data,
            processing_class=tokenizer, **given,
        )  # fmt: skip
        start = trained(trainer.model)
        with RecordCalls() as training:
            trainer.train()
        with RecordCalls() as evaluation:
            evaluated = trainer.evaluate()
        names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
        history = trainer.state.log_history
        return SimpleNamespace(
            logged={name: [line[name] for line in history if name in line] for name in names},
            evaluated={name: evaluated["eval_" + name] for name in (*names, "right") if "eval_" + name in evaluated},
            start=start,
            end=trained(trainer.model),
            ops=set(training.names),
            evaluation_ops=set(evaluation.names),
            trainer=trainer,
        )

    yield run
    reset(reset_partial_state=True)


def trained(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def assert_same(found, expected, tolerance=1e-4, layers=LAYERS):
    """Compares logs, and final parameters relative to how far they moved from the start."""
    assert len(expected.logged["loss"]) == 3 and len(expected.evaluated) >= 3
    for name, values in expected.logged.items():
        assert found.logged[name] == pytest.approx(values, rel=tolerance), name
    assert found.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
    assert torch.equal(found.start, expected.start)
    moved = (expected.end - expected.start).norm()
    assert moved > 0
    assert (found.end - expected.end).norm() <= 3 * tolerance * moved
    assert found.ops >= layers and found.evaluation_ops >= layers and not expected.ops
    assert not [op for op in found.ops | found.evaluation_ops if "cross_entropy" in op], "our loss ran"


def right(prediction):
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"right": (guesses == labels)[labels != -100].mean()}


def half(outputs, labels, num_items_in_batch=None):
    """Half of the default loss; in evaluation TRL passes no number of labels."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return 0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count


def adapters():
    return pytest.importorskip("peft").LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])


MODES = {
    # TRL's log-probabilities, computed in chunks from the head's weight
    "nll": {},
    "chunked_nll": dict(loss_type="chunked_nll"),
    "dft": dict(loss_type="dft"),
    # TRL passes these to Trainer's code, with logits from a call without labels
    "label_smoothing": dict(label_smoothing_factor=0.1),
    "loss_function": dict(trainer_options=dict(compute_loss_func=half)),
    "metrics": dict(trainer_options=dict(compute_metrics=right)),
    # which tokens count
    "completion_only": dict(kind=completion),
    "prompt_too": dict(kind=completion, completion_only_loss=False),
    "assistant_only": dict(kind=conversation, assistant_only_loss=True),
    # rows of several documents
    "packed": dict(packing=True, max_length=32),
    "packed_wrapped": dict(packing=True, packing_strategy="wrapped", max_length=32),
    "padding_free": dict(padding_free=True, max_length=None),
    "checkpointed": dict(gradient_checkpointing=True),
    "bf16": dict(bf16=True),
    "lora": dict(trainer_options=dict(peft_config=adapters)),
    "lora_checkpointed": dict(trainer_options=dict(peft_config=adapters), gradient_checkpointing=True),
}
ignores_trl_warnings = pytest.mark.filterwarnings("ignore::FutureWarning")


@ignores_trl_warnings
@pytest.mark.parametrize("mode", MODES)
def test_norms_glu_rope_are_ours_and_the_loss_is_trls(run, device, mode):
    stock = build(device=device).train()
    model = copy.deepcopy(stock)
    apply_liger_kernel_to_llama(model=model)
    found, expected = run(model, **MODES[mode]), run(stock, **MODES[mode])
    if mode == "bf16":  # rounding decides which of a random model's logits is the largest
        for of in (found, expected):
            del of.logged["mean_token_accuracy"], of.evaluated["mean_token_accuracy"]
    assert_same(found, expected, 3e-2 if mode == "bf16" else 1e-4)  # in bf16 each step rounds by 2^-8
    if "lora" not in mode:
        # Outside of TRL, the model computes our loss.
        assert ops(model.train(), **make_batch(device)) >= LAYERS | {"fused_linear_cross_entropy"}


@ignores_trl_warnings
@pytest.mark.parametrize("mode", ["nll", "dft", "label_smoothing", "lora_checkpointed", "assistant_only", "packed"])
def test_use_liger_kernel(run, device, mode):
    """TRL requests all patches except the fused loss, and patches after it replaced the forward."""
    model, stock = build(device=device).train(), build(device=device).train()
    with compat.install(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="trl|torch|transformers")
        found = run(model, use_liger_kernel=True, **MODES[mode])
    assert_same(found, run(stock, **MODES[mode]))
    assert type(model) is modeling_llama.LlamaForCausalLM


@ignores_trl_warnings
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_patched_and_reverted_around_trl(run, device, bf16):
    """TRL's forward follows the model's class, also below accelerate's autocast."""
    model = build(device=device).train()
    handle = apply_liger_kernel_to_llama(model=model)
    run(model, bf16=bf16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.revert()
        assert type(model) is modeling_llama.LlamaForCausalLM
        assert not ops(model.train(), **make_batch(device)) and model(**make_batch(device)).logits is not None
        apply_liger_kernel_to_llama(model=model)
    assert "logits" not in model(**make_batch(device))
    assert type(model) is llama.LlamaForCausalLM
