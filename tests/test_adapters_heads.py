"""Tests of PEFT's adapters on heads and embeddings of patched models, and of merging, saving and loading adapters."""

import pytest
import torch
from llama_models import VOCAB, build, make_batch, one_thread, ops, step  # noqa: F401
from packaging.version import Version
from test_adapters import TUNERS, adapt, assert_trains_as_stock, both, orders

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.ops._loss_plan import SMALLEST

peft = pytest.importorskip("peft")

HEADS = {
    "LoRA": dict(target_modules=["lm_head"]),
    "LoRA on both": dict(target_modules=["lm_head", "embed_tokens"]),
    "LoRA on both, tied": dict(target_modules=["lm_head", "embed_tokens"], ensure_weight_tying=True),
    "LoRA on the embedding": dict(target_modules=["embed_tokens"]),
    "LoRA on the embedding, tied": dict(target_modules=["embed_tokens"], ensure_weight_tying=True),
    "saved head": dict(target_modules=["v_proj"], modules_to_save=["lm_head"]),
    "saved embedding": dict(target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    "saved embedding, tied": dict(
        target_modules=["v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "saved both": dict(target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "tokens": dict(target_modules=["v_proj"], trainable_token_indices=[5, 17, 400]),
    "tokens of both": dict(
        target_modules=["v_proj"], trainable_token_indices={"embed_tokens": [5, 17, 400], "lm_head": [5, 400]}
    ),
}


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning", "ignore:.*tying:UserWarning")
@orders
@pytest.mark.parametrize("memory", ["auto", SMALLEST], ids=["whole", "chunks"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_heads_and_embeddings(device, options, tied, memory, order):
    if tied and options == HEADS["tokens of both"] and Version(peft.__version__) < Version("0.19"):
        pytest.skip("PEFT 0.18 raises an error")
    sizes = dict(tie_word_embeddings=tied)
    models = both(order, lambda m: adapt(m, "Lora", dict(r=4, **options)), device=device, sizes=sizes)
    assert_trains_as_stock(*models, make_batch(device, 6, 50), memory=memory)


UNTIED = {name: options for name, options in HEADS.items() if "ensure_weight_tying" not in options}


@orders
@pytest.mark.parametrize(
    "options", [TUNERS["LoRA"][1], TUNERS["DoRA"][1], *UNTIED.values()], ids=["LoRA", "DoRA", *UNTIED]
)
def test_merged(device, options, order):
    sizes = dict(tie_word_embeddings=False)
    models = both(order, lambda m: adapt(m, "Lora", dict(dict(r=4), **options)), device=device, sizes=sizes)
    batch = make_batch(device)
    assert_trains_as_stock(*models, batch)
    separate = models[1](**batch).loss
    for model in models:
        model.merge_adapter()
    torch.testing.assert_close(models[1](**batch).loss, separate, rtol=1e-4, atol=0)
    for model in models:
        model.unmerge_adapter()
    assert_trains_as_stock(*models, batch)
    models = [model.merge_and_unload().requires_grad_() for model in models]
    torch.testing.assert_close(models[1](**batch).loss, separate, rtol=1e-4, atol=0)
    assert_trains_as_stock(*models, batch)
    assert ops(models[1], **batch) == {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}


SAVED = ("LoRA", "LoRA, norms", "DoRA", "IA3", "VeRA", "prompt", "prefix", "norms")


@orders
@pytest.mark.parametrize("name", [*SAVED, *HEADS])
def test_saved_and_loaded(tmp_path, name, order):
    kind, options = TUNERS[name] if name in TUNERS else ("Lora", dict(r=4, **HEADS[name]))
    sizes = dict(tie_word_embeddings="ensure_weight_tying" in options)
    model = adapt(build(**sizes), kind, options).eval()
    apply_liger_kernel_to_llama(model=model)
    model.save_pretrained(tmp_path)
    trains = name not in ("prompt", "prefix")  # PEFT does not train loaded prompts
    loaded = both(order, lambda m: peft.PeftModel.from_pretrained(m, tmp_path, is_trainable=trains), sizes=sizes)
    batch = make_batch("cpu")
    with torch.no_grad():
        expected = model(**batch).loss
        for other in loaded:
            torch.testing.assert_close(other(**batch).loss, expected, rtol=1e-6, atol=0)
    if trains:
        assert_trains_as_stock(*loaded, batch)
