// The page: clicks, keys and typed numbers change the model; everything is drawn anew after each change.
(function () {
  "use strict";
  const { RULES } = window.evolveMemory;
  const play = window.evolvePlayground;
  const { state, readBack, curves, text, element } = window.evolveDraw;
  const root = document.getElementById("playground");
  const find = (part) => root.querySelector(`[data-part="${part}"]`);
  const address = window.evolveAddress;
  const model = play.create();

  function say(words) {
    find("status").textContent = words;
  }

  // --------------------------------------------------------------------------- what can be taken back

  const past = [];

  // Change some parts of the model by ``act``, so that undo can bring them back. Nothing where it throws.
  function change(words, parts, act) {
    const before = Object.fromEntries(parts.map((part) => [part, structuredClone(model[part])]));
    act();
    past.push({ words, before });
  }

  // The last change; after a reload, which forgets the changes and not the tokens, the last token.
  function undo() {
    const last = past.pop();
    if (!last && !model.tokens.length) return "There is nothing to take back.";
    const words = last ? last.words : `token ${model.tokens.length}`;
    Object.assign(model, last ? last.before : { tokens: model.tokens.slice(0, -1) });
    return `Taken back: ${words}.`;
  }

  // ------------------------------------------------------------------------------- numbers one can type

  // Field and slider of one number. A bad entry is explained beside the field, and the last good one stays.
  function numberField(box, { name, most, get, set }) {
    const [field, slider, alert] = ["input[type=text]", "input[type=range]", "[role=alert]"].map((s) => box.querySelector(s));
    field.addEventListener("input", () => {
      try {
        set(play.number(name, field.value, 0, most));
        clear();
        slider.value = get();
        show();
      } catch (error) {
        field.setAttribute("aria-invalid", "true");
        alert.textContent = `${error.message}. Still in use: ${get()}.`;
      }
    });
    field.addEventListener("change", () => {
      if (!field.hasAttribute("aria-invalid")) return;
      const words = alert.textContent.replace("Still in use", "Back to");
      refresh();
      alert.textContent = words;
    });
    slider.addEventListener("input", () => {
      set(Number(slider.value));
      refresh();
      show();
    });
    function clear() {
      field.removeAttribute("aria-invalid");
      alert.textContent = "";
    }
    function refresh() {
      clear();
      field.value = String(get());
      slider.value = get();
    }
    return refresh;
  }

  function makeNumber(id, label, most, access) {
    const box = element("div", { class: "pg-number" }, [
      element("label", { for: id }, [label]),
      element("input", { type: "text", inputmode: "decimal", autocomplete: "off", id, "aria-describedby": `${id}-alert` }),
      element("input", { type: "range", min: 0, max: most, step: 0.01, "aria-label": `${access.name}, slider` }),
      element("p", { role: "alert", id: `${id}-alert` }),
    ]);
    return [box, numberField(box, { most, ...access })];
  }

  const refreshers = [];
  function place(part, ...made) {
    const [box, refresh] = makeNumber(...made);
    find(part).append(box);
    refreshers.push(refresh);
  }
  place("beta", "pg-beta", "β, write strength", 2, { name: "beta", get: () => model.beta, set: (x) => (model.beta = x) });
  place("alpha", "pg-alpha", "α, decay of the head", 1, { name: "alpha", get: () => model.alpha, set: (x) => (model.alpha = x) });
  for (let c = 0; c < play.K; c++) {
    const access = { name: `alpha of channel ${c + 1}`, get: () => model.alphas[c], set: (x) => (model.alphas[c] = x) };
    place("alphas", `pg-alpha-${c + 1}`, `α${"₁₂₃₄₅₆"[c]}`, 1, access);
  }

  // ------------------------------------------------------------------------------------------ the board

  const board = find("board").tBodies[0];
  for (let k = 0; k < play.K; k++) {
    const row = board.insertRow();
    row.append(element("th", { scope: "row" }, [`key ${k + 1}`]));
    play.LETTERS.forEach((letter, v) => {
      const label = `Write value ${letter} under key ${k + 1}`;
      const button = element("button", { type: "button", "aria-label": label, tabindex: k + v ? -1 : 0 }, [letter]);
      button.addEventListener("click", () => write({ key: k, value: v }, `value ${letter} under key ${k + 1}`));
      row.append(element("td", {}, [button]));
    });
  }

  // Where a key leads from row r and column c; Home and End stay in the row unless Ctrl is held.
  const MOVES = {
    ArrowRight: (r, c) => [r, c + 1],
    ArrowLeft: (r, c) => [r, c - 1],
    ArrowDown: (r, c) => [r + 1, c],
    ArrowUp: (r, c) => [r - 1, c],
    Home: (r, c, far) => [far ? 0 : r, 0],
    End: (r, c, far) => [far ? play.K - 1 : r, play.V - 1],
  };

  // One stop of the tab key; these keys move inside.
  find("board").addEventListener("keydown", (event) => {
    const cell = event.target.closest("td");
    const far = event.ctrlKey || event.metaKey;
    if (!Object.hasOwn(MOVES, event.key) || !cell || event.altKey || (far && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    const [r, c] = MOVES[event.key](cell.parentElement.sectionRowIndex, cell.cellIndex - 1, far);
    for (const other of board.querySelectorAll("button")) other.tabIndex = -1;
    const next = board.rows[(r + play.K) % play.K].cells[((c + play.V) % play.V) + 1].firstChild;
    next.tabIndex = 0;
    next.focus();
  });

  function write(token, words) {
    try {
      change(words, ["tokens"], () => play.add(model, token));
      const { now, error } = show();
      say(`Token ${now}: ${words}. Mean read-back error ${text(error)}.`);
    } catch (error) {
      say(`Nothing was written: ${error.message}.`);
    }
  }

  // ---------------------------------------------------------------------------------------- the buttons

  function refreshAll() {
    for (const refresh of refreshers) refresh();
    for (const radio of root.querySelectorAll("input[type=radio]")) radio.checked = model[radio.name.slice(3)] === radio.value;
  }

  root.addEventListener("change", (event) => {
    if (event.target.type !== "radio") return;
    model[event.target.name.slice(3)] = event.target.value;
    const { error } = show();
    say(`${RULES[model.rule].name}: mean read-back error ${text(error)}.`);
  });

  find("pass").addEventListener("click", () => write(null, "nothing is written, only time passes"));
  find("undo").addEventListener("click", () => {
    const words = undo();
    refreshAll();
    show();
    say(words);
  });
  find("clear").addEventListener("click", () => {
    if (!model.tokens.length) return say("The memory is empty already.");
    change("clear", ["tokens"], () => (model.tokens = []));
    show();
    say("The memory is empty; rule and numbers are as they were. Undo brings the tokens back.");
  });
  for (const button of root.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => {
      change("the example", Object.keys(model), () => play.load(model, button.dataset.example));
      refreshAll();
      const { now, error } = show();
      say(`Example: ${button.textContent}. ${now} tokens, mean read-back error ${text(error)}.`);
    });
  }
  for (const button of root.querySelectorAll("[data-decays]")) {
    button.addEventListener("click", () => {
      change("the decays", ["alphas"], () => (model.alphas = JSON.parse(button.dataset.decays)));
      refreshAll();
      show();
      say(`Decays: ${model.alphas.join(", ")}.`);
    });
  }

  // ------------------------------------------------------------------------------- a pair of one's own

  // What a field holds; where it cannot be read the field is marked and the trouble noted.
  function typed(part, read, trouble) {
    const field = find(part);
    field.removeAttribute("aria-invalid");
    try {
      return read(field.value);
    } catch (error) {
      field.setAttribute("aria-invalid", "true");
      trouble.push(error.message);
    }
  }

  find("own").addEventListener("submit", (event) => {
    event.preventDefault();
    const trouble = [];
    const token = { key: typed("own-key", play.ownKey, trouble), value: typed("own-value", play.ownValue, trouble) };
    find("own-alert").textContent = trouble.length ? `${trouble.join("; ")}. Nothing was written.` : "";
    if (trouble.length) find("own").querySelector("[aria-invalid]").focus();
    else write(token, "a pair of your own");
  });
  find("own").addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));

  // ------------------------------------------------------------------------------------------- drawing

  function show() {
    const shown = play.evaluate(model);
    const rule = RULES[model.rule];
    find("beta").hidden = !rule.beta;
    find("alpha").hidden = rule.decay !== "head";
    find("channels").hidden = rule.decay !== "channel";
    find("full").hidden = rule.beta;
    for (const name of Object.keys(RULES)) {
      find(`error-${name}`).textContent = model.tokens.some(Boolean) ? text(play.evaluate(model, name).error) : "–";
    }
    for (const button of board.querySelectorAll("button")) button.classList.remove("latest");
    for (const { token } of shown.entries) {
      if (!Array.isArray(token.key)) board.rows[token.key].cells[token.value + 1].firstChild.classList.add("latest");
    }
    state(find("state"), shown.S);
    readBack(find("read").tBodies[0], shown.entries, play.LETTERS);
    curves(find("curves"), shown, play.AHEAD);
    find("count").textContent = `${shown.now} ${shown.now === 1 ? "token" : "tokens"}, still ${play.K * play.V} numbers`;
    find("means").textContent = shown.entries.length
      ? `mean error now ${text(shown.error)}, after ${play.AHEAD} more tokens without a write ${text(shown.later)}`
      : "";
    keep();
    return shown;
  }

  // ------------------------------------------------------------------------------------- the address

  let waiting = 0;
  let kept = null; // the fragment of what was last shown; none before the first change

  // Browsers refuse many changes of the address in a second, as a slider would make them: the last one counts.
  function keep() {
    const fragment = address.write(model);
    if (kept !== null && fragment !== kept) {
      window.clearTimeout(waiting);
      waiting = window.setTimeout(() => window.history.replaceState(null, "", fragment), 150);
    }
    kept = fragment;
  }

  // Show what the address holds, if it does.
  function open() {
    try {
      const found = address.read(window.location.hash);
      if (found) Object.assign(model, found);
    } catch (error) {
      say(`The address holds no state that can be read: ${error.message}.`);
    }
    refreshAll();
    show();
  }

  window.addEventListener("hashchange", () => {
    kept = null;
    const before = Object.fromEntries(Object.entries(model).map(([part, x]) => [part, structuredClone(x)]));
    open();
    if (address.write(before) !== kept) past.push({ words: "the state of the address", before });
  });
  // Cells and lines are painted anew in the colours of the other scheme.
  new MutationObserver(show).observe(document.documentElement, { attributeFilter: ["data-theme"] });

  root.hidden = false; // before anything is drawn: labels are spaced by the width that they have
  play.load(model, "crowd");
  open();
  window.evolvePlayground.model = model; // for tests, and for the curious in the console
})();
