// The four memory rules in plain arithmetic, as evolve.recurrent_* computes them with scale = 1.
// A state S is a list of K rows of V numbers. One token: the rows decay, the key is asked, a difference is
// written. Numbers are doubles throughout; nothing here touches the page.
(function () {
  "use strict";

  const RULES = {
    linear: { name: "Linear attention", delta: false, beta: false, decay: "none" },
    delta: { name: "Delta rule", delta: true, beta: true, decay: "none" },
    gated: { name: "Gated delta rule", delta: true, beta: true, decay: "head" },
    kda: { name: "KDA", delta: true, beta: true, decay: "channel" },
  };

  function zeros(K, V) {
    return Array.from({ length: K }, () => new Array(V).fill(0));
  }

  // Sᵀq: what the memory answers to q.
  function read(S, q) {
    return S[0].map((_, j) => S.reduce((sum, row, i) => sum + row[j] * q[i], 0));
  }

  // One token { k, v, beta, alpha }; alpha is a list with one decay for each row. Returns a new state.
  function step(rule, S, token) {
    const { delta, beta, decay } = RULES[rule];
    const faded = decay === "none" ? S : S.map((row, i) => row.map((x) => x * token.alpha[i]));
    const answer = delta ? read(faded, token.k) : token.v.map(() => 0);
    const strength = beta ? token.beta : 1;
    const write = token.v.map((x, j) => strength * (x - answer[j]));
    return faded.map((row, i) => row.map((x, j) => x + token.k[i] * write[j]));
  }

  // Every state from the empty one to the last: tokens.length + 1 of them.
  function run(rule, tokens, K, V) {
    const states = [zeros(K, V)];
    for (const token of tokens) states.push(step(rule, states[states.length - 1], token));
    return states;
  }

  function norm(x) {
    return Math.hypot(...x);
  }

  // ‖read − value‖ / ‖value‖; for a value of zeros the length of what is read.
  function relativeError(answer, value) {
    const length = norm(value);
    return norm(answer.map((x, j) => x - value[j])) / (length > 0 ? length : 1);
  }

  window.evolveMemory = { RULES, zeros, read, step, run, norm, relativeError };
})();
