// The site's search, which scripts/landing.py adds to Quarto's: all words must be in an entry, as beginnings of words,
// and guides come before tables of names. Quarto's own search, which forgives typing errors, comes in where nothing is found.

const QUIET = new Set("a an and are can could do does for from get how i if in into is it me my of on or should the there this to use using want what when where which why with you your".split(" "));

// What readers type, and what the pages say. Keys of several words come first.
const SYNONYMS = {
  "out of memory": "out of memory", "cuda out of memory": "out of memory", oom: "out of memory", memory: "memory",
  ner: "named entities", "named entity recognition": "named entities", "sequence labeling": "tokens", pos: "tokens",
  "token classification": "tokens", "text classification": "csv", classifier: "fine-tune", classification: "csv", sentiment: "csv",
  inference: "serve", deploy: "serve", deployment: "serve", quantize: "serve", quantization: "serve", predictions: "predict",
  install: "install", installation: "install", setup: "install", requirements: "install", extras: "install",
  cite: "cite", citation: "cite", bibtex: "cite", paper: "cite", checkpoint: "resume", checkpoints: "resume",
  "continue training": "resume", restart: "resume", crash: "resume", preempted: "resume", faq: "questions", help: "questions",
  "further pretraining": "continue a model", "domain adaptation": "continue a model", "multi gpu": "several", multigpu: "several",
  ddp: "several", slurm: "several", nodes: "several", cluster: "several", distributed: "several",
  sts: "embeddings", "sentence embeddings": "search", "semantic search": "search", retrieval: "search", rag: "search",
  lr: "learning_rate", "learning rate": "learning_rate", "batch size": "batch_size", epochs: "epochs", vocabulary: "vocab",
  "hugging face": "hub", huggingface: "hub", upload: "push", publish: "push", nan: "diagnose", "loss is nan": "diagnose",
  diverge: "diagnose", tpu: "tpu", yaml: "configurations", config: "configurations", configs: "configurations", wandb: "logger",
  tensorboard: "logger", "early stopping": "stop", lora: "adapters", peft: "adapters", "long context": "lengthen", "long text": "long documents",
};

const normal = (text) => text.toLowerCase().replaceAll("&amp;", "&").replace(/[-_]/g, "_");
const wordsOf = (text) => normal(text).match(/[\p{L}\p{N}_]+/gu) ?? [];

// Every word of a query with what may stand for it, each as the words that it needs.
function alternatives(query) {
  let rest = ` ${wordsOf(query).join(" ")} `;
  const needed = [];
  for (const phrase of Object.keys(SYNONYMS).sort((a, b) => b.length - a.length)) {
    const spelled = ` ${wordsOf(phrase).join(" ")} `;
    if (!rest.includes(spelled)) continue;
    rest = rest.replace(spelled, " ");
    needed.push([wordsOf(phrase), wordsOf(SYNONYMS[phrase])]);
  }
  const words = rest.split(" ").filter(Boolean);
  const telling = words.filter((word) => !QUIET.has(word));
  return [...needed, ...(telling.length || needed.length ? telling : words).map((word) => [[word]])];
}

// 2 for the whole word, 1 for the beginning of one or of a part of one: rate of learning_rate.
function match(word, words) {
  if (words.has(word)) return 2;
  for (const other of words) if (other.startsWith(word) || other.includes(`_${word}`)) return 1;
  return 0;
}

// A field as its words and as one text, in which words that belong together stand side by side.
function prepare(doc) {
  return [[doc.title, 10], [doc.section, 8], [doc.text, 1]].map(([text, weight]) => {
    const words = wordsOf(text ?? "");
    return { words: new Set(words), joined: ` ${words.join(" ")} `, weight };
  });
}

function scoreOf(needed, fields) {
  const ofWords = (words) => Math.max(...fields.map(({ words: held, joined, weight }) => weight * (words.length === 1
    ? match(words[0], held) : 2 * joined.includes(` ${words.join(" ")} `))));
  const best = needed.map((ways) => Math.max(...ways.map(ofWords)));
  return best.length && Math.min(...best) > 0 ? best.reduce((a, b) => a + b) : 0;
}

// A page before its parts, and guides before the reference and lists of modules. Options come by their names.
function standing(doc) {
  const place = /^(guides\/|index|cite)/.test(doc.href) ? 1.6 : /^(reference\/commands|course)/.test(doc.href) ? 1.2
    : /^(api|reference\/names|changelog|parts)/.test(doc.href) ? 0.5 : 1;
  return place * (doc.section ? 1 : 1.3) * (doc.href.includes("#option-") ? 0.5 : 1);
}

function snippet(text, needed) {
  const low = normal(text), words = needed.flat(2);
  const at = Math.max(0, Math.min(...words.map((word) => low.indexOf(word)).filter((i) => i >= 0).concat(low.length)));
  const begin = at < 60 || at === low.length ? 0 : text.lastIndexOf(" ", at - 40) + 1;
  return (begin ? "… " : "") + text.slice(begin, begin + 160).trim();
}

// Whether a query is the name of a page, not of each of its parts, or of an option with or without dashes and section.
function isNamed(doc, query) {
  const [title, name] = [doc.title, query].map((text) => normal(text).trim().replace(/^_+/, ""));
  return doc.href.includes("#option-") ? title === name || title.endsWith(`.${name}`) : title === name && !doc.section;
}

const prepared = new WeakMap();

function siteSearch(query, docs, limit) {
  const needed = alternatives(query), results = [];
  for (const doc of docs) {
    if (!prepared.has(doc)) prepared.set(doc, prepare(doc));
    const exact = isNamed(doc, query) ? 10 : 1;
    const score = exact * standing(doc) * scoreOf(needed, prepared.get(doc));
    if (score > 0) results.push([score, doc]);
  }
  results.sort((a, b) => b[0] - a[0]);
  const pages = new Map(), first = [], later = []; // at most two entries of a page before other pages
  for (const [, doc] of results) {
    const page = doc.href.split("#")[0], count = pages.get(page) ?? 0;
    pages.set(page, count + 1);
    (count < 2 || isNamed(doc, query) ? first : later).push(doc);
  }
  return [...first, ...later].slice(0, limit).map((doc) => ({ item: { ...doc, text: snippet(doc.text ?? "", needed) } }));
}
