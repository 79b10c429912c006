"""Join notebooks that nobody looks for alone into one page of the site, and let links to them lead there.

The first notebook of a group gives the page its address. Each notebook is a part of the page, under its own title.
"""

import json
import posixpath
import re
from pathlib import Path

import yaml
from reference import anchors, outside_fences

# Neighbours on one subject, together no longer than a page of the course: title, description, and notebooks.
GROUPS = (
    ("All parts", "The chapters of bertlab, their pages in reading order, and what each module imports.",
     ("parts.ipynb", "core/index.ipynb", "data/index.ipynb", "model/index.ipynb", "optim/index.ipynb", "train/index.ipynb",
      "finetuning/index.ipynb", "embeddings/index.ipynb", "explorers/index.ipynb", "cli/index.ipynb")),
    ("Files and serialization", "Replace files atomically, protect those of a run, and read YAML and JSON safely.",
     ("core/01_files.ipynb", "core/06_serialization.ipynb")),
    ("Durations and names", "Read the durations and names in a configuration, with error messages that suggest the nearest one.",
     ("core/02_durations.ipynb", "core/04_names.ipynb")),
    ("Sources and corpus", "Read your own text from anywhere, remove duplicates, and hold out documents for validation.",
     ("data/03_sources.ipynb", "data/04_corpus.ipynb")),
    ("Rows and collators", "Turn texts into arrays of one shape, and rows into batches with labels.",
     ("data/06_rows.ipynb", "data/10_collators.ipynb")),
    ("Stored tokens", "Store token ids so that many processes can read them, and tokenize terabytes of text.",
     ("data/11_tokens.ipynb", "data/18_tokenize.ipynb")),
    ("Mixing and streaming", "Choose how much of each source a model reads, and pack rows while training reads the text.",
     ("data/13_mixing.ipynb", "data/14_streaming.ipynb")),
    ("Loaders and data module", "Training batches in an order that depends only on the seed and the epoch.",
     ("data/15_loaders.ipynb", "data/16_module.ipynb")),
    ("Measure and change a tokenizer", "Compare tokenizers on a text, and add or remove pieces.",
     ("data/19_tokenizer_measures.ipynb", "data/20_vocabularies.ipynb")),
    ("Heads", "From vectors to words, labels, answers and spans.",
     ("model/06_heads.ipynb", "model/07_task_heads.ipynb")),
    ("Families and their weights", "Translate the settings and weights of each family, and report what was not loaded.",
     ("model/08_families.ipynb", "model/09_loading.ipynb")),
    ("Samplers and writing", "Fill gaps, continue, answer or rewrite texts, in the order that a sampler chooses.",
     ("model/12_sampling.ipynb", "model/13_generation.ipynb")),
    ("Judge what is written", "A likelihood bound, counts of repetition, a parser, and a causal model as a control.",
     ("model/14_likelihood.ipynb", "model/24_causal.ipynb")),
    ("Configure and drive a run", "The options of a run, the Trainer, and the driver that checks, trains, resumes and reports.",
     ("train/01_config.ipynb", "train/19_trainer.ipynb", "train/21_run.ipynb")),
    ("Steps and growing batches", "Divide summed losses once over all micro-batches and processes, and let the batch grow.",
     ("train/02_steps.ipynb", "train/12_batch_size.ipynb")),
    ("Objectives, first weights, modules", "Choose the objective, load the first weights, and train both as one LightningModule.",
     ("train/03_objectives.ipynb", "train/04_initialization.ipynb", "train/05_modules.ipynb")),
    ("Watch and report a run", "A history that survives a resume, speed and memory while a run trains, and a report of one page.",
     ("train/06_history.ipynb", "train/13_monitors.ipynb", "train/18_reports.ipynb")),
    ("Checkpoints and resuming", "What a checkpoint holds, when it is written, and how a run finds the newest complete one.",
     ("train/09_resume.ipynb", "train/10_checkpoints.ipynb")),
    ("Look at a model while it trains", "Distributions of weights, predictions and evaluations, without changing the run.",
     ("train/14_histograms.ipynb", "train/15_previews.ipynb", "train/16_evaluators.ipynb")),
    ("Publish a model", "Write a model card, push it to the hub, and show the model in a web page.",
     ("train/24_model_cards.ipynb", "train/26_web_page.ipynb")),
    ("Export and faster inference", "Write a model for other runtimes, and run its weights with the fastest of them.",
     ("train/25_export.ipynb", "train/28_backends.ipynb")),
    ("Labelled data", "Read labelled files, find bad rows before the first step, and keep texts out of two splits.",
     ("finetuning/01_files.ipynb", "finetuning/08_data.ipynb")),
    ("Evaluation and baselines", "Which labels a model confuses, whether its probabilities are right, and what it must beat.",
     ("finetuning/03_evaluation.ipynb", "finetuning/13_baselines.ipynb")),
    ("Four tasks", "Predict labels of texts, labels of words, answers, and entities that nest.",
     ("finetuning/04_classification.ipynb", "finetuning/05_tokens.ipynb", "finetuning/06_answers.ipynb",
      "finetuning/07_spans.ipynb")),
    ("Run a fine-tuning", "Exact scores over the whole split, the best weights, several seeds, and the options of a run.",
     ("finetuning/10_module.ipynb", "finetuning/11_runs.ipynb", "finetuning/15_config.ipynb")),
    ("Pooling and bi-encoder", "From the vectors of tokens to one vector per text, and one encoder for queries and documents.",
     ("embeddings/01_pooling.ipynb", "embeddings/04_bi_encoder.ipynb")),
    ("Contrastive losses", "Pull pairs together, push others away, and train on batches of thousands of pairs.",
     ("embeddings/02_losses.ipynb", "embeddings/03_gradcache.ipynb")),
    ("Compare embeddings", "Retrieval without a download, beside word-counting baselines, and classes with few labels.",
     ("embeddings/07_retrieval.ipynb", "embeddings/10_few_labels.ipynb")),
    ("Search and late interaction", "Find the nearest of a million texts exactly, by one vector each or by one for each token.",
     ("embeddings/08_search.ipynb", "embeddings/09_late_interaction.ipynb")),
    ("The program bertlab", "From a function's parameters to options, one table of commands, and an exit status for scripts.",
     ("cli/01_parser.ipynb", "cli/02_commands.ipynb", "cli/12_main.ipynb")),
    ("Use a model from the command line", "Find, validate, average, lengthen and export the model of a run, and write with it.",
     ("cli/03_models.ipynb", "cli/06_write.ipynb", "cli/09_adapt.ipynb", "cli/11_export.ipynb")),
    ("Fine-tune and search settings", "`bertlab finetune`, `bertlab predict` and `bertlab tune`, each as a function.",
     ("cli/05_finetune.ipynb", "cli/10_tune.ipynb")),
)  # fmt: skip
# What only the course's own checks need; on the site it would give answers away.
LEFT_OUT = ("course/checks/01_progress.ipynb", "course/checks/02_puzzles.ipynb")


def part_anchor(name: str) -> str:
    "Return the identifier of a notebook's heading in a joined page."
    stem = posixpath.basename(name).partition(".")[0]
    chapter = posixpath.dirname(name)
    return f"part-{chapter if stem == 'index' else stem.lstrip('0123456789_')}"


def rename_anchors(text: str, taken: set[str], suffix: str) -> tuple[str, dict[str, str]]:
    "Give headings whose identifiers are taken others; return the text and what was renamed."
    renamed: dict[str, str] = {}

    def change(match: re.Match) -> str:
        (identifier,) = anchors(match[0])
        new, number = identifier, 1
        while new in taken:
            number += 1
            new = f"{identifier}-{suffix}" + (f"-{number - 1}" if number > 2 else "")
        taken.add(new)
        if new == identifier:
            return match[0]
        renamed.setdefault(identifier, new)
        if f"{{#{identifier}" in match[0]:
            return match[0].replace(f"{{#{identifier}", f"{{#{new}")
        return f"{match[0].rstrip()} {{#{new}}}"

    return outside_fences(
        text, lambda part: re.sub(r"^#{1,6} .*\S", change, part, flags=re.MULTILINE)
    ), renamed


class Moved:
    "Where notebooks went: a page and the identifiers that changed, or an address outside the site."

    def __init__(self, left_out: dict[str, str]):
        self.places = {name: (url, {}) for name, url in left_out.items()}

    def target(self, link: str, source: str, page: str) -> str:
        "Return a link of a notebook as one of the page that it is on."
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:|/", link):
            return link
        name = (
            posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        )
        where, renamed = self.places.get(name, (name, {}))
        if name not in self.places and posixpath.dirname(source) == posixpath.dirname(page):
            return link
        if "://" in where:
            return where
        anchor = renamed.get(anchor, anchor)
        path = "" if where == page else posixpath.relpath(where, posixpath.dirname(page) or ".")
        return path + (f"#{anchor}" if anchor else "")

    def links(self, text: str, source: str, page: str) -> str:
        "Return Markdown or HTML of a notebook with links for the page that it is on."
        change = lambda match: match[1] + self.target(match[2], source, page)
        return outside_fences(
            text, lambda part: re.sub(r"((?<!\\)\]\(|\bhref=\")([^)\s\"]+)", change, part)
        )

    def move_links(self, notebook, source: str, page: str) -> None:
        "Change the links in the text and outputs of a staged notebook."
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.links(cell.source, source, page)
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                for kind in {"text/markdown", "text/html"} & data.keys():
                    data[kind] = self.links("".join(data[kind]), source, page)


def front_of(notebook) -> dict[str, str]:
    return yaml.safe_load(notebook.cells[0].source.strip().strip("-"))


def front_matter(values: dict[str, str]) -> str:
    return f"---\n{yaml.safe_dump(values, allow_unicode=True)}---\n"


def join(pages: dict, left_out: dict[str, str]) -> tuple[dict, Moved]:
    "Join staged notebooks by GROUPS; return the pages that remain, and where the others went."
    from execnb.nbio import mk_cell

    moved = Moved(left_out)
    for name in left_out:
        del pages[name]
    for title, _, names in GROUPS:
        taken: set[str] = set()
        for name in names:
            heading = part_anchor(name) if front_of(pages[name])["title"] != title else ""
            moved.places[name] = (names[0], {"": heading})
            for cell in pages[name].cells:
                if cell.cell_type == "markdown":
                    suffix = part_anchor(name).removeprefix("part-")
                    cell.source, renamed = rename_anchors(cell.source, taken, suffix)
                    moved.places[name][1].update({**renamed, **moved.places[name][1]})
    page_of = {name: place[0] for name, place in moved.places.items()}
    for name, notebook in pages.items():
        moved.move_links(notebook, name, page_of.get(name, name))
    for title, description, names in GROUPS:
        head = front_of(pages[names[0]])
        cells = [mk_cell(front_matter(head | {"title": title, "description": description}), "raw")]
        for name in names:
            part = front_of(pages[name])
            if part["title"] != title:
                heading = f"# {part['title']} {{#{part_anchor(name)}}}\n\n{part['description']}"
                cells.append(mk_cell(heading, "markdown"))
            cells += pages[name].cells[1:]
        pages[names[0]].cells = cells
        for name in names[1:]:
            del pages[name]
    return pages, moved


def kept_entries(entries: list, moved: Moved) -> list:
    "Return the entries of a sidebar without the notebooks that have no page of their own."
    is_kept = lambda name: moved.places.get(name, (name,))[0] == name
    kept = []
    for entry in entries:
        if isinstance(entry, dict):
            entry = entry | {"contents": kept_entries(entry["contents"], moved)}
            if not is_kept(entry.get("href")):
                del entry["href"]
        elif not is_kept(entry):
            continue
        kept.append(entry)
    return kept


def search_entries(root: Path) -> list[dict]:
    "Return an entry of the site's search for each part of a joined page."
    entries = []
    for title, _, names in GROUPS:
        for name in names:
            text = heading_of(root / "nbs" / name)
            part, description = (re.sub("^[#>] ", "", line) for line in text.splitlines()[:2])
            stem = posixpath.basename(names[0]).partition(".")[0].lstrip("0123456789_")
            address = (
                f"{posixpath.join(posixpath.dirname(names[0]), stem)}.html#{part_anchor(name)}"
            )
            if part != title:
                entries.append({"objectID": address, "href": address, "title": part, "section": "",
                                "text": description, "crumbs": [title]})  # fmt: skip
    return entries


def heading_of(path: Path) -> str:
    "Return the cell with the title of a notebook."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return next(source for source in sources if source.startswith("# "))
