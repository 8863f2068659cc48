"""Provides modules named ``liger_kernel`` that run liger_ext, for code that was written for Liger-Kernel.

`install` adds a finder to Python's imports; so does `provide`, in a program of ``python -m liger_ext run``. The finder
creates a module of ``MODULES`` when it is imported. Every module has the same names:

- the classes and functions of ``liger_ext`` that have Liger-Kernel's names;
- names that only Liger-Kernel has, from ``chunked_loss.py``, ``ops.py``, ``transformers.py`` and ``utils.py`` beside
  this file;
- placeholders for all other names with Liger-Kernel's prefixes. Callers import every name that they may use, so a
  placeholder can be imported, and raises an error when it is called.

Other names are absent: ``hasattr`` is False, and the finder raises an import error that names liger_ext. Every module
is a package, so ``from module import name`` has Python ask the finder for ``module.name``.
docs/liger_kernel_names.md lists the names that work.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import liger_ext
from liger_ext.models import check_transformers
from liger_ext.models.model_types import FUNCTION_TYPES
from liger_ext.models.patching.handle import PatchHandle

NAME = "liger_kernel"
# The version of Liger-Kernel whose names and arguments these modules have.
UPSTREAM_VERSION = "0.8.5"

_OPS = """cross_entropy fused_add_rms_norm fused_linear_cross_entropy geglu group_norm jsd layer_norm relu_squared
    rms_norm rope softmax swiglu"""
_PARTS = {
    NAME: "chunked_loss ops transformers triton utils",
    f"{NAME}.chunked_loss": """
        cosine_similarity_loss cpo_loss dpo_loss functional fused_linear_distillation fused_linear_ppo
        fused_linear_preference fused_linear_unpaired_preference grpo_loss jsd_loss kto_loss orpo_loss simpo_loss""",
    f"{NAME}.ops": f"""
        {_OPS} attn_res dyt fused_ce_tvd fused_linear_jsd fused_linear_kl_div fused_linear_scaled_cross_entropy
        fused_moe fused_neighborhood_attention grpo_loss kl_div llama4_rope mhc mlp modulated_rms_norm
        multi_token_attention poly_norm qwen2vl_mrope sparsemax tiled_mlp tvd utils vocab_parallel_cross_entropy""",
    f"{NAME}.transformers": f"""{_OPS} auto_model dyt fsdp functional fused_ce_tvd fused_linear_jsd fused_linear_kl_div
        fused_neighborhood_attention grpo_loss kl_div llama4_rope mhc mlp model modulated_rms_norm monkey_patch
        multi_token_attention poly_norm qwen2vl_mrope sparsemax tiled_mlp trainer trainer_integration tvd
        vocab_parallel_cross_entropy""",
    f"{NAME}.transformers.model": "loss_utils output_classes",
    f"{NAME}.transformers.trainer": "orpo_trainer",
    f"{NAME}.triton": "monkey_patch",
}
MODULES = frozenset((NAME, *(f"{parent}.{part}" for parent, parts in _PARTS.items() for part in parts.split())))

_LIGER_PREFIXES = ("Liger", "liger_", "apply_")
_PUBLIC = frozenset(name for name in liger_ext.__all__ if name.startswith((*_LIGER_PREFIXES, "CrossEntropyOutput")))
_PATCHES = frozenset(f"apply_liger_kernel_to_{model_type}" for model_type in FUNCTION_TYPES)
_LOSSES = "CPO DPO GRPO KTO ORPO SimPO"
_NAMES_BY_FILE = {  # the names in each file beside this one
    "chunked_loss": " ".join(
        f"LigerFusedLinear{loss}Function LigerFusedLinear{loss}Loss liger_fused_linear_{loss.lower()}"
        for loss in _LOSSES.split()
    ),
    "ops": """
        LigerCrossEntropyFunction LigerFusedAddRMSNormFunction LigerFusedGateUpSiLUMulFunction
        LigerFusedLinearCrossEntropyFunction LigerFusedLinearScaledCrossEntropyFunction
        LigerGELUMulFunction LigerGroupNormFunction LigerJSDFunction
        LigerLayerNormFunction LigerRMSNormFunction LigerReLUSquaredFunction LigerRopeFunction LigerSiLUMulFunction
        LigerSoftmaxFunction apply_liger_triton_cache_manager calculate_settings compare_version ensure_contiguous
        fused_linear_cross_entropy_backward fused_linear_cross_entropy_forward torch_to_triton_dtype""",
    "transformers": """
        AutoLigerKernelForCausalLM LigerCausalLMOutputWithPast LigerForCausalLMLoss MODEL_TYPE_TO_APPLY_LIGER_FN
        _FSDPForwardRedirection _apply_liger_kernel _apply_liger_kernel_to_instance""",
    "utils": """
        PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device is_hip is_npu_available is_peft_available
        transformers_version_dispatch""",
}
_FILE_BY_NAME = {name: file for file, names in _NAMES_BY_FILE.items() for name in names.split()}

_WHO = f"liger_ext, which answers to the name {NAME} here (liger_ext.compat.install() or python -m liger_ext run), has"

_installed = 0  # the number of active handles


def install() -> PatchHandle:
    """Implements `liger_ext.compat.install`."""
    global _installed
    if not _installed:
        found = importlib.util.find_spec(NAME)
        if found is None:
            sys.meta_path.append(_FINDER)
            _set_available(True)
        elif found.origin and Path(found.origin).parts[-3:-1] == ("run_path", NAME):
            importlib.import_module(NAME)  # calls `provide`
        else:
            raise RuntimeError(
                f"{NAME} is installed ({found.origin}), and its name is taken: uninstall liger-kernel, start the "
                "program by `python -m liger_ext run`, or patch with liger_ext.apply_liger_kernel_to_instance(model) "
                "and without use_liger_kernel=True"
            )
    _installed += 1
    handle = PatchHandle()
    handle.on_revert(_uninstall)
    return handle


def provide(package: types.ModuleType) -> None:
    """Gives the package of ``run_path``, which is being imported, its names and modules for the rest of the process."""
    global _installed
    sys.meta_path.insert(0, _FINDER)  # first, so that no module of an installed liger-kernel is found
    _installed += 1
    package.__path__ = []
    _add_names(package, NAME)


def _uninstall() -> None:
    global _installed
    _installed -= 1
    if _installed == 0:
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
        sys.meta_path.remove(_FINDER)
        _set_available(False)


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the modules, and the distribution, which older versions of transformers read to find the package."""

    def find_spec(self, name: str, *_) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        if name not in MODULES:
            # `name=NAME`, since `from module import missing` suppresses an error whose name is the missing module's.
            raise ModuleNotFoundError(f"{_WHO} no {name}. docs/liger_kernel_names.md lists its names.", name=NAME)
        spec = importlib.machinery.ModuleSpec(name, _Loader(), origin="liger_ext.compat", is_package=True)
        spec.submodule_search_locations = []
        return spec

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()) -> list["_Distribution"]:  # noqa: B008
        asked = (context.name or "").replace("-", "_").lower()
        return [_Distribution()] if asked == NAME else []


_FINDER = _Finder()


class _Loader:
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name, "liger_ext under the name of Liger-Kernel: liger_ext.compat.install()")
        _add_names(module, spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _add_names(module: types.ModuleType, module_name: str) -> None:
    module.__version__ = UPSTREAM_VERSION

    def find(name: str) -> object:
        found = _names(module_name) if name == "__all__" else _find(module_name, name)
        setattr(module, name, found)
        return found

    module.__getattr__ = find
    module.__dir__ = lambda: sorted({*vars(module), *_names(module_name)})


def _names(module: str) -> list[str]:
    """Returns the names that ``from module import *`` imports."""
    part = [*module.split("."), ""][1]
    names = (n for n, file in _FILE_BY_NAME.items() if file == part and n != "torch_to_triton_dtype" and n[0] != "_")
    return sorted([*names, *(_PUBLIC | _PATCHES if part == "transformers" else ())])


def _find(module: str, name: str) -> object:
    """Returns the object that `module` has under `name`."""
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    if name in _PATCHES or _FILE_BY_NAME.get(name) == "transformers":
        check_transformers()
    if name in _FILE_BY_NAME:
        return getattr(importlib.import_module(f"{__name__}.{_FILE_BY_NAME[name]}"), name)
    if name in _PATCHES:
        return importlib.import_module(f"{__name__}.transformers").patch_function(name)
    if name in _PUBLIC:
        return getattr(liger_ext, name)
    if name.startswith(_LIGER_PREFIXES):
        return _absent(module, name)
    raise AttributeError(f"{_WHO} no {module}.{name}")


def _absent(module: str, name: str) -> type:
    advice = "Call PyTorch's function instead. If a trainer has called it, set the trainer's use_liger_kernel to False"
    if name.startswith("apply_"):
        advice = "liger_ext.apply_liger_kernel_to_instance(model) patches the known parts of any model"

    def refuse(*_, **__):
        raise NotImplementedError(f"{_WHO} no {name}. {advice}")

    return type(name, (), {"__new__": refuse, "apply": refuse, "__module__": module})


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {UPSTREAM_VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


def _set_available(available: bool) -> None:
    """Updates libraries that have looked for the package once and cached the result."""
    for name in ("transformers.utils.import_utils", "trl.import_utils", "accelerate.utils.imports"):
        module = sys.modules.get(name)
        if hasattr(module, "_liger_kernel_available"):
            module._liger_kernel_available = available
        if hasattr(module, "_liger_kernel_version"):
            module._liger_kernel_version = UPSTREAM_VERSION if available else "N/A"
        check = getattr(module, "is_liger_kernel_available", None)
        while check is not None and not hasattr(check, "cache_clear"):
            check = getattr(check, "__wrapped__", None)
        if check is not None:
            check.cache_clear()
