"""A causal language model whose loss comes from the hidden states in training: what its forward does differently."""

import inspect
import operator
import re
import sys
from collections.abc import Callable

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.utils import can_return_tuple

from liger_ext.models.modules.as_liger_kernel import fused_loss_of, output_class
from liger_ext.models.modules.called_head import scaled
from liger_ext.models.modules.log_probs import fused_log_probs, log_probs_of_logits, take_options
from liger_ext.models.modules.loss import (
    CACHES,
    FUSED_OPTIONS,
    OUTPUT_OPTIONS,
    RESULTS,
    VALUE_OPTIONS,
    cache_in,
    causal_lm_cross_entropy,
    causal_lm_loss,
    counted_rows,
    fused_causal_lm_loss,
    liger_output,
    output_without,
    shift,
    softcapped,
)
from liger_ext.models.patching.calls import exports_onnx
from liger_ext.models.patching.forwards import text_of
from liger_ext.models.patching.swap import Mixin
from liger_ext.models.recognise.normal_form import MODEL_CALL, OWN_ARGUMENTS, renamed
from liger_ext.ops._loss_plan import Level


def _forward_like(stock: type[nn.Module], doc: str) -> Callable[..., ModelOutput]:
    """A `forward` with transformers' arguments, and `skip_logits`, that calls `self._forward`."""
    signature = inspect.signature(stock.forward)
    names = tuple(signature.parameters)[1:]

    @can_return_tuple
    def forward(self, *args, skip_logits: bool | None = None, **kwargs) -> ModelOutput:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if skip_logits is not None and not isinstance(skip_logits, bool):
            raise TypeError(f"skip_logits is {skip_logits!r}, expected True, False or None")
        as_tuple = arguments.pop("return_dict", None) is False  # one that was not given by its name
        output = self._forward(arguments, skip_logits)
        return output.to_tuple() if as_tuple and isinstance(output, ModelOutput) else output

    forward.__doc__, forward.__signature__ = doc, _with_skip_logits(signature)
    return forward


def _with_skip_logits(signature: inspect.Signature) -> inspect.Signature:
    """Trainer and generate() read the signature: which columns of a data set and which arguments the model takes."""
    parameters = list(signature.parameters.values())
    added = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
    last = sum(p.kind is not p.VAR_KEYWORD for p in parameters)
    return signature.replace(parameters=[*parameters[:last], added, *parameters[last:]])


class CausalLM(Mixin):
    liger_memory = "auto"
    # Operations of a head beside its matmul. A path names nested attributes: "config.logits_scaling".
    CASTS = False  # whether the hidden states get the dtype of the head's weight
    HIDDEN_DIVIDED_BY: str | None = None  # path of a divisor of the hidden states
    MULTIPLIED_BY: str | None = None  # path of a factor of the logits
    DIVIDED_BY: str | None = None  # path of a divisor of the logits
    SOFTCAP: str | None = None  # the attribute of the text's configuration that bounds the logits
    LOGITS: str | None = None  # dtype of logits that are returned; None: that of the head

    def liger_logits(self) -> tuple[float, float | None]:
        """What the head's results are multiplied with, and then bounded by (None: by nothing)."""
        scale = 1.0 if self.MULTIPLIED_BY is None else operator.attrgetter(self.MULTIPLIED_BY)(self)
        if self.DIVIDED_BY is not None:
            scale = 1 / operator.attrgetter(self.DIVIDED_BY)(self)
        return scale, None if self.SOFTCAP is None else getattr(self.config.get_text_config(), self.SOFTCAP, None)

    @classmethod
    def look_at(cls, stock: type[nn.Module]) -> None:
        cls.forward = _forward_like(stock, cls._forward.__doc__)
        output, cls.COPIED = _output_of(stock)
        cls.MODEL, cls.TAKES = _model_of(stock)
        cls.PASSED = _passed_by(stock)
        parameters = inspect.signature(stock.forward).parameters
        cls.KEEPS = "logits_to_keep" in parameters
        given = [p for p in parameters.values() if p.name not in OWN_ARGUMENTS]
        cls.DEFAULTS = {p.name: p.default for p in given if p.default not in (None, p.empty)}
        # They read the source of a class's module, and remember for subclasses what they found.
        for name in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
            if hasattr(stock, name):
                getattr(stock, name)()
        cls.OUTPUT, cls.OUTPUT_WITHOUT, cls.CACHE = liger_output(output), _outputs_without(output), cache_in(output)

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        """transformers' forward, but in training with labels the loss comes from the hidden states: no logits exist.

        Args:
            skip_logits: False brings the logits back in training, True spares them in evaluation. None: the rule above.
                Without labels there are always logits: a Trainer that takes the labels away still passes True.
            shift_labels, num_items_in_batch, ignore_index, label_smoothing, lse_square_scale, ce_weight,
                use_token_scaling, accum_dtype, memory, return_token_accuracy, return_predicted_tokens: for the loss.
            return_log_probs: also return each target's log-probability, `log_probs`, in eval mode, too, without logits.
                The loss is made of these: options that change it are a ValueError. With return_entropy, `entropy`, too.
            temperature: with return_log_probs, a number that divides the logits of log_probs, entropy and loss.
            max_rows: at most how many positions of the batch have a target that is not ignored (`count_rows`). In a
                graph of torch.compile the loss then takes as many rows, not all.

        A training step that makes no logits makes no cache of keys and values (`past_key_values`, or `cache`) either,
        unless `use_cache=True` asks for it, or `position_ids` come without an `attention_mask`. Reading what was not
        made is an error, and the tuple of `return_dict=False` has no place for it. The loss of labels that are all
        ignored is 0; transformers gives NaN. A loss of the user's own (`model.loss_function`) is obeyed: it gets
        logits, as it must, and all arguments that it would get unpatched.
        """
        labels, shift_labels = arguments.get("labels"), arguments.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        against = _against_ours(self)
        of_log_probs = take_options(arguments, has_labels, against)
        if skip_logits is None:
            skip_logits = has_labels and (self.training or of_log_probs is not None)
        if against is not None:
            return super().forward(**arguments)
        options = {name: arguments.pop(name) for name in _LOSS_OPTIONS if name in arguments}
        options.pop("return_z_loss", None)  # it is in the loss; the output has no place for it alone
        max_rows = options.pop("max_rows", None)
        if not has_labels or not (skip_logits or options or of_log_probs or labels is None):
            return super().forward(**arguments)

        loss_arguments = {name: arguments.pop(name) for name in _LOSS_ARGUMENTS if name in arguments}
        logits_to_keep = arguments.pop("logits_to_keep", 0) if self.KEEPS else 0
        if skip_logits and isinstance(logits_to_keep, int) and logits_to_keep == 0:
            loss_arguments |= counted_rows(self.lm_head, **loss_arguments, max_rows=max_rows)
        passed = {"labels": labels, "logits_to_keep": logits_to_keep}
        given = _given_to(arguments)
        spared = skip_logits and self.training and _spare_cache(self, arguments) and self.CACHE in self.COPIED
        arguments = {**self.DEFAULTS, **arguments}
        if self.TAKES is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.TAKES}
        model = operator.attrgetter(self.MODEL)(self)
        outputs = model(**arguments, **{name: passed[name] for name in self.PASSED}, return_dict=True)
        hidden_states = outputs.last_hidden_state
        if "logits_to_keep" not in self.PASSED or hidden_states.shape[1] == given.shape[1]:
            hidden_states = _keep(hidden_states, logits_to_keep)
        hidden_states = self._for_head(hidden_states)
        scale, softcap = self.liger_logits()
        options |= of_log_probs or {}
        if softcap is not None:
            options["softcap"] = softcap
        if skip_logits:
            output, shown = output_class(self, spared), {}
            if options.get("memory") is None:
                options["memory"] = self._loss_memory(hidden_states)
            options["function"] = fused_loss_of(self)
            make = fused_causal_lm_loss if of_log_probs is None else fused_log_probs
            result = make(hidden_states, self.lm_head, **loss_arguments, logit_scale=scale, **options)
        else:
            logits = self.lm_head(hidden_states)
            logits = scaled(logits, scale)
            logits = logits if self.LOGITS is None else logits.to(getattr(torch, self.LOGITS))
            make = causal_lm_loss if of_log_probs is None else log_probs_of_logits
            result = make(logits, **loss_arguments, **options)
            if softcap is not None:
                logits = softcapped(logits, softcap)
            output, shown = self.OUTPUT, {"logits": logits}
        results = dict(
            loss=result.loss,
            **{name: getattr(result, name, None) for name in RESULTS},
            **shown,
            **{name: getattr(outputs, name) for name in self.COPIED if not (spared and name == self.CACHE)},
        )
        return output(**self._results(results, arguments))

    def _loss_memory(self, hidden_states: torch.Tensor) -> str:
        """This model's level for its loss, which may take as much memory as the gradients of gate, up and hidden states
        do in a layer's backward, when that of the loss is free again. It follows from the configuration and the number
        of rows alone."""
        config = self.config.get_text_config()
        width, level = getattr(config, "intermediate_size", None), self.liger_memory
        if type(width) is not int or not hidden_states.requires_grad or torch.compiler.is_compiling() or level == "min":
            return level
        return Level(
            level,
            2 * hidden_states.numel() * hidden_states.itemsize * (width + config.hidden_size) // config.hidden_size,
        )

    def _for_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the head is called with."""
        if self.CASTS:
            hidden_states = hidden_states.to(self.lm_head.weight.dtype)
        if self.HIDDEN_DIVIDED_BY is not None:
            hidden_states = hidden_states / operator.attrgetter(self.HIDDEN_DIVIDED_BY)(self)
        return hidden_states

    def _results(self, results: dict[str, object], arguments: dict[str, object]) -> dict[str, object]:
        """`results` with what a family adds to them; `arguments` are those of `self.model`."""
        return results


def _against_ours(model: nn.Module) -> str | None:
    """Why transformers' own forward runs whatever its arguments are, if it does."""
    if exports_onnx():
        return "torch.onnx exports the unpatched model, which does not return them"
    if model.loss_function not in _LOSSES:
        return "model.loss_function is the user's own, which is given logits: set it to transformers' ForCausalLMLoss"
    return None


_LOSSES = ForCausalLMLoss, causal_lm_cross_entropy
_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_LOSS_OPTIONS = (*VALUE_OPTIONS, *OUTPUT_OPTIONS, *FUSED_OPTIONS)


class BambaCausalLM(CausalLM):
    """With a coefficient, the loss has a term of the logits of all positions: then they exist."""

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        if self.z_loss_coefficient > 0:
            take_options(arguments, True, "with a z_loss_coefficient its loss has another term")
            return super(CausalLM, self).forward(**arguments)
        return super()._forward(arguments, skip_logits)


class RoutedCausalLM(CausalLM):
    """Afmoe's, and Zaya's: what the routers say is returned if it is asked for, or the configuration says so."""

    def _routes(self) -> bool:
        return self.config.output_router_logits

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        if arguments.get("output_router_logits") is None:
            arguments["output_router_logits"] = self._routes()
        return super()._forward(arguments, skip_logits)


class MoeCausalLM(RoutedCausalLM):
    """Mixtral's: the loss that balances the experts' load is added."""

    AUX_LOSS_FACTOR = "router_aux_loss_coef"

    def _balance(self) -> tuple[int, int, float]:
        """How many experts there are, how many a token goes to, and the factor of their loss."""
        return self.num_experts, self.num_experts_per_tok, getattr(self, self.AUX_LOSS_FACTOR)

    def _results(self, results: dict[str, object], arguments: dict[str, object]) -> dict[str, object]:
        aux_loss = None
        if arguments["output_router_logits"]:
            balance = sys.modules[self.STOCK_MODULE].load_balancing_loss_func
            experts, of_token, factor = self._balance()
            aux_loss = balance(results["router_logits"], experts, of_token, arguments.get("attention_mask"))
            results["loss"] = results["loss"] + factor * aux_loss.to(results["loss"].device)
        return {**results, "aux_loss": aux_loss}


class MoeOfTextCausalLM(MoeCausalLM):
    """Qwen3-VL's and GLM-4V's, whose experts are those of the language model in it."""

    def _balance(self) -> tuple[int, int, float]:
        config = self.config.text_config
        counts = self if hasattr(self, "num_experts") else config
        return counts.num_experts, counts.num_experts_per_tok, config.router_aux_loss_coef

    def _routes(self) -> bool:
        return self.config.text_config.output_router_logits


class OmniMoeCausalLM(MoeOfTextCausalLM):
    """Qwen 3 Omni's thinker has the counts of experts, and the factor of their loss, itself."""

    _balance = MoeCausalLM._balance


class CausalLMInside(Mixin):
    """Llama 4's with images: the head is the language model's own, and the loss is made of what that returns."""

    @classmethod
    def look_at(cls, stock: type[nn.Module]) -> None:
        cls.forward = _forward_like(stock, cls._forward.__doc__)
        output, _ = _output_of(stock)
        cls.OUTPUT, cls.OUTPUT_WITHOUT = liger_output(output), _outputs_without(output)

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        """transformers' forward, as that of `LlamaForCausalLM` here."""
        labels, shift_labels = arguments.get("labels"), arguments.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        inner = self.language_model
        ours = isinstance(inner, CausalLM)
        against = (_against_ours(self) or _against_ours(inner)) if ours else "its language model is not patched"
        of_log_probs = take_options(arguments, has_labels, against)
        if skip_logits is None:
            skip_logits = self.training and has_labels
        options = {name: arguments.get(name) for name in _LOSS_OPTIONS if name in arguments}
        if not has_labels or against is not None or not (skip_logits or options or of_log_probs):
            return super().forward(**arguments)
        given = {name: arguments.pop(name) for name in (*_LOSS_ARGUMENTS, *options) if name in arguments}
        wants_more = any(options.get(name) for name in OUTPUT_OPTIONS)  # and the language model's are not handed on
        if wants_more or of_log_probs or not skip_logits:
            outputs = super().forward(**arguments, return_dict=True)
            given.pop("return_z_loss", None)
            make = causal_lm_loss if of_log_probs is None else log_probs_of_logits
            result = make(outputs.logits, **given, **(of_log_probs or {}))
            shown = {name: getattr(result, name, None) for name in RESULTS}
            return self.OUTPUT(**{**outputs, "loss": result.loss}, **shown)
        if shift_labels is None:
            given["shift_labels"] = shift(labels, given.get("ignore_index", -100))
        given.pop("labels", None)
        spared = self.training and _spare_cache(inner, arguments)  # here: stock's forward reads the cache
        outputs = super().forward(**arguments, **given, skip_logits=True, return_dict=True)
        results = {name: value for name, value in outputs.items() if not (spared and name in CACHES)}
        return output_class(self, spared)(loss=results.pop("logits"), **results)  # the first that it was given


def _outputs_without(output: type[ModelOutput]) -> dict[bool, type[ModelOutput]]:
    """What a step returns that makes no logits, by whether a cache is spared, too."""
    return {False: output_without(output, "logits"), True: output_without(output, "logits", cache_in(output))}


def _given_to(arguments: dict[str, object]) -> torch.Tensor | None:
    """The tokens, or what stands for them."""
    embeds = arguments.get("inputs_embeds")
    return arguments.get("input_ids") if embeds is None else embeds


def _spare_cache(head: nn.Module, arguments: dict[str, object]) -> bool:
    """Has a training step make no cache of keys and values, of which transformers' default makes a copy, where the
    caller has not decided. Returns whether an unpatched model's would be of use."""
    if any(arguments.get(name) is not None for name in ("use_cache", *CACHES)):
        return False
    # Where there is no cache, transformers (4.53 on) reads documents from positions, and keeps them apart.
    if arguments.get("position_ids") is not None and arguments.get("attention_mask") is None:
        return False
    given = _given_to(arguments)
    if isinstance(given, torch.Tensor) and given.is_meta:  # then positions cannot be read
        return False
    arguments["use_cache"] = False
    model = operator.attrgetter(head.MODEL)(head)
    is_checkpointed = any(
        getattr(m, "gradient_checkpointing", False) for m in (model, getattr(model, "language_model", None))
    )
    return bool(getattr(head.config.get_text_config(), "use_cache", False)) and not is_checkpointed


def _model_of(stock: type[nn.Module]) -> tuple[str, tuple[str, ...] | None]:
    """The name of a head's model, and which arguments that gets; None: all that the head gets."""
    text = text_of(stock.forward) or ""
    call = MODEL_CALL.search(text)
    given = re.search(r"= self\.model\((.*)\)$", renamed(text), re.MULTILINE)
    takes_all = given is None or "**" in given[1]
    return call["model"] if call else "model", None if takes_all else tuple(inspect.signature(stock.forward).parameters)


def _passed_by(stock: type[nn.Module]) -> list[str]:
    """Which of its arguments for the loss a head also gives to its model."""
    call = re.search(r"= self\.model\((.*)\)$", renamed(text_of(stock.forward) or ""), re.MULTILINE)
    return [name for name in ("labels", "logits_to_keep") if call and f"{name}={name}" in call[1]]


def _output_of(stock: type[nn.Module]) -> tuple[type[ModelOutput], list[str]]:
    """What a head returns, and the names of what it hands on from its model."""
    text = renamed(text_of(stock.forward) or "")
    call = re.search(r"return (\w*CausalLMOutput\w*)\((.*)\)$", text, re.MULTILINE)
    if call is None:
        return CausalLMOutputWithPast, [cache_in(CausalLMOutputWithPast), "hidden_states", "attentions"]
    copied = re.findall(r"\b(\w+)=outputs\.\1\b", call[2])
    return vars(sys.modules[stock.__module__])[call[1]], copied


def _keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions whose logits are wanted: the last n (0: all), those of a 1-D index, or, row by row, of a 2-D index
    [batch, n] or a 2-D bool mask [batch, seq] (which gives [n_true, hidden_size])."""
    if isinstance(logits_to_keep, int):
        return hidden_states if logits_to_keep == 0 else hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep.unsqueeze(-1), dim=1)
