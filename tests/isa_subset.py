"""Judges every op in every dtype, and many ops at odd sizes, against float64, and prints the CPU instruction set that
the library uses: ``python isa_subset.py``. test_library runs it in a child process, because LIGER_EXT_CPU_ISA must be
set before the library is loaded."""

import torch
from cases import LAYOUTS, laid_out, library_lines, normal, random_targets

from liger_ext.testing import judge, self_test


def main() -> None:
    torch.set_num_threads(1)
    measured = list(self_test("cpu", (torch.float32, torch.bfloat16, torch.float16, torch.float64)))
    for i, (cols, dtype) in enumerate(
        (c, d) for c in (1, 7, 17, 33, 64, 129, 1000) for d in (torch.float32, torch.bfloat16, torch.float16)
    ):
        made = [
            laid_out(normal(5, cols, dtype=dtype, seed=s), LAYOUTS[i % len(LAYOUTS)]).requires_grad_() for s in range(3)
        ]
        weight = normal(cols, seed=4, mean=1, scale=0.3).requires_grad_()
        measured += judge("rms_norm", {"x": made[0], "weight": weight, "casting_mode": "gemma"})
        measured += judge("add_rms_norm", {"x": made[0], "residual": made[1], "weight": weight})
        measured += judge("layer_norm", {"x": made[0], "weight": weight, "bias": weight})
        measured += judge("swiglu", {"gate": made[0], "up": made[1]})
        measured += judge("geglu", {"gate": made[0], "up": made[1], "approximate": "none"})
        measured += judge("softmax", {"x": made[0]})
        target = random_targets(5, cols)
        options = {"softcap": 10.0, "label_smoothing": 0.1, "lse_square_scale": 1e-3, "return_predicted_tokens": True}
        measured += judge("cross_entropy", {"logits": made[2], "target": target, **options})
        head = normal(cols, 24, dtype=dtype, seed=5).requires_grad_()
        measured += judge(
            "fused_linear_cross_entropy",
            {"x": normal(5, 24, dtype=dtype).requires_grad_(), "weight": head, "target": target},
        )
    worst = max(measured, key=lambda m: m.ratio)
    assert worst.ratio <= 1, worst
    print("isa", *library_lines("liger_ext_cpu_isa"), "measured", len(measured), "worst", worst)


if __name__ == "__main__":
    main()
