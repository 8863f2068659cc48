"""Counts how many classes of a release of transformers a table of known code from the previous release recognises.

    python tests/frozen_tables.py FOLDER...

Each FOLDER contains one release of transformers (pip install --no-deps --target); the oldest comes first. Folders with
its dependencies may follow it, separated as in a PYTHONPATH (a:b). A separate process inspects all classes of all
models of each release. A table frozen at a release lists the digests of that release and of the earlier folders. The
report counts, of the classes of the next release that today's table knows, those that the frozen table knows. It also
lists the families that lose the fused loss.
"""

import collections
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

PARTS = "head", "layer", "module", "experts", "attention"


def recognised_classes() -> dict[str, dict[str, list[str]]]:
    """Returns, by part, each known class of the imported transformers and the digests by which it is recognised."""
    from transformers.models.llama import modeling_llama

    from liger_ext.models.recognise.known import ropes_in
    from liger_ext.models.recognise.reading import build_head_form, build_layer_form
    from liger_ext.models.recognise.report import look

    of_llama = {"head": build_head_form(modeling_llama.LlamaForCausalLM)}
    of_llama["layer"] = build_layer_form(modeling_llama.LlamaDecoderLayer)
    found = {part: {} for part in PARTS}
    for each in look():
        if each.ropes:
            found["attention"][each.path] = [entry.digest for entry in ropes_in(each.cls).values()]
        elif each.entry is not None and each.entry.replacement is not None:
            part = each.entry.part
            found[part][each.path] = [each.entry.digest, *(of_llama[p].digest for p in (part,) if p in of_llama)]
    return found


def report(releases: list[tuple[str, dict[str, dict[str, list[str]]]]]) -> str:
    lines = [f"| frozen at | run on | {' | '.join(PARTS)} | heads that are lost |", "|---" * (len(PARTS) + 3) + "|"]
    frozen = set()
    for (version, found), (following, there) in itertools.pairwise(releases):
        frozen |= {digest for part in found.values() for digests in part.values() for digest in digests}
        known = {part: [n for n, digests in there[part].items() if frozen.issuperset(digests)] for part in PARTS}
        counts = [f"{len(known[part])} of {len(there[part])}" for part in PARTS]
        families = collections.Counter(name.split(".")[0] for name in there["head"].keys() - set(known["head"]))
        lines.append(f"| {version} | {following} | {' | '.join(counts)} | {', '.join(sorted(families)) or 'none'} |")
    return "\n".join(lines)


def inspect_release(folder: str) -> tuple[str, dict[str, dict[str, list[str]]]]:
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, folder]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, stdout=subprocess.PIPE, text=True, check=True)
    version, found = json.loads(done.stdout.splitlines()[-1])
    print(f"{version}: {sum(map(len, found.values()))} classes are known", file=sys.stderr)
    return version, found


if __name__ == "__main__":
    if sys.argv[1:]:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            print(report(list(pool.map(inspect_release, sys.argv[1:]))))
    else:
        found = recognised_classes()
        print(json.dumps((sys.modules["transformers"].__version__, found)))
