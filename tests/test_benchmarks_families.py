"""Tests of the suites `benchmarks families` and `benchmarks lora`, with transformers and with liger_ext: training steps
run and are recorded, every norm and MLP of the models is patched, and every set-up of adapters takes effect. Of
Unsloth's kernels, which need a GPU, the functions that the benchmark calls are replaced."""

import json
import sys
import textwrap
import warnings

import pytest
import torch
from llama_models import one_thread  # noqa: F401
from test_benchmarks_train import BATCH, SEQ, TINY
from transformers.models.llama import modeling_llama

from benchmarks import __main__ as cli
from benchmarks import families, lora, models, step_one, steps, suite
from benchmarks import unsloth as glue
from liger_ext.models.modules.causal_lm import CausalLM
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.modules.norms import Norm

QWEN = TINY | dict(model_type="qwen3", head_dim=8)


@pytest.mark.slow
def test_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "FAMILIES_CPU", {"tiny qwen3": (QWEN, BATCH, SEQ), "other": (TINY, 1, SEQ)})
    cli.main(["families", "--device", "cpu", "--out", str(tmp_path), "--models", "tiny"])
    records = [json.loads(line) for line in (tmp_path / "families_cpu_fp32.jsonl").read_text().splitlines()]
    table = (tmp_path / "families_cpu_fp32.md").read_text()
    assert [r["provider"] for r in records] == ["Hugging Face", "liger_ext"]
    for record in records:
        assert record["error"] == "" and record["model"] == "tiny qwen3" and record["tokens"] == BATCH * SEQ
        assert record["step"]["median"] > 0 and record["peak_mib"] > 0
        assert record["loss"] == pytest.approx(records[0]["loss"], rel=1e-4)
        assert f"| tiny qwen3 | {record['provider']} |" in table
    assert "| 1.000 |" in table


def measure(provider, dtype="fp32", config=QWEN, **options):
    return step_one.measure(config, BATCH, SEQ, provider, "cpu", dtype, lambda text: None, **options)


def test_adapters_alone_train():
    stock, ours = (measure(name, lora=dict(fp32=True, autocast=True)) for name in (models.STOCK, models.OURS))
    assert ours.loss == pytest.approx(stock.loss, rel=1e-2)
    assert abs(measure(models.STOCK).loss - stock.loss) > 1e-3


@pytest.mark.parametrize("name", lora.SET_UPS)
def test_set_ups_of_adapters(name, monkeypatch):
    """Every field of a set-up takes effect, and liger_ext's loss is stock's."""
    if "nf4" in name:
        pytest.importorskip("bitsandbytes")
    set_up, seen, autocast = lora.SET_UPS[name], [], []
    offered = models.on_request("cpu")

    def remembered(provider):
        def prepare(model):
            seen.append(model)
            model.register_forward_pre_hook(lambda *_: autocast.append(torch.is_autocast_enabled("cpu")))
            return offered[provider](model)

        return prepare

    monkeypatch.setattr(models, "on_request", lambda device: {each: remembered(each) for each in offered})
    wide = TINY | dict(hidden_size=64, intermediate_size=128, head_dim=16)  # rows of whole blocks of 64 values
    stock, ours = (measure(provider, "bf16", wide, lora=vars(set_up)).loss for provider in (models.STOCK, models.OURS))
    assert ours == pytest.approx(stock, rel=1e-2)
    assert set(autocast) == {set_up.autocast}
    for model in seen:
        layer = model.model.layers[0].mlp.down_proj
        assert type(layer).__name__ == ("Linear4bit" if set_up.four_bit else "Linear") and hasattr(layer, "lora_A")
        assert type(layer.base_layer).__name__ == type(layer).__name__
        assert layer.lora_A.default.weight.dtype == (torch.float32 if set_up.fp32 else torch.bfloat16)
        assert getattr(layer.lora_dropout.default, "p", 0.0) == set_up.dropout
        assert model.is_gradient_checkpointing == set_up.checkpoints
        for module in (model.model.norm, model.lm_head, model.model.embed_tokens):
            assert module.weight.dtype == (torch.float32 if set_up.prepared else torch.bfloat16)


@pytest.fixture
def unsloth(tmp_path, monkeypatch):
    """Packages with the functions that the benchmark calls, in PyTorch. Their `__init__` must not run."""
    parts = {
        "unsloth/kernels/fast_lora.py": """
            def apply_lora_qkv(self, x):
                return self.q_proj(x), self.k_proj(x), self.v_proj(x)
            def apply_lora_o(self, x):
                return self.o_proj(x)
            def apply_lora_mlp_swiglu(self, x):
                return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        """,
        "unsloth/kernels/rms_layernorm.py": """
            import torch
            def fast_rms_layernorm(self, x):
                return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
        """,
        "unsloth/kernels/rope_embedding.py": """
            from transformers.models.llama.modeling_llama import rotate_half
            def fast_rope_embedding(q, k, cos, sin):
                return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        """,
        "unsloth_zoo/fused_losses/cross_entropy_loss.py": """
            import torch
            def unsloth_fused_ce_loss(trainer, x, weight, bias, labels):
                return torch.nn.functional.cross_entropy((x @ weight.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        """,
        "unsloth_zoo/fused_losses/__init__.py": "",
    }
    for package in glue.PACKAGES:
        parts[f"{package.replace('.', '/')}/__init__.py"] = "raise ImportError('must not run')"
    for path, text in parts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "has", lambda module: True)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("unsloth", "unsloth_zoo")]:
        del sys.modules[name]


def test_unsloth_in_the_places_of_the_models_functions(unsloth, monkeypatch):
    offered = models.on_request("cuda")
    monkeypatch.setattr(models, "on_request", lambda device: offered)
    wide = TINY | dict(initializer_range=0.5)  # with small weights attention would hardly depend on positions
    for set_up in (lora.SetUp(), lora.SetUp(fp32=True, checkpoints=True)):
        stock = measure(models.STOCK, config=wide, lora=vars(set_up))
        with monkeypatch.context() as patch:
            for part in ("RMSNorm", "MLP", "Attention", "ForCausalLM"):
                patch.delattr(getattr(modeling_llama, f"Llama{part}"), "forward")
            theirs = measure(models.UNSLOTH, config=wide, lora=vars(set_up))
        assert theirs.loss == pytest.approx(stock.loss, rel=1e-5)
    with pytest.raises(ValueError, match="adapters only"):
        measure(models.UNSLOTH, config=TINY)


def test_the_table_has_shares_of_unsloth(unsloth, tmp_path, monkeypatch):
    """Unsloth's kernels run by default for Llama alone."""
    monkeypatch.setattr(lora, "LORA_CUDA", {"Llama": (TINY, BATCH, SEQ), "Gemma": (QWEN, BATCH, SEQ)})
    monkeypatch.setattr(lora, "FEWER", {"Gemma": [lora.BF16]})
    monkeypatch.setattr(lora, "eager_providers", lambda settings: [models.STOCK])
    requested = []

    def ask_each(requests, ahead):
        for _, request in requests:
            requested.append(request)
            time = 2.0 if request["provider"] == models.UNSLOTH else 3.0
            yield {"result": dict(step=dict(median=time, low=time, high=time), peak=time * 2**20, loss=1.0)}

    monkeypatch.setattr(steps, "ask_each", ask_each)
    settings = suite.Settings("cuda", "bf16", models=("Llama", "Gemma"), ops=(lora.BF16, lora.PREPARED))
    records = list(lora.run(settings))
    assert [(r.model, r.set_up, r.provider) for r in records] == [
        ("Llama", lora.BF16, models.STOCK),
        ("Llama", lora.BF16, models.UNSLOTH),
        ("Llama", lora.PREPARED, models.STOCK),
        ("Llama", lora.PREPARED, models.UNSLOTH),
        ("Gemma", lora.BF16, models.STOCK),
    ]
    assert [step_one.SetUp(**request["lora"]) for request in requested] == [lora.SET_UPS[r.set_up] for r in records]
    rows = lora.table(records, settings).rows
    assert [(row[4], row[7]) for row in rows] == [("1.500", "1.500"), ("1.000", "1.000")] * 2 + [("", "")]


@pytest.mark.parametrize("name", models.FAMILIES_CUDA)
def test_every_model_is_patched_as_a_whole(name):
    """Every part of a benchmarked model is patched, on the meta device: unknown code would issue a warning."""
    config, *_ = models.FAMILIES_CUDA[name]
    model = models.build(config, torch.device("meta"), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(models.providers("cpu")[models.OURS](model), CausalLM)
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    assert norms and all(isinstance(module, Norm) for module in norms)
    assert any(isinstance(module, MLP) for module in model.modules()) or "moe" in config["model_type"]
