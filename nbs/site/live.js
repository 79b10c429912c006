// The exported model in the site's pages: a box that fills gaps, and the glass encoder. Nothing of the model
// is fetched before the reader asks; until then the answer that came with the page stands there.

const svg = (tag, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

async function open(root) {
  const base = new URL(root.dataset.live, location.href);
  const [page, draw, model] = await Promise.all([
    fetch(new URL("page.json", base)).then((answer) => answer.json()),
    import(new URL("draw.js", base)), import(new URL("model.js", base)),
  ]);
  for (const file of [...Object.values(page.files), ...Object.values(page.packages)]) file.url = new URL(file.url, base).href;
  return { page, draw, Mistake: model.Mistake, load: () => model.Encoder.load(page) };
}

class Box {
  constructor(root) {
    this.root = root;
    this.asked = 0;
    this.encoder = null;
    this.form = this.part("form");
    this.form.hidden = false;
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && event.target.tagName === "TEXTAREA") { event.preventDefault(); this.ask(); }
    });
    for (const button of root.querySelectorAll("button.example")) {
      button.addEventListener("click", () => { this.part("textarea").value = button.textContent; this.ask(); });
    }
  }

  part(selector) { return this.root.querySelector(selector); }

  say(text) { this.part("[role=status]").textContent = text; }

  complain(error) {
    this.say("");
    const known = this.parts && error instanceof this.parts.Mistake;
    this.part(".mistake").textContent = known ? error.message
      : "The model could not be loaded: is the network there, and the folder live beside this page whole?";
    this.part(".mistake").hidden = false;
    if (!known) console.warn(error);
  }

  async ready() {
    this.parts ??= await open(this.root);
    if (!this.encoder) {
      this.say(`Loading the model and its runtime, ${(this.parts.page.bytes / 1e6).toFixed(1)} MB, once ...`);
      this.encoder = this.parts.load();
      this.encoder.catch(() => { this.encoder = null; });
    }
    return this.encoder;
  }

  async compute(text, chosen = null) {
    const number = ++this.asked;
    this.part(".mistake").hidden = true;
    try {
      const encoder = await this.ready();
      const began = performance.now();
      const answer = await encoder.ask(text, chosen);
      answer.took = Math.round(performance.now() - began);
      return number === this.asked ? answer : null; // a later question is on its way
    } catch (error) {
      if (number === this.asked) this.complain(error);
      return null;
    }
  }

  async ask() {
    const answer = await this.compute(this.part("textarea").value);
    if (answer) this.show(answer);
    return answer;
  }

  tell(answer) {
    const words = answer.gaps.map((place) => answer.guesses[place][0][0]);
    this.say(words.length ? `Filled in ${answer.took} ms: ${words.join(", ")}.`
      : `Read in ${answer.took} ms. The sentence has no gap: write ___ for a word to guess.`);
  }

  // The model always answers; where it has no idea, the page says so.
  doubt(answer) {
    const unsure = answer.gaps.filter((place) => answer.guesses[place][0][1] < 0.1);
    this.part(".unsure").hidden = !unsure.length;
    this.part(".unsure").textContent = !unsure.length ? ""
      : `No guess ${answer.gaps.length > 1 ? `for ${unsure.length} of the ${answer.gaps.length} gaps ` : ""}reaches 10 %: the model `
      + "has not read enough about this. Its probability is spread over many words, and the first of them is hardly likelier than the next.";
  }

  show(answer) {
    const { guessTable } = this.parts.draw;
    this.tell(answer);
    this.doubt(answer);
    this.part(".guesses").replaceChildren(...answer.gaps.map((place, i) => guessTable(answer.guesses[place], i + 1, answer.gaps.length)));
  }
}

class Glass extends Box {
  constructor(root) {
    super(root);
    Object.assign(this, { chosen: 0, layer: null, head: -1, before: null });
    this.shared = new URLSearchParams(location.hash.slice(1)); // somebody else's sentence, and what they chose
    if (this.shared.has("text")) this.part("textarea").value = this.shared.get("text").slice(0, 2000);
    this.part("#glass-layer").addEventListener("change", (event) => { this.layer = Number(event.target.value); this.draw(); });
    this.part("#glass-head").addEventListener("change", (event) => { this.head = Number(event.target.value); this.draw(); });
    this.part(".swap").addEventListener("submit", (event) => { event.preventDefault(); this.swap(); });
    this.part(".unmask").addEventListener("submit", (event) => { event.preventDefault(); this.keepSurest(); });
    this.part(".hide-words").addEventListener("click", () => this.hideWords());
    const pieces = this.part(".pieces");
    const of = (event) => { const button = event.target.closest("button.piece"); return button ? [...pieces.children].indexOf(button) : -1; };
    pieces.addEventListener("click", (event) => { if (of(event) >= 0) this.choose(of(event)); });
    pieces.addEventListener("mouseover", (event) => { if (of(event) >= 0 && this.answer) this.draw(of(event)); });
    pieces.addEventListener("mouseleave", () => this.answer && this.draw());
    pieces.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || !this.answer) return;
      event.preventDefault();
      this.choose(Math.min(this.answer.pieces.length - 1, Math.max(0, this.chosen + step)));
      pieces.children[this.chosen].focus();
    });
  }

  show(answer) {
    this.answer = answer;
    const { page } = this.parts;
    if (this.layer === null) {
      this.layer = page.layers - 1;
      const options = (id, names) => this.part(id).replaceChildren(...names.map(([value, text]) => new Option(text, value)));
      options("#glass-layer", Array.from({ length: page.layers }, (_, i) => [i, `${i + 1} of ${page.layers}`]));
      const chosen = (name, most, otherwise) => { const number = parseInt(this.shared.get(name) ?? "", 10); return number >= 0 && number < most ? number : otherwise; };
      this.layer = chosen("layer", page.layers, this.layer);
      this.head = chosen("head", page.heads, this.head);
      this.chosen = chosen("piece", answer.pieces.length, -1);
      options("#glass-head", [[-1, "mean of all"], ...Array.from({ length: page.heads }, (_, i) => [i, `${i + 1} of ${page.heads}`])]);
    }
    Object.assign(this.part("#glass-layer"), { value: this.layer });
    Object.assign(this.part("#glass-head"), { value: this.head });
    this.part(".steps").hidden = false;
    this.part(".static").hidden = true;
    const wanted = this.chosen;
    this.chosen = answer.gaps.find((place) => place === wanted) ?? answer.gaps[0] ?? 0;
    super.show(answer);
    this.draw();
    this.grid();
    if (this.shared.has("piece") && wanted >= 0 && wanted !== this.chosen) this.choose(wanted);
    this.shared.delete("piece");
  }

  // Everything at once: pieces below, a row of points for each layer above them, and from the chosen piece in each layer
  // an arc to each piece that it looks at, as strong as its share, in the colour of the head.
  picture(from) {
    const { answer, head } = this, { page, draw } = this.parts, { pieces } = answer;
    const x = (place) => 190 + 54 * place, y = (layer) => 20 + 56 * (page.layers - layer), right = x(pieces.length);
    const heads = head < 0 ? Array.from({ length: page.heads }, (_, i) => i) : [head], shape = { heads: page.heads, length: pieces.length };
    const marks = [], lens = answer.lens[from];
    for (let layer = 0; layer <= page.layers; layer++) {
      for (const one of layer ? heads : []) {
        const colour = `hsl(${(360 * one) / page.heads + 210} 75% 50%)`;
        draw.looks(answer.attention, shape, layer - 1, one, from).forEach((share, to) => {
          if (share < 0.03) return;
          const bend = (one - (page.heads - 1) / 2) * 8; // heads that look at the same piece stand side by side
          marks.push(svg("path", { d: `M${x(from)} ${y(layer)} Q${(x(from) + x(to)) / 2 + bend} ${y(layer) + 20} ${x(to)} ${y(layer - 1)}`,
            fill: "none", stroke: colour, "stroke-width": 1 + 5 * share, "stroke-opacity": Math.min(1, 0.15 + share) }));
        });
      }
      pieces.forEach((_, place) => marks.push(svg("circle", { cx: x(place), cy: y(layer), r: place === from ? 5 : 3, class: place === from ? "from" : "" })));
      const guess = lens ? `: ${lens[layer][0][0]} ${percent(lens[layer][0][1])}` : "";
      marks.push(svg("text", { x: 0, y: y(layer) + 4 }, (layer ? `layer ${layer}` : "embedding") + guess));
    }
    pieces.forEach((word, place) => marks.push(svg("text", { x: x(place), y: y(0) + 24, "text-anchor": "middle", class: answer.gaps.includes(place) ? "gap" : "" }, word)));
    const drawing = svg("svg", { class: "curve all", role: "img", width: right, height: y(0) + 34, viewBox: `0 0 ${right} ${y(0) + 34}`,
      "aria-label": `From ${pieces[from]} in each layer, arcs to the pieces that it looks at; the best guess after each layer is at the left` });
    drawing.append(...marks);
    this.part(".picture").replaceChildren(drawing);
  }

  // A small square for each head of each layer: every piece (down) looking at every piece (across).
  grid() {
    const { answer } = this, { page, draw } = this.parts, colour = getComputedStyle(this.part(".main")).backgroundColor;
    const cells = Array.from({ length: page.layers * page.heads }, (_, i) => {
      const layer = Math.floor(i / page.heads), head = i % page.heads, canvas = document.createElement("canvas");
      draw.headPicture(canvas, answer.attention, { heads: page.heads, length: answer.pieces.length }, layer, head, colour);
      const label = `Layer ${layer + 1}, head ${head + 1}`, button = Object.assign(document.createElement("button"), { type: "button", title: label });
      button.setAttribute("aria-label", label);
      button.append(canvas);
      button.addEventListener("click", () => {
        Object.assign(this, { layer, head });
        Object.assign(this.part("#glass-layer"), { value: layer });
        Object.assign(this.part("#glass-head"), { value: head });
        this.draw();
      });
      return button;
    });
    this.part(".grid-of").style.setProperty("--heads", page.heads);
    this.part(".grid-of").replaceChildren(...cells);
  }

  draw(from = this.chosen) {
    const { answer, layer, head } = this, { page, draw } = this.parts;
    const shares = draw.looks(answer.attention, { heads: page.heads, length: answer.pieces.length }, layer, head, from);
    const most = Math.max(...shares), row = this.part(".pieces");
    const buttons = answer.pieces.map((word, place) => {
      const button = draw.pieceButton(word, shares[place], most, place === this.chosen, answer.gaps.includes(place));
      button.tabIndex = place === this.chosen ? 0 : -1;
      button.title = `number ${answer.ids[place]} of the vocabulary`;
      return button;
    });
    if (row.children.length === buttons.length) { // keep the buttons, or the pointer would leave the one it is on
      buttons.forEach((button, place) => {
        const old = row.children[place];
        old.replaceChildren(...button.childNodes);
        for (const name of ["class", "aria-pressed", "tabindex", "title"]) old.setAttribute(name, button.getAttribute(name) ?? "");
      });
    } else row.replaceChildren(...buttons);
    const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
    this.part(".said").textContent = `${answer.pieces[from]} (piece ${from + 1}, number ${answer.ids[from]} of the vocabulary) looks most at `
      + order.map((place) => `${answer.pieces[place]} ${percent(shares[place])}`).join(", ") + ".";
    const lens = answer.lens[this.chosen];
    this.picture(from);
    const { text } = answer;
    if (from === this.chosen) history.replaceState(null, "", `#${new URLSearchParams({ text, piece: from, layer, head })}`);
    this.part(".lens").replaceChildren(...(lens ? [draw.lensTable(answer.pieces[this.chosen], lens)] : []));
    this.part("#glass-word").value = answer.pieces[this.chosen].replace(/^##/, "");
  }

  async choose(place) {
    this.chosen = place;
    this.draw();
    if (this.answer.lens[place]) return;
    const answer = await this.compute(this.answer.text, place);
    if (answer) { this.answer = answer; this.draw(); }
  }

  ask() {
    this.part(".kept").replaceChildren(); // another sentence
    return super.ask();
  }

  // The sentence with other words at some places; gaps stay gaps.
  async rewritten(words) {
    const encoder = await this.encoder;
    const { page } = this.parts, { ids } = this.answer;
    const middle = [...ids.keys()].slice(1, -1).map((place) => words.get(place)
      ?? (ids[place] === page.maskId ? "___" : encoder.nameOf(ids[place])));
    return middle.join(" ").replaceAll(" ##", "").replace(/ ([.,:;!?)])/g, "$1").replaceAll("( ", "(");
  }

  async askRewritten(words) {
    const text = await this.rewritten(words);
    this.part("textarea").value = text;
    const answer = await this.compute(text);
    if (answer) this.show(answer);
    return answer;
  }

  // Makes gaps of every second word, for who wants to see the model write.
  async hideWords() {
    const { pieces } = this.answer, words = [...pieces.keys()].slice(1, -1).filter((place) => /^[\p{L}\p{N}]/u.test(pieces[place]));
    this.part("textarea").value = await this.rewritten(new Map(words.filter((_, i) => i % 2).map((place) => [place, "___"])));
    await this.ask();
  }

  // One step of masked diffusion: the surest guess stays, and the other gaps are asked again.
  async keepSurest() {
    const { gaps, guesses } = this.answer, list = this.part(".kept");
    const tell = (text) => list.append(Object.assign(document.createElement("li"), { textContent: text }));
    if (!gaps.length) {
      if (!list.children.length) tell("There is no gap: hide some words first.");
      return;
    }
    const surest = gaps.reduce((best, place) => (guesses[place][0][1] > guesses[best][0][1] ? place : best));
    const [word, share] = guesses[surest][0], others = gaps.filter((place) => place !== surest);
    const answer = await this.askRewritten(new Map([[surest, word]]));
    if (!answer) return;
    const moved = others.filter((place, i) => answer.gaps[i] !== undefined && answer.guesses[answer.gaps[i]][0][0] !== guesses[place][0][0]);
    tell(`${word}, ${percent(share)} sure` + (others.length
      ? `; then ${moved.length} of ${others.length} other ${others.length === 1 ? "gap" : "gaps"} had another best guess.` : "; no gap is left."));
  }

  // Puts another word in the place of the chosen one, and says what that does to the guesses.
  async swap() {
    const word = this.part("#glass-word").value.trim();
    if (!this.answer || !word) return;
    const before = this.answer, answer = await this.askRewritten(new Map([[this.chosen, word]]));
    if (!answer) return;
    const lines = answer.gaps.map((place, i) => {
      const old = before.guesses[before.gaps[i]]?.[0], now = answer.guesses[place][0];
      return old ? `${old[0]} ${percent(old[1])} became ${now[0]} ${percent(now[1])}` : "";
    });
    this.part(".changed").textContent = `With ${word}: ${lines.filter(Boolean).join("; ") || "there is no gap"}.`;
  }
}

for (const root of document.querySelectorAll("[data-live]")) {
  const box = new (root.classList.contains("glass") ? Glass : Box)(root);
  root.ready = true; // for tests
  root.ask = (text) => { box.part("textarea").value = text; return box.ask(); };
}
