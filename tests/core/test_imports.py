"""What an import imports, asked in a fresh interpreter, and the one direction of imports, read from
the source.

Each check comes with a second one that proves the first can fail.
"""

import ast
import graphlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "softfocus"


# What an import imports


def modules_after(*steps: str) -> list[set[str]]:
    """Names of the modules that one fresh interpreter has loaded after each of some steps."""
    show = "\nimport sys, json\nprint('MODULES' + json.dumps(sorted(sys.modules)))\n"
    code = "".join(step + show for step in steps)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return [set(json.loads(line[7:])) for line in ran.stdout.splitlines() if line.startswith("MODULES")]


def torchs_own() -> set[str]:
    """Top-level names of what torch's distribution requires, and what that requires."""
    wanted, found = ["torch"], set()
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in requires:
            if "extra ==" not in line:
                wanted.append(re.match(r"[\w.-]+", line)[0].lower().replace("_", "-"))
    packages = importlib.metadata.packages_distributions()
    own = {top for top, homes in packages.items() if found & {home.lower().replace("_", "-") for home in homes}}
    return own | {"triton"}  # which torch imports where it finds it, required or not


def foreign_packages(after: set[str], before: set[str]) -> set[str]:
    """Top-level names of installed packages that were not loaded before and are not torch's (nor
    softfocus itself).
    """
    tops = {name.partition(".")[0] for name in after} - {name.partition(".")[0] for name in before}
    return (tops & set(importlib.metadata.packages_distributions())) - torchs_own() - {"softfocus"}


USE = """
import softfocus
q = torch.randn(1, 2, 9, 4, requires_grad=True)
for backend in ("auto", "tiled", "reference"):
    for name in ("lssar", "laser", "softmax_recentred_l1"):
        softfocus.attention(q, q, q, is_causal=True, mechanism=name, backend=backend).sum().backward()
softfocus.explain(q, q, q)
repr(softfocus.mechanisms()), softfocus.named("laser(lssar)"), softfocus.sharpened(softfocus.Mechanism(), 3)
"""


def test_using_softfocus_needs_torch_alone():
    before, after = modules_after("import torch", USE)
    assert "softfocus.functional" in after
    assert "torch" in before
    assert foreign_packages(after, before) == set()
    assert not {name for name in after if name.startswith(("softfocus.hf", "softfocus.lab", "softfocus.testing"))}


@pytest.mark.long
def test_a_call_on_the_cpu_loads_no_compiler():
    """Neither Triton nor torch's, which take as long again as torch to import."""
    call = (
        "x = torch.ones(1, 1, 2, 2, requires_grad=True); softfocus.attention(x, x, x, backend='tiled').sum().backward()"
    )
    (after,) = modules_after(f"import torch, softfocus; {call}")
    assert "softfocus.functional" in after
    assert not {"triton", "torch._dynamo"} & after


def test_a_foreign_package_would_be_noticed():
    """The check above on an interpreter that loads a package that softfocus must not need."""
    before, after = modules_after("", "import iniconfig")  # pytest's own, and light
    assert foreign_packages(after, before) == {"iniconfig"}
    assert foreign_packages({*before, "softfocus", "hypothesis.core", "torch.nn", "json"}, before) == {"hypothesis"}
    assert not {"pydantic", "transformers", "hypothesis"} & torchs_own()


def test_importing_softfocus_loads_no_torch():
    (after,) = modules_after("import softfocus; softfocus.__version__; dir(softfocus)")
    assert "softfocus" in after
    assert not {name for name in after if name == "torch" or name.startswith("torch.")}
    assert not {name for name in after if name.startswith("softfocus.")} - {"softfocus._version", "softfocus._process"}


def test_the_catalogue_and_the_algebra_need_no_torch():
    """So that the command line lists mechanisms and checks recipes without waiting for torch."""
    (after,) = modules_after("import softfocus; softfocus.named('lssar').to_json(); repr(softfocus.mechanisms())")
    assert "softfocus.catalog" in after
    assert "torch" not in after


def test_every_public_name_is_there_and_no_module_hides_it():
    import softfocus

    for name in softfocus.__all__:
        assert getattr(softfocus, name) is not None
        assert not (SOURCE / f"{name}.py").exists(), f"a submodule {name} would hide softfocus.{name}"
        assert not (SOURCE / name).is_dir()
    assert set(dir(softfocus)) == set(softfocus.__all__)
    assert {"attention", "Mechanism", "mechanisms", "sharpened", "laser", "explain", "__version__"} <= set(
        softfocus.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        softfocus.atention  # noqa: B018


# The direction of imports. Layers from the top (which uses) to the bottom (which is used). No layer
# imports one above it.
LAYERS = [
    "lab",
    "hf",
    "layout",
    "testing",
    "nn",
    "cache",
    "row_weights",
    "functional",
    "dispatch",
    "ops",
    "backends",
    "rows",
    "reference",
    "validation",
    "dropout",
    "pointwise",
    "contract",
    "visibility",
    "catalog",
    "mechanism",
    "switches",
    "warn",
    "_version",
    "_process",
]
LAB = [
    "__main__",
    "cli",
    "doctor",
    "catalogue",
    "claims",
    "studies",
    "inspect",
    "bench",
    "report",
    "generate",
    "evaluate",
    "train",
    "objective",
    "model",
    "architectures",
    "laser_ablation",
    "data",
    "recipes",
    "progress",
    "run_folder",
    "signals",
    "allocator",
    "errors",
]


def imports(tree: Path) -> dict[str, set[str]]:
    """For every module of a source tree, the modules of the package that it imports, anywhere in
    its text.
    """
    package = tree.name
    files = {_module(path, tree): path for path in tree.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[module] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    parts = parts if path.name == "__init__.py" else parts[:-1]
                    parts = parts[: len(parts) - node.level + 1]
                    base = ".".join([*parts, *([node.module] if node.module else [])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    found[module].add(full if full in files else base)
        found[module] = {name for name in found[module] if name == package or name.startswith(f"{package}.")}
    return found


def _module(path: Path, tree: Path) -> str:
    parts = [tree.name, *path.relative_to(tree).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str, package: str = "softfocus") -> str | None:
    """The layer of softfocus, or of softfocus.lab, that a module is in; None if it is in none."""
    below = module.removeprefix(f"{package}.")
    return below.partition(".")[0] if below != module else None


def wrong_ways(tree: Path) -> list[str]:
    """Every import that goes against the direction, as a sentence."""
    found = []
    for module, imported in imports(tree).items():
        here = layer_of(module)
        if here is None:
            continue  # __init__ re-exports lazily: test_importing_softfocus_loads_no_torch
        if here not in LAYERS:
            found.append(f"{module}: its layer is not in LAYERS")
            continue
        in_lab = layer_of(module, "softfocus.lab")
        if in_lab not in (None, *LAB):
            found.append(f"{module}: its layer is not in LAB")
            continue
        for name in imported:
            there = layer_of(name)
            if there is None:
                if here not in ("lab", "hf", "testing"):
                    found.append(f"{module} imports the package itself")
            elif there in LAYERS and LAYERS.index(there) < LAYERS.index(here):
                found.append(f"{module} imports {name}, a layer above it")
            elif there == "lab" and here != "lab":
                found.append(f"{module} imports {name}: the lab is imported by nothing")
            elif in_lab and _place(LAB, layer_of(name, "softfocus.lab")) < _place(LAB, in_lab):
                found.append(f"{module} imports {name}, a layer above it")
            elif here in ("backends", "rows") and there == "reference":
                found.append(f"{module} imports {name}: the oracle shares nothing with what is compared with it")
            elif here == "ops" and there == "backends":
                found.append(f"{module} imports {name}: ops imports no backend")
            elif module == "softfocus.backends.checked":
                continue  # it compares two backends, and is none
            elif here == "backends" and _backend(name, tree) not in (None, _backend(module, tree)):
                found.append(f"{module} imports {name}: no backend imports another")
    return sorted(found)


def _place(layers: list[str], name: str | None) -> int:
    return layers.index(name) if name in layers else len(layers)


def circle(tree: Path) -> list[str]:
    """Modules that import one another in a circle, from package to package or inside one; empty
    where none do.
    """
    edges = {module: names - {module} for module, names in imports(tree).items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def _backend(module: str, tree: Path) -> str | None:
    """The backend that a module is, or is a part of: a module or package of backends/ that has
    forward().

    Others there are helpers of any backend.
    """
    parts = module.split(".")[1:3]
    if len(parts) < 2 or parts[0] != "backends":
        return None
    for path in (tree.joinpath(*parts).with_suffix(".py"), tree.joinpath(*parts, "__init__.py")):
        if path.exists():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            if any(isinstance(node, ast.FunctionDef) and node.name == "forward" for node in body):
                return ".".join(parts)
    return None


def test_imports_go_one_way():
    assert len(imports(SOURCE)) > 15  # the tree was found
    assert wrong_ways(SOURCE) == []
    assert circle(SOURCE) == []


def test_every_package_of_the_lab_is_there():
    there = {
        path.stem for path in (SOURCE / "lab").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__"} == set(LAB)


def test_the_tree_is_read_as_it_stands():
    """The reader finds edges of every spelling that the source uses."""
    edges = imports(SOURCE)
    assert "softfocus.rows" in edges["softfocus.backends.tiled"]  # from softfocus import rows as rowwise
    assert "softfocus.backends.laser" in edges["softfocus.backends.tiled"]  # from softfocus.backends.laser import ..
    assert "softfocus.mechanism" in edges["softfocus.catalog"]
    assert "softfocus.lab.report.page" in edges["softfocus.lab.report.report"]  # inside a function
    assert _backend("softfocus.backends.tiled", SOURCE) == "backends.tiled"
    assert _backend("softfocus.backends.laser", SOURCE) is None
    assert _backend("softfocus.backends.cpu.build", SOURCE) == "backends.cpu"


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("mechanism.py", "from softfocus.catalog import named", "softfocus.catalog, a layer above it"),
        ("mechanism.py", "from softfocus import catalog", "softfocus.catalog, a layer above it"),
        ("mechanism.py", "from . import catalog", "softfocus.catalog, a layer above it"),
        ("mechanism.py", "from .catalog import named", "softfocus.catalog, a layer above it"),
        ("mechanism.py", "import softfocus.catalog", "softfocus.catalog, a layer above it"),
        ("mechanism.py", "def late():\n    from softfocus.catalog import named", "softfocus.catalog, a layer above it"),
        ("catalog.py", "import softfocus", "the package itself"),
        ("reference.py", "from softfocus.rows import forward", "softfocus.rows, a layer above it"),
        ("rows.py", "from softfocus.reference import unit", "the oracle shares nothing"),
        ("backends/fast.py", "from softfocus import reference", "the oracle shares nothing"),
        ("contract.py", "from softfocus.pointwise import POINTWISE", "softfocus.pointwise, a layer above it"),
        ("ops.py", "from softfocus.backends import tiled", "ops imports no backend"),
        ("ops.py", "from softfocus.dispatch import choose", "softfocus.dispatch, a layer above it"),
        ("backends/fast.py", "from softfocus.backends.tiled import forward", "no backend imports another"),
        ("backends/tiles.py", "from softfocus.backends.tiled import forward", "no backend imports another"),
        ("backends/fast.py", "from softfocus.backends.fused import build", "no backend imports another"),
        ("backends/fast.py", "from softfocus.backends.fused.build import library", "no backend imports another"),
        ("backends/fused/build.py", "from softfocus.backends import tiled", "no backend imports another"),
        ("backends/fast.py", "from softfocus.ops import attend", "softfocus.ops, a layer above it"),
        ("functional.py", "from softfocus.hf import use", "softfocus.hf, a layer above it"),
        (
            "hf/adapter.py",
            "from softfocus.lab.recipes.loading import load",
            "softfocus.lab.recipes.loading, a layer above it",
        ),
        ("lab/recipes/loading.py", "from softfocus.lab.cli import main", "softfocus.lab.cli, a layer above it"),
        ("lab/recipes/loading.py", "from softfocus.lab import cli", "softfocus.lab.cli, a layer above it"),
        (
            "lab/errors.py",
            "from softfocus.lab.recipes.loading import load",
            "softfocus.lab.recipes.loading, a layer above it",
        ),
        ("utils.py", "import math", "is not in LAYERS"),
        ("lab/utils.py", "import math", "is not in LAB"),
    ],
)
def test_each_wrong_way_would_be_noticed(tmp_path, file, line, expected):
    tree = tmp_path / "softfocus"
    for path in (
        "__init__.py", "mechanism.py", "catalog.py", "contract.py", "pointwise.py", "rows.py", "reference.py",
        "ops.py", "dispatch.py", "functional.py",
        "backends/__init__.py", "backends/tiled.py", "backends/fast.py", "backends/fused/__init__.py",
        "backends/fused/build.py", "backends/fused/call.py", "hf/__init__.py", "lab/errors.py",
        "lab/cli/__init__.py", "lab/recipes/__init__.py", "lab/recipes/loading.py",
    ):  # fmt: skip
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        is_backend = path in ("backends/tiled.py", "backends/fused/__init__.py")
        target.write_text("def forward(call): ...\n" if is_backend else "")
    # The parts of a backend know one another
    (tree / "backends/fused/call.py").write_text("from softfocus.backends.fused import build, forward")
    assert wrong_ways(tree) == []
    target = tree / file
    target.write_text(line)
    assert any(expected in sentence for sentence in wrong_ways(tree))


def test_a_circle_would_be_noticed(tmp_path):
    page, report = (tmp_path / "softfocus" / "lab" / "report" / name for name in ("page.py", "report.py"))
    page.parent.mkdir(parents=True)
    page.write_text("from softfocus.lab.report.report import Report")
    report.write_text("")
    assert circle(tmp_path / "softfocus") == []
    report.write_text("def write():\n    from softfocus.lab.report import page")
    assert set(circle(tmp_path / "softfocus")) == {
        "softfocus.lab.report.page",
        "softfocus.lab.report.report",
    }
