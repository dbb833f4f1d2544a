// Choosing a trial of a sweep's plot with the arrow keys; what the pointer is at is told by the page's own listener.
(() => {
  "use strict";
  document.querySelectorAll(".parallel").forEach((plot) => {
    // Drawn from the worst to the best, so that the best is on top; chosen from the best on.
    const lines = [...plot.querySelectorAll("g")].reverse();
    const output = plot.querySelector("output");
    let place = -1;

    function choose(next) {
      lines[place]?.classList.remove("chosen");
      place = next;
      lines[place]?.classList.add("chosen");
      plot.classList.toggle("choosing", place >= 0);
      output.textContent = place < 0 ? "" : lines[place].dataset.tip.replaceAll("\n", ", ");
    }

    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1, Home: 0, End: lines.length - 1 };
      if (event.key === "Escape") { choose(-1); return; }
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(Math.min(Math.max(moves[event.key], 0), lines.length - 1));
    });
    plot.addEventListener("blur", () => choose(-1));
  });
})();
