"""DPO, CPO and KTO in every type of TRL, as functions and as modules: values and gradients are those of TRL's own code,
which reads full logits in float64."""

import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from cases import normal
from test_losses import judge

from liger_ext import losses

trl = pytest.importorskip("trl")
cpo = pytest.importorskip("trl.experimental.cpo")

BETA, ALPHA, KL = 0.3, 0.5, 0.2
AVERAGES = "ipo", "sigmoid_norm"  # the types that divide by the number of tokens
TYPES = {
    "dpo": "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop "
    "sigmoid_norm",
    "cpo": "sigmoid hinge ipo",
    "kto": "kto apo_zero_unpaired",
}
# exo_pair needs label_smoothing. DPO's sigmoid takes it, and TRL ignores it there. KTO has none.
EXCLUDED = ("dpo", "exo_pair", 0), ("dpo", "sigmoid", 0.2), ("kto", "kto", 0.2), ("kto", "apo_zero_unpaired", 0.2)
CASES = {(kind, name, e) for kind in TYPES for name in TYPES[kind].split() for e in (0, 0.2)}.difference(EXCLUDED)


@pytest.fixture(autouse=True)
def _float64():
    """TRL creates tensors of options in the default dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def trainer(kind, **attributes):
    """A trainer of TRL with the attributes that its loss reads."""
    result = object.__new__(kind)
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda t: t, gather_for_metrics=lambda t: t)
    vars(result).update(
        accelerator=accelerator, model=SimpleNamespace(training=False), beta=BETA, aux_loss_enabled=False,
        precompute_ref_logps=True, _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, **attributes,
    )  # fmt: skip
    return result


def log_probs(logits, target):
    return -torch.nn.functional.cross_entropy(logits.mT, target, reduction="none")  # 0 where the target is ignored


def trl_loss(kind, logits, target, ref, loss_type, *, label_smoothing=0.0, desirable=None, alpha=0.0):
    """The loss of TRL's trainer. Its sequences begin with a prompt of one token."""
    nothing = target.new_zeros(target.shape)
    tokens = torch.nn.functional.pad(target, (1, 0), value=-100)
    if kind == "cpo":
        this = trainer(
            cpo.CPOTrainer, loss_type=loss_type, label_smoothing=label_smoothing, alpha=0.0, cpo_alpha=alpha,
            is_encoder_decoder=False, pad_token_id=0,
        )  # fmt: skip
        halves = zip(("chosen", "rejected"), tokens.chunk(2), strict=True)
        names = "input_ids", "attention_mask", "labels"
        outputs = SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 0, 0, 1)))
        batch = {f"{half}_{name}": t.clone() for half, t in halves for name in names}
        return this.get_batch_loss_metrics(lambda *_, **__: outputs, batch)[0]
    outputs = SimpleNamespace(
        log_probs=log_probs(logits, target), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    inputs = {"input_ids": tokens, "completion_mask": (tokens != -100).long()}
    if kind == "kto":
        this = trainer(
            trl.KTOTrainer, loss_type=loss_type, calculate_KL=loss_type != "apo_zero_unpaired", desirable_weight=1.0,
            undesirable_weight=1.0, _compute_kl_logps=lambda *_: torch.full((3,), KL),
        )  # fmt: skip
        inputs |= {"label": desirable, "ref_logps": ref, "ref_KL_logps": torch.zeros(3)}
    else:
        this = trainer(
            trl.DPOTrainer, loss_types=[loss_type], loss_weights=[1.0], label_smoothing=label_smoothing, ld_alpha=None,
            f_divergence_type="reverse_kl", use_weighting=False, args=SimpleNamespace(discopop_tau=0.05),
        )  # fmt: skip
        inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), ref.chunk(2), strict=True))
    return this._compute_loss(lambda **_: outputs, inputs, False)


def head(kind, pairs):
    x, weight, bias, ref_x, ref_weight = (
        normal(*shape, dtype=torch.float64, seed=seed).requires_grad_(seed < 3)
        for seed, shape in enumerate([(2 * pairs, 5, 8), (20, 8), (20,), (2 * pairs, 5, 6), (20, 6)])
    )
    target = torch.randint(20, (2 * pairs, 5), generator=torch.Generator().manual_seed(0))
    target[0, :2] = target[-1, 3:] = -100
    if pairs > 1 and kind != "cpo":  # an answer without tokens, whose average is NaN in TRL's CPO
        target[-2] = -100
    ref = log_probs(ref_x @ ref_weight.T, target).sum(1)
    return x, weight, bias, (ref_x, ref_weight), target, ref, torch.arange(2 * pairs) % 3 != 1


def function(kind, log_probs, target, ref, desirable, loss_type, **options):
    def answers(log_probs):
        return losses.answer_log_probs(log_probs, target != -100, average=loss_type in AVERAGES)

    options = {"beta": BETA, "loss_type": loss_type, **options}
    if kind == "kto":
        return losses.kto_loss(answers(log_probs), desirable, ref, KL, **options).mean()
    ref = ref / (target != -100).sum(1).clamp(min=1) if loss_type in AVERAGES else ref
    refs = ref.chunk(2) if kind == "dpo" else ()
    return getattr(losses, f"{kind}_loss")(*answers(log_probs).chunk(2), *refs, **options).mean()


@pytest.mark.parametrize("pairs", [1, 4])
@pytest.mark.parametrize("kind, loss_type, label_smoothing", sorted(CASES))
def test_as_in_trl(kind, loss_type, label_smoothing, pairs):
    options = {"label_smoothing": label_smoothing} if label_smoothing else {}
    x, weight, bias, of_ref, target, ref, desirable = head(kind, pairs)
    logits = x @ weight.T + bias
    expected = trl_loss(kind, logits, target, ref, loss_type, desirable=desirable, **options)
    found = function(kind, log_probs(logits, target), target, ref, desirable, loss_type, **options)
    judge(found, expected, x, weight, bias)
    if kind == "dpo":
        found = losses.LigerFusedLinearDPOLoss(beta=BETA, loss_type=loss_type, **options)(
            weight, x, target, bias, *of_ref
        )
    elif kind == "cpo":
        expected = trl_loss(kind, logits, target, ref, loss_type, alpha=ALPHA, **options)
        found = losses.LigerFusedLinearCPOLoss(beta=BETA, alpha=ALPHA, loss_type=loss_type, **options)(
            weight, x, target, bias
        )
    else:
        found = losses.LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=True, loss_type=loss_type, **options)(
            x, weight, target, bias, desirable, *of_ref, kl=KL
        )
    judge(found[0], expected, x, weight, bias)


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("pairs", [6, 60])
def test_ties(loss_type, pairs):
    """Pairs with equal log-probabilities, and other references."""
    target = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0)).repeat_interleave(pairs, 0)
    logits = normal(4, 5, 20, dtype=torch.float64).repeat_interleave(pairs // 2, 0).requires_grad_()
    ref = normal(2 * pairs, dtype=torch.float64).round(decimals=1)
    expected = trl_loss("dpo", logits, target, ref, loss_type)
    judge(function("dpo", log_probs(logits, target), target, ref, None, loss_type), expected, logits)


def test_types_are_those_of_trl():
    """Except sft, which is compute_nll_loss of a module, and simpo with alphapo, a form of it."""
    logits, target = torch.zeros(2, 5, 20), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="Unknown loss type") as of_dpo:
        trl_loss("dpo", logits, target, torch.zeros(2), "?")
    choices = [set(re.findall(r"'(\w+)'", str(of_dpo.value)))]
    for config in (cpo.CPOConfig, trl.KTOConfig):
        choices.append(set(config.__dataclass_fields__["loss_type"].metadata["choices"]))
    for (kind, names), of_trl in zip(TYPES.items(), choices, strict=True):
        assert of_trl - {"sft", "simpo", "alphapo"} == set(names.split())
        for name in ("?", "sft", ["sigmoid", "bco_pair"]):
            message = re.escape(f"loss_type: {name!r}, expected one of {', '.join(names.split())}")
            x = torch.zeros(2)
            with pytest.raises(ValueError, match=message):
                function(kind, x[:, None], target[:, :1], x, x > 0, name)
            with pytest.raises(ValueError, match=message):
                getattr(losses, f"LigerFusedLinear{kind.upper()}Loss")(loss_type=name)
