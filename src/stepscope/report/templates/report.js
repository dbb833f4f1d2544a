// Sorting, copying, tooltips and the theme; the page reads well without any of it.
(() => {
  "use strict";
  const root = document.documentElement;
  const tooltip = document.getElementById("tooltip");

  function tip(text, x, y) {
    tooltip.hidden = !text;
    if (!text) return;
    tooltip.textContent = text;
    const { width, height } = tooltip.getBoundingClientRect();
    tooltip.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 6)) + "px";
    tooltip.style.top = (y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18) + "px";
  }

  document.addEventListener("pointermove", (event) => {
    tip(event.target.closest?.("[data-tip]")?.dataset.tip ?? "", event.clientX, event.clientY);
  });

  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const toggle = document.getElementById("theme");
  const named = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };

  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    named();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", named);
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
  });
  named();

  function compare(first, second) {
    const [a, b] = [first.dataset.value, second.dataset.value];
    if (a === undefined) return first.textContent.localeCompare(second.textContent);
    return Number(a) - Number(b);
  }

  function sort(header) {
    const table = header.closest("table");
    const column = header.cellIndex;
    // Numbers are looked at from the largest, names from A.
    const first = header.classList.contains("number") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = header.getAttribute("aria-sort") === first ? other : first;
    table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const isEmpty = (cell) => cell.dataset.value === "";
    const rows = [...table.tBodies[0].rows].sort((x, y) => {
      const [a, b] = [x.cells[column], y.cells[column]];
      return isEmpty(a) - isEmpty(b) || sign * compare(a, b);
    });
    table.tBodies[0].append(...rows);
  }
  document.querySelectorAll("table.sortable th").forEach((header) => {
    header.querySelector("button").addEventListener("click", () => sort(header));
  });

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      // Not allowed here: select it, so that the user's own copy works.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => copy(button)));
})();
