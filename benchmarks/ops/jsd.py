"""The implementations with which our generalised Jensen-Shannon divergence is compared: a composition of PyTorch's
functions, and peers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.installed import Peer


def jsd(log_q, log_p, labels, beta=0.5):
    """TRL's composition, without the selection of the rows that count."""
    if beta == 0:
        columns = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    else:
        log_m = torch.logsumexp(torch.stack([log_q + math.log1p(-beta), log_p + math.log(beta)]), 0)
        p_terms = F.kl_div(log_m, log_p, reduction="none", log_target=True)
        columns = beta * p_terms + (1 - beta) * F.kl_div(log_m, log_q, reduction="none", log_target=True)
    counted = labels != -100
    return (columns.sum(-1) * counted).sum() / counted.sum()


EAGER = {"jsd": jsd}
# Called without labels: with labels it synchronises with the host, which a CUDA graph cannot do. This adds no work.
_LIGER = Peer("liger_kernel.transformers.functional:liger_jsd", lambda f, q, p, labels: f(q, p, None, 0.5))
PEERS = {"jsd": {"liger": _LIGER}}
