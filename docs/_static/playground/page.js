// The page: clicks, keys and typed numbers change the model; everything is drawn anew after each change.
(function () {
  "use strict";
  const { RULES } = window.evolveMemory;
  const play = window.evolvePlayground;
  const { state, readBack, curves, text, element } = window.evolveDraw;
  const root = document.getElementById("playground");
  const find = (part) => root.querySelector(`[data-part="${part}"]`);
  const model = play.create();

  function say(words) {
    find("status").textContent = words;
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

  // One stop of the tab key; the arrow keys move inside.
  find("board").addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const cell = event.target.closest("td");
    if (!step || !cell || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const row = board.rows[(cell.parentElement.sectionRowIndex + step[0] + play.K) % play.K];
    const column = ((cell.cellIndex - 1 + step[1] + play.V) % play.V) + 1;
    for (const other of board.querySelectorAll("button")) other.tabIndex = -1;
    const next = row.cells[column].firstChild;
    next.tabIndex = 0;
    next.focus();
  });

  function write(token, words) {
    try {
      play.add(model, token);
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
    const had = model.tokens.length;
    model.tokens.pop();
    show();
    say(had ? `Token ${had} is taken back.` : "There is nothing to take back.");
  });
  find("clear").addEventListener("click", () => {
    model.tokens = [];
    show();
    say("The memory is empty; rule and numbers are as they were.");
  });
  for (const button of root.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => {
      play.load(model, button.dataset.example);
      refreshAll();
      const { now, error } = show();
      say(`Example: ${button.textContent}. ${now} tokens, mean read-back error ${text(error)}.`);
    });
  }
  for (const button of root.querySelectorAll("[data-decays]")) {
    button.addEventListener("click", () => {
      model.alphas = JSON.parse(button.dataset.decays);
      refreshAll();
      show();
      say(`Decays: ${model.alphas.join(", ")}.`);
    });
  }
  find("own").addEventListener("submit", (event) => {
    event.preventDefault();
    const alert = find("own-alert");
    alert.textContent = "";
    try {
      const token = play.ownPair(find("own-key").value, find("own-value").value);
      write(token, "a pair of your own");
    } catch (error) {
      alert.textContent = `${error.message}. Nothing was written.`;
    }
  });

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
    return shown;
  }

  root.hidden = false; // before anything is drawn: labels are spaced by the width that they have
  play.load(model, "crowd");
  refreshAll();
  show();
  window.evolvePlayground.model = model; // for tests, and for the curious in the console
})();
