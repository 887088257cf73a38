// Boxes that scroll sideways (formulas, tables, outputs) can be reached and scrolled with the keyboard.
(function () {
  "use strict";
  const boxes = [
    ["div.math", "Formula"],
    [".pst-scrollable-table-container", "Table"],
    [".cell_output .output pre, .cell_output pre", "Output"],
    ["div.highlight pre", "Code"],
  ];

  function mark() {
    for (const [selector, name] of boxes) {
      for (const box of document.querySelectorAll(selector)) {
        if (box.scrollWidth > box.clientWidth + 1) {
          box.tabIndex = 0;
          if (!box.hasAttribute("role")) {
            box.setAttribute("role", "group");
            box.setAttribute("aria-label", name + ", scrolls sideways");
          }
        }
      }
    }
  }

  let waiting = 0;
  function later() {
    window.clearTimeout(waiting);
    waiting = window.setTimeout(mark, 100);
  }
  window.addEventListener("load", mark);
  window.addEventListener("resize", later);
  document.addEventListener("toggle", later, true); // a folded cell was opened
})();
