"""`make docs`: a site of the Markdown pages, and of the API by its docstrings. The pages stay where they are, so that
their links are the same on a code host and here: the source folder is the repository's root."""

import re
from pathlib import Path

import liger_ext

ROOT = Path(__file__).resolve().parent.parent

project = "liger_ext"
version = release = liger_ext.__version__
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**.md"]
exclude_patterns = [
    ".venv*",
    ".[a-z]*",
    "build*",
    "dist",
    "csrc",
    "liger_ext",
    "tests",
    "shared",
    "docs/plots",
    "docs/results",
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"liger_ext {version}"
html_show_sourcelink = False

default_role = "code"  # `x` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
myst_enable_extensions = ["substitution"]
myst_heading_anchors = 3

# The contents, which a page on a code host does not need.
CONTENTS = {
    "Use": [
        "quickstart",
        "recipes",
        "installation",
        "patching",
        "adapters",
        "preference",
        "ops",
        "families",
        "from_liger_kernel",
        "liger_kernel_names",
        "tools",
    ],
    "API": ["api/patching", "api/functional", "api/modules", "api/losses", "api/compat", "api/torch_ops"],
    "Results": ["results", "measurements", "numerics"],
    "Development": ["../CONTRIBUTING", "code_organisation", "writing_a_kernel", "adding_a_model", "decisions"],
    "Project": ["../CHANGELOG", "../SECURITY"],
}


def _with_contents(app, name: str, source: list[str]) -> None:
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            listed = "\n".join(f"/docs/{page}".replace("/docs/../", "/") for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def _first_page(app, failure: Exception | None) -> None:
    """A browser that opens the folder gets the README."""
    (Path(app.outdir) / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')


def setup(app) -> None:
    app.connect("source-read", _with_contents)
    app.connect("build-finished", _first_page)


def _schemas() -> str:
    """The ops of csrc/schemas.cpp, m.def("name(arguments) -> results"), and those whose texts are in csrc/schemas.h."""
    texts = []
    for file, definition in (("schemas.cpp", r'm\.def\(\s*(".*?)\);\n'), ("schemas.h", r"\[\] =\n(.*?);\n")):
        texts += re.findall(definition, (ROOT / "csrc" / file).read_text(), re.DOTALL)
    blocks = []
    for schema in ("".join(re.findall(r'"([^"]*)"', text)) for text in texts):
        name, arguments, results = re.fullmatch(r"(\w+)\((.*?)\) -> (.*)", schema).groups()
        listed = re.sub(r", (?=\w+[\w!?()]* \w)", ",\n    ", arguments)
        blocks.append(f"## {name}\n\n```text\n{name}(\n    {listed})\n  -> {results}\n```\n")
    return "\n".join(blocks)


def _families() -> str:
    names = [name for name in liger_ext.__all__ if name.startswith("apply_liger_kernel_to_")]
    listed = [name for name in names if name not in ("apply_liger_kernel_to_instance", "apply_liger_kernel_to_llama")]
    return "```{eval-rst}\n" + "\n".join(f".. autofunction:: liger_ext.{name}" for name in listed) + "\n```"


myst_substitutions = {"schemas": _schemas(), "families": _families()}
