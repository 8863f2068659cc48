"""DeepSpeed's ZeRO, emulated by a class that changes a model as DeepSpeed (0.16) does.

Stage 3 leaves parameters empty. Hooks on every module, registered here in DeepSpeed's order, gather the module's own
parameters before its forward and its backward, and release them afterwards; a parameter's gradient is removed as soon
as it is accumulated. Stages 1 and 2 turn all parameters into views of one flat tensor; stage 2 also removes gradients.
"""

import collections
import copy
import types

import family_models
import pytest
import torch
from cases import RecordCalls
from family_models import assert_same
from llama_models import build, checkpoint_layers, levels, lora, one_thread, tokens  # noqa: F401
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

DEEPSPEEDS = "deepspeed.runtime.zero.parameter_offload"  # DeepSpeed's module that defines its hooks


def deepspeed_hook(hook):
    hook.__module__ = DEEPSPEEDS
    return hook


def map_tensors(function, value):
    """Like DeepSpeed's `apply_to_tensors_only`: builds new tuples and lists, changes dicts in place, ignores other
    objects."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, v) for v in value)
    if isinstance(value, dict):
        for name, v in value.items():
            value[name] = map_tensors(function, v)
        return value
    return function(value) if isinstance(value, torch.Tensor) else value


class Parameters(dict):
    """A module's parameters. A read outside of the module's call gathers a parameter until the running call ends."""

    def __init__(self, parameters, zero):
        super().__init__(parameters)
        self.zero = zero

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if parameter is not None and not parameter.numel() and self.zero.running:
            self.zero.running[-1].append(parameter)
            self.zero.foreign_reads.add(self.zero.names[parameter])
            self.zero.gather([parameter])
        return parameter


class ZeRO3:
    def __init__(self, model):
        self.model, self.gradients, self.gathered = model, {}, collections.defaultdict(list)
        self.running, self.foreign_reads = [], set()  # parameters that each running call must release at its end
        self.names = {p: name for name, p in model.named_parameters()}
        self.full = {p: p.data for p in self.names}
        for i, p in enumerate(self.names):
            p.ds_id = i
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)
            p.data = p.data.new_empty(0)
        for module in model.modules():
            module._parameters = Parameters(module._parameters, self)
            self.hook(module)

    def hook(self, module):
        own = [p for p in dict.values(module._parameters) if p is not None]
        waiting = backwards = 0

        class BeforeBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, output):
                nonlocal backwards
                backwards += 1
                return output.detach()

            @staticmethod
            def backward(ctx, gradient):
                nonlocal backwards
                if backwards:
                    backwards -= 1
                    self.gather(own)
                return gradient

        class AfterBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                nonlocal waiting
                waiting += value.requires_grad
                return value.detach()

            @staticmethod
            def backward(ctx, gradient):
                nonlocal waiting
                waiting -= 1
                if waiting == 0:
                    self.release(own)
                return gradient

        @deepspeed_hook
        def before(module, inputs):
            self.running.append(list(own))
            self.gather(own)

        @deepspeed_hook
        def behind(module, inputs, output):
            self.release(self.running.pop())

        @deepspeed_hook
        def mark_outputs(module, inputs, output):
            return map_tensors(BeforeBackward.apply, output)

        @deepspeed_hook
        def mark_inputs(module, inputs):
            nonlocal waiting
            waiting = 0
            return map_tensors(AfterBackward.apply, inputs)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(behind)
        module.register_forward_hook(mark_outputs)
        module.register_forward_pre_hook(mark_inputs)

    def gather(self, parameters):
        for p in parameters:
            if not p.numel():
                p.data = self.full[p].clone()
                self.gathered[self.names[p]].append(StorageWeakRef(p.data.untyped_storage()))

    def release(self, parameters):
        for p in parameters:
            p.data = p.data.new_empty(0)

    def reduce(self, p):
        assert p.grad.shape == self.full[p].shape
        name = self.names[p]
        self.gradients[name] = self.gradients.get(name, 0) + p.grad
        p.grad = None

    def alive(self):
        """Names of the parameters whose full weights are still referenced."""
        return {name for name, storages in self.gathered.items() if not all(s.expired() for s in storages)}

    def step(self, **batch):
        """Returns loss and gradients, and the full weights that were alive between forward and backward and at the
        end."""
        output = self.model(**batch)
        between = self.alive()
        output.loss.backward()
        self.release(self.names)
        found = {"loss": output.loss.detach(), **self.gradients}
        del output
        self.gradients = {}
        return found, between, self.alive()


class ZeRO3Linear(torch.autograd.Function):
    """DeepSpeed's linear function, which saves the parameter, so that the backward reads its current data."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return torch._C._nn.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        return dout @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0) if ctx.has_bias else None


def zero3_linear(module="deepspeed.runtime.zero.linear"):
    def linear(x, weight, bias=None):
        return ZeRO3Linear.apply(x, weight, bias)

    names = {"__name__": module, "ZeRO3Linear": ZeRO3Linear}
    return types.FunctionType(linear.__code__, names, argdefs=linear.__defaults__)


@pytest.fixture(params=[False, True], ids=["torch's linear", "ZeRO's linear"])
def linear(request, monkeypatch):
    """`zero.Init` replaces torch's linear function by its own, permanently."""
    if request.param:
        monkeypatch.setattr(nn.functional, "linear", zero3_linear())


def make_batch():
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :3] = -100
    return dict(input_ids=ids, labels=labels, use_cache=False)


def plain_step(model):
    model = copy.deepcopy(model)
    loss = model(**make_batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def compare(stock, prepare=lambda model: None, **options):
    prepare(stock)
    expected = plain_step(stock)
    model = family_models.patched(stock, **options)
    theirs, ours = ZeRO3(copy.deepcopy(stock)), ZeRO3(model)
    for _ in range(2):
        (found, *alive), (of_stock, *alive_of_stock) = ours.step(**make_batch()), theirs.step(**make_batch())
        assert_same(of_stock, expected)
        assert_same(found, expected)
        for now, stocks in zip(alive, alive_of_stock, strict=True):
            assert now <= stocks
        assert ours.foreign_reads <= theirs.foreign_reads
    with RecordCalls() as record:
        ours.step(**make_batch())
    assert set(record.names) >= {"rms_norm", "rope", "fused_linear_cross_entropy"}


SMALL = dict(num_hidden_layers=2)


@pytest.mark.usefixtures("linear")
@levels
def test_stage_3(memory):
    compare(build(**SMALL).train(), memory=memory)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "granite"])
def test_stage_3_of_families(family):
    compare(family_models.build(family, num_hidden_layers=2, **family_models.all_experts(family)))


@pytest.mark.usefixtures("linear")
def test_stage_3_with_tied_weights():
    compare(build(**SMALL, tie_word_embeddings=True).train())


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_stage_3_in_checkpoints(use_reentrant, memory):
    compare(build(**SMALL).train(), lambda model: checkpoint_layers(model, use_reentrant), memory=memory)


@pytest.mark.usefixtures("linear")
def test_stage_3_with_adapters():
    compare(lora(build(**SMALL), target_modules=["q_proj", "up_proj", "down_proj"]).train())


class ZeRO2:
    """Stage 2; with `takes_gradients=False`, stage 1."""

    def __init__(self, model, takes_gradients):
        self.model, self.takes_gradients = model, takes_gradients
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.flat = torch.cat([p.data.flatten() for p in self.trained])
        self.gradient = torch.zeros_like(self.flat)
        first = 0
        for p in self.trained:
            rows = slice(first, first := first + p.numel())
            p.data = self.flat[rows].view(p.shape)
            if takes_gradients:
                p.register_post_accumulate_grad_hook(lambda p, rows=rows: self.take(p, rows))

    def take(self, p, rows):
        self.gradient[rows] += p.grad.flatten()
        p.grad = None

    def step(self):
        loss = self.model(**make_batch()).loss
        loss.backward()
        if not self.takes_gradients:
            self.gradient = torch.cat([p.grad.flatten() for p in self.trained])
            self.model.zero_grad()
        found = {"loss": loss.detach(), "gradient": self.gradient.clone()}
        self.flat -= 0.1 * self.gradient
        self.gradient.zero_()
        return found


@levels
@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("takes_gradients", [False, True], ids=["stage 1", "stage 2"])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_stages_1_and_2(takes_gradients, memory, adapted):
    stock = build(**SMALL, tie_word_embeddings=True).train()
    if adapted:
        stock = lora(stock, target_modules=["q_proj", "up_proj", "down_proj"])
    theirs = ZeRO2(copy.deepcopy(stock), takes_gradients)
    ours = ZeRO2(family_models.patched(stock, memory=memory), takes_gradients)
    losses = []
    for _ in range(3):
        found, expected = ours.step(), theirs.step()
        assert_same(found, expected)
        losses.append(float(found["loss"]))
    assert losses[2] < losses[1] < losses[0]
    with RecordCalls() as record:
        ours.step()
    assert set(record.names) >= {"add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}


def test_another_linear_of_all_is_obeyed(monkeypatch):
    """A function from an unknown library must be called, because it may compute another result."""
    monkeypatch.setattr(nn.functional, "linear", zero3_linear("deepspeed.elsewhere"))
    with RecordCalls() as record:
        family_models.patched(build(**SMALL).train())(**make_batch())
    assert "fused_linear_cross_entropy" not in record.names
