"""The generalised Jensen-Shannon divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.installed import has


def jsd(log_q, log_p, labels, beta=0.5):
    """TRL's composition, without its gathering of the rows that count."""
    if beta == 0:
        columns = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    else:
        log_m = torch.logsumexp(torch.stack([log_q + math.log1p(-beta), log_p + math.log(beta)]), 0)
        of_p = F.kl_div(log_m, log_p, reduction="none", log_target=True)
        columns = beta * of_p + (1 - beta) * F.kl_div(log_m, log_q, reduction="none", log_target=True)
    counted = labels != -100
    return (columns.sum(-1) * counted).sum() / counted.sum()


def jsd_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.transformers.functional import liger_jsd

    # With labels it waits for the host, which a CUDA graph cannot: without them it has no more to do than the others.
    return {"liger": lambda log_q, log_p, labels, beta=0.5: liger_jsd(log_q, log_p, None, beta)}


EAGER = {"jsd": jsd}
PEERS = {"jsd": jsd_peers}
