// The picture of one step on a canvas: lanes of slices, and for each device a strip of idle gaps by cause.
const ROW = 15, AXIS = 22, SPACE = 10, STRIP = 28, COLUMN = 2, DEEPEST = 48, SHORTEST_VIEW_NS = 50;

class StepPicture {
  constructor(element, data, tip) {
    Object.assign(this, { data, tip, canvas: element.querySelector("canvas"), output: element.querySelector("output") });
    this.context = this.canvas.getContext("2d");
    this.length = Math.max(data.duration, 1);
    this.whole = Math.max(data.scale ?? 0, this.length);
    this.beside = []; // pictures on the same scale, which show the same stretch
    [this.from, this.to, this.marked] = [0, this.whole, null];
    this.bySlice = data.lanes.map(() => []);
    data.slices.forEach((slice) => this.bySlice[slice[0]].push(slice));
    this.byDevice = new Map(data.devices.map((device) => [device, data.gaps.filter((gap) => gap[0] === device)]));
    this.path = (data.path ?? []).map((piece) => ["", ...piece]);
    this.patterns = new Map();
    this.place();
    this.listen(element);
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  // Rows from top to bottom: host threads, then each device's idle strip above its queues.
  place() {
    const { lanes, devices } = this.data;
    let y = AXIS + 5;
    const track = (height, more) => { this.tracks.push({ y, height, ...more }); y += height + SPACE; };
    const lane = (index) => {
      const [label, , , rows, around] = lanes[index];
      const shown = Math.min(rows, DEEPEST);
      const hint = (rows > shown ? `, ${rows - shown} deeper rows not drawn` : "")
        + (around.length ? "\ninside: " + around.join(" › ") : "");
      track(shown * ROW, { lane: index, label, hint: label + hint });
    };
    this.tracks = [];
    if (this.path.length) track(STRIP, { gaps: this.path, views: this.data.resources, label: "critical path", hint: "critical path: what the step waited for;\nwhere pieces are narrow, the height is their share of the time" });
    lanes.forEach((each, index) => { if (each[1] === "host") lane(index); });
    devices.forEach((device) => {
      const [label, idle] = device ? [`device ${device}: idle`, `device ${device}: coloured where none of its queues worked`]
        : ["main thread: by cause", "main thread: coloured where it did not compute"];
      track(STRIP, { device, gaps: this.byDevice.get(device), views: this.data.causes, label, hint: `${idle};\nwhere gaps are narrow, the height is their share of the time` });
      lanes.forEach((each, index) => { if (each[1] === "queue" && each[2] === device) lane(index); });
    });
    this.height = y;
  }

  listen(element) {
    const { canvas } = this;
    const actions = {
      in: () => this.zoom(1 / 1.6), out: () => this.zoom(1.6), left: () => this.pan(-0.25), right: () => this.pan(0.25),
      whole: () => { this.marked = null; this.look(0, this.whole); },
    };
    const keys = { "+": "in", "=": "in", "-": "out", ArrowUp: "in", ArrowDown: "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole", Home: "whole" };
    element.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", actions[button.dataset.do]));
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions[keys[event.key]]();
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 300), this.timeAt(event.offsetX));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
      else return;
      event.preventDefault();
    }, { passive: false });
    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => { dragged = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged === null) { this.hover(event); return; }
      this.pan((dragged - event.clientX) / (this.width - this.gutter));
      dragged = event.clientX;
      this.tip("");
    });
    ["pointerup", "pointercancel"].forEach((name) => canvas.addEventListener(name, () => { dragged = null; }));
    canvas.addEventListener("pointerleave", () => this.tip(""));
    canvas.addEventListener("dblclick", (event) => {
      const found = this.at(event.offsetX, event.offsetY);
      if (found) this.look(found.start - found.duration * 0.1, found.start + found.duration * 1.1);
    });
  }

  look(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST_VIEW_NS), this.whole);
    this.from = Math.min(Math.max(from, 0), this.whole - length);
    this.to = this.from + length;
    this.draw();
    this.beside.forEach((each) => { [each.from, each.to] = [this.from, this.to]; each.draw(); });
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.look(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  // Mark an interval of the trace and go there, with some room on both sides.
  show(start, duration) {
    const from = start - this.data.start;
    this.marked = [from, duration];
    this.look(from - duration, from + 2 * duration);
  }

  x(time) { return this.gutter + (time - this.from) / (this.to - this.from) * (this.width - this.gutter); }
  timeAt(x) { return this.from + (x - this.gutter) / (this.width - this.gutter) * (this.to - this.from); }

  draw() {
    const { canvas, context } = this;
    this.width = canvas.parentElement.clientWidth;
    if (!this.width) return;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    this.gutter = this.width < 560 ? 84 : 168;
    canvas.width = this.width * ratio;
    canvas.height = this.height * ratio;
    canvas.style.height = this.height + "px";
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const styles = getComputedStyle(document.documentElement);
    this.colour = (name) => styles.getPropertyValue("--" + name).trim();
    this.font = "11px " + getComputedStyle(document.body).fontFamily;
    context.font = this.font;
    context.textBaseline = "middle";
    context.fillStyle = this.colour("card");
    context.fillRect(0, 0, this.width, this.height);
    this.drawTime();
    context.save();
    context.beginPath();
    context.rect(this.gutter, AXIS, this.width - this.gutter, this.height);
    context.clip();
    this.drawEnd();
    this.drawMark(true);
    this.tracks.forEach((track) => (track.gaps ? this.drawGaps(track) : this.drawLane(track)));
    this.drawMark(false);
    context.restore();
    this.tracks.forEach((track) => this.drawLabel(track));
    if (this.output) this.output.textContent = `${StepPicture.duration(this.to - this.from)} of ${StepPicture.duration(this.whole)}`;
  }

  drawTime() {
    const { context } = this;
    const rough = (this.to - this.from) / Math.max(2, (this.width - this.gutter) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const [divisor, unit] = StepPicture.unit(this.to);
    const digits = Math.max(0, Math.ceil(-Math.log10(tick / divisor) - 1e-9));
    for (let time = Math.ceil(this.from / tick) * tick; time <= this.to; time += tick) {
      const x = Math.round(this.x(time)) + 0.5;
      context.fillStyle = this.colour("line");
      context.fillRect(x, AXIS - 5, 1, this.height);
      context.fillStyle = this.colour("muted");
      if (x < this.width - 40) context.fillText(`${(time / divisor).toFixed(digits)} ${unit}`, x + 4, AXIS / 2);
    }
  }

  // What lies behind the end of a step that is shorter than the scale.
  drawEnd() {
    if (this.length >= this.whole) return;
    const left = Math.max(this.x(this.length), this.gutter);
    this.context.fillStyle = this.colour("idle");
    this.context.fillRect(left, AXIS, this.width - left, this.height);
  }

  drawLane(track) {
    for (const [, depth, start, duration, name, kind] of this.bySlice[track.lane]) {
      if (depth >= DEEPEST || start > this.to || start + duration < this.from) continue;
      const left = Math.max(this.x(start), this.gutter - 2);
      const width = Math.max(Math.min(this.x(start + duration), this.width + 2) - left, 0.25);
      const word = this.data.names[kind].replace(/^copy_.*/, "copy").replace("set", "other");
      this.box(left, track.y + depth * ROW, width, ROW - 1, this.colour("k-" + word) || this.colour("k-other"), this.data.names[name], this.colour("ink"));
    }
  }

  drawGaps(track) {
    const { context } = this;
    context.fillStyle = this.colour(track.device === undefined ? "idle" : "busy");
    context.fillRect(this.x(0), track.y, this.x(this.length) - this.x(0), STRIP);
    const filled = new Float64Array(Math.ceil((this.width - this.gutter) / COLUMN));
    for (const [cause, columns] of this.timeByColumn(track.gaps)) {
      const { colour, hatched } = track.views[this.data.names[cause]];
      context.beginPath();
      columns.forEach((share, column) => {
        if (share) context.rect(this.gutter + column * COLUMN, track.y + filled[column] * STRIP, COLUMN, share * STRIP);
        filled[column] += share;
      });
      context.fillStyle = colour;
      context.fill();
      if (hatched) { context.fillStyle = this.hatch(); context.fill(); }
    }
    for (const [, start, duration, cause] of track.gaps) {
      const left = Math.max(this.x(start), this.gutter), width = Math.min(this.x(start + duration), this.width) - left;
      const { label, colour, hatched } = track.views[this.data.names[cause]];
      if (width > 40) this.text(label, left, track.y, width, STRIP, StepPicture.inkOn(colour), hatched ? colour : "");
    }
  }

  // Cause -> its share of each column's time. A thousand gaps of a microsecond, drawn a pixel each, would look
  // like a device that never works; stacked by share, they take the place that they took.
  timeByColumn(gaps) {
    const count = Math.ceil((this.width - this.gutter) / COLUMN);
    const perColumn = COLUMN / (this.width - this.gutter) * (this.to - this.from);
    const shares = new Map();
    for (const [, start, duration, cause] of gaps) {
      const first = Math.max((start - this.from) / perColumn, 0), last = Math.min((start + duration - this.from) / perColumn, count);
      if (last <= first) continue;
      if (!shares.has(cause)) shares.set(cause, new Float64Array(count));
      const columns = shares.get(cause);
      for (let column = Math.floor(first); column < last; column++)
        columns[column] += Math.min(last, column + 1) - Math.max(first, column);
    }
    return shares;
  }

  // The marked interval: tinted behind the slices, framed before them, so that their colours stay.
  drawMark(behind) {
    if (!this.marked) return;
    const { context } = this;
    const [from, duration] = this.marked;
    const left = this.x(from), width = Math.max(this.x(from + duration) - left, 2);
    context.fillStyle = context.strokeStyle = this.colour("accent");
    context.lineWidth = 2;
    context.globalAlpha = behind ? 0.14 : 1;
    if (behind) context.fillRect(left, AXIS, width, this.height);
    else context.strokeRect(left, AXIS + 1, width, this.height - AXIS - 3);
    context.globalAlpha = 1;
  }

  drawLabel({ y, height, label }) {
    this.context.fillStyle = this.colour("line");
    this.context.fillRect(0, y + height + SPACE / 2, this.width, 1);
    this.text(label, 4, y, this.gutter - 6, Math.min(height, STRIP), this.colour("ink"), "");
  }

  box(left, top, width, height, colour, name, ink) {
    this.context.fillStyle = colour;
    this.context.fillRect(left, top, width > 3 ? width - 0.6 : width, height);
    if (width > 26) this.text(name, left, top, width, height, ink, "");
  }

  // As much of a text as fits; `behind` clears the hatching under it.
  text(words, left, top, width, height, ink, behind) {
    const { context } = this;
    const x = Math.max(left, left < this.gutter - 4 ? left : this.gutter) + 4;
    const room = left + width - x - 3;
    let shown = words.length * 4 > room ? words.slice(0, Math.ceil(room / 4)) : words;
    while (shown && context.measureText(shown + (shown === words ? "" : "…")).width > room) shown = shown.slice(0, -1);
    if (shown.length < Math.min(words.length, 3)) return;
    if (shown !== words) shown += "…";
    if (behind) { context.fillStyle = behind; context.fillRect(x - 2, top + 3, context.measureText(shown).width + 4, height - 6); }
    context.fillStyle = ink;
    context.fillText(shown, x, top + height / 2 + 0.5);
  }

  hatch() {
    if (this.hatching) return this.hatching;
    const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    const brush = tile.getContext("2d");
    brush.strokeStyle = "rgb(0 0 0 / .55)";
    brush.lineWidth = 1.5;
    [-8, 0, 8].forEach((shift) => { brush.moveTo(shift - 1, 9); brush.lineTo(shift + 9, -1); });
    brush.stroke();
    this.hatching = this.context.createPattern(tile, "repeat");
    return this.hatching;
  }

  // What stands under a point of the canvas.
  at(x, y) {
    const track = this.tracks.find((each) => y >= each.y && y < each.y + each.height);
    if (!track) return null;
    if (x < this.gutter) return { text: track.hint };
    const time = this.timeAt(x), near = 1.5 / (this.width - this.gutter) * (this.to - this.from);
    const hit = (start, duration) => time >= start - near && time < start + duration + near;
    const { names } = this.data;
    const nearest = (slices, start) => slices.reduce((best, each) =>
      (best === null || Math.abs(each[start] + each[start + 1] / 2 - time) < Math.abs(best[start] + best[start + 1] / 2 - time) ? each : best), null);
    if (track.gaps) {
      const gap = nearest(track.gaps.filter((each) => hit(each[1], each[2])), 1);
      if (!gap && track.device === undefined) return null;
      if (!gap) return time > this.length ? null : { text: track.device ? "busy" : "computing" };
      const { label, meaning } = track.views[names[gap[3]]];
      if (track.device === undefined) return { start: gap[1], duration: gap[2], text: `the step waits ${StepPicture.duration(gap[2])}: ${label}\n${meaning}${names[gap[4]] ? `\n${names[gap[4]]}` : ""}` };
      const after = names[gap[4]] ? `\nafter ${names[gap[4]]}` : "";
      return { start: gap[1], duration: gap[2], text: `${track.device ? "idle " : ""}${StepPicture.duration(gap[2])}: ${label}\n${meaning}${after}` };
    }
    const depth = Math.floor((y - track.y) / ROW);
    const slice = nearest(this.bySlice[track.lane].filter((each) => each[1] === depth && hit(each[2], each[3])), 2);
    if (!slice) return null;
    const [, , start, duration, name, kind] = slice;
    const where = `${names[kind].replaceAll("_", " ")}, ${StepPicture.duration(duration)}, at ${StepPicture.duration(start)}`;
    return { start, duration, text: `${names[name] || "(no name)"}\n${where}` };
  }

  hover(event) {
    this.tip(this.at(event.offsetX, event.offsetY)?.text ?? "", event.clientX, event.clientY);
  }

  static unit(ns) {
    return [[1e9, "s"], [1e6, "ms"], [1e3, "us"]].find(([each]) => ns >= each) ?? [1, "ns"];
  }

  static duration(ns) {
    const [divisor, unit] = StepPicture.unit(ns);
    return `${(ns / divisor).toFixed(unit === "s" ? 2 : unit === "ns" ? 0 : 1)} ${unit}`;
  }

  static inkOn(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 110 ? "#111" : "#fff";
  }
}
