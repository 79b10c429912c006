"""Build the pages of the site that are not notebooks: the first page, the glass encoder and the changelog.

Figures are read from benchmarks/results/ or from the run of the model when the site is built.
"""

import csv
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import joins  # noqa: E402
import reference  # noqa: E402
from reference import front, search_entries  # noqa: E402
from sync import GUIDES, Address, fenced, output_markdown, source_of, title_of  # noqa: E402

# --- the live model -------------------------------------------------------------------------------


# Sentences about what the model has read, which is Python's documentation.
EXAMPLES = (
    "Return [MASK] if the object is a string, and False otherwise.",
    "Return the number of [MASK] in the list.",
    "If the file does not [MASK], an error is [MASK].",
    "Changed in [MASK] 3.9: the parameter was added.",
    "The first argument is the [MASK] of the file to open.",
)


def training_time(live: Path) -> str:
    "Return how long the live model was trained, in words."
    path = live / "metrics.json"
    seconds = json.loads(path.read_text(encoding="utf-8"))["train_seconds"] if path.is_file() else 0
    minutes = max(1, round(seconds / 60))
    return f", for {minutes} minute{'s' * (minutes > 1)} on a CPU" if seconds else ""


def install_packages(folder: Path) -> Path | None:
    "Let npm install the packages of the live page; None without npm: the page then loads them."
    from bertlab.train.web_page import PACKAGES

    if (npm := shutil.which("npm")) is None:
        return None
    names = [f"{package.name}@{package.version}" for package in PACKAGES]
    command = [npm, "install", "--ignore-scripts", "--silent", "--prefix", str(folder), *names]
    is_installed = subprocess.run(command).returncode == 0
    return folder / "node_modules" if is_installed else None


def export_live(model: Path, target: Path) -> Path:
    """Export a model as a web page into the site, with the browser packages if npm can install them.

    A folder written by `bertlab export --to web` is copied.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if (model / "page.json").is_file():
        shutil.copytree(model, target)
        return target
    from bertlab.train.web_page import export_web_page

    with tempfile.TemporaryDirectory() as folder:
        packages = install_packages(Path(folder))
        export_web_page(model, target, packages, EXAMPLES, name="The model of this site")
    for name in ("history.csv", "metrics.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, target / name)
    return target


def first_answer(live: Path) -> dict:
    return json.loads((live / "page.json").read_text(encoding="utf-8"))["first"]


def share_text(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def answer_table(caption: str, heads: tuple[str, ...], rows: list[tuple]) -> str:
    "Return a table as draw.js makes it: words, and at the end of each row a probability with its bar."
    lines = []
    for first, *words, share in rows:
        cells = "".join(f"<td>{html.escape(word)}</td>" for word in words)
        lines.append(
            f'<tr><th scope="row">{html.escape(first)}</th>{cells}<td class="number">{share_text(share)}</td>'
            f'<td class="bar" aria-hidden="true"><div style="width:{share:.1%}"></div></td></tr>'
        )
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    return (
        f'<table class="plain"><caption>{caption}</caption><thead><tr>{head}<th scope="col">probability</th><td></td></tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table>"
    )


def guess_tables(answer: dict) -> str:
    "Return the guesses of an answer as HTML tables."
    count = len(answer["gaps"])
    return "".join(
        answer_table(
            f"Gap {number} of {count}" if count > 1 else "The gap",
            ("guess",),
            [(word, share) for word, share, _ in answer["guesses"][str(position)]],
        )
        for number, position in enumerate(answer["gaps"], 1)
    )


def lens_table(answer: dict) -> str:
    "Return the best guess after each layer at the first gap, as an HTML table."
    states = answer["lens"][str(answer["gaps"][0])]
    names = ["embedding", *(f"layer {layer}" for layer in range(1, len(states)))]
    rows = [(name, *words[0][:2]) for name, words in zip(names, states, strict=True)]
    return answer_table(
        "Best guess for the first gap after each layer", ("after", "best guess"), rows
    )


def attention_bars(answer: dict) -> str:
    "Return the mean attention of the last layer from the first gap as SVG bars."
    position, last = answer["gaps"][0], answer["attention"][-1]
    shares = [
        sum(head[position][to] for head in last) / len(last) for to in range(len(answer["pieces"]))
    ]
    height, most = 18, max(shares)
    rows = []
    for row, (piece, share) in enumerate(zip(answer["pieces"], shares, strict=True)):
        y = row * height
        rows.append(f'<text x="130" y="{y + 13}" text-anchor="end">{html.escape(piece)}</text>'
                    f'<rect x="138" y="{y + 3}" width="{180 * share / most:.1f}" height="{height - 6}"/>'
                    f'<text x="{144 + 180 * share / most:.1f}" y="{y + 13}">{share_text(share)}</text>')  # fmt: skip
    label = f"Bars: how much the gap looks at each piece of the sentence, mean of the last layer's {len(last)} heads"
    return (f'<svg class="curve bars" role="img" aria-label="{label}" viewBox="0 0 400 {height * len(shares)}">'
            f'<g fill="currentColor">{"".join(rows)}</g></svg>')  # fmt: skip


# --- the loss curve -------------------------------------------------------------------------------


def curve(history: Path, unigram: float) -> str:
    "Return the loss of a run and the unigram baseline as SVG."
    with history.open(encoding="utf-8") as lines:
        points = [
            (float(row["step"]), float(row["train_loss"]))
            for row in csv.DictReader(lines)
            if row["train_loss"]
        ]
    width, height, margin, bottom = 640, 310, 48, 40
    steps = points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    low, high = min(low, unigram) - 0.2, high + 0.1
    x = lambda step: margin + (width - margin - 8) * step / steps
    y = lambda loss: 8 + (height - bottom - 8) * (high - loss) / (high - low)
    window = max(1, len(points) // 60)
    smooth = []
    for i in range(0, len(points), window):
        part = points[i : i + window]
        smooth.append(
            (sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part))
        )
    path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in smooth)
    ticks = "".join(f'<text x="{margin - 8}" y="{y(nats) + 4:.1f}" text-anchor="end">{nats}</text>'
                    for nats in range(int(low) + 1, int(high) + 1))  # fmt: skip
    label = (f"Loss of the run that made the model, from {smooth[0][1]:.1f} nats to {smooth[-1][1]:.1f} after {steps:.0f} steps; "
            f"the unigram baseline is {unigram:.2f}")  # fmt: skip
    return (
        f'<svg class="curve" role="img" aria-label="{label}" viewBox="0 0 {width} {height}">'
        f'<path class="axis" fill="none" d="M{margin} 8V{height - bottom}H{width - 8}"/>{ticks}'
        f'<text x="{margin}" y="{height - 18}">0</text>'
        f'<text x="{(width + margin) / 2:.0f}" y="{height - 4}" text-anchor="middle">optimizer step</text>'
        f'<text x="{width - 8}" y="{height - 18}" text-anchor="end">{steps:.0f}</text>'
        f'<text transform="translate(12 {height / 2:.0f}) rotate(-90)" text-anchor="middle">loss (nats)</text>'
        f'<path class="unigram" d="M{margin} {y(unigram):.1f}H{width - 8}"/>'
        f'<text x="{width - 12}" y="{y(unigram) - 7:.1f}" text-anchor="end">word frequencies alone:'
        f' {unigram:.2f} nats</text><polyline class="loss" points="{path}"/></svg>'
    )


def lesson_picture() -> str:
    "Return the loss figure of the page Three minutes, for a site without a model."
    notebook = json.loads((ROOT / "nbs/course/04_three_minutes.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        alt = re.search(
            r'^#\| fig-alt: "(.*unigram.*)"',
            "".join(cell["source"]),
            flags=re.MULTILINE | re.IGNORECASE,
        )
        for output in cell.get("outputs", []):
            if alt and "image/png" in output.get("data", {}):
                png = "".join(output["data"]["image/png"]).replace("\n", "")
                return f'<figure><img src="data:image/png;base64,{png}" alt="{html.escape(alt[1])}" width="640"></figure>'
    return ""


# --- measured figures -----------------------------------------------------------------------------


def results(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def measured() -> list[tuple[str, str, str]]:
    "Return three figures: the number, its meaning and the machine."
    demo, rates, memory = results("demo"), results("pretraining"), results("memory")
    ratios = rates["rates"]["small, bert"]["ratios"]
    grouped, padded = (
        min(ratios[f"ours in {p} over {rows} in {p}"]["wall"]["median"] for p in ("fp32", "bf16"))
        for rows in ("grouped", "padded")
    )
    less = memory["ratios"]["30522, transformers over ours, sparse"]["median"]
    where = lambda result: f"{result['processor']}, {result['cores']} cores; {result['measured']}"
    seconds = demo["median"]["seconds"]
    return [
        (f"{seconds:.0f} s", f"from a bare directory to a trained encoder, {demo['median']['nats_below_unigram']:.1f} "
         "nats below the unigram line", where(demo)),
        (f"{grouped:.1f} x", "the real tokens per second of transformers' Trainer with full rows, same model and precision; "
         f"with one document a row, {padded:.0f} x", where(rates["rates"]["small, bert"]["machine"])),
        (f"{less:.1f} x", "less memory for a training step with 30,522 words than transformers' model",
         where(memory["machine"])),
    ]  # fmt: skip


# --- pages ----------------------------------------------------------------------------------------

CARDS = (
    (
        "guides/own_text.ipynb",
        "Train on my text",
        "Train a model on a file, a directory or a table.",
    ),
    (
        "guides/finetune_csv.ipynb",
        "Fine-tune",
        "Labels from a CSV file, compared with simple baselines.",
    ),
    (
        "course/index.ipynb",
        "Learn how it works",
        "A course with a map, and a model whose layers you can inspect.",
    ),
    ("api.qmd", "Reference", "Every command, every setting, every name."),
)
FORM = """\
<p>This small model has read nothing but Python's own documentation{time}. Ask it about Python. Of
everything else it knows nothing: <em>Paris is the capital of ___.</em> gets a word of the documentation, too.</p>
<form hidden>
<label for="{id}">Sentence, with a gap where you write <code>___</code></label>
<textarea id="{id}" rows="2" maxlength="2000" spellcheck="false">{first}</textarea>
<div class="row-of"><button type="submit" class="main">Fill the gaps</button>
<span class="soft">Loads {megabytes:.1f} MB from this site, once; what you type stays in your browser.</span></div>
</form>
<p class="soft row-of">{examples}</p>
<p role="status"></p>
{unsure}
<p class="mistake" role="alert" hidden></p>
"""


def unsure(answer: dict) -> str:
    "Return the note on an answer without a guess of 10 %, hidden where there is one; live.js writes it anew."
    is_sure = all(answer["guesses"][str(position)][0][1] >= 0.1 for position in answer["gaps"])
    text = "" if is_sure else (
        "No guess reaches 10 %: the model has not read enough about this. Its probability is spread over many words.")  # fmt: skip
    return f'<p class="unsure" role="note"{" hidden" * is_sure}>{text}</p>'


def form(live: Path, identifier: str) -> str:
    page = json.loads((live / "page.json").read_text(encoding="utf-8"))
    buttons = "".join(
        f'<button type="button" class="example">{html.escape(text)}</button>'
        for text in page["examples"]
    )
    text = FORM.format(id=identifier, first=html.escape(page["first"]["text"]), examples=buttons,
                       megabytes=page["bytes"] / 1e6, time=training_time(live), unsure=unsure(page["first"]))  # fmt: skip
    if any("://" in package["url"] for package in page["packages"].values()):
        text = text.replace("from this site", "from pinned addresses")
    return text


def install_tabs(address: Address) -> str:
    return f"""\
::: {{.panel-tabset}}

## Colab

[Open in Colab]({address.colab("nbs/course/04_three_minutes.ipynb")}) trains a model in your browser, with
nothing to install: *Three minutes*, a page of the course.

## pip

```sh
pip install "{address.requirement()}"
bertlab demo
```

## Clone

```sh
git clone {address.git_url}
cd {address.repo}
make demo
```

:::
"""


def guide_links() -> list[str]:
    "Return a list of all guides by title."
    return [
        f"- [{title_of(ROOT / f'nbs/guides/{name}.ipynb')}](guides/{name}.ipynb)" for name in GUIDES
    ]


def landing_page(live: Path | None, address: Address) -> str:
    "Return the first page: the model, three ways to go, installation, and what was measured."
    tiles = "".join(
        f'<div><b class="figure">{figure}</b>{html.escape(meaning)}<br><span class="soft">{html.escape(where)}</span></div>'
        for figure, meaning, where in measured()
    )
    cards = "\n".join(f"- [**{title}** {text}]({target})" for target, title, text in CARDS)
    parts = front("bertlab", "Train BERT-style encoders on your own text, from notebooks that teach how.",
                  page_layout="full", toc="false", sidebar="false", pagetitle='"Train BERT-style encoders"',
                  repo_actions="false", body_classes="first")  # fmt: skip
    if live:
        parts += ["```{=html}", '<div class="live" data-live="live/">', form(live, "box-text"),
                  f'<div class="guesses tables" aria-live="polite">{guess_tables(first_answer(live))}</div>', "</div>",
                  '<script type="module" src="site/live.js"></script>', "```", ""]  # fmt: skip
    parts += ["::: {.buttons}", "[Learn](course/index.ipynb) [Train on my text](guides/own_text.ipynb) "
              "[Reference](api.qmd)", ":::", "", "## Start", "", install_tabs(address)]  # fmt: skip
    parts += ["## It learns in minutes", "", "```{=html}"]
    if live and (live / "history.csv").is_file():
        metrics = json.loads((live / "metrics.json").read_text(encoding="utf-8"))
        parts += [curve(live / "history.csv", metrics["unigram_entropy"]), "```", "",
                  "The loss of the run that made the model above; the dashed line is the unigram baseline, which knows how "
                  "frequent each word is, and no context."]  # fmt: skip
    else:
        parts += [lesson_picture(), "```", ""]
    parts += ["The loss is in nats. [What is a nat?](course/glossary.ipynb#nat)", ""]
    if live:
        parts += ["[The glass encoder](glass.qmd) shows how the model computes its answer.", ""]
    parts += ["## Measured", "", "```{=html}", f'<div class="tiles">{tiles}</div>', "```", ""]
    parts += [
        "[Ten measurements](benchmarks.ipynb), each beside its fairest alternative, and [all of them](measurements.ipynb).",
        "",
    ]
    parts += ["## Where to go", "", "::: {.cards}", "", cards, "", ":::", ""]
    parts += ["## Guides", "", "::: {.guides}", "", *guide_links(), "", ":::", ""]
    parts += [
        "[The overview](overview.ipynb) has everything on one page; [cite](cite.qmd) gives BibTeX.",
        "",
    ]
    return "\n".join(parts)


GLASS = """\
<div class="live glass" data-live="live/">
{form}
<div class="static">
<p>This is the model's answer from when the page was made.</p>
<div class="tables">{lens}{bars}</div>
</div>
<section aria-labelledby="glass-answer"><h2 id="glass-answer">The answer</h2>
<p>The head compares the gap's last vector with the vector of each word of the vocabulary; a softmax turns the scores into probabilities.</p>
<div class="guesses tables" aria-live="polite">{guesses}</div></section>
<div class="steps" hidden>
<section aria-labelledby="glass-pieces"><h2 id="glass-pieces">Words become pieces, and pieces look at each other</h2>
<p>Hover over a piece, or use the arrow keys: the bars show how much of its attention goes to each piece, in one
head of one layer. The highest bar fills its box; the numbers sum to 100 %.</p>
<div class="row-of"><label>Layer <select id="glass-layer"></select></label>
<label>Head <select id="glass-head"></select></label></div>
<div class="pieces" role="group" aria-label="Pieces of the sentence; the chosen one looks at the others"></div>
<p class="said soft" aria-live="polite"></p></section>
<section aria-labelledby="glass-picture"><h2 id="glass-picture">The whole computation</h2>
<p>The pieces are at the bottom, and each row above them is a layer. Arcs go from the chosen piece to the pieces that it
looks at, one colour for each head, as wide as the share. At the left is the best guess after each layer.</p>
<div class="picture scrolls" tabindex="0" role="region" aria-label="Drawing of all layers"></div>
<p>All heads at once, one row for each layer. A square shows every piece (down) looking at every piece (across); press
one to see it above. The address of this page keeps the sentence and your choice: copy it to share them.</p>
<div class="grid-of" role="group" aria-label="Attention of each head in each layer"></div></section>
<section aria-labelledby="glass-lens"><h2 id="glass-lens">Layer by layer</h2>
<p>Each piece starts as a vector from a table, the embedding, and each layer adds to it. If the model ended after
a layer, this would be its prediction at the chosen piece (the logit lens).</p>
<div class="lens tables"></div></section>
<section aria-labelledby="glass-swap"><h2 id="glass-swap">Swap a word</h2>
<p>Replace the chosen piece by another word, and see what changes.</p>
<form class="swap row-of"><label>Instead <input id="glass-word" maxlength="60" autocomplete="off"></label>
<button type="submit">Swap</button></form>
<p class="changed" role="status"></p></section>
<section aria-labelledby="glass-unmask"><h2 id="glass-unmask">Gap by gap</h2>
<p>The guesses for several gaps are made at once and independently. Masked diffusion writes in steps. One
of its orders: the most confident guess stays, and the other gaps are predicted again, now with one more word of context. The
model of this page was trained on sentences that keep most of their words; a model for writing is trained on any share of gaps.</p>
<form class="unmask row-of"><button type="button" class="hide-words">Hide every second word</button>
<button type="submit">Keep the surest guess</button></form>
<ol class="kept" aria-live="polite"></ol></section>
</div>
<noscript><p>The page computes with JavaScript, which is switched off; this is a stored answer.</p></noscript>
</div>
<script type="module" src="site/live.js"></script>
"""


def explorer_links() -> list[str]:
    "Return a list of the pages with something to move, each with its description."
    lines = []
    for path in sorted((ROOT / "nbs/explorers").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = next(source_of(cell) for cell in cells if cell["cell_type"] == "markdown")
        description = re.search(r"^> (.+)", text, flags=re.MULTILINE)[1]
        lines.append(f"- [**{title_of(path)}** {description}](explorers/{path.name})")
    return lines


def glass_page(live: Path | None) -> str:
    parts = front("The glass encoder", "Words become pieces, pieces become vectors, layer by layer to an answer: watch "
                  "a model at work, in this page.", toc="false", repo_actions="false")  # fmt: skip
    parts += ["A sentence with a gap goes through an encoder from bottom to top. A tokenizer cuts it into pieces, and each "
              "piece becomes a vector. In each layer the pieces attend to each other, with several heads, and each "
              "receives a weighted mixture of their vectors; a small network then processes each vector separately. After the "
              "last layer the vector at the gap is compared with every word that the model knows.", ""]  # fmt: skip
    if live:
        answer = first_answer(live)
        parts += ["```{=html}", GLASS.format(form=form(live, "glass-text"), lens=lens_table(answer),
                  bars=attention_bars(answer), guesses=guess_tables(answer)), "```", ""]  # fmt: skip
        parts += ["`bertlab demo` trains such a model in minutes, and `bertlab export --to web` makes "
                  "[a page of its own](live/index.html){target=\"_self\"} of any model of yours.", ""]  # fmt: skip
    else:
        parts += ["This copy of the site was made without a model, so this page has no live part: "
                  "`python scripts/docs.py --train` makes one with.", ""]  # fmt: skip
    parts += ["How each part is written, and tested:", ""]
    parts += ["- [words become pieces](data/05_tokenizers.ipynb)", "- [pieces look at each other](model/03_attention.ipynb)",
              "- [layer upon layer](model/04_encoder.ipynb)", "- [from vectors to words](model/06_heads.ipynb)",
              "- [gap by gap](course/17_writing_by_unmasking.ipynb)",
              "- [the same with letters, by hand](course/01_inside_the_encoder.ipynb)", ""]  # fmt: skip
    parts += ["## More to explore", "", "::: {.cards}", "", *explorer_links(), "", ":::", ""]
    return "\n".join(parts)


def changelog_page() -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    return "\n".join(
        [
            *front(
                "Changelog",
                "What changed for those who use bertlab, version by version.",
                repo_actions="false",
            ),
            text,
        ]
    )


def cite_page() -> str:
    "Return the page with BibTeX, from CITATION.cff."
    import yaml

    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join("{" + author["name"] + "}" for author in cff["authors"])
    fields = {"title": "{" + cff["title"] + "}", "author": authors, "year": str(cff["date-released"])[:4],
              "version": cff["version"], "url": Address.read(ROOT).git_url, "note": cff["license"]}  # fmt: skip
    lines = "\n".join(f"  {name:8}= {{{value}}}," for name, value in fields.items())
    parts = front("Cite bertlab", "How to cite bertlab in a paper, with BibTeX.")
    parts += ["```bibtex", f"@software{{bertlab,\n{lines}\n}}", "```", "",
              "The same is in `CITATION.cff` of the repository. The methods that bertlab implements have authors of their "
              "own: the reference of each name cites the paper that it follows.", ""]  # fmt: skip
    return "\n".join(parts)


def missing_page() -> str:
    parts = front("There is no such page", "A missing page, and where to continue.", toc="false", sidebar="false",
                  search="false", repo_actions="false")  # fmt: skip
    parts += ["It may have moved. Use the search at the top, or start at one of these:", ""]
    site = Address.read(ROOT).site_url
    parts += [
        f"- [{title}]({site}/{Path(target).with_suffix('.html')})" for target, title, _ in CARDS
    ]
    return "\n".join([*parts, ""])


def pages(live: Path | None, root: Path) -> dict[str, str]:
    "Return the generated pages by file."
    address = Address.read(root)
    return {"index.qmd": landing_page(live, address), "glass.qmd": glass_page(live), "changelog.qmd": changelog_page(), "cite.qmd": cite_page(),
            "404.qmd": missing_page()}  # fmt: skip


# --- llms.txt and post-processing ---------------------------------------------------------------------------


def head_of_page(path: Path) -> dict:
    "Return the front matter of a staged page."
    import yaml

    if path.suffix == ".qmd":
        return yaml.safe_load(path.read_text(encoding="utf-8").split("---\n", 2)[1])
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    return yaml.safe_load("".join(first["source"]).strip().strip("-")) or {}


def output_of(name: str, front_matter: dict) -> str:
    "Return the address of a staged page, relative to the site."
    return (
        Path(name).with_name(front_matter.get("output-file", Path(name).stem + ".html")).as_posix()
    )


def llms(staged: Path, sidebars: list[dict]) -> str:
    "Return llms.txt: one line per page."
    address = Address.read(ROOT)
    lines = ["# bertlab", "", "> Train BERT-style encoders (masked language modelling, diffusion, fine-tuning, "
             "embeddings) with torch and Lightning, from notebooks that teach how.", ""]  # fmt: skip

    def walk(items: list) -> None:
        for item in items:
            if isinstance(item, dict) and "contents" in item:
                walk([{"href": item["href"]}] if "href" in item else [])
                walk(item["contents"])
                continue
            name = item if isinstance(item, str) else item["href"]
            if (staged / name).is_file():
                head = head_of_page(staged / name)
                lines.append(
                    f"- [{head['title']}]({address.site_url}/{Path(output_of(name, head)).with_suffix('.md')}): {head['description']}"
                )

    for bar in sidebars:
        lines.append(f"\n## {bar['title']}\n")
        walk(bar["contents"])
    return "\n".join([*lines, ""])


# Scripts that Quarto puts into pages of notebooks with HTML in their outputs, for widgets that are not there.
ELSEWHERE = re.compile(
    r'<script src="https?://[^>]*></script>\s*|<script type="application/javascript">define\(\'jquery\'.*?</script>\s*',
    re.DOTALL,
)  # fmt: skip

# Quarto takes a link for one to elsewhere, and opens it in a new window, wherever the page's own address is neither the
# published one nor localhost: on a phone that reads a preview, in a file, on a fork's site.
SAME_SITE = "new URL(href).host === window.location.host"


# The contents list in the body of a page is for phones, and closed.
CONTENTS = re.compile(r'<nav id="TOC-body".*?</nav>', re.DOTALL)
# Quarto's bar for a phone names its search button with a title alone.
SEARCH_BUTTON = re.compile(r'<button type="button" class="btn quarto-search-button"')


# Tables of the reference, by the head of their first column: on a phone, a row of them is a stack.
STACKED = re.compile(r"<th[^>]*>(?:<strong>)?(?:parameter|option|command|module|name|method)<")


def mend(text: str, root: str = "") -> str:
    """Remove scripts from other hosts, let code and tables scroll by keyboard, and add the script of the site.

    `root` leads from the page to the root of the site.
    """
    text = reference.put_code(ELSEWHERE.sub("", text), reference.highlighted)
    text = text.replace(
        "return filterRegex.test(href)", f"return {SAME_SITE} || filterRegex.test(href)"
    )
    text = re.sub(
        r'<pre(?=(?: class="[^"]*")?><code| class="sourceCode)', '<pre tabindex="0"', text
    )
    text = text.replace('<math display="block"', '<math tabindex="0" display="block"')
    text = re.sub(r"<code>(--[\w.+-]+)", r'<code><span class="flag">\1</span>', text)
    text = SEARCH_BUTTON.sub(r'\g<0> aria-label="Search"', text)
    text = CONTENTS.sub(
        lambda match: (
            f'<details class="contents"><summary>On this page</summary>{match[0]}</details>'
        ),
        text,
    )
    text = text.replace(
        "</body>", f'<script type="module" src="{root}site/page.js"></script>\n</body>'
    )
    table = re.compile(r'<table(?![^>]*class="plain")[^>]*>.*?</table>', re.DOTALL)
    box = '<div class="scrolls{}" tabindex="0" role="region" aria-label="Table">{}</div>'
    boxed = lambda match: box.format(" stacks" if STACKED.search(match[0]) else "", match[0])
    head, tag, body = text.partition("<main")
    return head + tag + table.sub(boxed, body)


def mend_search(docs: Path) -> None:
    "Put the search of the site in place of Quarto's, with entries for commands, options and parts of pages."
    index = docs / "search.json"
    entries = json.loads(index.read_text(encoding="utf-8"))
    entries = [entry for entry in entries if not entry["href"].startswith("reference/commands/")]
    entries += [*search_entries(), *joins.search_entries(ROOT)]
    index.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
    (script,) = docs.glob("site_libs/quarto-search/quarto-search.js")
    text = script.read_text(encoding="utf-8")
    old = "const resultsRaw = await index.search(query, fuseOptions);"
    new = "const found = siteSearch(query, fuse.getIndex().docs, fuseOptions.limit);\n  const resultsRaw = found.length ? found : await index.search(query, fuseOptions);"
    if old not in text:
        sys.exit(
            "this version of Quarto searches in another way: adapt mend_search in scripts/landing.py"
        )
    own = (ROOT / "nbs/site/search.js").read_text(encoding="utf-8")
    script.write_text(text.replace(old, new) + own, encoding="utf-8")


def keep_used_icons(docs: Path) -> None:
    "Drop the icons that no page uses from the icon font, the largest file of a page."
    from fontTools import subset
    from fontTools.ttLib import TTFont

    (style,) = docs.glob("site_libs/bootstrap/bootstrap-icons.css")
    texts = [path.read_text(encoding="utf-8") for pattern in ("*.html", "*.css", "*.js")
             for path in docs.rglob(pattern) if path != style]  # fmt: skip
    used = {name for text in texts for name in re.findall(r"bi-[\w-]+|\\f\w{3}\b", text)}
    codes = []

    def kept(rule: re.Match) -> str:
        if rule[1] not in used and f"\\{rule[2]}" not in used:
            return ""
        codes.append(int(rule[2], 16))
        return rule[0]

    rule = re.compile(r'\.(bi-[\w-]+)::before \{ content: "\\(\w+)"; \}\n?')
    style.write_text(rule.sub(kept, style.read_text(encoding="utf-8")), encoding="utf-8")
    font = style.with_suffix(".woff")
    loaded, subsetter = TTFont(font), subset.Subsetter()
    subsetter.populate(unicodes=codes)
    subsetter.subset(loaded)
    loaded.save(font)


def shorten_style(css: str, used: set[str]) -> str:
    "Drop the rules of a minified style whose classes are not among those in use."

    def kept(rule: re.Match) -> str:
        selectors = []
        for selector in re.split(r",(?![^(]*\))", rule[1]):
            needed = re.sub(r":(?:not|is|where|has)\([^)]*\)", "", selector)
            if set(re.findall(r"\.(-?[A-Za-z_][\w-]*)", needed)) <= used:
                selectors.append(selector)
        return f"{','.join(selectors)}{{{rule[2]}}}" if selectors else ""

    css = re.sub(r"([^{};@]+)\{([^{}]*)\}", kept, css)
    return re.sub(r"@(?:media|supports)[^{}]*\{\}", "", css)


def keep_used_rules(docs: Path) -> None:
    "Drop the rules of Bootstrap's styles, half of a page's first view, that no page or script uses."
    used = {
        word
        for pattern in ("*.html", "*.js")
        for path in docs.rglob(pattern)
        for word in re.findall(r"[\w-]+", path.read_text(encoding="utf-8"))
    }
    for style in docs.glob("site_libs/bootstrap/bootstrap-*.min.css"):
        css = style.read_text(encoding="utf-8")
        style.write_text(shorten_style(css, used), encoding="utf-8")


def as_markdown(path: Path) -> str:
    "Return a staged page as Markdown, for programs that read."
    if path.suffix == ".qmd":
        return path.read_text(encoding="utf-8").split("---\n", 2)[2]
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"][1:]:
        source = source_of(cell)
        if cell["cell_type"] == "markdown":
            source = reference.put_code(source, lambda code: fenced(code, "python"))
        if cell["cell_type"] == "code":
            source = fenced(re.sub(r"^#\|.*\n", "", source, flags=re.MULTILINE), "python")
        parts.append(source)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
            parts.append(output_markdown(output, "", "")[0])
    return "\n\n".join(filter(None, parts)) + "\n"


def write_markdown(docs: Path, staged: Path) -> None:
    "Write each page as Markdown beside its HTML."
    for path in [*staged.rglob("*.ipynb"), *staged.rglob("*.qmd")]:
        head = head_of_page(path)
        target = docs / output_of(path.relative_to(staged).as_posix(), head)
        title = f"# {head['title']}\n\n> {head['description']}\n\n"
        if target.is_file():
            target.with_suffix(".md").write_text(title + as_markdown(path), encoding="utf-8")


def finish(docs: Path, staged: Path) -> None:
    "Post-process the rendered pages."
    for path in docs.rglob("*.html"):
        relative = path.relative_to(docs)
        if "live" in relative.parts[:1]:
            continue
        text = path.read_text(encoding="utf-8")
        changed = mend(text, "../" * (len(relative.parts) - 1))
        if changed != text:
            path.write_text(changed, encoding="utf-8")
    mend_search(docs)
    write_markdown(docs, staged)
    keep_used_icons(docs)
    keep_used_rules(docs)
