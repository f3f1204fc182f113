"""Mutants that lack one event, wait or record, made where the code is running already.

`mutants_of(module)` finds every statement that waits, synchronises or keeps, and every event that is recorded; `apply`
takes one of them away in this process: the statement, or the event, which is then one that has happened already.
"""

import ast
import importlib
import inspect
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from hethub.kernels import device as device_layer

_STATEMENTS = {"wait", "wait_for", "wait_until_read", "synchronize", "keep"}
_DONE = "_no_event"


class Mutant(NamedTuple):
    """Line and column of what is taken away, what it says, and the function or class that holds it."""

    module: str
    line: int
    column: int
    text: str
    holder: str


def mutants_of(module: str) -> list[Mutant]:
    """All of the module's, in order."""
    tree, found = ast.parse(inspect.getsource(importlib.import_module(module))), []
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in ast.walk(tree):
        if _is_statement(node) or _is_record(node):
            assert isinstance(node, ast.expr | ast.stmt)
            around = [each for each in holders if each.lineno <= node.lineno <= (each.end_lineno or 0)]
            holder = max(around, key=lambda each: each.lineno).name
            found.append(Mutant(module, node.lineno, node.col_offset, ast.unparse(node), holder))
    return sorted(set(found))


def _called(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", None))
    return None


def _is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and _called(node.value) in _STATEMENTS


def _is_record(node: ast.AST) -> bool:
    return _called(node) == "record"


class _Remove(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self._place = mutant.line, mutant.column
        self._text = mutant.text

    def visit_Expr(self, node: ast.Expr) -> Any:
        if (node.lineno, node.col_offset) == self._place and _is_statement(node) and ast.unparse(node) == self._text:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if (node.lineno, node.col_offset) == self._place and _is_record(node) and ast.unparse(node) == self._text:
            return ast.copy_location(ast.Call(ast.Name(_DONE, ast.Load()), [], []), node)
        return self.generic_visit(node)


def apply(mutant: Mutant) -> None:
    """From here on this process runs without it. Functions keep their identity: only their code is replaced."""
    module = importlib.import_module(mutant.module)
    tree = ast.fix_missing_locations(_Remove(mutant).visit(ast.parse(inspect.getsource(module))))
    changed = compile(tree, module.__file__ or "", "exec")
    vars(module)[_DONE] = lambda: device_layer.Event(None)
    codes = {code.co_qualname: code for code in _codes(changed)}
    replaced = [
        _replace(function, codes)
        for function in _functions(module)
        if function.__code__.co_firstlineno <= mutant.line <= _last_line(function.__code__)
    ]
    assert any(replaced), f"no function holds {mutant}"


def _codes(code: CodeType) -> list[CodeType]:
    """The code of all functions and methods, those inside functions left out."""
    found = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.append(constant)
            if not constant.co_flags & inspect.CO_OPTIMIZED:  # a class
                found += _codes(constant)
    return found


def _functions(module: ModuleType) -> list[FunctionType]:
    found = []
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for member in members:
            member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            member = member.fget if isinstance(member, property) else member
            member = inspect.unwrap(member) if callable(member) else member
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                found.append(member)
    return found


def _replace(function: FunctionType, codes: dict[str, CodeType]) -> bool:
    code = codes[function.__code__.co_qualname]
    if len(code.co_freevars) != len(function.__code__.co_freevars):
        return False
    function.__code__ = code
    return True


def _last_line(code: CodeType) -> int:
    inner = [_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return max([line for *_, line in code.co_lines() if line] + inner)
