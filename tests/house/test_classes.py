"One class, one place: how classes stand on each other, read from the package's source."

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT

MOST_ABOVE = 2  # classes of ours between a class and the library's
# Classes with one child that are right all the same, each with its reason.
ONE_CHILD: dict[str, str] = {
    "BertLabModel": "the encoder; its child is BERT's bare model, which has a pooler",
    "Block": "its child rebuilds hidden words with the same weights and another way forward",
    "MLP": "its child is the same with a gate",
    "RunCheckpoint": "one checkpoint, for users; its child keeps a series of them",
    "ScheduledLR": "any schedule as torch's scheduler; its child is a name of the reference API",
    "SelfAttention": "its child looks at other words than its own with the same weights",
}


@dataclass
class Found:
    "What the source says of a class."

    place: str  # chapter.module
    bases: list[str]
    sets: set[str] = field(default_factory=set)  # attributes and methods that it defines
    reads: set[str] = field(default_factory=set)  # attributes of `self` that it reads


def classes(root: Path) -> dict[str, Found]:
    "Every class at the top of a module of the package, by name."
    found: dict[str, Found] = {}
    for path in sorted(root.glob("bertlab/*/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in found, f"two classes are called {node.name}"
                found[node.name] = read_class(node, f"{path.parent.name}.{path.stem}")
    return found


def read_class(node: ast.ClassDef, place: str) -> Found:
    bases = [
        base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases
    ]
    read = Found(place, bases)
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            read.sets.add(statement.name)
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "target", None)]
        )
        read.sets |= {
            n.id
            for target in targets
            if target is not None
            for n in ast.walk(target)
            if isinstance(n, ast.Name)
        }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", None) == "self":
            (read.reads if isinstance(inner.ctx, ast.Load) else read.sets).add(inner.attr)
        # `vars(self).update(...)`, `register_buffer("x", ...)`: the name is a string
        if isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") in (
            "register_buffer",
            "register_parameter",
        ):
            read.sets.add(getattr(inner.args[0], "value", ""))
    return read


def above(name: str, found: dict[str, Found]) -> list[str]:
    "The classes of ours that a class stands on, the nearest first, each once."
    ours = []
    for base in found[name].bases:
        if base in found:
            ours += [base, *above(base, found)]
    return list(dict.fromkeys(ours))


def height(name: str, found: dict[str, Found]) -> int:
    "How many classes of ours stand one upon the other above the library's, this one left out."
    return max(
        (1 + height(base, found) for base in found[name].bases if base in found and base != name),
        default=0,
    )


def children(name: str, found: dict[str, Found]) -> list[str]:
    return [other for other, read in found.items() if name in read.bases]


def read_of_children(name: str, found: dict[str, Found]) -> set[str]:
    "Attributes that a class reads, and that only classes below it set."
    own = found[name].sets.union(*(found[base].sets for base in above(name, found)))
    below = set()
    for other in found:
        if name in above(other, found):
            below |= found[other].sets
    return (found[name].reads - own) & below


def test_no_class_stands_on_more_than_two_of_ours():
    found = classes(ROOT)
    assert {name: height(name, found) for name in found if height(name, found) > MOST_ABOVE} == {}


def test_a_class_with_one_child_is_rare_and_has_its_reason():
    found = classes(ROOT)
    alone = {name for name in found if len(children(name, found)) == 1}
    assert alone - ONE_CHILD.keys() == set(), (
        "part of its child, or named in ONE_CHILD with a reason"
    )
    assert ONE_CHILD.keys() - alone == set(), "has no longer one child: take it out of ONE_CHILD"
    assert len(alone) <= 12


def test_no_class_reads_what_only_a_child_sets():
    found = classes(ROOT)
    assert {name: sorted(read) for name in found if (read := read_of_children(name, found))} == {}


LADDER = """
import torch
class A(torch.nn.Module):
    def f(self): return self.x + self.own
class B(A):
    own = 1
class C(B):
    def __init__(self): self.x = 1
class D(C): pass
class E(D): pass
"""


@pytest.mark.parametrize(
    "name, tall, only, read",
    [("A", 0, True, {"x", "own"}), ("C", 2, True, set()), ("E", 4, False, set())],
)
def test_a_ladder_is_found(name, tall, only, read, tmp_path):
    (tmp_path / "bertlab/core").mkdir(parents=True)
    (tmp_path / "bertlab/core/x.py").write_text(LADDER)
    found = classes(tmp_path)
    assert height(name, found) == tall
    assert (len(children(name, found)) == 1) == only
    assert read_of_children(name, found) == read
