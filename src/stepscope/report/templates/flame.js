// A flame graph, its widest frames at the top: a button for each frame, so that a keyboard and a screen reader find them.
const FLAME_ROW = 20, FLAME_LEAST = 0.0008, FLAME_KINDS = ["line", "phase", "operator", "other"];

class FlameGraph {
  constructor(element, data) {
    Object.assign(this, { data, box: element.querySelector(".frames"), output: element.querySelector("output") });
    this.search = element.querySelector("input");
    this.above = data.frames.map(() => []);
    this.roots = [];
    data.frames.forEach(([, parent], index) => (parent < 0 ? this.roots : this.above[parent]).push(index));
    this.focus = -1;
    this.place();
    this.draw();
    element.querySelector("[data-do=out]").addEventListener("click", () => this.out());
    element.querySelector("[data-do=whole]").addEventListener("click", () => this.zoom(-1));
    this.search.addEventListener("input", () => this.draw());
    this.box.addEventListener("click", ({ target }) => { if (target.dataset.frame) this.zoom(Number(target.dataset.frame)); });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  // Every frame's left edge in nanoseconds, and its row. Frames come after the ones below them.
  place() {
    const { frames } = this.data;
    this.left = new Array(frames.length).fill(0);
    this.row = new Array(frames.length).fill(0);
    const lay = (indices, from) => indices.forEach((index) => { this.left[index] = from; from += frames[index][2]; });
    lay(this.roots, 0);
    frames.forEach(([, parent], index) => {
      if (parent >= 0) this.row[index] = this.row[parent] + 1;
      lay(this.above[index], this.left[index]);
    });
  }

  name(index) { return this.data.names[this.data.frames[index][0]]; }

  // The frames to show for the one that is zoomed to: those below it, at full width, and those above it.
  draw() {
    const { frames, kinds, total } = this.data;
    const word = this.search.value.trim().toLowerCase();
    const [from, whole] = this.focus < 0 ? [0, total] : [this.left[this.focus], frames[this.focus][2]];
    const below = new Set();
    for (let index = this.focus; index >= 0; index = frames[index][1]) below.add(index);
    let deepest = 0, matched = 0;
    const found = new Set();
    frames.forEach(([, parent, ns], index) => {
      if (!word || !this.name(index).toLowerCase().includes(word)) return;
      found.add(index);
      let covered = false;
      for (let under = parent; under >= 0 && !covered; under = frames[under][1]) covered = found.has(under);
      if (!covered) matched += ns;
    });
    this.shown = [];
    const buttons = frames.flatMap(([name, , ns], index) => {
      const inside = this.left[index] >= from && this.left[index] + ns <= from + whole && this.row[index] >= (this.focus < 0 ? 0 : this.row[this.focus]);
      const width = below.has(index) ? 1 : inside ? ns / Math.max(whole, 1) : 0;
      if (width < FLAME_LEAST) return [];
      const button = document.createElement("button");
      const left = below.has(index) ? 0 : (this.left[index] - from) / Math.max(whole, 1);
      const label = `${this.name(index)}: ${flameTime(ns)}, ${(100 * ns / Math.max(total, 1)).toFixed(1)} %`;
      button.type = "button";
      button.dataset.frame = index;
      button.dataset.tip = label;
      button.setAttribute("aria-label", label);
      button.tabIndex = -1;
      button.textContent = this.data.names[name].replace(/^.*\/(?=[^/]+\/[^/]+:\d+ )/, "…/");
      button.className = `flame-${FLAME_KINDS[kinds[name]]}${found.has(index) ? " found" : ""}${below.has(index) && index !== this.focus ? " around" : ""}`;
      Object.assign(button.style, { left: `${100 * left}%`, width: `${100 * width}%`, top: `${this.row[index] * FLAME_ROW}px` });
      deepest = Math.max(deepest, this.row[index]);
      this.shown.push(index);
      return [button];
    });
    this.box.replaceChildren(...buttons);
    this.box.style.height = `${(deepest + 1) * FLAME_ROW + 2}px`;
    this.box.classList.toggle("searching", Boolean(word));
    const first = this.button(this.focus) ?? buttons[0];
    if (first) first.tabIndex = 0;
    this.output.textContent = word ? `${found.size} frames found, ${(100 * matched / Math.max(total, 1)).toFixed(1)} % of the time`
      : this.focus >= 0 ? this.button(this.focus).dataset.tip : "";
  }

  button(index) { return this.box.querySelector(`[data-frame="${index}"]`); }

  zoom(index) {
    const before = this.focus;
    const had = this.box.contains(document.activeElement);
    this.focus = index;
    this.draw();
    if (had) (this.button(index) ?? this.button(before) ?? this.box.firstElementChild)?.focus();
  }

  out() { if (this.focus >= 0) this.zoom(this.data.frames[this.focus][1]); }

  key(event) {
    const index = Number(event.target.dataset.frame);
    const parent = this.data.frames[index]?.[1];
    const beside = this.shown.filter((each) => this.row[each] === this.row[index]).sort((a, b) => this.left[a] - this.left[b]);
    const next = {
      ArrowUp: parent, ArrowDown: this.above[index]?.find((each) => this.shown.includes(each)),
      ArrowLeft: beside[beside.indexOf(index) - 1], ArrowRight: beside[beside.indexOf(index) + 1],
    };
    if (event.key === "Escape") this.out();
    else if (!(event.key in next)) return;
    else this.move(event.target, next[event.key]);
    event.preventDefault();
  }

  move(from, index) {
    const to = index === undefined || index < 0 ? null : this.button(index);
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

function flameTime(ns) {
  const [unit, name] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]].find(([each]) => ns >= each) ?? [1, "ns"];
  return `${(ns / unit).toFixed(unit === 1 ? 0 : 1)} ${name}`;
}
