// Turns answers into elements. Nothing here knows where an answer comes from.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.startsWith("aria-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

function bar(share, className = "bar") {
  const inside = make("div");
  inside.style.width = `${100 * share}%`;
  const cell = make("td", { className }, inside);
  cell.setAttribute("aria-hidden", "true");
  return cell;
}

function table(caption, titles, rows) {
  const head = make("tr", {}, ...titles.map((title) => (title ? make("th", { scope: "col" }, title) : make("td", { className: "wide" }))));
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))));
}

export function guessTable(words, number, count) {
  const rows = words.map(([word, share]) => [
    make("th", { scope: "row", dir: "auto" }, word), make("td", { className: "number" }, percent(share)), bar(share)]);
  return table(count > 1 ? `Gap ${number} of ${count}` : "The gap", ["guess", "probability", ""], rows);
}

export function lensTable(piece, states) {
  const last = states.length - 1;
  const rows = states.map((words, state) => [
    make("th", { scope: "row" }, state === 0 ? "embedding" : state === last ? `layer ${state}, the answer` : `layer ${state}`),
    make("td", { dir: "auto" }, words[0][0]), make("td", { className: "number" }, percent(words[0][1])), bar(words[0][1], "bar wide"),
    make("td", { className: "soft", dir: "auto" }, words.slice(1).map(([word]) => word).join(", "))]);
  return table(`For ${piece}`, ["after", "best guess", "probability", "", "then"], rows);
}

// How much `from` looks at each piece; head -1 is the mean of the layer's heads.
export function looks(attention, shape, layer, head, from) {
  const { heads, length } = shape;
  const chosen = head < 0 ? Array.from({ length: heads }, (_, i) => i) : [head];
  const shares = new Float64Array(length);
  for (const one of chosen) {
    const begin = ((layer * heads + one) * length + from) * length;
    for (let to = 0; to < length; to++) shares[to] += attention[begin + to] / chosen.length;
  }
  return shares;
}

export function pieceButton(word, share, most, pressed, isGap) {
  const fill = make("div");
  fill.style.height = `${(100 * share) / most}%`; // the number below is the share itself
  const tower = make("div", { className: "tower" }, fill);
  tower.setAttribute("aria-hidden", "true");
  return make("button", {
    type: "button", className: isGap ? "piece gap" : "piece", "aria-pressed": String(pressed),
  }, tower, make("span", { className: "word", dir: "auto" }, word), " ", make("span", { className: "share" }, percent(share)));
}

export function headPicture(canvas, attention, shape, layer, head, colour) {
  const { length } = shape;
  canvas.width = canvas.height = length;
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour;
  for (let from = 0; from < length; from++) {
    const shares = looks(attention, shape, layer, head, from);
    for (let to = 0; to < length; to++) {
      pen.globalAlpha = Math.min(1, Math.sqrt(shares[to])); // the root lets faint ones be seen
      pen.fillRect(to, from, 1, 1);
    }
  }
}
