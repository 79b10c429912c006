"""The map of a chapter: what each of its modules is for and what it builds on, read from the source."""

import ast
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from bertlab.core.plots import BLUE, GREY, NotebookFigure


class Part(NamedTuple):
    "One module of a chapter, as its source describes it."

    name: str
    notebook: str  # its file
    purpose: str  # one line
    imports: frozenset[str]  # parts of the same chapter
    chapters: frozenset[str]  # other chapters


def read_parts(
    folder: str | os.PathLike,  # of a chapter: bertlab/data, say
) -> list[Part]:  # in reading order
    "Read what the modules of a chapter are for, and what each builds on."
    parts = []
    for path in Path(folder).glob("[!_]*.py"):
        source = path.read_text(encoding="utf-8")
        tree, inside, outside = ast.parse(source), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                firsts = {name.partition(".")[0] for name in names}
                inside, outside = (
                    (inside | firsts, outside) if node.level == 1 else (inside, outside | firsts)
                )
        notebook = re.search(r"File to edit: .*?([^/\s]+\.ipynb)", source)
        parts.append(
            Part(
                path.stem,
                notebook[1] if notebook else path.name,
                (ast.get_docstring(tree) or "").partition("\n")[0],
                frozenset(inside),
                frozenset(outside),
            )
        )
    return sorted(parts, key=lambda part: part.notebook)


def part_table(parts: Sequence[Part]) -> str:  # Markdown
    "List parts in reading order, each with its line and a link to its page."
    rows = [f"| [{part.name}]({part.notebook}) | {part.purpose} |" for part in parts]
    return "\n".join(["| part | what it is for |", "|---|---|", *rows])


def _all_below(parts: Mapping[str, Part], name: str) -> set[str]:
    "All parts that a part builds on, directly or through others."
    direct = parts[name].imports & set(parts)
    return set(direct).union(*(_all_below(parts, part) for part in direct))


def _positions(parts: Mapping[str, Part]) -> dict[str, tuple[int, float]]:
    "A column for each part, to the right of what it imports, and a height near to that."
    depth = {name: 0 for name in parts}
    for name in sorted(parts, key=lambda name: len(_all_below(parts, name))):
        depth[name] = max((1 + depth[part] for part in parts[name].imports & set(parts)), default=0)
    tallest = max(list(depth.values()).count(column) for column in depth.values())
    positions: dict[str, tuple[int, float]] = {}
    for column in range(max(depth.values()) + 1):
        names = [name for name in parts if depth[name] == column]
        if column:  # else in reading order
            near = lambda name: np.mean(
                [positions[part][1] for part in parts[name].imports if part in positions]
            )
            names.sort(key=near, reverse=True)
        for row, name in enumerate(names):
            positions[name] = column, -(row + 0.5) * tallest / len(names)
    return positions


def plot_parts(
    parts: Sequence[Part],
    title: str = "",
) -> Figure:
    """Draw parts as boxes, and an arrow from each part to those that build on it.

    Raises `ValueError` without parts.
    """
    if not parts:
        raise ValueError("parts is empty: there is nothing to draw")
    named = {part.name: part for part in parts}
    positions = _positions(named)
    columns = 1 + max(x for x, _ in positions.values())
    bottom = min(y for _, y in positions.values()) - 0.5
    figure = NotebookFigure(
        figsize=(max(1.95 * columns, 4), 0.68 * -bottom + 0.5), layout="constrained", dpi=100
    )
    axes = figure.add_subplot(xlim=(-0.4, columns - 0.6), ylim=(bottom, 0))
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10)
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    for name, (x, y) in positions.items():
        direct = named[name].imports & set(named)
        indirect = set().union(*(_all_below(named, part) for part in direct))
        for part in direct - indirect:
            start = positions[part][0] + 0.36, positions[part][1]
            axes.annotate("", (x - 0.36, y), start, arrowprops=arrow, zorder=1)
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.36, y - 0.3),
                0.72,
                0.6,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor="white",
                edgecolor=BLUE,
                zorder=2,
            )
        )
        lines = textwrap.wrap(name.replace("_", " "), 16)
        axes.text(
            x,
            y + 0.08,
            "\n".join(lines),
            ha="center",
            va="center",
            weight="bold",
            fontsize=8.5 if len(lines) == 1 else 7.5,
            linespacing=0.95,
            zorder=3,
        )
        axes.text(
            x,
            y - 0.21,
            ", ".join(sorted(named[name].chapters)),
            ha="center",
            va="center",
            fontsize=6.5,
            color=GREY,
            zorder=3,
        )
    return figure
