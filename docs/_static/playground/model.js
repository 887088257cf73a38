// What the playground knows: settings, the tokens written so far, and what follows from the two.
// All states are computed anew from the tokens, so a changed setting shows what the same text leaves behind.
(function () {
  "use strict";
  const { RULES, read, relativeError, run, norm } = window.evolveMemory;

  const K = 6;
  const V = 6;
  const AHEAD = 20; // tokens without a write, to see what fades
  const MOST = 200; // tokens
  const LETTERS = ["A", "B", "C", "D", "E", "F"];
  const SIGNS = ["+++---", "+-+-+-", "++--++", "-+++-+", "--+++-", "-++-+-"];
  const VALUES = SIGNS.map((signs) => [...signs].map((s) => (s + "1") / Math.sqrt(V)));

  // Six unit keys; every two of them have the inner product `overlap`.
  function keys(overlap) {
    const own = Math.sqrt(1 - overlap);
    const shared = (Math.sqrt(own * own + K * overlap) - own) / K;
    return Array.from({ length: K }, (_, i) =>
      Array.from({ length: K }, (_, c) => shared + (c === i ? own : 0)),
    );
  }
  const KEYS = { apart: keys(0), overlapping: keys(0.5) };

  // --------------------------------------------------------------------------- reading what was typed

  // A number from `least` to `most`; throws an Error whose message says what is wrong.
  function number(name, text, least, most) {
    const trimmed = String(text).trim();
    const rule = `${name} must be a number from ${least} to ${most}`;
    if (trimmed === "") throw new Error(`${rule}, the field is empty`);
    const shown = trimmed.length > 20 ? trimmed.slice(0, 20) + "…" : trimmed;
    const plain = trimmed.replace(",", ".").replace("\u2212", "-"); // the minus sign that pages are set with
    const value = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(plain) ? Number(plain) : NaN;
    if (!Number.isFinite(value) || value < least || value > most) throw new Error(`${rule}, got ${shown}`);
    return value;
  }

  // `count` numbers between spaces, commas or semicolons.
  function vector(name, text, count, most) {
    const parts = String(text).split(/[\s,;]+/).filter((part) => part !== "");
    if (parts.length !== count) throw new Error(`${name} must be ${count} numbers, got ${parts.length}`);
    return parts.map((part, i) => number(`number ${i + 1} of the ${name}`, part, -most, most));
  }

  // A key of one's own as it was typed; where it is used it is scaled to length 1, as the layers of the series do.
  function ownKey(text) {
    const key = vector("key", text, K, 100);
    if (norm(key) === 0) throw new Error("the key must have a number that is not 0");
    return key;
  }

  function ownValue(text) {
    return vector("value", text, V, 100);
  }

  function decays(text) {
    return vector("decays", text, K, 1).map((x, i) => number(`number ${i + 1} of the decays`, x, 0, 1));
  }

  // --------------------------------------------------------------------------------------- the model

  const SETTINGS = { rule: "delta", overlap: "apart", beta: 1, alpha: 0.9, alphas: [1, 1, 1, 0.8, 0.8, 0.8] };

  function create() {
    return { ...SETTINGS, alphas: [...SETTINGS.alphas], tokens: [] };
  }

  // A write is { key: 0 … 5 | [K numbers], value: 0 … 5 | [V numbers] }; null lets a token pass.
  function add(model, token) {
    if (model.tokens.length >= MOST) throw new Error(`at most ${MOST} tokens: undo some, or clear`);
    model.tokens.push(token);
  }

  function keyOf(model, token) {
    if (!Array.isArray(token.key)) return KEYS[model.overlap][token.key];
    const length = norm(token.key);
    return token.key.map((x) => x / length);
  }

  function valueOf(token) {
    return Array.isArray(token.value) ? token.value : VALUES[token.value];
  }

  function decaysOf(model, rule) {
    if (RULES[rule].decay === "channel") return model.alphas;
    return new Array(K).fill(RULES[rule].decay === "head" ? model.alpha : 1);
  }

  // The token as the arithmetic takes it. One that passes has a key and a value of zeros: it only decays.
  function arithmetic(model, rule, token) {
    const alpha = decaysOf(model, rule);
    if (token === null) return { k: new Array(K).fill(0), v: new Array(V).fill(0), beta: 0, alpha };
    return { k: keyOf(model, token), v: valueOf(token), beta: model.beta, alpha };
  }

  function same(one, other) {
    return one.every((x, i) => Math.abs(x - other[i]) < 1e-9);
  }

  // Each different key that was written, in order: its writes and latest token, and a name and a place among the
  // colours of its own. A key that was typed and equals one of the board is that one.
  function written(model) {
    const found = [];
    model.tokens.forEach((token, t) => {
      if (token === null) return;
      const key = keyOf(model, token);
      let entry = found.find((other) => same(other.key, key));
      if (!entry) found.push((entry = { key, since: t + 1, writes: new Map() }));
      if (!Array.isArray(token.key)) Object.assign(entry, { name: `key ${token.key + 1}`, place: token.key });
      entry.writes.set(t + 1, token);
      entry.token = token;
    });
    found.filter((entry) => !entry.name).forEach((entry, i) => Object.assign(entry, { name: `own ${i + 1}`, place: K + i }));
    return found;
  }

  function mean(numbers) {
    return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : 0;
  }

  // The error of every key at every token from its first write on, against its value at that time.
  function curves(model, states) {
    return written(model).map((entry) => {
      const points = [];
      let value = null;
      for (let t = entry.since; t < states.length; t++) {
        if (entry.writes.has(t)) value = valueOf(entry.writes.get(t));
        points.push([t, relativeError(read(states[t], entry.key), value)]);
      }
      return { ...entry, points };
    });
  }

  // Everything that the page shows, for one rule (the chosen one unless given).
  function evaluate(model, rule = model.rule) {
    const now = model.tokens.length;
    const passing = new Array(AHEAD).fill(null);
    const tokens = [...model.tokens, ...passing].map((token) => arithmetic(model, rule, token));
    const states = run(rule, tokens, K, V);
    const S = states[now];
    const entries = curves(model, states).map((curve) => ({
      ...curve,
      value: valueOf(curve.token),
      answer: read(S, curve.key),
      error: curve.points[now - curve.since][1],
      later: curve.points[curve.points.length - 1][1],
    }));
    return { now, S, entries, error: mean(entries.map((e) => e.error)), later: mean(entries.map((e) => e.later)) };
  }

  const EXAMPLES = {
    twice: { settings: { rule: "delta", overlap: "apart", beta: 1 }, pairs: ["1A", "2B", "3C", "1D"] },
    crowd: { settings: { rule: "delta", overlap: "overlapping", beta: 1 }, pairs: ["1A", "2B", "3C", "4D", "5E", "6F"] },
    scratch: {
      settings: { rule: "kda", overlap: "apart", beta: 1, alpha: 0.8, alphas: [1, 1, 1, 0.5, 0.5, 0.5] },
      pairs: ["1A", "2B", "3C", "4D", "5E", "6F", null, null],
    },
  };

  function load(model, name) {
    const { settings, pairs } = EXAMPLES[name];
    Object.assign(model, structuredClone(settings));
    model.tokens = pairs.map((p) => p && { key: Number(p[0]) - 1, value: LETTERS.indexOf(p[1]) });
  }

  window.evolvePlayground = {
    K, V, KEYS, VALUES, LETTERS, AHEAD, MOST, number, ownKey, ownValue, decays, create, add, load, evaluate, arithmetic,
  };
})();
