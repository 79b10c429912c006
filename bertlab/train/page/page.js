// The page's state, and what the reader does to it.

import { guessTable, headPicture, lensTable, looks, make, percent, pieceButton } from "./draw.js";
import { Encoder, Mistake, readPage } from "./model.js";

const at = (id) => document.getElementById(id);
const state = { page: null, encoder: null, answer: null, chosen: 0, layer: 0, head: -1, asked: 0 };

function complain(error) {
  at("status").textContent = "";
  at("mistake").textContent = error instanceof Mistake ? error.message
    : "Something went wrong that this page did not expect; reload it.";
  at("mistake").hidden = false;
  if (!(error instanceof Mistake)) console.error(error);
}

async function encoderOf() {
  if (!state.encoder) {
    const megabytes = (state.page.bytes / 1e6).toFixed(1);
    at("status").textContent = `Loading the model and its runtime, ${megabytes} MB, once ...`;
    state.encoder = Encoder.load(state.page);
    state.encoder.catch(() => { state.encoder = null; }); // the next question may find the files mended
  }
  const encoder = await state.encoder;
  at("cost").textContent = "";
  return encoder;
}

async function ask(text, chosen = null) {
  const number = ++state.asked;
  at("mistake").hidden = true;
  at("go").disabled = true;
  try {
    const encoder = await encoderOf();
    const began = performance.now();
    const answer = await encoder.ask(text, chosen);
    if (number !== state.asked) return; // a later question is on its way
    const took = Math.round(performance.now() - began);
    const gaps = answer.gaps.length;
    at("status").textContent = gaps
      ? `${gaps === 1 ? "One gap" : `${gaps} gaps`} filled in ${took} ms: ${answer.gaps.map((place) => answer.guesses[place][0][0]).join(", ")}.`
      : `Read in ${took} ms. The sentence has no gap: write ___ for a word to guess.`;
    show(answer, chosen ?? answer.gaps[0] ?? 0);
  } catch (error) {
    if (number === state.asked) complain(error);
  } finally {
    if (number === state.asked) at("go").disabled = false;
  }
}

function show(answer, chosen) {
  state.answer = answer;
  state.chosen = chosen;
  at("answer").hidden = false;
  const tables = answer.gaps.map((place, i) => guessTable(answer.guesses[place], i + 1, answer.gaps.length));
  at("guesses").replaceChildren(...(tables.length ? tables : [make("p", {}, "No gap, no guess.")]));
  showHeads();
  showChosen();
}

function shapeOf(answer) {
  return { layers: state.page.layers, heads: state.page.heads, length: answer.pieces.length };
}

function showChosen() {
  const { answer, chosen, layer, head } = state;
  const shares = looks(answer.attention, shapeOf(answer), layer, head, chosen);
  const highest = Math.max(...shares);
  const buttons = answer.pieces.map((word, place) => {
    const button = pieceButton(word, shares[place], highest, place === chosen, answer.gaps.includes(place));
    button.addEventListener("click", () => choose(place));
    button.tabIndex = place === chosen ? 0 : -1;
    return button;
  });
  const held = at("pieces").contains(document.activeElement);
  at("pieces").replaceChildren(...buttons);
  if (held) buttons[chosen].focus();
  const most = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
  at("said").textContent = `${answer.pieces[chosen]} (piece ${chosen + 1}) looks most at `
    + most.map((place) => `${answer.pieces[place]} ${percent(shares[place])}`).join(", ") + ".";
  at("layer").value = layer;
  at("head").value = head;
  for (const button of at("heads").children) {
    const on = Number(button.dataset.layer) === layer && Number(button.dataset.head) === head;
    button.setAttribute("aria-pressed", String(on));
    button.tabIndex = on || (head < 0 && button.dataset.layer === String(layer) && button.dataset.head === "0") ? 0 : -1;
  }
  const lens = answer.lens[chosen];
  at("lens").replaceChildren(lens ? lensTable(`${answer.pieces[chosen]} (piece ${chosen + 1})`, lens)
    : make("p", {}, "Not computed for this piece yet."));
}

function choose(place) {
  state.chosen = place;
  showChosen();
  if (!state.answer.lens[place]) ask(state.answer.text, place);
}

function showHeads() {
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  const { answer } = state, shape = shapeOf(answer), buttons = [];
  for (let layer = 0; layer < shape.layers; layer++) {
    for (let head = 0; head < shape.heads; head++) {
      const canvas = make("canvas");
      canvas.setAttribute("aria-hidden", "true");
      headPicture(canvas, answer.attention, shape, layer, head, colour);
      const button = make("button", { type: "button", "aria-label": `Layer ${layer + 1}, head ${head + 1}` }, canvas);
      Object.assign(button.dataset, { layer, head });
      button.addEventListener("click", () => chooseHead(layer, head));
      buttons.push(button);
    }
  }
  at("heads").style.gridTemplateColumns = `repeat(${shape.heads}, max-content)`;
  at("heads").replaceChildren(...buttons);
}

function chooseHead(layer, head) {
  Object.assign(state, { layer, head });
  showChosen();
}

// Arrow keys walk inside a group of buttons, of which one is reached by Tab.
function walk(group, columns) {
  group.addEventListener("keydown", (event) => {
    const buttons = [...group.children], here = buttons.indexOf(document.activeElement);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
    const there = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : here + (steps[event.key] ?? NaN);
    if (here < 0 || !buttons[there]) return;
    event.preventDefault();
    buttons[there].focus();
    buttons[there].click();
  });
}

function fillControls(page) {
  const number = (label, count) => Array.from({ length: count }, (_, i) => make("option", { value: i }, `${i + 1}${label}`));
  at("layer").replaceChildren(...number(` of ${page.layers}`, page.layers));
  at("head").replaceChildren(make("option", { value: -1 }, "mean of all"), ...number(` of ${page.heads}`, page.heads));
  at("layer").addEventListener("change", (event) => chooseHead(Number(event.target.value), state.head));
  at("head").addEventListener("change", (event) => chooseHead(state.layer, Number(event.target.value)));
  const buttons = page.examples.map((text) => {
    const button = make("button", { type: "button", className: "example", dir: "auto" }, text);
    button.addEventListener("click", () => { at("text").value = text; ask(text); });
    return button;
  });
  at("examples").replaceChildren("Try: ", ...buttons);
  walk(at("pieces"), () => 1);
  walk(at("heads"), () => page.heads);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.answer && show(state.answer, state.chosen));
}

export async function start() {
  const page = await readPage();
  state.page = page;
  state.layer = page.layers - 1;
  fillControls(page);
  at("text").value ||= page.first.text; // a reader may have been faster
  at("cost").textContent = `The first question loads ${(page.bytes / 1e6).toFixed(1)} MB.`;
  const first = { ...page.first, attention: Float32Array.from(page.first.attention.flat(3)) };
  show(first, first.gaps[0]);
  at("status").textContent = "This answer came with the page; ask your own question to run the model here.";
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(at("text").value);
  });
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      ask(at("text").value);
    }
  });
  globalThis.bertlab = { // for tests, and for the curious at the console
    ask: async (text, chosen = null) => (await encoderOf()).ask(text, chosen),
  };
}
