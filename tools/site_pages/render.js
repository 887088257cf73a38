// node render.js KATEX: reads [[latex, display], ...] from stdin, writes [{html} or {error}, ...] to stdout.
"use strict";
const katex = require(process.argv[2]);
const formulas = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const rendered = formulas.map(([latex, displayMode]) => {
  try {
    return { html: katex.renderToString(latex, { displayMode, throwOnError: true, strict: "ignore" }) };
  } catch (error) {
    return { error: error.message };
  }
});
process.stdout.write(JSON.stringify(rendered));
