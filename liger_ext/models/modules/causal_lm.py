"""Mixins for causal language models, whose training step computes the loss from hidden states, without logits."""

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

from liger_ext.models.modules.as_liger_kernel import head_loss_function, output_class
from liger_ext.models.modules.called_head import scaled
from liger_ext.models.modules.log_probs import fused_log_probs, log_probs_from_logits, take_options
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
from liger_ext.models.patching.forwards import arguments_read, source_text
from liger_ext.models.patching.swap import Mixin
from liger_ext.models.recognise.normal_form import HEAD_ARGUMENTS, MODEL_CALL, renamed
from liger_ext.ops._checks import check_constants
from liger_ext.ops._loss_plan import Level


def _forward_like(stock: type[nn.Module], doc: str) -> Callable[..., ModelOutput]:
    """Returns a `forward` with transformers' arguments and `skip_logits`, which calls `self._forward`."""
    signature = inspect.signature(stock.forward)
    names = tuple(signature.parameters)[1:]

    @can_return_tuple
    def forward(self, *args, skip_logits: bool | None = None, **kwargs) -> ModelOutput:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if skip_logits is not None and not isinstance(skip_logits, bool):
            raise TypeError(f"skip_logits is {skip_logits!r}, expected True, False or None")
        as_tuple = arguments.pop("return_dict", None) is False  # a positional one; can_return_tuple removes the keyword
        output = self._forward(arguments, skip_logits)
        return output.to_tuple() if as_tuple and isinstance(output, ModelOutput) else output

    forward.__doc__, forward.__signature__ = doc, _with_skip_logits(signature)
    return forward


def _with_skip_logits(signature: inspect.Signature) -> inspect.Signature:
    """Adds `skip_logits` to a signature. Trainer reads the signature to select a data set's columns, and generate() to
    check arguments."""
    parameters = list(signature.parameters.values())
    added = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
    last = sum(p.kind is not p.VAR_KEYWORD for p in parameters)
    return signature.replace(parameters=[*parameters[:last], added, *parameters[last:]])


class CausalLM(Mixin):
    liger_memory = "auto"
    # The operations of a head beside its matmul. All are off by default; entries of the table of known code set them. A
    # path names nested attributes of the model, as "config.logits_scaling" does.
    CASTS = False  # True: the hidden states are cast to the dtype of the head's weight
    HIDDEN_DIVIDED_BY: str | None = None  # path of a divisor of the hidden states
    MULTIPLIED_BY: str | None = None  # path of a factor of the logits
    DIVIDED_BY: str | None = None  # path of a divisor of the logits
    SOFTCAP: str | None = None  # the attribute of the text configuration that bounds the logits
    LOGITS: str | None = None  # dtype of the returned logits; None: the head's
    HIDDEN_STATES: str | None = None  # the output's field for the argument of the head's call

    def liger_logits(self) -> tuple[float, float | None]:
        """Returns the factor of the head's results, and the softcap that then bounds them (None: no bound)."""
        scale = 1.0 if self.MULTIPLIED_BY is None else operator.attrgetter(self.MULTIPLIED_BY)(self)
        if self.DIVIDED_BY is not None:
            scale = 1 / operator.attrgetter(self.DIVIDED_BY)(self)
        return scale, None if self.SOFTCAP is None else getattr(self.config.get_text_config(), self.SOFTCAP, None)

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        cls.forward = _forward_like(stock, cls._forward.__doc__)
        output, cls.COPIED = _stock_output(stock)
        cls.MODEL, cls.TAKES = _stock_model(stock)
        cls.PASSED = _passed_by(stock)
        parameters = inspect.signature(stock.forward).parameters
        cls.KEEPS = "logits_to_keep" in parameters
        read, others = arguments_read(stock.forward), parameters.keys() - HEAD_ARGUMENTS
        cls.UNREAD = sorted(others - read)  # `deprecate_kwarg` may rename them
        given = [parameter for name, parameter in parameters.items() if name in others & read]
        cls.DEFAULTS = {p.name: p.default for p in given if p.default not in (None, p.empty)}
        # These methods read the source of a class's module. The call caches the result for subclasses, ours included.
        for name in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
            if hasattr(stock, name):
                getattr(stock, name)()
        cls.OUTPUT, cls.OUTPUT_WITHOUT, cls.CACHE = liger_output(output), _outputs_without(output), cache_in(output)

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        """Computes transformers' forward. In training with labels it computes the loss from the hidden states instead,
        and the output has no logits.

        Args:
            skip_logits: False computes logits in training, too; True omits them in evaluation, too. None: the rule
                above. Without labels logits are always computed: a Trainer that removes the labels still passes True.
            shift_labels, num_items_in_batch, ignore_index, label_smoothing, lse_square_scale, ce_weight,
                use_token_scaling, accum_dtype, memory, return_token_accuracy, return_predicted_tokens: for the loss.
            return_log_probs: also return each target's log-probability as `log_probs`, and with return_entropy
                `entropy`; without logits, in eval mode, too. The loss is then the mean of -log_probs, or their sum
                divided by num_items_in_batch: ValueError for options that would change it.
            temperature: with return_log_probs, a number that divides the logits of log_probs, entropy and loss.
            logits_dtype: with return_log_probs, as in `functional.linear_log_probs`.
            max_rows: an upper bound of the number of targets in the batch that are not ignored (`count_rows`). In a
                graph of torch.compile the loss then processes this number of rows, not all.

        A training step without logits also builds no cache of keys and values (`past_key_values`, or `cache`), unless
        `use_cache=True` is passed, or `position_ids` come without an `attention_mask`. Reading a value that was not
        computed raises an error; with `return_dict=False` the tuple has no entry for it. If all labels are ignored, the
        loss is 0, where transformers returns NaN. A user's own loss (`model.loss_function`) is called with logits, and
        with all arguments that it receives in an unpatched model.
        """
        labels, shift_labels = arguments.get("labels"), arguments.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        unread = next((name for name in self.UNREAD if arguments.get(name) is not None), None)
        against = self.stock_reason() or (unread and f"transformers' forward may rename {unread}: pass its new name")
        log_probs_options = take_options(arguments, has_labels, against)
        if skip_logits is None:
            skip_logits = has_labels and (self.training or log_probs_options is not None)
        if against is not None:
            return super().forward(**arguments)
        options = {name: arguments.pop(name) for name in _LOSS_OPTIONS if name in arguments}
        options.pop("return_z_loss", None)  # the loss includes it; the output has no field for it
        max_rows = options.pop("max_rows", None)
        if not has_labels or not (skip_logits or options or log_probs_options or labels is None):
            return super().forward(**arguments)

        check_constants(type(self).__name__, **options)
        loss_arguments = {name: arguments.pop(name) for name in _LOSS_ARGUMENTS if name in arguments}
        logits_to_keep = arguments.pop("logits_to_keep", 0) if self.KEEPS else 0
        if skip_logits and isinstance(logits_to_keep, int) and logits_to_keep == 0:
            loss_arguments |= counted_rows(self.lm_head, **loss_arguments, max_rows=max_rows)
        passed = {"labels": labels, "logits_to_keep": logits_to_keep}
        given = _model_input(arguments)
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
        options |= log_probs_options or {}
        if softcap is not None:
            options["softcap"] = softcap
        if skip_logits:
            output, shown = output_class(self, spared), {}
            if options.get("memory") is None:
                options["memory"] = self._loss_memory(hidden_states)
            options["function"] = head_loss_function(self)
            make = fused_causal_lm_loss if log_probs_options is None else fused_log_probs
            result = make(hidden_states, self.lm_head, **loss_arguments, logit_scale=scale, **options)
        else:
            logits = scaled(self.lm_head(hidden_states), scale)
            logits = logits if self.LOGITS is None else logits.to(getattr(torch, self.LOGITS))
            make = causal_lm_loss if log_probs_options is None else log_probs_from_logits
            result = make(logits, **loss_arguments, **options)
            if softcap is not None:
                logits = softcapped(logits, softcap)
            output, shown = self.OUTPUT, {"logits": logits}
        results = dict(
            loss=result.loss,
            **{name: getattr(result, name, None) for name in RESULTS},
            **shown,
            **({} if self.HIDDEN_STATES is None else {self.HIDDEN_STATES: hidden_states}),
            **{name: getattr(outputs, name) for name in self.COPIED if not (spared and name == self.CACHE)},
        )
        return output(**self._results(results, arguments))

    def stock_reason(self) -> str | None:
        """Returns why transformers' own forward must run, whatever its arguments are; None if ours may run."""
        if exports_onnx():
            return "torch.onnx exports the unpatched model, which does not return them"
        own = "model.loss_function is the user's own, which is given logits: set it to transformers' ForCausalLMLoss"
        return None if self.loss_function in _LOSSES else own

    def _loss_memory(self, hidden_states: torch.Tensor) -> str:
        """Returns this model's level of memory for its loss, mostly with the bytes that the loss may use without a
        higher peak of the step: the size of the gradients of gate, up and hidden states in a layer's backward, which
        runs after the loss has freed its memory. It depends only on the configuration, the dtype and number of rows."""
        config = self.config.get_text_config()
        width, level = getattr(config, "intermediate_size", None), self.liger_memory
        if type(width) is not int or not hidden_states.requires_grad or torch.compiler.is_compiling() or level == "min":
            return level
        return Level(
            level,
            2 * hidden_states.numel() * hidden_states.itemsize * (width + config.hidden_size) // config.hidden_size,
        )

    def _for_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the argument of the head's call."""
        if self.CASTS:
            hidden_states = hidden_states.to(self.lm_head.weight.dtype)
        if self.HIDDEN_DIVIDED_BY is not None:
            hidden_states = hidden_states / operator.attrgetter(self.HIDDEN_DIVIDED_BY)(self)
        return hidden_states

    def _results(self, results: dict[str, object], arguments: dict[str, object]) -> dict[str, object]:
        """Returns the output's fields: `results` and a family's additions. `arguments` are those of `self.model`."""
        return results


_LOSSES = ForCausalLMLoss, causal_lm_cross_entropy
_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_LOSS_OPTIONS = (*VALUE_OPTIONS, *OUTPUT_OPTIONS, *FUSED_OPTIONS)


class BambaCausalLM(CausalLM):
    """Bamba. With `z_loss_coefficient` the loss has a term of all positions' logits, so that these must exist."""

    def stock_reason(self) -> str | None:
        own = "with a z_loss_coefficient its loss has another term" if self.z_loss_coefficient > 0 else None
        return super().stock_reason() or own


class MoshiCausalLM(CausalLM):
    """Moshi's text model. The whole Moshi calls it with embeddings, and reads the logits also in training."""

    HIDDEN_STATES = "last_hidden_state"

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        is_inside = arguments.get("input_ids") is None
        return super()._forward(arguments, False if is_inside and skip_logits is None else skip_logits)


class RoutedCausalLM(CausalLM):
    """Afmoe and Zaya: the output has router logits if the argument or, without it, the configuration requests them."""

    def _routes(self) -> bool:
        return self.config.output_router_logits

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        if arguments.get("output_router_logits") is None:
            arguments["output_router_logits"] = self._routes()
        return super()._forward(arguments, skip_logits)


class MoeCausalLM(RoutedCausalLM):
    """Mixtral: if router logits are requested, the loss that balances the experts' load is added."""

    AUX_LOSS_FACTOR = "router_aux_loss_coef"

    def _balance(self) -> tuple[int, int, float]:
        """Returns the number of experts, the number of experts per token, and the factor of the balancing loss."""
        return self.num_experts, self.num_experts_per_tok, getattr(self, self.AUX_LOSS_FACTOR)

    def _results(self, results: dict[str, object], arguments: dict[str, object]) -> dict[str, object]:
        aux_loss = None
        if arguments["output_router_logits"]:
            balance = sys.modules[self.STOCK_MODULE].load_balancing_loss_func
            experts, experts_per_token, factor = self._balance()
            aux_loss = balance(results["router_logits"], experts, experts_per_token, arguments.get("attention_mask"))
            results["loss"] = results["loss"] + factor * aux_loss.to(results["loss"].device)
        return {**results, "aux_loss": aux_loss}


class TextMoeCausalLM(MoeCausalLM):
    """Qwen3-VL-MoE and GLM-4V-MoE, whose inner language model has the experts."""

    def _balance(self) -> tuple[int, int, float]:
        config = self.config.text_config
        counts = self if hasattr(self, "num_experts") else config
        return counts.num_experts, counts.num_experts_per_tok, config.router_aux_loss_coef

    def _routes(self) -> bool:
        return self.config.text_config.output_router_logits


class OmniMoeCausalLM(TextMoeCausalLM):
    """Qwen 3 Omni's thinker, which itself has the counts of experts and the factor of their loss as attributes."""

    _balance = MoeCausalLM._balance


class CausalLMInside(Mixin):
    """Llama 4 with images: the head belongs to the inner language model, whose output the loss is computed from."""

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        cls.forward = _forward_like(stock, cls._forward.__doc__)
        output, _ = _stock_output(stock)
        cls.OUTPUT, cls.OUTPUT_WITHOUT = liger_output(output), _outputs_without(output)

    def stock_reason(self) -> str | None:
        inner = self.language_model
        if not isinstance(inner, CausalLM):
            return "its language model is not patched"
        return CausalLM.stock_reason(self) or inner.stock_reason()

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        """Computes transformers' forward, with the arguments and rules of the patched `LlamaForCausalLM.forward`."""
        labels, shift_labels = arguments.get("labels"), arguments.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        inner, against = self.language_model, self.stock_reason()
        log_probs_options = take_options(arguments, has_labels, against)
        if skip_logits is None:
            skip_logits = self.training and has_labels
        options = {name: arguments.get(name) for name in _LOSS_OPTIONS if name in arguments}
        if not has_labels or against is not None or not (skip_logits or options or log_probs_options):
            return super().forward(**arguments)
        given = {name: arguments.pop(name) for name in (*_LOSS_ARGUMENTS, *options) if name in arguments}
        wants_more = any(options.get(name) for name in OUTPUT_OPTIONS)  # stock's forward drops the language model's
        if wants_more or log_probs_options or not skip_logits:
            outputs = super().forward(**arguments, return_dict=True)
            given.pop("return_z_loss", None)
            make = causal_lm_loss if log_probs_options is None else log_probs_from_logits
            result = make(outputs.logits, **given, **(log_probs_options or {}))
            shown = {name: getattr(result, name, None) for name in RESULTS}
            return self.OUTPUT(**{**outputs, "loss": result.loss}, **shown)
        if shift_labels is None:
            given["shift_labels"] = shift(labels, given.get("ignore_index", -100))
        given.pop("labels", None)
        spared = self.training and _spare_cache(inner, arguments)  # not in `inner`, whose cache stock's forward reads
        outputs = super().forward(**arguments, **given, skip_logits=True, return_dict=True)
        results = {name: value for name, value in outputs.items() if not (spared and name in CACHES)}
        return output_class(self, spared)(loss=results.pop("logits"), **results)  # stock takes the loss for logits


def _outputs_without(output: type[ModelOutput]) -> dict[bool, type[ModelOutput]]:
    """Returns the output classes of a step without logits; key True: without a cache of keys and values, too."""
    return {False: output_without(output, "logits"), True: output_without(output, "logits", cache_in(output))}


def _model_input(arguments: dict[str, object]) -> torch.Tensor | None:
    """Returns `inputs_embeds`, or else `input_ids`."""
    embeds = arguments.get("inputs_embeds")
    return arguments.get("input_ids") if embeds is None else embeds


def _spare_cache(head: nn.Module, arguments: dict[str, object]) -> bool:
    """Sets `use_cache=False` for a training step unless the caller has decided: transformers' default cache is a copy
    of all keys and values. Returns whether an unpatched model would return a cache."""
    if "use_cache" in head.UNREAD or any(arguments.get(name) is not None for name in ("use_cache", *CACHES)):
        return False
    # Without a cache, transformers (4.53 on) finds packed documents by their positions, and masks them from each other.
    if arguments.get("position_ids") is not None and arguments.get("attention_mask") is None:
        return False
    given = _model_input(arguments)
    if isinstance(given, torch.Tensor) and given.is_meta:  # then positions cannot be read
        return False
    arguments["use_cache"] = False
    model = operator.attrgetter(head.MODEL)(head)
    models = model, getattr(model, "language_model", None)
    is_checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in models)
    return bool(getattr(head.config.get_text_config(), "use_cache", False)) and not is_checkpointed


def _stock_model(stock: type[nn.Module]) -> tuple[str, tuple[str, ...] | None]:
    """Returns the attribute that holds a head's model, and the arguments that this model receives (None: all)."""
    text = source_text(stock.forward) or ""
    call = MODEL_CALL.search(text)
    given = re.search(r"= self\.model\((.*)\)$", renamed(text), re.MULTILINE)
    takes_all = given is None or "**" in given[1]
    return call["model"] if call else "model", None if takes_all else tuple(inspect.signature(stock.forward).parameters)


def _passed_by(stock: type[nn.Module]) -> list[str]:
    """Returns the arguments for the loss that a head also passes to its model."""
    call = re.search(r"= self\.model\((.*)\)$", renamed(source_text(stock.forward) or ""), re.MULTILINE)
    return [name for name in ("labels", "logits_to_keep") if call and f"{name}={name}" in call[1]]


def _stock_output(stock: type[nn.Module]) -> tuple[type[ModelOutput], list[str]]:
    """Returns a head's output class, and the names of the fields that it copies from its model's output."""
    call = re.search(r"return (\w*CausalLMOutput\w*)\((.*)\)$", renamed(source_text(stock.forward) or ""), re.MULTILINE)
    if call is None:
        return CausalLMOutputWithPast, [cache_in(CausalLMOutputWithPast), "hidden_states", "attentions"]
    copied = re.findall(r"\b(\w+)=outputs\.\1\b", call[2])
    return vars(sys.modules[stock.__module__])[call[1]], copied


def _keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Returns the hidden states of the positions to keep: the last n (0: all), a 1-D index, or for each row a 2-D index
    [batch, n] or a 2-D bool mask [batch, seq]. The mask's result is [n_true, hidden_size]."""
    if isinstance(logits_to_keep, int):
        return hidden_states if logits_to_keep == 0 else hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep.unsqueeze(-1), dim=1)
