// Drawing: coloured cells, the table of what is read back, the forgetting curves. Reads the model, never
// changes it. Colours come with the page, from the palette of the series.
(function () {
  "use strict";
  const palettes = JSON.parse(document.getElementById("playground-palette").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function palette() {
    return palettes[document.documentElement.dataset.theme === "dark" ? "dark" : "light"];
  }

  function lineColour(entry) {
    const { lines } = palette();
    return lines[entry.place % lines.length];
  }

  function text(x) {
    const rounded = Math.abs(x) < 0.005 ? 0 : x;
    return (Math.abs(x) >= 1000 ? x.toExponential(1) : rounded.toFixed(2)).replace("-", "−");
  }

  // The colour of a signed number; full colour at ±1.
  function colour(x) {
    const { diverging } = palette();
    const last = diverging.length - 1;
    return diverging[Math.round(((Math.max(-1, Math.min(1, x)) + 1) / 2) * last)];
  }

  // Relative luminance of "#rrggbb" (WCAG 2.2).
  function luminance(hex) {
    const [r, g, b] = [1, 3, 5].map((i) => {
      const c = parseInt(hex.slice(i, i + 2), 16) / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  // Black where it reads at 4.5 : 1, else white; one of the two always does.
  function paint(cell, x) {
    const ground = colour(x);
    cell.style.backgroundColor = ground;
    cell.style.color = (luminance(ground) + 0.05) / 0.05 >= 4.5 ? "#000000" : "#ffffff";
  }

  function element(name, attributes = {}, children = []) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // The state as a table of numbers; built once, repainted after.
  function state(table, S) {
    const body = table.tBodies[0];
    if (!body.rows.length) {
      S.forEach((row, i) => {
        const tr = body.insertRow();
        tr.append(element("th", { scope: "row" }, [String(i + 1)]));
        row.forEach(() => tr.append(element("td")));
      });
    }
    S.forEach((row, i) =>
      row.forEach((x, j) => {
        const cell = body.rows[i].cells[j + 1];
        cell.textContent = text(x);
        cell.dataset.value = x;
        paint(cell, x);
      }),
    );
  }

  function strip(numbers, words) {
    const cells = numbers.map((x) => {
      const cell = element("span", { class: "pg-swatch" });
      cell.style.backgroundColor = colour(x);
      return cell;
    });
    return element("span", { class: "pg-strip", role: "img", "aria-label": words }, cells);
  }

  function listed(numbers) {
    return numbers.map(text).join(", ");
  }

  // One row for each key that was written: its value, what is read, the error.
  function readBack(body, entries, letters) {
    body.replaceChildren();
    if (!entries.length) {
      const row = body.insertRow();
      row.append(element("td", { colspan: 4 }, ["Nothing is written yet: click a pair above."]));
    }
    entries.forEach((entry) => {
      const own = Array.isArray(entry.token.value);
      const letter = own ? "own" : letters[entry.token.value];
      const bar = element("span", { class: "pg-bar", "aria-hidden": "true" });
      bar.style.width = `${Math.min(100, entry.error * 50)}%`;
      bar.style.backgroundColor = lineColour(entry);
      const row = body.insertRow();
      row.append(
        element("th", { scope: "row" }, [entry.name]),
        element("td", {}, [element("b", {}, [letter + " "]), strip(entry.value, `value: ${listed(entry.value)}`)]),
        element("td", {}, [strip(entry.answer, `read: ${listed(entry.answer)}`)]),
        element("td", { "data-error": entry.error }, [text(entry.error), bar]),
      );
    });
  }

  // ------------------------------------------------------------------------------------- the curves

  const BOX = { left: 44, right: 592, top: 14, bottom: 214 };
  const TOP = 1.5; // relative error at the upper edge

  function draw(svg, name, attributes, content) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (content !== undefined) made.textContent = content;
    svg.append(made);
    return made;
  }

  function axes(svg, x, y, last, now) {
    for (const e of [0, 0.5, 1, 1.5]) {
      draw(svg, "line", { x1: BOX.left, x2: BOX.right, y1: y(e), y2: y(e), class: "pg-grid" });
      draw(svg, "text", { x: BOX.left - 8, y: y(e) + 4, "text-anchor": "end" }, String(e));
    }
    for (let t = 0; t <= last; t += last > 60 ? 20 : 5) {
      draw(svg, "text", { x: x(t), y: BOX.bottom + 18, "text-anchor": "middle" }, String(t));
    }
    draw(svg, "line", { x1: x(now), x2: x(now), y1: BOX.top, y2: BOX.bottom, class: "pg-now" });
    draw(svg, "text", { x: x(now) + 5, y: BOX.top + 9 }, "now");
    draw(svg, "text", { x: BOX.right, y: BOX.bottom + 36, "text-anchor": "end" }, "token");
  }

  function path(points, x, y) {
    return points.map(([t, e], i) => `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(Math.min(e, TOP)).toFixed(1)}`).join("");
  }

  // Labels at the right end, pushed apart where they would overlap.
  function labels(svg, ends) {
    let lowest = BOX.top - 10;
    const sorted = [...ends].sort((a, b) => a.y - b.y);
    const room = Math.min(svg.clientWidth && svg.clientWidth < 450 ? 23 : 14, (BOX.bottom - BOX.top + 14) / Math.max(1, sorted.length));
    for (const end of sorted) {
      lowest = Math.max(lowest + room, Math.min(end.y, BOX.bottom - room * (sorted.length - 1 - sorted.indexOf(end))));
      draw(svg, "text", { x: BOX.right + 6, y: lowest + 4, fill: end.colour, class: "pg-label" }, end.name);
    }
  }

  function curves(svg, shown, ahead) {
    const last = shown.now + ahead;
    const x = (t) => BOX.left + ((BOX.right - BOX.left) * t) / last;
    const y = (e) => BOX.bottom - ((BOX.bottom - BOX.top) * e) / TOP;
    svg.replaceChildren();
    axes(svg, x, y, last, shown.now);
    const ends = shown.entries.map((entry) => {
      const stroke = lineColour(entry);
      const past = entry.points.filter(([t]) => t <= shown.now);
      const coming = entry.points.filter(([t]) => t >= shown.now);
      draw(svg, "path", { d: path(past, x, y), stroke, class: "pg-line" });
      draw(svg, "path", { d: path(coming, x, y), stroke, class: "pg-line pg-coming" });
      if (past.length === 1) draw(svg, "circle", { cx: x(past[0][0]), cy: y(Math.min(past[0][1], TOP)), r: 3.5, fill: stroke });
      return { name: entry.name, colour: stroke, y: y(Math.min(entry.later, TOP)) };
    });
    labels(svg, ends);
    const said = shown.entries.map((e) => `${e.name} ${text(e.error)}, later ${text(e.later)}`).join("; ");
    svg.setAttribute(
      "aria-label",
      `Relative read-back error of each key over the tokens, and over ${ahead} more without a write. ` +
        (said ? `Now: ${said}.` : "Nothing is written yet."),
    );
  }

  window.evolveDraw = { state, readBack, curves, text, element };
})();
