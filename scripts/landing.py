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

from reference import front  # noqa: E402
from sync import Address  # noqa: E402

# --- the live model -------------------------------------------------------------------------------


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
        export_web_page(model, target, packages, name="The model of this site")
    for name in ("history.csv", "metrics.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, target / name)
    return target


def first_answer(live: Path) -> dict:
    return json.loads((live / "page.json").read_text(encoding="utf-8"))["first"]


def share_text(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def guess_tables(answer: dict) -> str:
    "Return the guesses of an answer as HTML tables."
    tables = []
    for count, position in enumerate(answer["gaps"], 1):
        rows = "".join(f'<tr><th scope="row">{html.escape(word)}</th><td class="number">{share_text(share)}</td></tr>'
                       for word, share, _ in answer["guesses"][str(position)])  # fmt: skip
        caption = "The gap" if len(answer["gaps"]) == 1 else f"Gap {count}"
        tables.append(
            f'<table class="plain"><caption>{caption}</caption><tbody>{rows}</tbody></table>'
        )
    return "".join(tables)


def lens_table(answer: dict) -> str:
    "Return the best guess after each layer at the first gap, as an HTML table."
    position, rows = answer["gaps"][0], []
    states = answer["lens"][str(position)]
    for layer, words in enumerate(states):
        after = "embedding" if layer == 0 else f"layer {layer}"
        rows.append(f'<tr><th scope="row">{after}</th><td>{html.escape(words[0][0])}</td>'
                    f'<td class="number">{share_text(words[0][1])}</td></tr>')  # fmt: skip
    return (f'<table class="plain"><caption>Best guess for the first gap after each layer</caption>'
            f'<tbody>{"".join(rows)}</tbody></table>')  # fmt: skip


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
    width, height, margin, bottom = 640, 300, 44, 34
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
        f'<text x="{margin}" y="{height - 10}">0</text>'
        f'<text x="{width - 8}" y="{height - 10}" text-anchor="end">{steps:.0f} steps</text>'
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
    padded = {
        name: ratio["wall"]["median"]
        for name, ratio in rates["rates"]["small, bert"]["ratios"].items()
    }
    times = min(padded[f"ours in {p} over padded in {p}"] for p in ("fp32", "bf16"))
    less = memory["ratios"]["30522, transformers over ours, sparse"]["median"]
    where = lambda result: f"{result['processor']}, {result['cores']} cores; {result['measured']}"
    seconds = demo["median"]["seconds"]
    return [
        (f"{seconds:.0f} s", f"from a bare directory to a trained encoder, {demo['median']['nats_below_unigram']:.1f} "
         "nats below the unigram line", where(demo)),
        (f"{times:.1f} x", "the real tokens per second of transformers' Trainer with one document a row, same model and "
         "precision", where(rates["rates"]["small, bert"]["machine"])),
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
EXAMPLES_FORM = """\
<form hidden>
<label for="{id}">Sentence, with a gap where you write <code>___</code></label>
<textarea id="{id}" rows="2" maxlength="2000" spellcheck="false">{first}</textarea>
<div class="row-of"><button type="submit" class="main">Fill the gaps</button>
<span class="soft">The first question loads {megabytes:.1f} MB, from this site alone; what you type goes nowhere.</span></div>
</form>
<p class="soft row-of">{examples}</p>
<p role="status"></p>
<p class="mistake" role="alert" hidden></p>
"""


def form(live: Path, identifier: str) -> str:
    page = json.loads((live / "page.json").read_text(encoding="utf-8"))
    buttons = "".join(
        f'<button type="button" class="example">{html.escape(text)}</button>'
        for text in page["examples"][1:]
    )
    text = EXAMPLES_FORM.format(id=identifier, first=html.escape(page["first"]["text"]), examples=buttons,
                                megabytes=page["bytes"] / 1e6)  # fmt: skip
    if any("://" in package["url"] for package in page["packages"].values()):
        text = text.replace("from this site alone", "the runtime from its pinned address")
    return text


def install_tabs(address: Address) -> str:
    return f"""\
::: {{.panel-tabset}}

## Clone

```sh
git clone {address.git_url}
cd {address.repo}
make demo
```

## pip

```sh
pip install "{address.requirement()}"
bertlab demo
```

## Colab

[Open in Colab]({address.colab("nbs/course/04_three_minutes.ipynb")}): *Three minutes*, a page of the course, in a
browser, with nothing to install.

:::
"""


def landing_page(live: Path | None, address: Address) -> str:
    tiles = "".join(
        f'<div><b class="figure">{figure}</b>{html.escape(meaning)}<br><span class="soft">{html.escape(where)}</span></div>'
        for figure, meaning, where in measured()
    )
    cards = "\n".join(f"[**{title}** {text}]({target})" for target, title, text in CARDS)
    parts = front("bertlab", "Train BERT-style encoders, from notebooks that teach how.", page_layout="full",
                  toc="false", sidebar="false", pagetitle='"Train BERT-style encoders"', repo_actions="false")  # fmt: skip
    parts += ["[One command trains a small BERT on a laptop, and every part of it is a notebook that you can read, "
              "run and change.]{.lead}"]  # fmt: skip
    parts += ["", install_tabs(address), "## It learns in minutes", ""]
    if live and (live / "history.csv").is_file():
        metrics = json.loads((live / "metrics.json").read_text(encoding="utf-8"))
        parts += ["```{=html}", curve(live / "history.csv", metrics["unigram_entropy"]), "```", ""]
        parts += ["The loss of the run that made the model on this page, and the unigram baseline, which uses no "
                  "context.", ""]  # fmt: skip
    else:
        parts += ["```{=html}", lesson_picture(), "```", ""]
    if live:
        parts += ["## Ask the model", "", "```{=html}", '<div class="live" data-live="live/">', form(live, "box-text"),
                  f'<div class="guesses tables" aria-live="polite">{guess_tables(first_answer(live))}</div>', "</div>",
                  '<script type="module" src="site/live.js"></script>', "```", ""]  # fmt: skip
        parts += ["[The glass encoder](glass.qmd) shows how it computes its answer.", ""]
    parts += ["## Measured", "", "```{=html}", f'<div class="tiles">{tiles}</div>', "```", ""]
    parts += ["[All measurements](benchmarks.ipynb), with failures and how to repeat them.", ""]
    parts += ["## Where to go", "", "::: {.cards}", ""]
    parts += [f"- {card}" for card in cards.splitlines()]
    parts += ["", ":::", "", "[The overview](overview.ipynb) has everything on one page.", ""]
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
    return {"index.qmd": landing_page(live, address), "glass.qmd": glass_page(live), "changelog.qmd": changelog_page(),
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
                    f"- [{head['title']}]({address.site_url}/{output_of(name, head)}): {head['description']}"
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


def mend(text: str) -> str:
    "Remove scripts from other hosts, and let code and tables scroll by keyboard."
    text = ELSEWHERE.sub("", text)
    text = text.replace(
        "return filterRegex.test(href)", f"return {SAME_SITE} || filterRegex.test(href)"
    )
    text = re.sub(
        r'<pre(?=(?: class="[^"]*")?><code| class="sourceCode)', '<pre tabindex="0"', text
    )
    text = text.replace('<math display="block"', '<math tabindex="0" display="block"')
    table = re.compile(r'<table(?![^>]*class="plain")[^>]*>.*?</table>', re.DOTALL)
    box = '<div class="scrolls" tabindex="0" role="region" aria-label="Table">{}</div>'
    head, tag, body = text.partition("<main")
    return head + tag + table.sub(lambda match: box.format(match[0]), body)


def finish(docs: Path, staged: Path) -> None:
    "Post-process the rendered pages."
    for path in docs.rglob("*.html"):
        if "live" in path.relative_to(docs).parts[:1]:
            continue
        text = path.read_text(encoding="utf-8")
        changed = mend(text)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
