"""What the source of a module says: its classes, their fields with the comments beside them, and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDED = re.compile(
    r"Annotated\[((?:(?!Annotated\[).)+?), (?:Range\((.+?), (.+?)\)|\w+\((?:max_items=)?([\w*-]+)\))\]"
)


@dataclass(frozen=True, slots=True)
class FieldSource:
    name: str
    type: str
    default: str
    comment: str


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module by its path from the root of the repository."""

    path: str

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def classes(self) -> Iterator[ast.ClassDef]:
        """Public ones, in their order."""
        return (one for one in self.tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_"))

    def class_named(self, name: str) -> ast.ClassDef:
        return next(one for one in self.classes() if one.name == name)

    def fields(self, owner: ast.ClassDef | ast.Module) -> Iterator[FieldSource]:
        """Annotated or plain assignments of a class, or of the module."""
        lines = self.text.splitlines()
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name, kind, value = node.target.id, ast.unparse(node.annotation), node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, kind, value = node.targets[0].id, "", node.value
            else:
                continue
            line = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
            comment = line.partition("#")[2].strip() if "#" in line else ""
            default = ast.unparse(value) if value is not None else ""
            yield FieldSource(name, kind, default, "" if comment.startswith("noqa") else comment)


def bounded(annotation: str) -> str:
    """A type with its bounds in words, such as `int (0 to 8)`, from the innermost one on."""
    while (found := BOUNDED.search(annotation)) is not None:
        kind, low, high, most = found.groups()
        told = f"{kind} ({low} to {high})" if most is None else f"{kind} (at most {most})"
        annotation = annotation[: found.start()] + told + annotation[found.end() :]
    return annotation


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """As it is called: without `self` and `cls`."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    answer = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({ast.unparse(arguments)}){answer}"
