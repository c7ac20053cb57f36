// What the pages need beside htmx: updates that pause, a notice when the server is gone, and the choice of letters.
"use strict";
(() => {
  const live = () => document.getElementById("live");
  const toggle = document.getElementById("updates");
  const lost = document.getElementById("lost");
  let paused = false, answered = new Date();

  if (live() && live().hasAttribute("hx-get")) toggle.hidden = false;
  toggle.addEventListener("click", () => {
    paused = !paused;
    toggle.setAttribute("aria-pressed", String(paused));
    toggle.textContent = paused ? "Updates paused" : "Pause updates";
  });

  // A page that nobody sees asks for nothing.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const update = event.detail.elt.id === "live";
    if (update && (paused || document.hidden)) event.preventDefault();
  });

  // A selection would be lost with the nodes that it is in.
  document.addEventListener("htmx:beforeSwap", (event) => {
    const selection = document.getSelection();
    const chosen = selection && !selection.isCollapsed && live() && live().contains(selection.anchorNode);
    if (event.detail.requestConfig.elt.id === "live" && chosen) event.detail.shouldSwap = false;
  });

  const gone = (isGone) => {
    if (isGone) document.getElementById("lost-at").textContent = answered.toLocaleTimeString();
    else answered = new Date();
    lost.hidden = !isGone;
    document.body.classList.toggle("stale", isGone);
  };
  document.addEventListener("htmx:sendError", () => gone(true));
  document.addEventListener("htmx:timeout", () => gone(true));
  document.addEventListener("htmx:afterOnLoad", () => gone(false));

  const letters = document.getElementById("letters");
  if (letters) {
    const every = document.getElementById("every");
    const boxes = [...letters.querySelectorAll("input[name=chosen]")];
    const count = () => {
      const chosen = boxes.filter((box) => box.checked).length;
      letters.querySelectorAll("[data-of-chosen]").forEach((button) => { button.disabled = !chosen; });
      if (every) {
        every.checked = chosen === boxes.length;
        every.indeterminate = chosen > 0 && chosen < boxes.length;
      }
    };
    if (every) every.addEventListener("change", () => {
      boxes.forEach((box) => { box.checked = every.checked; });
      count();
    });
    letters.addEventListener("change", count);
    count();
  }
})();
