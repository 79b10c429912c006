"""The course as one numbered sequence: everything that follows from the list in nbs/course/spine.toml."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = "nbs/course"
READERS = {"curious": "the curious", "practitioner": "the practitioner"}
NEXT = re.compile(r"(?<=\*\*Next\*\*: )\[[^\]]*\]\([\w./]+\.ipynb\)")
PREVIOUS = re.compile(r"(?<=\*\*Previous\*\*: )\[[^\]]*\]\([\w./]+\.ipynb\)")
TAKES = re.compile(r"\*\*Takes\*\* (.+?)(?:,| on )")


@dataclass(frozen=True)
class Page:
    "A page of the course."

    name: str  # of its file, without number and suffix
    title: str
    after: str
    number: int | None = None  # None: a page aside
    reader: str = ""
    needs: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return (
            f"{self.name}.ipynb" if self.number is None else f"{self.number:02d}_{self.name}.ipynb"
        )

    @property
    def heading(self) -> str:
        return self.title if self.number is None else f"{self.number}. {self.title}"

    @property
    def link(self) -> str:
        return f"[{self.heading}]({self.file})"


def read(root: Path) -> list[Page]:
    "Return the pages in reading order."
    text = (root / FOLDER / "spine.toml").read_text(encoding="utf-8")
    pages, number = [], 0
    for entry in tomllib.loads(text)["page"]:
        aside = entry.pop("aside", False)
        number += not aside
        pages.append(
            Page(
                **{**entry, "needs": tuple(entry.get("needs", ()))},
                number=None if aside else number,
            )
        )
    return pages


def name_of(stem: str) -> str:
    "Return the name of a notebook without its number."
    return re.sub(r"^\d\d_", "", stem)


def neighbours(pages: list[Page], page: Page) -> tuple[Page | None, Page | None]:
    "Return the numbered pages before and after a page."
    index = pages.index(page)
    numbered = lambda candidates: next((p for p in candidates if p.number is not None), None)
    return numbered(reversed(pages[:index])), numbered(pages[index + 1 :])


def fill(cells: list[str], pages: list[Page], page: Page) -> list[str]:
    """Return a page's Markdown cells with its title, and the links to the pages before and after it.

    The first cell says what a page builds on, which need not be the page before it.
    """
    before, after = neighbours(pages, page)
    cells = [NEXT.sub(after.link, text) if after else text for text in cells]
    if before and page.number is not None:
        cells[-1] = PREVIOUS.sub(before.link, cells[-1])
    cells[0] = re.sub(r"^# .*", f"# {page.heading}", cells[0])
    return cells


def entry(page: Page, by_name: dict[str, Page], text: str) -> str:
    "Return a page's line of the map."
    takes = TAKES.search(text)
    facts = [f"[{page.title}]({page.file})", *([takes[1]] if takes else [])]
    if page.needs:
        needed = [by_name[name] for name in page.needs]
        facts.append("builds on " + ", ".join(f"[{p.number or p.title}]({p.file})" for p in needed))
    if page.reader:
        facts.append(f'<span class="{page.reader}">{READERS[page.reader]}</span>')
    return f"{' · '.join(facts)}<br>{page.after}"


def course_map(pages: list[Page], texts: dict[str, str]) -> str:
    "Return the map as a Markdown list, which the site's styles draw as a path with pages aside."
    by_name, lines, started = {page.name: page for page in pages}, [], False
    for page in pages:
        if page.number is not None and not started:
            lines, started = [*lines, ""], True
        indent = "    " if started and page.number is None else ""
        mark = "-" if page.number is None else f"{page.number}."
        lines.append(f"{indent}{mark} {entry(page, by_name, texts[page.name])}")
    return "\n".join(['<div class="course-map">', "", *lines, "", "</div>"])


def summary(pages: list[Page]) -> str:
    "Return links to the numbered pages, for the README."
    links = (f"[{page.heading}](course/{page.file})" for page in pages if page.number is not None)
    return " · ".join(links)


def renumber(root: Path, pages: list[Page]) -> None:
    "Rename the notebooks whose number has changed, and every mention of them."
    present = {
        name_of(path.stem): path for path in (root / FOLDER).glob("*.ipynb") if path.stem != "index"
    }
    names = {page.name for page in pages}
    if wrong := sorted(names ^ present.keys()):
        sys.exit(f"{FOLDER}/spine.toml and the notebooks beside it differ in {', '.join(wrong)}: list each page there, "
                 "after the page that it follows")  # fmt: skip
    moves = {
        present[page.name].name: page.file for page in pages if present[page.name].name != page.file
    }
    if not moves:
        return
    for old, new in moves.items():
        (root / FOLDER / old).rename(root / FOLDER / new)
    names = "|".join(map(re.escape, moves))
    anywhere, beside = (
        re.compile(rf"(?<=course/)(?:{names})"),
        re.compile(rf"(?<![\w/])(?:{names})"),
    )
    for folder in ("nbs", "scripts", "tests", "benchmarks"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".ipynb", ".py", ".md") and path.is_file():
                old = new = path.read_text(encoding="utf-8")
                patterns = [anywhere, beside] if path.parent == root / FOLDER else [anywhere]
                for pattern in patterns:
                    new = pattern.sub(lambda match: moves[match[0]], new)
                if new != old:
                    path.write_text(new, encoding="utf-8")
