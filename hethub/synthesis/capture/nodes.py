"""What a node of a traced graph says: whose it is, what it writes to, what it was given."""

from typing import Any

import torch
from torch import fx

from hethub.synthesis.graph import argument_of, schema_of

OUTERMOST = "the module itself"  # or one that is not known
NUMBERS = (torch.SymInt, torch.SymFloat)


def called(node: fx.Node) -> str:
    """The name of what it calls, without namespace; empty where it has none."""
    return getattr(node.target, "__name__", "")


def module_of(node: fx.Node) -> str:
    """How messages call the module whose forward makes a node."""
    return annotated(node) or OUTERMOST


def annotated(node: fx.Node) -> str | None:
    """The name of the module whose forward makes a node, empty for the outermost; None where it is not known."""
    found: str | None = node.meta.get("custom", {}).get("module")
    return found


def writes(node: fx.Node) -> bool:
    """Whether an operator writes in place."""
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable


def is_check(node: fx.Node) -> bool:
    """Whether an operator makes nothing: it looks at types or values, which are those of one device."""
    schema = schema_of(node.target)
    return schema is not None and not schema.returns and not schema.is_mutable


def owner_of(node: fx.Node) -> Any:
    """Whose memory an operator writes to: what the view that it is given, if it is one, was taken of."""
    found: Any = node.args[0]
    while found.op == "call_function":
        schema = schema_of(found.target)  # none of what picks one of several outputs
        if schema is not None and not any(part.alias_info for part in schema.returns):
            break
        found = found.args[0]
    return found


def given(node: fx.Node, name: str) -> Any:
    """The argument of an operator that is called `name`; None where it takes none."""
    return argument_of(node.target, node.args, node.kwargs, name)


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; dropout 0, attention's too, draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    wanted = [name for name in ("dropout_p", "p") if name in names]
    return not wanted or any(given(node, name) not in (None, 0.0) for name in wanted)
