"""Counts the classes of a release of transformers that tables as old as the release before it would know.

    python tests/frozen_tables.py FOLDER...

Each folder has a transformers in it (pip install --no-deps --target), the oldest first; it may be followed by others
with what that version needs, as in a PYTHONPATH (a:b). A process of its own looks at all classes of all models of each
release. A table frozen at a release lists the digests that occur in it or in an earlier folder. The report says, for
each next release, how many of the classes that are known today this table knows, and which families lose the fused
loss.
"""

import collections
import concurrent.futures
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

PARTS = "heads", "layers", "norms and MLPs", "experts", "attentions"


def look() -> dict[str, dict[str, list[str]]]:
    """Of the transformers that is imported: by part, each known class and the digests that it is known by."""
    import logging
    import warnings

    import transformers
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

    from liger_ext.models import digests, known_code, normal_form
    from liger_ext.models.decoder import DecoderLayer
    from liger_ext.models.forwards import code_of, definition_of
    from liger_ext.models.rope import ROPES

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found = {part: {} for part in PARTS}
    llamas = {normal_form.of_head: LlamaForCausalLM, normal_form.of_layer: LlamaDecoderLayer}
    of_llama = {normal: normal_form.digest(known_code._form(normal, cls)) for normal, cls in llamas.items()}

    def digests_of(cls: type[nn.Module]) -> None:
        name = f"{cls.__module__.removeprefix('transformers.models.')}.{cls.__name__}"
        code = code_of(cls.forward, cls)
        head = known_code._of_head(cls) if issubclass(cls, transformers.PreTrainedModel) else None
        layer, gate = known_code._of_layer(cls), code_of(getattr(cls, "_apply_gate", None))
        definition = definition_of(cls.forward)
        names = normal_form.names_read(definition)[0] if definition else []
        ropes = [code_of(vars(sys.modules[cls.__module__]).get(n)) for n in names if n.startswith("apply_rotary_")]
        if code in digests.MODULES:
            is_layer = issubclass(digests.MODULES[code], DecoderLayer)
            found["layers" if is_layer else "norms and MLPs"][name] = [code]
        elif head in digests.HEADS:
            found["heads"][name] = [head, of_llama[normal_form.of_head]]
        elif layer in digests.LAYERS:
            found["layers"][name] = [layer, of_llama[normal_form.of_layer]]
        elif gate in digests.GATES_OF_EXPERTS:
            found["experts"][name] = [gate]
        elif known_code._ropes_of(cls):
            found["attentions"][name] = [rope for rope in ropes if rope in ROPES]

    folder = Path(transformers.__file__).parent
    for path in sorted(folder.glob("models/*/modeling_*.py")):
        if path.name.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError:  # of a package that is not there
            continue
        for cls in list(vars(module).values()):
            if (
                isinstance(cls, type)
                and issubclass(cls, nn.Module)
                and cls.__module__ == name
                and "forward" in vars(cls)
            ):
                digests_of(cls)
    return found


def report(releases: list[tuple[str, dict[str, dict[str, list[str]]]]]) -> str:
    lines = [f"| frozen at | run on | {' | '.join(PARTS)} | heads that are lost |", "|---" * (len(PARTS) + 3) + "|"]
    frozen = set()
    for (version, found), (following, there) in itertools.pairwise(releases):
        frozen |= {digest for part in found.values() for digests in part.values() for digest in digests}
        known = {part: [n for n, digests in there[part].items() if frozen.issuperset(digests)] for part in PARTS}
        counts = [f"{len(known[part])} of {len(there[part])}" for part in PARTS]
        families = collections.Counter(name.split(".")[0] for name in there["heads"].keys() - set(known["heads"]))
        lines.append(f"| {version} | {following} | {' | '.join(counts)} | {', '.join(sorted(families)) or 'none'} |")
    return "\n".join(lines)


def look_at(folder: str) -> tuple[str, dict[str, dict[str, list[str]]]]:
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, folder]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, stdout=subprocess.PIPE, text=True, check=True)
    version, found = json.loads(done.stdout.splitlines()[-1])
    print(f"{version}: {sum(map(len, found.values()))} classes are known", file=sys.stderr)
    return version, found


if __name__ == "__main__":
    if sys.argv[1:]:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            print(report(list(pool.map(look_at, sys.argv[1:]))))
    else:
        found = look()
        print(json.dumps((sys.modules["transformers"].__version__, found)))
