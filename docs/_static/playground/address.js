// The state of the playground as the fragment of the page's address, so that a reload or a link shows the same:
// rule=kda&keys=apart&beta=1&alpha=0.9&alphas=1,1,1,0.8,0.8,0.8&tokens=1A;2B;-;1,1,0,0,0,0:0.5,0,0,0,0,0
(function () {
  "use strict";
  const { RULES } = window.evolveMemory;
  const play = window.evolvePlayground;
  const OWN = /^#rule=/; // any other fragment is a heading of the page

  function wordOf(token) {
    if (token === null) return "-";
    if (Array.isArray(token.key)) return `${token.key.join(",")}:${token.value.join(",")}`;
    return `${token.key + 1}${play.LETTERS[token.value]}`;
  }

  function write(model) {
    const { rule, overlap, beta, alpha, alphas, tokens } = model;
    const parts = { rule, keys: overlap, beta, alpha, alphas: alphas.join(","), tokens: tokens.map(wordOf).join(";") };
    return "#" + Object.entries(parts).map((pair) => pair.join("=")).join("&");
  }

  function oneOf(name, text, words) {
    if (!words.includes(text)) throw new Error(`${name} must be one of ${words.join(", ")}, got ${text.slice(0, 20)}`);
    return text;
  }

  function tokenOf(word, t) {
    if (word === "-") return null;
    const pair = /^([1-6])([A-F])$/.exec(word);
    if (pair) return { key: Number(pair[1]) - 1, value: play.LETTERS.indexOf(pair[2]) };
    const [key, value, ...more] = word.split(":");
    if (value === undefined || more.length) throw new Error(`token ${t + 1} must be like 1A, got ${word.slice(0, 20)}`);
    return { key: play.ownKey(key), value: play.ownValue(value) };
  }

  function tokensOf(text) {
    const words = text.split(";").filter((word) => word !== "");
    if (words.length > play.MOST) throw new Error(`tokens must be at most ${play.MOST}, got ${words.length}`);
    return words.map(tokenOf);
  }

  const READERS = {
    rule: (text) => ({ rule: oneOf("rule", text, Object.keys(RULES)) }),
    keys: (text) => ({ overlap: oneOf("keys", text, Object.keys(play.KEYS)) }),
    beta: (text) => ({ beta: play.number("beta", text, 0, 2) }),
    alpha: (text) => ({ alpha: play.number("alpha", text, 0, 1) }),
    alphas: (text) => ({ alphas: play.decays(text) }),
    tokens: (text) => ({ tokens: tokensOf(text) }),
  };

  // The settings and tokens in a fragment, what it leaves out as at the start; null where it holds none.
  // Throws an Error whose message says what is wrong.
  function read(fragment) {
    if (!OWN.test(fragment)) return null;
    let text = fragment.slice(1);
    try {
      text = decodeURIComponent(text); // some programs escape commas and semicolons
    } catch {
      throw new Error("an escape in it is cut off");
    }
    const found = play.create();
    for (const part of text.split("&")) {
      const at = part.indexOf("=");
      const reader = Object.hasOwn(READERS, part.slice(0, at)) ? READERS[part.slice(0, at)] : null;
      if (at > 0 && reader) Object.assign(found, reader(part.slice(at + 1)));
    }
    return found;
  }

  window.evolveAddress = { read, write };
})();
