"""The object that a patch function returns: it reverts the patch, and describes what runs in the model."""

import contextlib
import importlib
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

TOKENS = 8192  # for which the size of logits is shown


class Part(NamedTuple):
    """The modules of one kind: those that run our code, all, and the names of the others by the reason."""

    ours: int
    total: int
    stock: dict[str, list[str]]


class Loss(NamedTuple):
    """A head and its loss in training."""

    how: str  # "fused", "in chunks" or "all logits"
    reason: str | None  # why it is not fused
    vocab_size: int | None
    dtype: torch.dtype  # of the logits
    model: str  # the name of the class that computes it
    is_patched: bool

    def logits_bytes(self, tokens: int) -> int:
        return tokens * (self.vocab_size or 0) * self.dtype.itemsize

    def text(self, tokens: int) -> str:
        size, dtype = _size(self.logits_bytes(tokens)), str(self.dtype).removeprefix("torch.")
        because = f", because {self.reason}" if self.reason else ""
        if self.how == "all logits":
            return f"all logits, {size} in {dtype} for {tokens:,} tokens{because}"
        return f"{self.how}{because}; all logits of {tokens:,} tokens would take {size} in {dtype}"


class Summary(NamedTuple):
    """The parts and losses of a model that run liger_ext's code when :meth:`PatchHandle.summary` is called. ``str()``
    returns a table."""

    model: str  # the name of its class
    memory: str | None  # the level; several, if modules differ; None: nothing is patched
    parts: dict[str, Part]
    losses: list[Loss]

    def line(self) -> str:
        parts = [f"{part.ours} of {part.total} {name}" for name, part in self.parts.items()]
        losses = [f"loss {loss.how}" for loss in self.losses]
        level = [f"memory={self.memory!r}"] if self.memory else []
        return f"{self.model}: {', '.join(parts + losses + level) or 'no part that liger_ext knows'}"

    def __str__(self) -> str:
        return self.table()

    def table(self, tokens: int = TOKENS) -> str:
        """Returns the table, with the size of the logits of this number of tokens."""
        lines = [self.model + (f", memory={self.memory!r}" if self.memory else ", not patched")]
        for name, part in self.parts.items():
            lines.append(f"  {name:12}{part.ours} of {part.total} run liger_ext's code")
            for reason, names in part.stock.items():
                others = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"  {'':12}  {len(names)}: {reason} ({names[0] or self.model}{others})")
        if not self.parts and not self.losses:
            lines.append("  no part that liger_ext knows")
        for loss in self.losses:
            lines.append(f"  {'loss':12}{loss.text(tokens)}{f' ({loss.model})' if len(self.losses) > 1 else ''}")
        return "\n".join(lines)


def _size(count: int) -> str:
    """Returns a number of bytes with three digits: 2.05 GiB."""
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"))
    size, unit = float(count), next(units)
    while size >= 999.5 and unit != "PiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}"


class PatchHandle:
    """Reverts a patch: call `revert()`, or use the handle as a context manager; `summary()` describes the patch.

    A handle reverts the changes of its own call. Reverting twice is harmless. Handles of different models, or of parts
    without a common module, may be reverted in any order. Revert several handles of one model in the reverse order of
    their calls. A handle does not keep a model alive.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()

    def __repr__(self) -> str:
        """Returns one line: the numbers of the model's parts that run liger_ext's code, the loss, the level."""
        model = self._model and self._model()
        if model is None:
            return f"<PatchHandle of {'no single model' if self._model is None else 'a model that is gone'}>"
        return f"<PatchHandle of {self.summary(model).line()}>"

    def revert(self) -> None:
        """Undoes the patch. A patched module gets its former class again, or a warning names it."""
        self._undo.close()

    def summary(self, model: nn.Module | None = None) -> Summary:
        """Describes what runs liger_ext's code in the patched model at present, and why other parts do not.

        Args:
            model: another model, such as one that was built under a patch of its class.

        Returns:
            A tuple with the name of the model's class, the level of memory, `parts` (for norms, MLPs, experts,
            attentions, decoder layers and adapters: the number that run liger_ext's code, the number of all, and the
            names of the others by the reason), and `losses` (whether the loss is fused with the head, and the reason if
            not). `str()` of it is a table.

        Raises:
            TypeError: `model` is not an nn.Module.
            ValueError: the handle is of no single model, and `model` is None; or the model is gone.
        """
        found = model if model is not None or self._model is None else self._model()
        if found is None:
            raise ValueError("this handle has no model to describe: pass one, handle.summary(model)")
        if not isinstance(found, nn.Module):
            raise TypeError(f"model is {type(found).__name__}, expected an nn.Module")
        return importlib.import_module("liger_ext.models.summary").summarise(found)  # it imports the patches

    def on_revert(self, function: Callable[..., object], *args: object) -> None:
        """Has the revert call `function(*args)`, before the functions that were passed earlier."""
        self._undo.callback(function, *args)

    def replace(self, owner: ModuleType | nn.Module, name: str, replacement: object) -> None:
        """Sets an attribute of a Python module or an nn.Module. The revert restores the former value, or deletes the
        attribute if it did not exist, unless other code has set it in the meantime."""
        found, reference = vars(owner).get(name, _ABSENT), weakref.ref(owner)
        setattr(owner, name, replacement)

        def undo() -> None:
            module = reference()
            if module is None or vars(module).get(name) is not replacement:
                return
            if found is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, found)

        self.on_revert(undo)


_ABSENT = object()
