"""The prediction of a row of logits is the index of its first largest value, with NaN as the largest of all, as in
torch.argmax: for any start and end of the row in memory, any distribution over threads, and all options."""

import functools
import itertools

import pytest
import torch
from cases import class_weights, device_dtypes, laid_out

from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST

NAN, INF = float("nan"), float("inf")
# (largest value, value before its first occurrence)
VALUES = [(5.0, 0.0), (0.0, -1.0), (INF, 0.0), (NAN, 0.0), (NAN, INF), (-INF, -INF)]
WANTED = {"return_predicted_tokens": True, "return_token_accuracy": True, "reduction": "none"}
OPTIONS = [{}, {"softcap": 3.0}, {"softcap": 3.0, "label_smoothing": 0.1, "weight": True}]


def rows_and_predictions(cols, firsts, dtype, device):
    """Rows in which each of the largest values starts at each of the columns, and the expected predictions."""
    cases = list(itertools.product(VALUES, firsts))
    rows = torch.empty(len(cases), cols)
    for row, ((largest, before), first) in zip(rows, cases, strict=True):
        row[:first], row[first:] = before, largest
        row[first::2] *= -1 if largest == 0 else 1  # zeros of both signs are equal
    expected = torch.tensor([0 if largest == before else first for (largest, before), first in cases])
    assert torch.equal(rows.argmax(-1), expected)
    return rows.to(device, dtype), expected.to(device)


def check(loss, expected, **options):
    """``loss(target, ...)`` returns the expected predictions, for equal and for other targets."""
    target = expected.clone()
    target[1::2] = (expected[1::2] == 0).long()  # another class
    out = loss(target, **WANTED, **options)
    torch.testing.assert_close(out.predicted_tokens, expected, rtol=0, atol=0)
    assert torch.equal(out.token_accuracy, (expected == target).float())
    if out.loss.requires_grad:
        out.loss.sum().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_rows_that_begin_anywhere(device, options):
    for dtype in device_dtypes(device):
        vector = 16 // dtype.itemsize
        # Rows shorter than a vector, and rows for a part of a warp, several warps and most threads of a block.
        for cols, firsts in ((5, range(5)), (133, range(vector + 2)), (4099, (0, 3)), (10_001, (1,))):
            made = rows_and_predictions(cols, firsts, dtype, device)
            # With an odd number of columns, the copies of a row start at every offset within 16 bytes.
            rows, expected = (t.repeat_interleave(vector, 0) for t in made)
            more = {"weight": class_weights(cols)(device, dtype)} if "weight" in options else {}
            rows.requires_grad_("softcap" in options)
            check(functools.partial(F.cross_entropy, rows), expected, **options | more)


@pytest.mark.parametrize("gradient", [True, False], ids=["gradient", ""])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "all options"])
def test_fused_loss(device, weighted, gradient):
    """Short rows, held rows, and classes in two chunks; element by element where class weights are not aligned."""
    options = {name: value for name, value in OPTIONS[-1].items() if weighted and name != "weight"}
    for dtype, (cols, memory) in itertools.product(
        device_dtypes(device), ((35, "fast"), (1051, "fast"), (2051, SMALLEST))
    ):
        if weighted:
            options["ce_weight"] = laid_out(class_weights(cols)(device, dtype), "offset")
        for row, expected in zip(*rows_and_predictions(cols, (3,), dtype, device), strict=True):
            x, weight = row.new_ones(2, 1), row[:, None].clone().requires_grad_(gradient)
            fused = functools.partial(F.fused_linear_cross_entropy, x, weight, memory=memory)
            check(fused, expected.expand(2), **options)
