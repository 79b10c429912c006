// Fetches what the page computes with, checks it against page.json, and asks the model.

export class Mistake extends Error {
  // A sentence for the reader of the page.
  forReaders = true;
}

const nameOf = (file) => file.url.split("/").pop();

async function fetchChecked(file, what) {
  try {
    const response = await fetch(file.url, file.integrity ? { integrity: file.integrity } : {});
    if (response.ok) return await response.arrayBuffer();
  } catch {
    // Missing, damaged and out of reach look alike here; a second question tells them apart.
    const again = await fetch(file.url, { cache: "no-store" }).catch(() => null);
    again?.body?.cancel();
    if (again?.ok) {
      throw new Mistake(`${what} is damaged: ${nameOf(file)} is not the file that was exported. Copy it again.`);
    }
    if (!again) {
      throw new Mistake(`${what} cannot be reached: ${nameOf(file)} at ${new URL(file.url, location.href).host}.`);
    }
  }
  throw new Mistake(`${what} is missing: there is no ${nameOf(file)}. Copy the whole folder.`);
}

async function importChecked(file, what) {
  const bytes = await fetchChecked(file, what);
  const address = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  try {
    return await import(address);
  } finally {
    URL.revokeObjectURL(address);
  }
}

async function readJson(file, what) {
  const bytes = await fetchChecked(file, what);
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    throw new Mistake(`${what} is damaged: ${nameOf(file)} is not JSON.`);
  }
}

export async function readPage() {
  const page = await readJson({ url: "page.json" }, "The description of this page");
  if (page.format !== 1) throw new Mistake("page.json is of another version than this page: export both again.");
  return page;
}

export function bestOf(logits, begin, size, count) {
  // Probabilities of the best ids of one row, best first: [[id, p], ...].
  let top = -Infinity, sum = 0;
  for (let i = begin; i < begin + size; i++) if (logits[i] > top) top = logits[i];
  for (let i = begin; i < begin + size; i++) sum += Math.exp(logits[i] - top);
  const best = [];
  for (let i = begin; i < begin + size; i++) {
    if (best.length === count && logits[i] <= logits[begin + best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && logits[begin + best[at - 1]] < logits[i]) at--;
    best.splice(at, 0, i - begin);
    if (best.length > count) best.pop();
  }
  return best.map((id) => [id, Math.exp(logits[begin + id] - top) / sum]);
}

export class Encoder {
  constructor(page, tokenizer, ort, session) {
    Object.assign(this, { page, tokenizer, ort, session });
  }

  static async load(page) {
    const { packages, files } = page;
    const [tokenizers, ort, wasm, model, vocabulary, settings] = await Promise.all([
      importChecked(packages.tokenizers, "The tokenizers' code"),
      importChecked(packages.runtime, "The runtime"),
      fetchChecked(packages.wasm, "The runtime"),
      fetchChecked(files.model, "The model"),
      readJson(files.tokenizer, "The tokenizer"),
      readJson(files.settings, "The tokenizer"),
    ]);
    ort.env.logLevel = "fatal";
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.proxy = false;
    ort.env.wasm.wasmBinary = wasm;
    let tokenizer, session;
    try {
      tokenizer = new tokenizers.Tokenizer(vocabulary, settings);
    } catch {
      throw new Mistake("The tokenizer cannot be read: tokenizer.json is damaged, or of a kind that this page does not know.");
    }
    try {
      session = await ort.InferenceSession.create(new Uint8Array(model), { executionProviders: ["wasm"] });
    } catch {
      throw new Mistake(`The model cannot be computed: ${nameOf(files.model)} is no ONNX file, or a damaged one.`);
    }
    return new Encoder(page, tokenizer, ort, session);
  }

  nameOf(id) {
    const token = this.tokenizer.id_to_token(id) ?? "";
    if (token.startsWith("##")) return token;
    return this.tokenizer.decode([id], { skip_special_tokens: false }).trim() || token;
  }

  encode(text) {
    const { mask, maskId, maxTokens } = this.page;
    const written = text.replace(/_{3,}/g, mask).replaceAll("[MASK]", mask);
    const ids = this.tokenizer.encode(written).ids;
    if (ids.length > maxTokens) {
      throw new Mistake(`The sentence has ${ids.length} pieces, and this page reads ${maxTokens}: shorten it.`);
    }
    return { ids, gaps: ids.flatMap((id, place) => (id === maskId ? [place] : [])) };
  }

  // What the model says: guesses for gaps, attention of every head, and the lens at gaps and `chosen`.
  async ask(text, chosen = null) {
    if (!text.trim()) throw new Mistake("There is no sentence: type one, with a gap such as ___ in it.");
    const { ids, gaps } = this.encode(text);
    const looked = [...new Set([...gaps, ...(chosen === null || chosen >= ids.length ? [] : [chosen])])];
    if (!looked.length) looked.push(0);
    const whole = (values, ...dims) => new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
    const feeds = {
      input_ids: whole(ids, 1, ids.length),
      attention_mask: whole(ids.map(() => 1), 1, ids.length),
      positions: whole(looked, 1, looked.length),
    };
    let found;
    try {
      found = await this.session.run(feeds);
    } catch {
      throw new Mistake("The model could not compute this sentence; a shorter one may fit.");
    }
    const size = found.logits.dims[2], states = found.lens.dims[1];
    const named = (logits, row, count) =>
      bestOf(logits, row * size, size, count).map(([id, share]) => [this.nameOf(id), share, id]);
    const guesses = {}, lens = {};
    for (const place of gaps) guesses[place] = named(found.logits.data, place, 5);
    looked.forEach((place, column) => {
      lens[place] = Array.from({ length: states }, (_, state) =>
        named(found.lens.data, state * looked.length + column, 3));
    });
    return {
      text, ids, gaps, guesses, lens, attention: found.attentions.data,
      pieces: ids.map((id) => this.nameOf(id)),
    };
  }
}
