// One script for every player on the page. It asks for nothing from outside and uses no ids, so that any number
// of players, and the same one twice, live side by side.
(() => {
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const icon = (path, name = "") =>
    `<svg class="${name}" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d="${path}"/></svg>`;
  // Made here and not in the page: where scripts do not run, no dead buttons are shown.
  const CONTROLS = `
    <button type="button" data-part="back" aria-label="Previous frame">${icon("M19 5v14L9 12zM5 5h3v14H5z")}</button>
    <button type="button" data-part="toggle" aria-label="Play">
      ${icon("M7 4v16l13-8z", "play")}${icon("M6 4h4v16H6zM14 4h4v16h-4z", "pause")}
    </button>
    <button type="button" data-part="forward" aria-label="Next frame">${icon("M5 5v14l10-7zM16 5h3v14h-3z")}</button>
    <input type="range" data-part="slider" min="0" step="1" aria-label="Frame">
    <select data-part="speed" aria-label="Speed">
      <option value="0.5">½×</option><option value="1" selected>1×</option>
      <option value="2">2×</option><option value="4">4×</option>
    </select>`;

  function start(root) {
    root.dataset.ready = "true";
    const { frames, captions, poster, interval, loop, autoplay } = JSON.parse(
      root.querySelector('script[type="application/json"]').textContent,
    );
    const bar = document.createElement("div");
    bar.className = "evolve-player-bar";
    bar.innerHTML = CONTROLS;
    root.querySelector("img").after(bar);
    const find = (part) => root.querySelector(`[data-part="${part}"]`);
    const [toggle, slider, speed] = ["toggle", "slider", "speed"].map(find);
    const [picture, caption] = [root.querySelector("img"), root.querySelector("p")];
    const last = frames.length - 1;
    let at = poster;
    let timer = null;

    function show(index) {
      at = Math.max(0, Math.min(last, index));
      picture.src = frames[at];
      slider.value = at;
      const place = `${at + 1} of ${frames.length}`;
      slider.setAttribute("aria-valuetext", captions[at] ? `${place}: ${captions[at]}` : place);
      caption.textContent = captions[at] ? `${place} · ${captions[at]}` : place;
    }

    function pause() {
      clearTimeout(timer);
      timer = null;
      root.classList.remove("playing");
      caption.setAttribute("aria-live", "polite");
      toggle.setAttribute("aria-label", "Play");
    }

    function tick() {
      if (!root.isConnected) return pause();
      if (at < last || loop) show(at < last ? at + 1 : 0);
      if (at === last && !loop) return pause();
      timer = setTimeout(tick, interval / Number(speed.value));
    }

    function play() {
      if (at === last) show(0);
      root.classList.add("playing");
      caption.setAttribute("aria-live", "off"); // or a screen reader would read every frame
      toggle.setAttribute("aria-label", "Pause");
      timer = setTimeout(tick, interval / Number(speed.value));
    }

    const flip = () => (timer === null ? play() : pause());
    const go = (index) => (pause(), show(index));

    toggle.addEventListener("click", flip);
    find("back").addEventListener("click", () => go(at - 1));
    find("forward").addEventListener("click", () => go(at + 1));
    slider.addEventListener("input", () => go(Number(slider.value)));
    picture.addEventListener("click", () => (slider.focus(), flip()));

    const keys = {
      " ": flip,
      ArrowLeft: () => go(at - 1),
      ArrowRight: () => go(at + 1),
      Home: () => go(0),
      End: () => go(last),
    };
    root.addEventListener("keydown", (event) => {
      const { key, target } = event;
      if (!keys[key] || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      if (target === speed || (key === " " && target.tagName === "BUTTON")) return; // their own keys
      event.preventDefault();
      event.stopPropagation();
      keys[key]();
    });

    slider.max = last;
    show(at);
    if (autoplay && !calm.matches) play();
    calm.addEventListener("change", () => calm.matches && pause());
  }

  document.querySelectorAll(".evolve-player:not([data-ready])").forEach(start);
})();
