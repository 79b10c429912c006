// The search behind Quarto's box. It takes the place of the fuzzy finder that Quarto brings, has the same two
// methods, and ranks sections by whole words and beginnings of words, rare ones first.
"use strict";
(function (home) {
  const words = (text) => text.toLowerCase().normalize("NFKD").match(/[\p{L}\p{N}_]+/gu) ?? [];
  const split = (text) => words(text).flatMap((word) => [word, ...(word.includes("_") ? word.split("_").filter(Boolean) : [])]);
  const stem = (word) => word.replace(/(?<=\w{3})(ing|ed|es|s|e)$/, "");
  const SMALL = new Set("a an and are do does for from how i in is it my of on or the to with what".split(" "));
  const FIELDS = [["title", 8], ["section", 6], ["text", 1]];

  class Find {
    constructor() { this.items = []; this.seen = new Map(); }

    add(item) {
      const found = new Map();
      for (const [field, weight] of FIELDS) {
        const list = split(item[field] ?? "").map(stem), counts = new Map();
        for (const word of list) counts.set(word, (counts.get(word) ?? 0) + 1);
        for (const [word, count] of counts) {
          const spread = field === "text" ? 1 + list.length / 150 : 1 + list.length / 12;
          found.set(word, (found.get(word) ?? 0) + (weight * count) / (count + spread));
        }
      }
      for (const word of found.keys()) this.seen.set(word, (this.seen.get(word) ?? 0) + 1);
      this.items.push({ item, found, said: ` ${FIELDS.flatMap(([field]) => words(item[field] ?? "")).join(" ")} ` });
    }

    search(query, options = {}) {
      const all = words(query), asked = all.filter((word) => !SMALL.has(word)).map(stem);
      if (!asked.length) return [];
      const rare = (word) => Math.log(1 + this.items.length / (1 + (this.seen.get(word) ?? 0)));
      const known = asked.map((begin) => {
        const like = [...this.seen.keys()].filter((word) => word !== begin && begin.length > 2 && word.startsWith(begin));
        return this.seen.has(begin) ? [[begin, 1], ...like.map((word) => [word, 0.3])] : like.map((word) => [word, 0.7]);
      });
      const results = [], phrase = ` ${all.join(" ")} `;
      for (const { item, found, said } of this.items) {
        let score = 0, hits = 0;
        known.forEach((list, number) => {
          let best = 0;
          for (const [word, share] of list) {
            if (found.has(word)) best = Math.max(best, share * found.get(word) * rare(asked[number] in found ? asked[number] : word));
          }
          score += best;
          hits += best > 0;
        });
        if (!hits) continue;
        score *= (hits / known.length) ** 2;
        if (asked.length > 1 && said.includes(phrase)) score *= 2; // in the very words
        if (item.href.startsWith("guides/")) score *= 1.4; // a recipe first
        if (item.href.startsWith("changelog")) score *= 0.3;
        results.push({ item, score });
      }
      return results.sort((a, b) => b.score - a.score).slice(0, options.limit ?? 50);
    }
  }
  home.Fuse = Find;
})(typeof window === "undefined" ? globalThis : window);
