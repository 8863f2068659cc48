"""The process that runs calls. Before each call it writes the call's number to a file, so that the driver can name the
call after a crash. It prints findings as JSON lines."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import mmap
import os
import re
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from layouts import Guarded, draw_layout, same_bits
from ops import OPS, draw_call
from torch import Tensor

from fuzz import raw, verdict
from fuzz.spoil import FLOATING, MAY, MUST, NEVER, SPOILS, Case
from liger_ext.functional import check_errors
from liger_ext.records import RECORDS
from liger_ext.testing import named_outputs

ROOM = 1 << 30  # bytes of address space for calls, beyond the address space of the process before the first call
# torch's caches must not fill that room, or every call would run out of memory. So a process ends after CALLS calls,
# and oneDNN caches few compiled matrix products.
CALLS = 20_000
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


class Finding(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def draw_case(seed: int, number: int, ops: tuple[str, ...], device: str) -> Case:
    rng = Random(f"{seed}/{number}")
    dtypes = FLOATING if device == "cpu" else FLOATING[:3]
    case = Case(draw_call(rng, rng.choice(ops), dtypes, device), rng)
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
        rng.choice(SPOILS)(case)
    if len(case.notes) > 1 and "target" in case.faults:  # a later change may have removed the bad value
        case.faults["target"] = min(MAY, case.faults["target"])
    return case


def lay_out(case: Case) -> Guarded:
    """Gives the tensors of half of the calls random layouts. If elements share memory, another may overwrite a bad
    target."""
    guard = Guarded()
    if case.rng.randrange(2):
        return guard
    for name, t in case.call.tensors().items():
        if t.device.type != "meta" and t.dtype in (*FLOATING, torch.int64) and t.numel() < 1 << 16:
            placed = guard.place(name, t, draw_layout(case.rng, t.shape))
            if t.dtype == torch.int64 and not torch.equal(placed, t):
                case.faults["target"] = min(MAY, case.faults.get("target", MAY))
            case.call = case.call.with_tensors({name: placed})
    return guard


def want_gradients(case: Case) -> list[str]:
    """Makes some tensors leaves that require gradients, occasionally one for which the op has no gradient."""
    wanted, made = [], {}
    for name, t in case.call.tensors().items():
        constant = name in case.call.constants
        if t.dtype.is_floating_point and case.rng.randrange(40) < (1 if constant else 32):
            made[name] = t.detach().requires_grad_()
            wanted.append(name)
            if constant:
                case.faults["gradient"] = MAY
    case.call = case.call.with_tensors(made)
    return wanted


def upstream_gradients(outputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    kind = case.rng.choice(["normal", "normal", "normal", "zero", "large", "nan", "inf", "laid out"])
    made = {}
    for name, t in outputs.items():
        if t.requires_grad:
            value = {
                "zero": 0.0,
                "large": case.rng.choice([1024.0, 4096.0, 3e4]),
                "nan": float("nan"),
                "inf": float("inf"),
            }.get(kind)
            g = torch.full_like(t, value) if value is not None else torch.randn_like(t)
            laid_out = kind == "laid out" and t.device.type != "meta"
            made[name] = Guarded().place(name, g, draw_layout(case.rng, g.shape)) if laid_out else g
    case.judged = case.judged and (case.ordinary or kind != "zero")
    case.ordinary = case.ordinary and kind in ("normal", "zero", "laid out")
    if kind != "normal":
        case.notes.append(f"{kind} gradient")
    return made


def run(
    case: Case, wanted: list[str], upstream: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> tuple[dict, dict, dict]:
    """Returns outputs, gradients and upstream gradients of one call."""
    outputs = named_outputs(case.call(), RECORDS[case.call.op].outputs[0])
    used = {n: t for n, t in outputs.items() if t.requires_grad}
    if not used:
        return outputs, {}, {}
    grads = upstream(used)
    leaves = [case.call.arguments[n] for n in wanted]
    found = torch.autograd.grad(list(used.values()), leaves, [grads[n] for n in used], allow_unused=True)
    return outputs, {f"d{n}": g for n, g in zip(wanted, found, strict=True) if g is not None}, grads


def in_threads(case: Case, wanted: list[str]) -> tuple[dict, dict, dict]:
    """Runs three threads on the same tensors, which must have the same bits or raise the same error."""
    results: list[Any] = []

    def once() -> None:
        try:
            results.append(run(case, wanted, lambda used: {n: torch.ones_like(t) for n, t in used.items()}))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=once) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = min(results, key=out_of_memory)
    for other in results:
        if out_of_memory(first) or out_of_memory(other):
            continue
        if any(t.is_cuda for t in case.call.tensors().values()) and (
            isinstance(first, IndexError) or isinstance(other, IndexError)
        ):
            continue  # a bad target: the first thread that checks receives the report
        if isinstance(first, Exception) or isinstance(other, Exception):
            if type(first) is not type(other):
                raise Finding("threads", f"{first!r:.200} and {other!r:.200}")
        elif not all(equal(a[n], b[n]) for a, b in zip(first[:2], other[:2], strict=True) for n in a):
            raise Finding("threads", "different results")
    if isinstance(first, Exception):
        raise first
    return first


def equal(a: Tensor, b: Tensor) -> bool:
    return a.device.type == "meta" or same_bits(a, b)


def out_of_memory(result: Any) -> bool:
    memory = isinstance(result, (MemoryError, torch.OutOfMemoryError))
    return memory or (isinstance(result, RuntimeError) and bool(re.search(verdict.MEMORY, str(result))))


def forget_reported_targets() -> None:
    """Discards a GPU's report of a bad target, which the next call would raise."""
    with contextlib.suppress(IndexError):
        check_errors()


def public_call(case: Case, device: str, judge: bool) -> None:
    """Calls a public function; raises Finding for an unacceptable outcome."""
    guard = lay_out(case)
    wanted = want_gradients(case)
    mode = case.rng.choice(["grad"] * 12 + ["no_grad", "no_grad", "inference", "threads", "autocast"])
    if mode != "grad":
        case.notes.append(mode)
    if mode == "autocast" and RECORDS[case.call.op].llama.hidden:  # autocast changes the dtype of its matmuls
        case.judged = False
        case.faults["accum_dtype"] = max(case.faults.get("accum_dtype", NEVER), MAY)
    autocast = functools.partial(torch.autocast, device, torch.bfloat16)
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "autocast": autocast}
    try:
        with contexts.get(mode, torch.enable_grad)():
            if mode == "threads":
                outputs, gradients, grads = in_threads(case, wanted)
            else:
                outputs, gradients, grads = run(case, wanted, functools.partial(upstream_gradients, case=case))
        if any(t.is_cuda for t in outputs.values()):
            check_errors()
    except Finding:
        raise
    except Exception as error:
        judge_exception(error, case)
        return
    finally:
        if guard.changed():
            raise Finding("wrote", f"changed {guard.changed()} or memory beside it")
    if case.raises == MUST:
        raise Finding("accepted", "; ".join(case.notes))
    judge_results(case, outputs, gradients, grads, judge)


def judge_exception(error: Exception, case: Case) -> None:
    text = f"{type(error).__name__}: {error}"
    if case.raises == NEVER and not out_of_memory(error):
        raise Finding("refused", text)
    if not verdict.acceptable(error, list(case.call.arguments)):
        raise Finding("exception", text)


def judge_results(case: Case, outputs: dict, gradients: dict, grads: dict, judge: bool) -> None:
    call = case.call
    if wrong := verdict.wrong_shapes(call, outputs):
        raise Finding("shape", wrong)
    for name, g in gradients.items():
        leaf = call.arguments[name[1:]]
        if (g.shape, g.dtype) != (leaf.shape, leaf.dtype):
            raise Finding("shape", f"{name} is {g.dtype} {tuple(g.shape)}")
    results = outputs | gradients
    if any(t.device.type == "meta" for t in results.values()):
        return
    if case.ordinary and not all(bool(t.isfinite().all()) for t in results.values()):
        raise Finding("not finite", str([n for n, t in results.items() if not bool(t.isfinite().all())]))
    # The probability of a target jumps between 0 and 1 if logits are large.
    scaled = call.arguments.get("use_token_scaling") and not case.ordinary
    if judge and case.judged and not scaled and verdict.has_references(call):
        try:
            wrong = verdict.wrong(call, outputs, gradients, grads)
            wrong = wrong or verdict.unlike_cross_entropy(call, gradients, grads)
        except (RuntimeError, ValueError, IndexError) as error:
            raise Finding("no reference", f"{type(error).__name__}: {error}") from None
        if wrong:
            raise Finding("wrong", wrong)


def one_call(seed: int, number: int, ops: tuple[str, ...], device: str, judge_every: int) -> dict[str, Any] | None:
    """Runs a call and returns its finding, or None."""
    torch.manual_seed(number)
    case = draw_case(seed, number, ops, device)
    kind = case.rng.randrange(4)
    try:
        if kind == 0 and case.raises == NEVER:
            raw.call_directly(case)
        else:
            public_call(case, device, number % judge_every == 0)
    except (Finding, raw.Unacceptable) as found:
        return {
            "number": number,
            "kind": found.kind,
            "op": case.call.op,
            "text": str(found),
            "call": str(case.call),
            "notes": case.notes,
        }
    finally:
        if device == "cuda":
            forget_reported_targets()
    return None


def limit_memory() -> None:
    if "asan" in os.environ.get("LD_PRELOAD", ""):  # ASan reserves terabytes of addresses, and has its own limit
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(args: Any) -> None:
    """Runs the calls first, first + step, … below ``args.calls``, at most CALLS of them."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.device == "cpu":
        draw_case(args.seed, 0, OPS, args.device)
        limit_memory()
    with open(args.current, "r+b") as file, mmap.mmap(file.fileno(), 8) as current:
        end = min(args.calls, args.first + CALLS * args.step)
        for number in range(args.first, end, args.step):
            current[:] = number.to_bytes(8, "little")
            if number == args.crash_at:
                os.kill(os.getpid(), signal.SIGSEGV)
            found = one_call(args.seed, number, args.ops, args.device, args.judge_every)
            if found:
                print(json.dumps(found), flush=True)
        current[:] = end.to_bytes(8, "little")
