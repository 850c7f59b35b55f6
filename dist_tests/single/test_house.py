# SPDX-License-Identifier: Apache-2.0
"""The house rules, read from the sources: who may import whom, and what may be said where."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_quant
from dist_tests import house
from dist_tests.single.hopper import operator_schemas

PACKAGE = Path(fsdp_quant.__file__).parent
ROOT = PACKAGE.parent

# Imports point from a later floor to an earlier one, or stay on a floor.
FLOORS = (
    ("options", "migration"),
    ("formats", "families", "counters"),
    ("ops",),
    ("scaling", "encoded_matrix", "storage"),
    ("gemm",),
    ("tensor",),
    ("quantizer",),
    ("roles", "recipe_options", "recipe", "qat", "checkpoint"),
    ("context", "optim"),
    ("linear",),
    ("models",),
    ("training", "memory", "weight_sync"),
    ("parallel",),
    ("inspection", "integrations", "hooks", "serving"),
    ("recipes", "numerics", "steps", "public", "__init__", "__main__"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
SOURCES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
TEXTS, TREES = house.read_package(ROOT)


def floor_of(source: str) -> int:
    """The floor of a module, or of the package that its path begins with. Raises for one that
    nobody placed."""
    path = source.removesuffix(".py")
    part = path if path in FLOOR else path.split("/")[0]
    assert part in FLOOR, f"fsdp_quant/{source} has no floor: place {part!r} in FLOORS"
    return FLOOR[part]


def module_name(source: str) -> str:
    parts = ["fsdp_quant", *source.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(s): s for s in SOURCES}


@functools.cache
def imports_of(source: str) -> list[tuple[ast.stmt, str]]:
    """(statement, dotted name) of everything a source imports; `from x import y` gives x.y and
    x."""
    package = module_name(source).split(".")
    if not source.endswith("__init__.py"):
        package = package[:-1]
    found = []
    for node in ast.walk(TREES[source]):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((node, module))
            found += [(node, f"{module}.{alias.name}") for alias in node.names]
    return found


def own_imports(source: str) -> set[str]:
    """Sources of this package that a source imports."""
    return {
        MODULES[name]
        for _, name in imports_of(source)
        if name in MODULES and MODULES[name] != source
    }


def is_own_package(target: str, source: str) -> bool:
    """`from . import x` names the package before the module: importing it is no dependence on its
    __init__."""
    return target in ("__init__.py", str(Path(source).parent / "__init__.py"))


def test_imports_point_downward():
    """Otherwise a format or a storage depends on a module that depends on it, and nothing can be
    read alone."""
    for source in SOURCES:
        for target in own_imports(source):
            if not is_own_package(target, source):
                assert floor_of(target) <= floor_of(source), (
                    f"fsdp_quant/{source} imports fsdp_quant/{target}, a floor above"
                )


def test_imports_have_no_circle():
    """Otherwise the order in which modules are first imported decides whether the library works."""
    state: dict[str, str] = {}

    def visit(source: str, path: tuple[str, ...]) -> None:
        assert state.get(source) != "open", f"circle: {' -> '.join(path + (source,))}"
        if source in state:
            return
        state[source] = "open"
        for target in sorted(own_imports(source)):
            # A submodule names its package; the package's own imports are what could close a
            # circle.
            if not is_own_package(target, source):
                visit(target, path + (source,))
        state[source] = "done"

    for source in SOURCES:
        visit(source, ())
    assert set(state.values()) == {"done"}


def test_imports_are_at_the_top():
    """Otherwise a dependence is hidden in a function, and fails, or costs, at the first call.

    The package itself imports its public names at their first use, which is what makes its import
    cheap (test_ease).
    """
    for source in SOURCES:
        if source == "__init__.py":
            assert {name for _, name in imports_of(source) if "public" in name} == {
                "fsdp_quant.public",
                "fsdp_quant.public.*",
                "fsdp_quant.public.ALIASES",
                "fsdp_quant.public.NAMES",
            }
            continue
        inside = {
            child
            for node in ast.walk(TREES[source])
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.walk(node)
        }
        for statement, name in imports_of(source):
            assert statement not in inside, (
                f"fsdp_quant/{source}:{statement.lineno} imports {name} inside a function"
            )


def registrations_at_import(source: str) -> list[str]:
    """Module-level statements that change an object of another module of the package: a method
    called on it, or an attribute or item of it assigned."""
    imported = {
        alias.asname or alias.name
        for node in TREES[source].body
        if isinstance(node, ast.ImportFrom) and (node.level or "fsdp_quant" in (node.module or ""))
        for alias in node.names
    }
    found = []
    for node in TREES[source].body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            changed = [node.value.func]
        elif isinstance(node, ast.Assign):
            changed = node.targets
        else:
            continue
        for target in changed:
            root = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in imported:
                found.append(f"{source}: {ast.unparse(node)}")
    return found


def test_no_module_registers_itself_with_another_at_import():
    """Otherwise a lower floor calls a higher one, in an order that the order of imports decides."""
    for source in SOURCES:
        assert not registrations_at_import(source)


def test_optimizer_hooks_are_registered_in_one_place():
    """Otherwise no function says in which order things happen around an optimizer's step."""
    registrars = {
        source
        for source in SOURCES
        for _, name in imports_of(source)
        if re.search(r"register_optimizer_step_\w+_hook$", name)
    }
    assert registrars == {"linear/training_steps.py"}


def above_ops() -> list[str]:
    return [s for s in SOURCES if floor_of(s) > FLOOR["ops"]]


def names_a_format(node: ast.expr) -> bool:
    """The expression is called a format: fmt, x.fmt, format_of(...), a_format, self.element."""
    text = ast.unparse(node)
    last = (
        re.split(r"[.\[(]", text.rstrip(")]"))[-1]
        if not isinstance(node, ast.Call)
        else text.split("(")[0]
    )
    return (
        bool(re.search(r"(^|_)(fmt|format|element|family)(_|$|s$|_of$)", last.lower()))
        or "fmt" in text.split(".")[-1]
    )


def test_no_branch_on_the_kind_of_a_format():
    """Otherwise a new format needs code in many places instead of a row of data."""
    for source in above_ops():
        classes = {"Format", "Element", "Family", "Encoding"}
        for node in ast.walk(TREES[source]):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "isinstance"
            ):
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not asked & classes, (
                    f"fsdp_quant/{source}:{node.lineno}: {ast.unparse(node)}"
                )
            if isinstance(node, ast.Compare):
                compared = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                compared = [node.subject]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("startswith", "endswith")
            ):
                compared = [node.func.value]
            else:
                compared = []
            for operand in compared:
                named = (
                    isinstance(operand, ast.Attribute)
                    and operand.attr == "name"
                    and names_a_format(operand.value)
                )
                assert not named, (
                    f"fsdp_quant/{source}:{node.lineno} compares the name of a format: "
                    f"{ast.unparse(node)}"
                )


def kind_questions() -> list[str]:
    """Where code outside formats.py and ops/ reads what a format is made of, instead of a property
    that says what it does."""
    fields = {"tensor_scale", "pow2", "block", "scale_rounding", "scale_rule", "element", "scale"}
    return [
        f"{source}:{node.lineno}: {ast.unparse(node)}"
        for source in SOURCES
        if source != "formats.py" and not source.startswith("ops/")
        for node in ast.walk(TREES[source])
        if isinstance(node, ast.Attribute) and node.attr in fields and names_a_format(node.value)
    ]


def test_what_a_format_is_made_of_is_read_in_few_places():
    """If false, a format that is a new row needs code far from its row. The number may fall."""
    found = kind_questions()
    assert 20 <= len(found) <= 55, "\n".join(found)


def test_the_rule_on_format_names_finds_them():
    """Otherwise the test above passes because it looks for nothing."""
    for text in (
        "self.fmt",
        "fmt",
        "storage.fmt",
        "quantizer.fmt.element",
        "format_of(x)",
        "a_fmt",
    ):
        assert names_a_format(ast.parse(text, mode="eval").body), text
    for text in ("buffer", "self", "product", "history", "b", "managed.param.sharded_state"):
        assert not names_a_format(ast.parse(text, mode="eval").body), text


LOADS = re.compile(r"load_library|import_module|importlib|\bCDLL\b")


def test_only_the_extension_module_loads_the_library():
    """Otherwise a machine without the compiled operators cannot import the package, or loads them
    twice."""
    for source in SOURCES:
        found = LOADS.search(TEXTS[source])
        if source == "ops/build.py":
            assert not found or "_CHECK" in TEXTS[source]  # in a process of its own
        elif source == "integrations/__init__.py":
            # it imports tools by name
            assert not re.search(r"load_library|\bCDLL\b", TEXTS[source])
        elif source == "ops/extension.py":
            assert found, "fsdp_quant/ops/extension.py loads nothing, so the rule guards nothing"
        else:
            assert not found, (
                f"fsdp_quant/{source} says {found[0]}; only ops/extension.py loads the library"
            )


def test_the_extension_module_needs_only_torch():
    """Otherwise the library cannot be loaded, or found absent, before the rest of the package is
    imported."""
    names = {name for _, name in imports_of("ops/extension.py")}
    own = {name for name in names if name.split(".")[0] == "fsdp_quant"}
    assert {name.split(".")[0] for name in names - own} - sys.stdlib_module_names == {"torch"}
    assert own == {"fsdp_quant.ops", "fsdp_quant.ops.build"}, own
    roots = {name.split(".")[0] for _, name in imports_of("ops/build.py")}
    assert not roots - sys.stdlib_module_names, "setup.py reads ops/build.py before torch is there"


TRAINERS = {"megatron", "torchtitan", "accelerate", "transformers", "lightning", "peft", "trl"}


def test_only_integrations_import_a_trainer():
    """Otherwise a trainer that is missing, or another version of it, breaks the library for
    everybody."""
    importers = {
        source
        for source in SOURCES
        for _, name in imports_of(source)
        if name.split(".")[0] in TRAINERS
    }
    assert importers and all(source.startswith("integrations/") for source in importers), importers
    integrations = {source for source in SOURCES if source.startswith("integrations/")} - {
        "integrations/__init__.py"
    }
    assert not own_imports("integrations/__init__.py")
    outside = {
        source
        for source in SOURCES
        if source not in integrations and own_imports(source) & integrations
    }
    assert not outside, f"{outside} would import a trainer with the library"


def test_only_the_hooks_module_names_fsdps_extension_points():
    """Otherwise a change in FSDP2 has to be looked for."""
    for source in SOURCES:
        if source == "tensor/fsdp_hooks.py":
            assert "fsdp_pre_all_gather" in TEXTS[source]
            continue
        for word in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            assert word not in TEXTS[source], f"fsdp_quant/{source} says {word}"


# Documented ways to make a tensor subclass.
PUBLIC_DESPITE_THE_UNDERSCORE = {
    "torch._C._disabled_torch_function_impl",
    "torch.Tensor._make_wrapper_subclass",
    "torch.ops.aten._",
}
# Attributes of torch's own objects.
PRIVATE_ATTRIBUTES = {
    "_local_tensor",
    "_spec",
    "_unsharded_inner_tensors",
    "_unsharded_param",
    "_sharded_local_tensor",
    "_sharded_param_data",
    "_training_state",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_fsdp_param",
    "_param_fqn",
    "_module_info",
    "_orig_size",
    "_reshard_after_forward",
    "_use_post_forward_mesh",
    "_state_ctx",
    "_init_extensions",
}


def is_private(name: str) -> bool:
    if any(name.startswith(public) for public in PUBLIC_DESPITE_THE_UNDERSCORE):
        return False
    return name.split(".")[0] == "torch" and any(
        p.startswith("_") and not p.startswith("__") for p in name.split(".")
    )


def test_private_torch_names_are_in_torch_compat():
    """Otherwise a torch release breaks the library in places that nobody listed."""
    for source in [s for s in SOURCES if not s.startswith("tensor/torch_compat/")]:
        for statement, name in imports_of(source):
            assert not is_private(name), f"fsdp_quant/{source}:{statement.lineno} imports {name}"
        inner = {
            id(node.value) for node in ast.walk(TREES[source]) if isinstance(node, ast.Attribute)
        }
        for node in ast.walk(TREES[source]):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                assert not is_private(ast.unparse(node)), (
                    f"fsdp_quant/{source}:{node.lineno} uses {ast.unparse(node)}"
                )
            if isinstance(node, ast.Attribute):
                assert node.attr not in PRIVATE_ATTRIBUTES, (
                    f"fsdp_quant/{source}:{node.lineno} uses {ast.unparse(node)}"
                )


def test_operators_that_tests_and_benches_name_are_declared():
    """Otherwise a rename breaks what only a GPU runs, and no one sees it here."""
    declared = {name.partition(".")[0] for name in operator_schemas()}
    for path in sorted((ROOT / "dist_tests").rglob("*.py")):
        named = set(re.findall(r"ops\.fsdp_quant\.(\w+)", path.read_text()))
        assert named <= declared, f"{path.name} names {named - declared}"


CREATES = frozenset(
    f"torch.{name}"
    for name in (
        "arange as_tensor empty empty_strided eye full linspace logspace normal ones rand randint "
        "randn randperm range scalar_tensor tensor zeros"
    ).split()
)


def test_every_tensor_is_created_with_a_dtype_and_a_device():
    """Otherwise torch.set_default_dtype and torch.set_default_device change our numbers."""
    for source, node in ((source, node) for source in SOURCES for node in ast.walk(TREES[source])):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CREATES:
            options = {keyword.arg for keyword in node.keywords}
            assert None in options or {"dtype", "device"} <= options, (
                f"fsdp_quant/{source}:{node.lineno}: {ast.unparse(node)} takes torch's defaults"
            )


def test_no_bare_assert():
    """Otherwise a check disappears under python -O, and a user reads a line of code instead of a
    sentence."""
    for source in SOURCES:
        for node in ast.walk(TREES[source]):
            assert not isinstance(node, ast.Assert), (
                f"fsdp_quant/{source}:{node.lineno} asserts; raise what was got and wanted"
            )


def test_no_source_is_long():
    """Otherwise a file is about more than its first line says."""
    most = {".py": 600, ".sh": 200, **dict.fromkeys((".cpp", ".cu", ".cuh", ".h"), 450)}
    folders = PACKAGE, *(ROOT / name for name in ("csrc", "examples", "launch"))
    files = (p for folder in folders for p in folder.rglob("*") if p.suffix in most)
    lines = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in files}
    assert not {p: n for p, n in lines.items() if n > most[p.suffix]}


@pytest.mark.parametrize("name", house.BUDGETS)
def test_budgets_are_not_exceeded(name: str):
    """Otherwise what was deleted grows back: doors, types, questions, words."""
    budget, package = house.BUDGETS[name], (TEXTS, TREES)
    count = budget.count(*package)
    assert count <= budget.ceiling, "\n".join(budget.places(*package))


def test_the_budgets_find_what_they_count():
    """Otherwise a budget is kept because its rule looks for nothing."""
    text = """
class Matrix:
    data: Tensor
    scale: Tensor | None

class Pair:
    rowwise: Matrix

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, plan):
        found, *rest = [i for i in x if i and weight or plan]
        self._made = torch.compiler.is_compiling()
"""
    text += "        if x: pass\n" * house.MAX_COMPLEXITY
    text += "\n" * house.MAX_LINES
    package = {"a.py": text}, {"a.py": house.ast.parse(text)}
    counts = {name: len(budget.places(*package)) for name, budget in house.BUDGETS.items()}
    lines = counts.pop("lines of the package")
    assert lines == len(text.splitlines())
    assert list(counts.values()) == [1, 2, 1, 1, 2, 1, 1], counts


def test_every_source_says_what_it_is_for():
    """Otherwise a reader has to guess which of two files a change belongs in."""
    for source in SOURCES:
        text = TEXTS[source]
        assert ast.get_docstring(TREES[source]), f"fsdp_quant/{source} has no docstring"
        assert text.isascii(), f"fsdp_quant/{source} is not ASCII"


# Every tracked file #


def tracked_files() -> list[Path]:
    """Files that git tracks, or all sources where there is no git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        found = ((p, p.relative_to(ROOT).parts) for p in ROOT.rglob("*") if p.is_file())
        made = {"build", "__pycache__"}
        return [
            p
            for p, parts in found
            if not made & set(parts) and not re.match(r"\.(?!git(hub|ignore)$)", parts[0])
        ]
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts() -> dict[str, str]:
    found = {}
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found[path.relative_to(ROOT).as_posix()] = data.decode(errors="replace")
    return found


def test_no_machine_paths():
    """Otherwise the repository works on one machine, or tells where it was written."""
    places = "|".join(("work", "tmp", "root", "home"))
    machine = re.compile(rf"(?<![\w.~}}/$-])/({places})(?![\w-])")
    found = [
        f"{name}:{i}: {line.strip()[:100]}"
        for name, text in texts().items()
        for i, line in enumerate(text.splitlines(), 1)
        if machine.search(line)
    ]
    assert not found, "\n".join(found)
    assert machine.search("cd /" + "tmp/x")
    assert not machine.search("https://example.org/work")


def test_the_laws_that_ci_samples_are_listed():
    """Otherwise nobody knows what a change was not tested with."""
    folder = ROOT / "dist_tests"
    asks = {"EVERYTHING", "sample", "crossed", "diagonals", "every_second"}
    sampled = set()
    for path in folder.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "dist_tests.laws":
                names = {alias.name for alias in node.names}
            else:
                names = {node.attr} if isinstance(node, ast.Attribute) else set()
                names = names if asks & names and ast.unparse(node.value) == "laws" else set()
            if asks & names:
                sampled.add(path.relative_to(folder).as_posix())
        assert not re.search(r"environ.*[\"']FSDP_QUANT_ALL_PAIRS", path.read_text()), path
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    listed = set(re.findall(r"^\| `(\w+/test_\w+\.py)` \|", page.split("## The full run")[1], re.M))
    assert listed == sampled and len(sampled) > 20, listed ^ sampled


def test_no_file_is_named_utils():
    """Otherwise there is a place for everything that nobody thought about."""
    vague = ("utils", "util", "helpers", "helper", "misc")
    assert not [name for name in texts() if Path(name).stem.lower().strip("_") in vague]


def test_the_public_names_exist():
    """Otherwise the package's surface is not what its documentation lists."""
    for name in (
        "autocast",
        "begin_step",
        "skip_step",
        "sync",
        "token_offset",
        "convert",
        "set_recipe",
        "Linear",
        "Quantizer",
        "HybridQuantizer",
        "Recipe",
        "Role",
        "CustomRecipe",
        "recipes",
        "Format",
        "format_of",
        "gemm",
        "Storage",
        "QuantizedTensor",
        "StaleWeightError",
        "state_dict",
        "load_state_dict",
        "checkpoint",
        "plan",
        "receipt",
        "quantized_model_init",
        "optim",
        "GroupedLinear",
        "Quantize",
        "hooks",
        "export",
        "from_pretrained_quantized",
    ):
        assert hasattr(fsdp_quant, name), name
