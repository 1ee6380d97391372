"""Types of compiled modules: a stub says what its module has, by name and by parameter."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, ident, sources

STUBS = [p for p in sources(".pyi") if p.with_suffix(".pyx").exists()]


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of each parameter of a stub's function."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaulted = len(positional) - len(a.defaults)
    return [(p.arg, i >= defaulted) for i, p in enumerate(positional)] + [
        (p.arg, d is not None) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]


def stub_faults(stub: ast.AST, thing: object, where: str, *, whole: bool) -> list[str]:
    """What a stub's module or class says that the compiled one is not, and, with `whole`, public
    names that it leaves out."""
    faults, named = [], set()
    for node in ast.iter_child_nodes(stub):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        named.add(name)
        found = getattr(thing, name, None)
        if name.startswith("_"):  # types of the stub alone, and what Python calls by itself
            continue
        if not hasattr(thing, name) and not isinstance(node, ast.AnnAssign):
            faults.append(f"{where}.{name} does not exist")
        elif isinstance(node, ast.ClassDef):
            whole_class = not issubclass(found, tuple | enum.Enum) and not is_dataclass(found)
            faults += stub_faults(node, found, f"{where}.{name}", whole=whole_class)
        elif isinstance(node, ast.FunctionDef) and callable(found):
            real = [
                (p.name, p.default is not p.empty)
                for p in inspect.signature(found).parameters.values()
            ]
            said = parameters(node)
            # What C declares has a `self` of its own; a static method has none.
            if [p for p in said if p[0] != "self"] != [p for p in real if p[0] != "self"]:
                faults.append(f"{where}.{name} takes {real}, and the stub says {said}")
    if whole and "__getattr__" not in named:  # with it, a stub says that it is not whole
        owner = thing.__name__ if inspect.ismodule(thing) else None
        public = {
            name
            for name, value in vars(thing).items()
            if not name.startswith("_")
            and (owner is None or getattr(value, "__module__", None) == owner)
        }
        faults += [f"{where}.{name} is not in the stub" for name in sorted(public - named)]
    return faults


@pytest.mark.parametrize("path", STUBS, ids=ident)
def test_a_stub_says_what_the_compiled_module_has(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts)
    module = importlib.import_module(name)
    assert str(module.__file__).endswith(".so"), f"{name} is not compiled"
    assert not stub_faults(ast.parse(path.read_text()), module, name, whole=True)


def constructors(source: str) -> dict[str, list[str]]:
    """Class -> names of the parameters of its `__init__`, or else of its `__cinit__`, in a Cython
    source, "*" and "**rest" among them: a compiled class does not tell them."""
    found = {}
    for name in ("__cinit__", "__init__"):
        for match in re.finditer(
            rf"^(?:cdef )?class (\w+)(?:(?!^(?:cdef )?class ).)*?^    def {name}\((.*?)\):\n",
            source,
            re.MULTILINE | re.DOTALL,
        ):
            listed = re.sub(r"\([^()]*\)", "", match[2])  # a default may be a tuple
            declared = [p.partition("=")[0].strip() for p in listed.split(",")]
            found[match[1]] = [p.removesuffix(" not None").split()[-1] for p in declared if p]
    return found


@pytest.mark.parametrize("path", STUBS, ids=ident)
def test_a_stub_says_how_objects_are_made(path: Path) -> None:
    real = constructors(path.with_suffix(".pyx").read_text())
    for node in ast.parse(path.read_text()).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                a = inner.args
                said = [p.arg for p in a.args]
                said += ["*"] * bool(a.kwonlyargs) + [p.arg for p in a.kwonlyargs]
                said += [f"**{a.kwarg.arg}"] if a.kwarg else []
                if a.vararg is None:  # `*arguments`: its subclasses say
                    assert said == real.get(node.name), f"{ident(path)}: {node.name}"


def test_a_wrong_stub_is_noticed() -> None:
    from kdirect.format import batch

    stub = (
        "def crc32c(data, start): ...\ndef gone(): ...\nclass BatchInfo:\n    def far(self): ...\n"
    )
    faults = "\n".join(stub_faults(ast.parse(stub), batch, "batch", whole=True))
    for fault in ("crc32c takes", "gone does not", "BatchInfo.far does not", "stamp is not in"):
        assert fault in faults, faults
