"""The rules of the house that no linter knows: import order, file sizes and names, who may print.

`find_violations(root)` judges a package directory and returns sentences. It runs on the real package and on
small made-up ones, each of which breaks one rule, so that a check that finds nothing does not pass for clean.
"""

import ast
import graphlib
import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import lmfit_gpu

# A file, or a package such as backends/, imports only from those above it.
ORDER = """
    exceptions threads warning_filters launch devices distributed rows box factors parameters losses likelihoods
    models ties constraints factories network penalty blocks row_check preparation problem layer_rows
    layer_positions layer_blocks layer_uses layers layer_route layerwise weight_uses autodiff stencil differences
    user_jacobian jacobian extrapolation check_jacobian backends linear certificate saddle damping acceleration
    estimability goodness report result termination messages state outcome early_stopping trial levenberg_marquardt
    compact attempt batched guesses candidates separable starts progress delta_method sandwich fitting prediction
    bands parameter_constraints protocol arguments solution facts diagnostics function_space batch held_fits
    profiles profile_map bootstrap inferring plan persistence optim estimator scipy_keywords curve_data
    curve_functions curve_output curve_fit plotting datasets validate demo __main__ __init__
""".split()
MAX_LINES = 450  # the aim is 400; the slack is for a docstring that grows
VAGUE_NAMES = {"utils", "common", "misc", "helpers"}
PRINTING = {"__main__", "demo", "validate"}  # files whose job is to report
LEGATE_FILES = {"backends/cupynumeric.py", "backends/legate_tasks.py"}
LEGATE_PACKAGES = {"cupynumeric", "legate"}
IMPORT_FROM_ANYWHERE = "plotting"  # if inside a function: plot() methods


@dataclass(frozen=True)
class Import:
    """One import as written: its module in full, the names taken from it, and where it stands."""

    module: str
    names: tuple[str, ...]
    line: int
    in_function: bool


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    root: Path
    path: Path

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self):
        return ast.parse(self.text, filename=str(self.path))

    @property
    def name(self):
        return self.path.relative_to(self.root).as_posix()

    @property
    def entry(self):
        """Its line in ORDER: rows for rows.py, linear for anything in linear/."""
        return Path(self.name).parts[0].removesuffix(".py")

    @cached_property
    def imports(self):
        return list(_imports(self.tree, (self.root.name, *Path(self.name).parent.parts)))


def find_violations(root):
    """Return a sentence for every rule that the package in directory `root` breaks."""
    sources = [Source(root, path) for path in sorted(root.rglob("*.py"))]
    found = [message for source in sources for message in _judge(source)]
    return found + _cycles(sources)


def _judge(source):
    yield from _size_and_name(source)
    yield from _order(source)
    yield from _legate(source)
    yield from _prints(source)


def _size_and_name(source):
    n_lines = len(source.text.splitlines())
    if n_lines > MAX_LINES:
        yield f"{source.name} has {n_lines} lines; split it (the aim is 400, the limit {MAX_LINES})"
    parts = {part.removesuffix(".py") for part in Path(source.name).parts}
    for part in sorted(parts & VAGUE_NAMES):
        yield f"{source.name}: '{part}' says nothing about what is in it; name the idea"


def _order(source):
    if source.entry not in ORDER:
        yield f"{source.name} is not in ORDER of test_house.py; add '{source.entry}' below what it imports"
        return
    for statement in source.imports:
        allowed_here = {IMPORT_FROM_ANYWHERE} if statement.in_function else set()
        for target in _targets(statement, source.root):
            entry = Source(source.root, target).entry
            if entry == source.entry or entry in allowed_here or entry not in ORDER:
                continue  # a file that is not in ORDER is reported once, as itself
            if ORDER.index(entry) > ORDER.index(source.entry):
                yield f"{source.name}:{statement.line} imports {entry}, which stands below {source.entry}"


def _legate(source):
    if source.name in LEGATE_FILES:
        return
    for statement in source.imports:
        if statement.module.split(".")[0] in LEGATE_PACKAGES:
            allowed = " and ".join(sorted(LEGATE_FILES))
            yield f"{source.name}:{statement.line} imports {statement.module}; only {allowed} may"


def _prints(source):
    if source.entry in PRINTING:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.name}:{node.lineno} prints; return the text and let a report print it"


def _cycles(sources):
    """Return the first cycle of imports between files, if there is one.

    Plotting from within a function does not count: it runs when a user calls plot(), long after the imports.
    """
    graph = {
        source.path: {
            target
            for statement in source.imports
            for target in _targets(statement, source.root)
            if target != source.path
            and not (statement.in_function and Source(source.root, target).entry == IMPORT_FROM_ANYWHERE)
        }
        for source in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        root = sources[0].root
        return ["files import each other: " + " <- ".join(Source(root, p).name for p in error.args[1])]
    return []


def _imports(node, package, in_function=False):
    """Yield every import below `node`, those inside functions and import_module("...") included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, in_function)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else ()
            module = ".".join([*base, *filter(None, [child.module])])
            yield Import(module, tuple(alias.name for alias in child.names), child.lineno, in_function)
        elif isinstance(child, ast.Call) and (module := _import_module_argument(child)):
            yield Import(module, (), child.lineno, in_function)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, package, in_function or is_function)


def _import_module_argument(call):
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in {"import_module", "__import__"} and call.args and isinstance(call.args[0], ast.Constant):
        return call.args[0].value
    return None


def _targets(statement, root):
    """Return the files of the package that an import names; none if it is another package's."""
    first, *rest = statement.module.split(".")
    if first != root.name:
        return []
    own = _file_of(root.joinpath(*rest))
    submodules = {name: _file_of(root.joinpath(*rest, name)) for name in statement.names}
    found = [path for path in submodules.values() if path]
    names_something_else = not statement.names or len(found) < len(statement.names)
    return found + ([own] if own and names_something_else else [])


def _file_of(path):
    candidates = [path.with_name(path.name + ".py"), path / "__init__.py"]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


# ---- the real package


def test_the_package_keeps_the_rules():
    root = Path(lmfit_gpu.__file__).parent
    assert (root / "__init__.py").is_file()
    assert find_violations(root) == []


def test_versions_agree():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == importlib.metadata.version("lmfit-gpu") == lmfit_gpu.__version__


def test_licence_and_type_marker_are_installed():
    assert (Path(lmfit_gpu.__file__).parent / "py.typed").is_file()
    licences = [f for f in importlib.metadata.files("lmfit-gpu") if f.name == "LICENSE"]
    assert licences
    assert "BSD 3-Clause" in licences[0].read_text()


# ---- made-up packages: the rules themselves

CLEAN = {
    "__init__.py": "from .estimator import fit\nfrom lmfit_gpu.rows import blocks",
    "rows.py": "import numpy\nfrom . import exceptions",
    "exceptions.py": "",
    "linear/__init__.py": "from .qr import solve\nfrom .step import Step",
    "linear/qr.py": "from lmfit_gpu.backends import scipy\nfrom .step import Step\nfrom ..rows import blocks",
    "linear/step.py": "from ..exceptions import Error",
    "backends/__init__.py": "",
    "backends/scipy.py": "import scipy",
    "backends/cupynumeric.py": "def load():\n    import cupynumeric",
    "backends/legate_tasks.py": "def load():\n    import legate.core",
    "result.py": "def plot():\n    from .plotting import FitDisplay",
    "plotting.py": "from .result import Result",
    "estimator.py": "import lmfit_gpu.linear.qr",
    "demo.py": "print('fit')",
}


def write_package(directory, files):
    root = directory / "lmfit_gpu"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_clean_package_has_no_violations(tmp_path):
    assert find_violations(write_package(tmp_path, CLEAN)) == []


BROKEN = {
    "upwards, relative": ({"rows.py": "from .estimator import fit"}, "rows.py:1 imports estimator"),
    "upwards, absolute": ({"rows.py": "from lmfit_gpu.estimator import fit"}, "rows.py:1 imports estimator"),
    "upwards, plain import": ({"rows.py": "import lmfit_gpu.estimator as e"}, "rows.py:1 imports estimator"),
    "upwards, module as name": ({"rows.py": "from . import estimator"}, "rows.py:1 imports estimator"),
    "upwards, in a function": (
        {"rows.py": "def f():\n    from .estimator import fit"},
        "rows.py:2 imports est",
    ),
    "upwards, from a package": (
        {"linear/qr.py": "from ..estimator import fit"},
        "linear/qr.py:1 imports est",
    ),
    "upwards, into a package": ({"rows.py": "from .linear.qr import solve"}, "rows.py:1 imports linear"),
    "upwards, __init__": ({"rows.py": "from lmfit_gpu import fit"}, "rows.py:1 imports __init__"),
    "upwards, import_module": (
        {"rows.py": "import importlib\nimportlib.import_module('lmfit_gpu.estimator')"},
        "rows.py:2 imports estimator",
    ),
    "plotting at the top": ({"rows.py": "from .plotting import FitDisplay"}, "rows.py:1 imports plotting"),
    "cycle in a package": ({"linear/step.py": "from .qr import solve"}, "files import each other: linear/"),
    "cycle in functions": (
        {"linear/step.py": "def f():\n    from . import qr"},
        "files import each other: linear/",
    ),
    "file not in the order": ({"kitchen.py": ""}, "add 'kitchen' below what it imports"),
    "package not in the order": ({"kitchen/__init__.py": ""}, "add 'kitchen' below what it imports"),
    "file too long": ({"rows.py": "x = 1\n" * 451}, "rows.py has 451 lines"),
    "vague name": ({"linear/utils.py": ""}, "linear/utils.py: 'utils' says nothing"),
    "vague package": ({"helpers/__init__.py": ""}, "helpers/__init__.py: 'helpers' says nothing"),
    "legate elsewhere": (
        {"linear/qr.py": "def f():\n    import legate.core"},
        "linear/qr.py:2 imports legate.core; only",
    ),
    "cupynumeric elsewhere": (
        {"backends/scipy.py": "from importlib import import_module\nimport_module('cupynumeric')"},
        "backends/scipy.py:2 imports cupynumeric; only",
    ),
    "print": ({"rows.py": "def f():\n    print(1)"}, "rows.py:2 prints"),
}


@pytest.mark.parametrize(("files", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_found(tmp_path, files, message):
    violations = find_violations(write_package(tmp_path, CLEAN | files))
    assert any(message in violation for violation in violations), violations


@pytest.mark.parametrize("n_lines", [MAX_LINES, 1])
def test_a_file_within_the_limit_passes(tmp_path, n_lines):
    assert find_violations(write_package(tmp_path, CLEAN | {"losses.py": "x = 1\n" * n_lines})) == []
