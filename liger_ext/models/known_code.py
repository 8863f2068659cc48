"""Which code of transformers is known: told by the text of a class's `forward`, and of what it calls.

Text is compared without what does not matter (`forwards.text_of`), with Llama's of the installed version, or by digests
of what has stayed the same in all versions that are named beside them.
"""

import ast
import difflib
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from liger_ext.models import llama
from liger_ext.models.causal_lm import (
    CausalLM,
    CausalLMInside,
    CausalLMOfFloat,
    DividedCausalLM,
    MoeCausalLM,
    MoeOfTextCausalLM,
    MultipliedByModelCausalLM,
    MultipliedCausalLM,
    SoftcappedCausalLM,
)
from liger_ext.models.decoder import (
    Attention,
    DecoderLayer,
    DropoutLayer,
    FalconH1Layer,
    Gemma4Layer,
    Glm4Layer,
    HybridLayer,
    Llama4Layer,
    SandwichLayer,
    ScaledLayer,
)
from liger_ext.models.experts import BatchedExperts, ClampedExperts, Experts
from liger_ext.models.forwards import find_calls, text_of
from liger_ext.models.mlp import (
    DropoutMLP,
    Llama4MLP,
    MixtralMLP,
    PackedMLP,
    ScaledMLP,
    UngatedMLP,
    VisionMLP,
)
from liger_ext.models.names import MODELS, name_of
from liger_ext.models.norms import (
    FalconGatedRMSNorm,
    GatedRMSNorm,
    GatedRMSNormInFloat,
    Gemma4RMSNorm,
    GroupedGatedRMSNorm,
    LayerNorm1P,
    Llama4RMSNorm,
    RMSNormInFloat,
    UnbiasedLayerNorm,
    WeightlessRMSNorm,
    ZeroCenteredRMSNorm,
)
from liger_ext.models.patch import stands_in, stock_class
from liger_ext.models.rope import ROPES, rope_for


@functools.cache
def patch_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass that takes the place of a class of transformers; None where its code is not known."""
    if patch_of_llamas(cls):
        return patch_of_llamas(cls)
    kind = _kinds().get(_code_of(cls.forward, cls))
    if kind is None and issubclass(cls, PreTrainedModel):
        kind = _HEADS.get(_difference(_text_of_head, cls, stock_class(llama.LlamaForCausalLM)))
    if kind is None:
        kind = _LAYERS.get(_difference(_text_of_layer, cls, stock_class(llama.LlamaDecoderLayer)))
    module, replacements = sys.modules[cls.__module__], {}
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if kind is None and code is not None:
        ropes = {name: vars(module).get(name) for name in code.co_names if name.startswith("apply_rotary_")}
        known = {name: (rope, _known_ropes().get(_code_of(rope))) for name, rope in ropes.items()}
        replacements = {name: rope_for(rope, **how) for name, (rope, how) in known.items() if how is not None}
        kind = Attention if replacements else None
    if kind is None:
        kind = _GATES_OF_EXPERTS.get(_code_of(getattr(cls, "_apply_gate", None)))
    if kind is None:
        return None
    # The module's __getattr__ finds it again.
    namespace = {"__module__": "liger_ext.models.families", "__qualname__": name_of(cls)}
    if hasattr(kind, "forward"):
        namespace["forward"] = kind.forward
    return stands_in(module, **replacements)(type(cls)(cls.__name__, (kind, cls), namespace))


def is_left_alone(cls: type[nn.Module]) -> bool:
    """Whether the code is known, and nothing is to be gained."""
    codes = _difference(_text_of_layer, cls, stock_class(llama.LlamaDecoderLayer)), _code_of(cls.forward, cls)
    return not _LEFT_ALONE.isdisjoint(codes)


@functools.cache
def _kinds() -> dict[str, type]:
    """By the digest of a class's code: the mixin that does the same."""
    patches = llama.LlamaRMSNorm, llama.LlamaMLP
    codes = {_code_of(stock_class(patch).forward, stock_class(patch)): patch.__bases__[0] for patch in patches}
    return {code: kind for code, kind in codes.items() if code is not None} | _OTHERS


_OTHERS = {
    "b748919e3a9033e5": ZeroCenteredRMSNorm,  # GemmaRMSNorm, of all supported versions
    "eef4e978a32aa4a4": RMSNormInFloat,  # Olmo2RMSNorm of 4.52 on, GptOssRMSNorm
    "e8d404cbecb96285": PackedMLP,  # Phi3MLP, of all supported versions
    "cb22d52059d9aaf1": Gemma4RMSNorm,  # Gemma3nRMSNorm of 5.0 on, too
    "6fb92cf4142d8989": Llama4RMSNorm,  # Llama4TextRMSNorm, of all supported versions
    "07d835dcad37e65e": WeightlessRMSNorm,  # Llama4TextL2Norm, of all supported versions, and NanoChatRMSNorm
    "96920b139d7fbbc2": GatedRMSNorm,  # Qwen3NextRMSNormGated of 5.23
    "0befe0d7cbec41df": GatedRMSNorm,  # before
    "e930594abdf99541": GroupedGatedRMSNorm,  # Zamba2RMSNormGated of all supported versions, MambaRMSNormGated of 5.23
    "0784e1271fca788e": GroupedGatedRMSNorm,  # before, of one group
    "873a05ece6ae6c87": FalconGatedRMSNorm,  # FalconH1RMSNormGated
    "66adebd7ca546584": GatedRMSNormInFloat,  # KimiLinearRMSNormGated
    "ec976d1bff6235ff": UnbiasedLayerNorm,  # CohereLayerNorm, of all supported versions
    "9256ffcc8828f07e": LayerNorm1P,  # NemotronLayerNorm1P of 5.23
    "957547f394ae4ffa": LayerNorm1P,  # of 4.57
    "d6d1d883e2820916": LayerNorm1P,  # of 4.51
    "c4447c48b0f9ccf3": Llama4MLP,  # Llama4TextMLP, of all supported versions
    "a937255ed446bfd6": MixtralMLP,  # MixtralBlockSparseTop2MLP, before 5.0
    "0d7b11835db6b508": VisionMLP,  # Qwen2_5_VLMLP, of all supported versions
    "24ed32eb8cb32194": DropoutMLP,  # SeedOssMLP
    "2ccda7a06d8a5c89": ScaledMLP,  # FalconH1MLP
    "81bc4bc569be56c2": UngatedMLP,  # NemotronMLP, of all supported versions
    "5f66bc719c393081": BatchedExperts,  # Llama4TextExperts
    "027e9ce52954e82b": FalconH1Layer,  # FalconH1DecoderLayer of 5.23
}

_GATES_OF_EXPERTS = {
    "82821f94b28660b6": Experts,  # transformers.integrations.moe, 5.0 on
    "63686633f3cb5d4a": ClampedExperts,  # GptOssExperts
}

# Heads and layers change from version to version, but what others do differently from Llama's in the same does not.
_HEADS = {
    "e3b0c44298fc1c14": CausalLM,  # no difference
    "9a35629b99bb02e3": CausalLMOfFloat,  # MllamaForCausalLM of 5.23
    "189c4b340361c46a": CausalLMOfFloat,  # of 4.57 and 5.0
    "1dff45b7a0ab64b8": MoeCausalLM,  # MixtralForCausalLM
    "4a503be17ccd1ad2": MoeOfTextCausalLM,  # Qwen3VLMoeForConditionalGeneration
    "ad4844e68163c0ab": MoeOfTextCausalLM,  # Glm4vMoeForConditionalGeneration
    "c22b5fbbdfdc9573": SoftcappedCausalLM,  # Gemma2ForCausalLM
    "8573b2c9e65ae139": SoftcappedCausalLM,  # PaliGemmaForConditionalGeneration of 5.21 on
    "3f440530c0fd0e92": SoftcappedCausalLM,  # Gemma4ForCausalLM
    "8c9618da0f7c2055": SoftcappedCausalLM,  # Gemma4ForConditionalGeneration
    "fff64a902b89006c": DividedCausalLM,  # GraniteForCausalLM
    "3955b7c698a2918b": MultipliedCausalLM,  # CohereForCausalLM
    "8991d921548cfd06": MultipliedByModelCausalLM,  # FalconH1ForCausalLM of 5.23
    "474db812108fa665": MultipliedByModelCausalLM,  # of 4.57 and 5.0
    "d42ef39b8cc8c3c0": CausalLMInside,  # Llama4ForConditionalGeneration of 5.23
}

_LAYERS = {
    "e3b0c44298fc1c14": DecoderLayer,  # no difference
    "8702bd01918e7ce4": SandwichLayer,  # Gemma2DecoderLayer of 4.53 to 4.56 and of 5.0 on
    "502430feb4f77262": SandwichLayer,  # of 4.57
    "3d1bcef31599620f": Glm4Layer,  # of all supported versions
    "95741f3e291ba554": ScaledLayer,  # GraniteDecoderLayer, but for 4.57 and 5.0
    "53ab13df176a3976": ScaledLayer,  # of these
    "7d9d354cfcae8f63": DropoutLayer,  # Phi3DecoderLayer of 4.57 on
    "337b64fde9c2ee06": DecoderLayer,  # GptOssDecoderLayer of 4.57 on, whose MLP returns what its router says as well
    "b23b8652668c11f5": DecoderLayer,  # MllamaSelfAttentionDecoderLayer of 4.57 on
    "8ab29f0069a3c2c6": Llama4Layer,  # Llama4TextDecoderLayer of 4.57 on
    "b444d18588c2c619": Gemma4Layer,  # Gemma4TextDecoderLayer of 5.23
    "30097b5c3b51517c": Gemma4Layer,  # Gemma4UnifiedTextDecoderLayer of 5.23
    "480a5c088a0b85ed": HybridLayer,  # Qwen3NextDecoderLayer of 5.23
    "2670243c1934e08c": HybridLayer,  # Qwen3_5DecoderLayer of 5.23
}

_LEFT_ALONE = {  # in which nothing can be fused
    "6913de200383abad",  # Olmo2DecoderLayer: what is added to the residual stream is normalised, and not the sum
    "6a52429b77334fc6",  # CohereDecoderLayer: attention and MLP read the same norm's output, and are added as they are
    "0b41299b2e269fa2",  # NemotronDecoderLayer: the sum has no RMSNorm
    "78305e689641703c",  # GptOssMLP of 5.0 on: a router, and experts, which are looked at by themselves
    "4cfe1fd04fd3dd1f",  # before
}


@functools.cache
def _known_ropes() -> dict[str, dict[str, object]]:
    llamas = _code_of(modeling_llama.apply_rotary_pos_emb)
    return ROPES if llamas is None else {llamas: {}, **ROPES}


def _code_of(function: Callable | None, cls: type | None = None, seen: tuple = ()) -> str | None:
    """A digest of what `function` does, with the functions of its module, and the methods of `cls`, that it names.

    None if some of the source is not there to be read; it is then like no other.
    """
    text = None if function is None else text_of(function)
    if text is None:
        return None
    function = inspect.unwrap(function)
    texts = [text]
    for name in function.__code__.co_names:
        found = vars(cls).get(name) if cls else None
        found = function.__globals__.get(name) if found is None else found
        found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else None
        if found is not None and found.__module__ == function.__module__ and found not in (*seen, function):
            texts.append(_code_of(found, cls, (*seen, function)))
    return None if None in texts else _digest(texts)


def _difference(text: Callable[[Callable], str | None], cls: type, other: type) -> str | None:
    """A digest of what turns `other.forward` into `cls.forward`: the lines that go and those that come, in order."""
    texts = text(other.forward), text(cls.forward)
    if None in texts:
        return None
    changes = difflib.unified_diff(*(text.splitlines() for text in texts), n=0, lineterm="")
    return _digest([change for change in list(changes)[2:] if not change.startswith("@@")])


@functools.cache
def _text_of_layer(forward: Callable) -> str | None:
    """The text of a layer that gives its arguments to the attention, by their names, without these arguments. It may
    withhold some: `DecoderLayer` looks which."""
    text = text_of(forward)
    if text is None:
        return None
    function = ast.parse(text).body[0]
    calls = find_calls(function, "self.self_attn")
    names = _names_of_arguments(function)
    given = [name for name in names if any(keyword.arg == name for call in calls for keyword in call.keywords)]
    if len(calls) != 1 or given[:1] != names[:1] or not _hands_on(calls[0], function, given):
        return None
    calls[0].keywords, function.args.args, function.args.defaults = [], [], []
    return ast.unparse(function)


@functools.cache
def _text_of_head(forward: Callable) -> str | None:
    """The text of a head that gives its arguments to `self.model`, by their names, without these arguments; without
    the number of classes, which our loss does not read, and without what it returns as `self.model` has returned it."""
    text = text_of(forward)
    if text is None or "**" not in text.partition("\n")[0]:
        return None
    function = _Resolved().visit(ast.parse(text.replace("outputs[0]", "outputs.last_hidden_state"))).body[0]
    for_model = [n for n in _names_of_arguments(function) if n not in ("labels", "logits_to_keep")]
    for node in ast.walk(function):
        callee = ast.unparse(node.func) if isinstance(node, ast.Call) else None
        if callee == "self.model":
            node.keywords = [k for k in node.keywords if ast.unparse(k) not in _PASSED]
            if not _hands_on(node, function, for_model):
                return None
            node.keywords = []
        elif callee == "self.loss_function":
            node.keywords = [k for k in node.keywords if k.arg != "vocab_size"]
            node.keywords = [*map(ast.keyword, ("logits", "labels"), node.args), *node.keywords]
            node.args = node.args[3:]  # the third is vocab_size
            if not _hands_on(node, function, ["logits", "labels"]):
                return None
            node.keywords = []
        elif callee is not None and callee.endswith("CausalLMOutputWithPast"):
            node.func = ast.Name("Output")
            node.keywords = [k for k in node.keywords if ast.unparse(k.value) != f"outputs.{k.arg}"]
    function.args.args, function.args.defaults = [], []
    function.args.kwarg.arg = "kwargs"
    return ast.unparse(function)


# What our head does, too, where transformers' does.
_PASSED = "return_dict=True", "labels=labels", "logits_to_keep=logits_to_keep"


class _Resolved(ast.NodeTransformer):
    """Without the lines in which a head decides what its model would decide as well, and without advice to the user."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        name = ast.unparse(node.targets[0])
        default = f"{name} = {name} if {name} is not None else self.config.{name}"
        decided = name in ("output_attentions", "output_hidden_states") and ast.unparse(node) == default
        return None if decided else node

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        advice = all(ast.unparse(line).startswith("logger.warning_once(") for line in node.body)
        return None if advice and not node.orelse else self.generic_visit(node)


def _names_of_arguments(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args[1:]]


def _hands_on(call: ast.Call, function: ast.FunctionDef, names: list[str]) -> bool:
    """Whether `call` is given these by their names, the rest of the arguments of `function`, and nothing else."""
    rest = function.args.kwarg
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    return not call.args and rest is not None and given == {name: name for name in names} | {None: rest.arg}


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def stock_classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """The classes of models of transformers that `modules` are of, or are derived from."""
    found = {}
    for cls in dict.fromkeys(map(type, modules)):
        stock = [c for c in cls.__mro__ if c.__module__.startswith(MODELS) or patch_of_llamas(c)]
        found.update(dict.fromkeys([c for c in stock if "forward" in vars(c)][:1]))
    return list(found)


def patch_of_llamas(cls: type) -> type[nn.Module] | None:
    """The patch of a class of Llama's: by the class, which may be one that other code has put there."""
    patch = getattr(llama, cls.__name__, None)
    return patch if isinstance(patch, type) and cls in patch.__bases__ else None
