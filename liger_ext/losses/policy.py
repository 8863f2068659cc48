"""Losses of policy-gradient RL, computed from log-probabilities of tokens: GRPO and its variants."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ext.losses.preference import check_number, check_positive, check_shapes

__all__ = ["GRPOOutput", "grpo_loss", "grpo_targets", "high_entropy_mask"]

_CLIPPED = "grpo", "bnpo", "dr_grpo", "dapo", "luspo"
_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
_MEAN_OVER_TOKENS = "bnpo", "dapo", "cispo", "vespo"  # the others: over sequences
_VESPO = "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"
_LARGEST_LOG, _LEAST_LOG = 20.0, math.log(1e-8)  # of VESPO's weights
_FINITE = (
    80.0  # bound of a ratio's logarithm: exp(80) is finite in float32. With inf a clipped ratio's gradient would be NaN
)


class GRPOOutput(NamedTuple):
    """Results of :func:`grpo_loss`. Only ``loss`` has a gradient."""

    loss: Tensor
    kl: Tensor | None  # mean divergence from the reference over tokens; None if beta is 0
    clip_ratio: Tensor  # share of the tokens whose ratio is clipped, and whose loss the clipping changes


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    loss_type: str = "dapo",
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    sampling_ratio: Tensor | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    normalizer: Tensor | float | None = None,
    policy_mask: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy_normalizer: Tensor | float | None = None,
) -> GRPOOutput:
    """Computes the loss of group relative policy optimisation (Shao et al., arXiv:2402.03300) or of a variant.

    With the ratio ``r = exp(log_probs - old_log_probs)`` (without old_log_probs ``r`` is 1 and has the gradient of
    log_probs) and the advantage ``A``, the loss of a token is, by ``loss_type``:

    - grpo, bnpo, dr_grpo (arXiv:2503.20783), dapo (arXiv:2503.14476), luspo (arXiv:2602.05261):
      ``-min(min(r, delta) * A, clip(r, 1 - epsilon_low, 1 + epsilon_high) * A)``
    - cispo (arXiv:2506.13585): ``-min(r, epsilon_high) * A * log_probs``, the factor min(...) without gradient
    - sapo (arXiv:2511.20347): ``-(4 / t) * sigmoid(t * (r - 1)) * A``, ``t`` by the sign of A
    - vespo (arXiv:2602.10693): ``-phi * A * log_probs``, ``phi = exp(l + k * log(W) - l * W)`` without gradient,
      ``W`` the product of the sequence's ratios, ``k`` and ``l`` by the sign of A

    It is multiplied by ``sampling_ratio``. Then ``beta * kl`` is added, with ``kl = exp(q) - q - 1`` and
    ``q = ref_log_probs - log_probs`` (the estimator k3). The reduction over sequences of ``n`` tokens is:

    - grpo, sapo: the mean over sequences of ``sum over tokens / n``
    - bnpo, dapo, cispo, vespo: the mean over tokens, ``sum over tokens / sum of n``
    - dr_grpo: ``sum over tokens / (sequences * max_completion_length)``
    - luspo: the mean over sequences of the sum over tokens

    ``normalizer`` replaces the number of tokens or sequences. With the numbers of a whole step, the losses of the
    step's micro-batches, and their gradients, add up to those of the step.

    Args:
        log_probs: ``(sequences, tokens)``, of the policy.
        advantages: ``(sequences,)`` or ``(sequences, tokens)``, without gradients.
        mask: ``(sequences, tokens)``, the tokens of completions, bool or numbers. Where it is 0, the values of the
            other tensors have no effect, even if they are NaN.
        old_log_probs, ref_log_probs: of the policy that sampled the tokens, and of the reference, without gradients.
        beta: weight of the divergence from the reference; more than 0 requires ref_log_probs.
        epsilon_low, epsilon_high: the clipping range; for cispo epsilon_high is the largest ratio.
        delta: bound of the ratio where the advantage is negative (arXiv:2505.07291), or None.
        importance_sampling_level: "token", or "sequence" (GSPO, arXiv:2507.18071): then a sequence has one r, the
            exponential of the mean of its tokens' log-ratios. Not for cispo, sapo and vespo.
        sampling_ratio: ``(sequences,)``, ``(sequences, 1)`` or ``(sequences, tokens)``: a correction for another
            sampler (vLLM's importance ratio). For vespo it is a factor of W.
        use_bias_correction_kl: multiply kl by r (DeepSeek-V3.2).
        max_completion_length: required for dr_grpo.
        normalizer: the sum of mask (bnpo, dapo, cispo, vespo) or the number of sequences (other types) of all
            micro-batches of a step, a number or a tensor of one element, at least 0. If several processes share the
            step: of all processes, divided by the number of processes. Tensors are not checked. If no token of mask is
            valid, the loss is 0, also with normalizer 0; otherwise normalizer 0 makes it infinite or NaN. None: the
            count of this call, at least 1.
        policy_mask: broadcasts to the shape of mask: the tokens whose loss counts (:func:`high_entropy_mask`), as bool
            or as weights; kl counts for all tokens. None: all.
        entropy: ``(sequences, tokens)``, of the policy. The loss becomes ``loss - entropy_coef * mean(entropy)``, with
            the mean over the tokens of mask and policy_mask.
        entropy_normalizer: replaces the sum of ``mask * policy_mask`` in this mean, as normalizer does in the loss.
            None: normalizer, if that is the same sum (bnpo, dapo, cispo, vespo without policy_mask).

    Returns:
        :class:`GRPOOutput`. ``kl`` and ``clip_ratio`` are means over the tokens of this call.

    Raises:
        ValueError: an unknown type or level; a tensor of the wrong shape; an option without the option it requires.
    """
    _check(locals())
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    valid, mask = mask != 0, mask.detach().to(dtype)
    tokens = mask.sum()
    log_probs = torch.where(valid, log_probs.to(dtype), 0.0)
    advantages = _where_valid(valid, advantages.detach().to(dtype), 0.0)
    old = log_probs.detach() if old_log_probs is None else torch.where(valid, old_log_probs.detach(), 0.0)
    log_ratio = log_probs - old
    if importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    log_ratio = log_ratio.clamp(max=_FINITE)
    # With advantage 0 the ratio has no effect, and the log-probability may not have been computed (grpo_targets).
    ratio = torch.where(advantages != 0, log_ratio, 0.0).exp()
    if sampling_ratio is not None:
        sampling_ratio = _where_valid(valid, sampling_ratio.detach(), 1.0)
    if policy_mask is not None:
        policy_mask = torch.where(valid, policy_mask.detach(), 0)

    low, high = ratio < 1 - epsilon_low, ratio > 1 + epsilon_high
    if loss_type in _CLIPPED:
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.min(bounded * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    elif loss_type == "cispo":
        low, high = torch.zeros_like(low), ratio > epsilon_high
        loss = -ratio.detach().clamp(max=epsilon_high) * advantages * log_probs
    else:
        low = high = torch.zeros_like(low)
        if loss_type == "sapo":
            t = torch.full_like(advantages, sapo_temperature_neg).masked_fill(advantages > 0, sapo_temperature_pos)
            loss = -(4 / t) * (t * (ratio - 1)).sigmoid() * advantages
        else:
            k = torch.full_like(advantages, vespo_k_neg).masked_fill(advantages >= 0, vespo_k_pos)
            rate = torch.full_like(advantages, vespo_lambda_neg).masked_fill(advantages >= 0, vespo_lambda_pos)
            loss = -_vespo_weight(log_ratio.detach() * mask, sampling_ratio, k, rate) * advantages * log_probs
    if policy_mask is not None:
        loss = loss * policy_mask
    if sampling_ratio is not None and loss_type != "vespo":
        loss = loss * sampling_ratio
    kl = None
    if beta != 0:
        q = torch.where(valid, ref_log_probs.detach(), 0.0) - log_probs
        each = torch.expm1(q.clamp(max=_FINITE)) - q
        if use_bias_correction_kl:
            each = each * log_ratio.exp()
        loss, kl = loss + beta * each, ((each * mask).sum() / tokens.clamp(min=1)).detach()

    loss = loss * mask
    if loss_type in ("grpo", "sapo"):
        loss = loss.sum(-1) / mask.sum(-1).clamp(min=1)
    over_tokens = loss_type in _MEAN_OVER_TOKENS
    divisor = _divisor(normalizer, tokens if over_tokens else torch.full_like(tokens, mask.shape[0]), mask)
    loss = loss.sum() / (divisor * max_completion_length if loss_type == "dr_grpo" else divisor)
    if entropy is not None and entropy_coef != 0:
        weights = mask if policy_mask is None else mask * policy_mask
        if entropy_normalizer is None:
            entropy_normalizer = normalizer  # the same sum, or None: see _check
        bonus = (torch.where(valid, entropy, 0.0) * weights).sum()
        loss = loss - entropy_coef * bonus / _divisor(entropy_normalizer, weights.sum(), weights)
    clipped = ((low & (advantages < 0)) | (high & (advantages > 0))) * mask
    return GRPOOutput(loss, kl, (clipped.sum() / tokens.clamp(min=1)).detach())


def _where_valid(valid: Tensor, t: Tensor, other: float) -> Tensor:
    """Returns t as ``(sequences, 1)`` or ``(sequences, tokens)``, with ``other`` where no token is valid."""
    t = t.unsqueeze(1) if t.dim() == 1 else t
    return torch.where(valid if t.shape[1] == valid.shape[1] else valid.any(1, keepdim=True), t, other)


def _divisor(normalizer: Tensor | float | None, count: Tensor, weights: Tensor) -> Tensor:
    """Returns the divisor of a sum over tokens with these weights. It is 1 if all are 0: 0 / 0 would be NaN, and so
    would the gradient."""
    if normalizer is None:
        return count.clamp(min=1)
    if isinstance(normalizer, Tensor):
        total = normalizer.reshape(()).to(count.device, count.dtype)
    else:
        total = torch.full_like(count, normalizer)
    return torch.where(weights.any(), total, 1.0)


def _vespo_weight(log_ratio: Tensor, sampling_ratio: Tensor | None, k: Tensor, rate: Tensor) -> Tensor:
    log_w = log_ratio.clamp(-_LARGEST_LOG, _LARGEST_LOG).sum(-1, keepdim=True)
    if sampling_ratio is not None:
        log_w = log_w + sampling_ratio.log().clamp(_LEAST_LOG, _LARGEST_LOG).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LEAST_LOG, _LARGEST_LOG)
    rate = rate.clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def grpo_targets(
    token_ids: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    every_token: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """Returns the targets of :func:`liger_ext.functional.linear_log_probs` for :func:`grpo_loss`.

    The target of a token is ignore_index if neither the loss nor its gradient depends on the token: it is masked, or
    its advantage is 0 (with a ratio of whole sequences: all advantages of its sequence are 0). With
    ``rows=count_rows(targets)``, called before the model runs, the head's matmuls leave out most of these tokens.

    Args:
        token_ids, mask: ``(sequences, tokens)``.
        advantages: ``(sequences,)`` or ``(sequences, tokens)``.
        loss_type, importance_sampling_level: as in grpo_loss.
        every_token: keep tokens with advantage 0. Set it if beta is not 0, or if the entropies are used.
        ignore_index: the target of ignored tokens.

    Returns:
        ``(sequences, tokens)``, int64.

    Raises:
        ValueError: an unknown type or level; a tensor of the wrong shape or dtype.
    """
    _check_types("grpo_targets", loss_type, importance_sampling_level)
    if token_ids.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise ValueError(f"grpo_targets: token_ids has dtype {token_ids.dtype}, expected torch.int64")
    check_shapes("grpo_targets", token_ids=token_ids, mask=mask)
    _check_advantages("grpo_targets", "advantages", advantages, token_ids)
    keep = mask != 0
    if not every_token:
        counts = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) != 0
        # The ratio of a sequence depends on all of its tokens.
        counts = counts if importance_sampling_level == "token" and loss_type != "vespo" else counts.any(-1, True)
        keep = keep & counts
    return torch.where(keep, token_ids.long(), ignore_index)


def high_entropy_mask(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Selects the ``share`` of the tokens of mask that has the highest entropies (Wang et al., arXiv:2506.01939).
    Waits for the device.

    Args:
        entropy, mask: ``(sequences, tokens)``.
        share: in (0, 1].

    Returns:
        ``(sequences, tokens)``, bool, for ``policy_mask`` of grpo_loss.

    Raises:
        ValueError: share outside its range; shapes that differ.
    """
    check_number("high_entropy_mask", "share", share, "a number in (0, 1]", lambda share: 0 < share <= 1)
    check_shapes("high_entropy_mask", entropy=entropy, mask=mask)
    valid = mask != 0
    token_entropies = entropy.detach()[valid].float().sort().values
    if token_entropies.numel() == 0:
        return valid
    least = token_entropies[math.ceil(round((1 - share) * (token_entropies.numel() - 1), 6))]
    return valid & (entropy.detach() >= least)


def _check(options: dict) -> None:
    op, log_probs, kind = "grpo_loss", options["log_probs"], options["loss_type"]
    _check_types(op, kind, options["importance_sampling_level"])
    if kind == "dr_grpo" and options["max_completion_length"] is None:
        raise ValueError("max_completion_length must be provided for loss_type 'dr_grpo', and is None")
    not_negative = ["beta", "epsilon_low", "epsilon_high"]
    for name in ("normalizer", "entropy_normalizer"):
        if not isinstance(options[name], Tensor):
            not_negative += [name] if options[name] is not None else []
        elif options[name].numel() != 1:
            raise ValueError(f"{op}: {name} has shape {tuple(options[name].shape)}, expected one number")
    for name in not_negative:
        check_number(op, name, options[name], "a number, at least 0", lambda value: value >= 0)
    for name in ("entropy_coef", *(_VESPO if kind == "vespo" else ())):
        check_number(op, name, options[name], "a number", lambda _: True)
    positive = ["sapo_temperature_pos", "sapo_temperature_neg"] if kind == "sapo" else []
    positive += [name for name in ("delta", "max_completion_length") if options[name] is not None]
    check_positive(op, **{name: options[name] for name in positive})
    for option, needed in (("beta", "ref_log_probs"), ("entropy_coef", "entropy")):
        if options[option] != 0 and options[needed] is None:
            raise ValueError(f"{op}: {option} is {options[option]!r} and {needed} is None: pass it, or {option}=0")
    counted = "tokens" if kind in _MEAN_OVER_TOKENS else "sequences"
    alone = options["normalizer"] is not None and options["entropy_normalizer"] is None
    if options["entropy_coef"] != 0 and alone and (counted == "sequences" or options["policy_mask"] is not None):
        raise ValueError(
            f"{op}: entropy_normalizer is None, and normalizer counts {counted} (loss_type {kind!r}), but the "
            "entropy's mean is over mask * policy_mask: pass the sum of mask * policy_mask over the step"
        )
    if log_probs.dim() != 2:
        raise ValueError(f"{op}: log_probs has shape {tuple(log_probs.shape)}, expected (sequences, tokens)")
    check_shapes(
        op, log_probs=log_probs, **{n: options[n] for n in ("mask", "old_log_probs", "ref_log_probs", "entropy")}
    )
    for name in ("advantages", "sampling_ratio"):
        _check_advantages(op, name, options[name], log_probs)
    policy = options["policy_mask"]
    if policy is not None:
        sizes = zip(policy.shape[::-1], log_probs.shape[::-1], strict=False)
        if policy.dim() > 2 or any(size not in (1, full) for size, full in sizes):
            raise ValueError(
                f"{op}: policy_mask has shape {tuple(policy.shape)}, expected one that broadcasts to that of "
                f"log_probs, {tuple(log_probs.shape)}"
            )


def _check_types(op: str, kind: object, level: object) -> None:
    if kind not in _TYPES:
        raise ValueError(f"{op}: Unknown loss type: {kind!r}, expected one of {', '.join(_TYPES)}")
    if level not in ("token", "sequence"):
        raise ValueError(f"{op}: importance_sampling_level is {level!r}, expected 'token' or 'sequence'")
    if level == "sequence" and kind not in _CLIPPED:
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type={kind!r}: use the level 'token', or "
            f"one of {', '.join(_CLIPPED)}"
        )


def _check_advantages(op: str, name: str, t: Tensor | None, like: Tensor) -> None:
    rows, tokens = like.shape
    expected = (rows,), (rows, 1), (rows, tokens)
    if t is not None and tuple(t.shape) not in expected:
        either = " or ".join(map(str, expected))
        raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}, expected {either}")
