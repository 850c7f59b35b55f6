# SPDX-License-Identifier: Apache-2.0
"""Budgets of the package, read from its sources: what should not grow back.

    python -m dist_tests.house [TREE]          print the table; TREE: another checkout, as "before"
    python -m dist_tests.house --where NAME    print the places that a budget counts

`dist_tests/single/test_house.py` compares each count with its ceiling. Lower a ceiling when its
count falls.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Words that name nothing of the field. `*rest` is a habit of Python and allowed.
DIALECT = frozenset(
    "of own found one given made kept at its said now got there lie lies whole them those that who "
    "what rest seen wanted told came done alike known".split()
)
# Classes that hold operands without being one: a transfer, a parameter, buffers of a gather, what
# a node saves.
HOLDERS = frozenset({"Gather", "QuantizedWeight", "DirectionBuffers", "Call", "Saved"})
MAX_COMPLEXITY = 20
MAX_LINES = 500
LONG_FILES = frozenset({"linear/plan.py"})  # the resolved plan and its reasons

Sources = dict[str, str]
Trees = dict[str, ast.Module]


class Budget(NamedTuple):
    """A count of places, what it must not exceed, and what the design wants.

    places: of sources and trees, by path below the package: a line per place.
    share:  of all that `share` counts, in percent; None: the number of places.
    """

    places: Callable[[Sources, Trees], list[str]]
    ceiling: float
    wanted: float
    share: Callable[[Sources, Trees], int] | None = None

    def count(self, sources: Sources, trees: Trees) -> float:
        number = len(self.places(sources, trees))
        return number if self.share is None else 100 * number / self.share(sources, trees)


def read_package(root: Path) -> tuple[Sources, Trees]:
    """Return text and syntax tree per source of the package in a checkout."""
    package = root / "fsdp_quant"
    sources = {p.relative_to(package).as_posix(): p.read_text() for p in package.rglob("*.py")}
    return sources, {name: ast.parse(text) for name, text in sorted(sources.items())}


def _nodes(trees: Trees, kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for source, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield source, node


def multiplying_functions(_: Sources, trees: Trees) -> list[str]:
    """Autograd functions whose forward receives a weight, and the plan or the call of a layer."""
    places = []
    for source, node in _nodes(trees, ast.ClassDef):
        if not any(ast.unparse(base).endswith("autograd.Function") for base in node.bases):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                arguments = [*method.args.args, method.args.vararg]
                names = {a.arg for a in arguments if a is not None}
                weights = names & {"weight", "weights", "w", "parameters"}
                if weights and names & {"plan", "call", "program"}:
                    places.append(f"{source}:{node.lineno}: {node.name}")
    return places


class _Members(NamedTuple):
    """A class: its bases, annotations of fields, attributes and properties, and its methods."""

    bases: set[str]
    fields: dict[str, str]
    methods: set[str]

    @classmethod
    def read(cls, node: ast.ClassDef) -> _Members:
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
        annotated = [m for m in node.body if isinstance(m, ast.AnnAssign)]
        for statement in (s for m in methods if m.name == "__init__" for s in ast.walk(m)):
            if isinstance(statement, ast.AnnAssign):
                annotated.append(statement)
        fields = {ast.unparse(s.target).split(".")[-1]: s.annotation for s in annotated}
        for method in methods:
            if method.returns and "property" in map(ast.unparse, method.decorator_list):
                fields[method.name] = method.returns
        texts = {name: ast.unparse(annotation) for name, annotation in fields.items()}
        return cls({ast.unparse(b) for b in node.bases}, texts, {m.name for m in methods})

    def holds(self, types: set[str]) -> bool:
        """Return whether a field has one of these types."""
        named = re.compile(rf"\b({'|'.join(sorted(types))})\b")
        return any(named.search(annotation) for annotation in self.fields.values())


def operand_types(_: Sources, trees: Trees) -> list[str]:
    """Classes of codes with scales: with the tensors `data` and `scale`, or derived from such a
    class; with a field of such a class; with tensors, and `rowwise` and `columnwise` or a method
    that returns operands."""
    classes = {
        f"{source}:{node.lineno}: {node.name}": _Members.read(node)
        for source, node in _nodes(trees, ast.ClassDef)
        if node.name not in HOLDERS
    }
    buffers = {
        name.split()[-1]
        for name, members in classes.items()
        if "Tensor" in members.fields.get("data", "") and "scale" in members.fields
    }
    matrices = {n.split()[-1] for n, members in classes.items() if members.bases & buffers}
    places = []
    for name, members in classes.items():
        by_direction = members.fields.keys() >= {"rowwise", "columnwise"}
        returns_operands = members.methods & {"operand", "operands"}
        has_tensors = members.holds({"Tensor"})
        is_operand = name.split()[-1] in buffers | matrices or members.holds(buffers | matrices)
        if is_operand or (has_tensors and (by_direction or returns_operands)):
            places.append(name)
    return places


def graph_questions(_: Sources, trees: Trees) -> list[str]:
    """Calls that ask, or declare, that a graph is built."""
    asks = {"is_tracing", "is_compiling", "tracing"}
    return [
        f"{source}:{node.lineno}: {ast.unparse(node)}"
        for source, node in _nodes(trees, ast.Call)
        if ast.unparse(node.func).split(".")[-1] in asks
    ]


def graph_question_files(sources: Sources, trees: Trees) -> list[str]:
    """Sources that `graph_questions` lists."""
    return sorted({place.split(":")[0] for place in graph_questions(sources, trees)})


def stored_names(trees: Trees) -> list[tuple[str, int, str]]:
    """Source, line and name of each variable, argument and attribute that is stored."""
    starred, names = set(), []
    for _, node in _nodes(trees, (ast.Starred, ast.arguments)):
        starred.add(id(node.value if isinstance(node, ast.Starred) else node.vararg))
    for source, node in _nodes(trees, (ast.Name, ast.arg, ast.Attribute)):
        if isinstance(node, ast.arg):
            name = node.arg
        elif not isinstance(node.ctx, ast.Store):
            continue
        else:
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name != "rest" or id(node) not in starred:
            names.append((source, node.lineno, name))
    return names


def dialect_names(_: Sources, trees: Trees) -> list[str]:
    """Stored names that are words of `DIALECT`, with or without underscores."""
    return [
        f"{source}:{line}: {name}"
        for source, line, name in stored_names(trees)
        if name.strip("_") in DIALECT
    ]


def complexity(function: ast.AST) -> int:
    """Return 1, plus one per branch, loop, handler, `and`, `or`, ternary and comprehension clause
    of a function and of the functions inside it."""
    branches = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
    number = 1
    for node in ast.walk(function):
        if isinstance(node, branches):
            number += 1
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            number += 1 + len(node.ifs)
    return number


def complex_functions(_: Sources, trees: Trees) -> list[str]:
    """Functions of a complexity above `MAX_COMPLEXITY`."""
    return [
        f"{source}:{node.lineno}: {node.name} {number}"
        for source, node in _nodes(trees, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (number := complexity(node)) > MAX_COMPLEXITY
    ]


def package_lines(sources: Sources, _: Trees) -> list[str]:
    """Every line of the package."""
    return [line for text in sources.values() for line in text.splitlines()]


def long_files(sources: Sources, _: Trees) -> list[str]:
    """Sources of more than `MAX_LINES` lines, but for `LONG_FILES`."""
    lines = {name: len(text.splitlines()) for name, text in sorted(sources.items())}
    return [f"{s}: {n}" for s, n in lines.items() if n > MAX_LINES and s not in LONG_FILES]


BUDGETS = {
    "autograd functions that multiply": Budget(multiplying_functions, 1, 1),
    "operand types": Budget(operand_types, 9, 8),
    "places that ask for a graph": Budget(graph_questions, 6, 15),
    "files that ask for a graph": Budget(graph_question_files, 6, 6),
    "dialect names, % of stored names": Budget(
        dialect_names, 0.5, 0.5, share=lambda _, trees: len(stored_names(trees))
    ),
    f"functions of complexity > {MAX_COMPLEXITY}": Budget(complex_functions, 8, 25),
    "lines of the package": Budget(package_lines, 41800, 31000),
    f"files of more than {MAX_LINES} lines": Budget(long_files, 8, 0),
}


def table(trees: list[Path]) -> str:
    """Return a Markdown table: per budget, the count in each checkout, the ceiling and what is
    wanted."""
    packages = [read_package(root) for root in trees]
    head = ["budget", *(["before", "after"] if len(trees) == 2 else ["now"]), "ceiling", "wanted"]
    rows = [head, ["---"] * len(head)]
    for name, budget in BUDGETS.items():
        counts = [budget.count(*package) for package in packages]
        rows.append([name, *(f"{n:.10g}" if n % 1 == 0 else f"{n:.2f}" for n in counts)])
        rows[-1] += [f"{budget.ceiling:.10g}", f"{budget.wanted:.10g}"]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dist_tests.house",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tree", nargs="?", type=Path, help="a checkout to compare with")
    parser.add_argument("--where", help="a budget, or the beginning of its name")
    args = parser.parse_args()
    if args.where:
        package = read_package(args.tree or ROOT)
        for name, budget in BUDGETS.items():
            if name.startswith(args.where):
                print(*budget.places(*package), sep="\n")
        return 0
    print(table([*([args.tree] if args.tree else []), ROOT]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
