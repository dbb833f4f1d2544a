// Values of a plot beside the pointer, and a hair at the same time in all plots of the section.
(() => {
  "use strict";
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };

  function scaled(value, steps, digits) {
    const [divisor, unit] = steps.find(([each]) => Math.abs(value) >= each) ?? steps.at(-1);
    return `${(value / divisor).toFixed(divisor === 1 ? 0 : digits)} ${unit}`;
  }

  const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

  function text(value, unit) {
    if (unit === "bytes") return scaled(value, SIZES, 2);
    if (unit === "bytes/s") return scaled(value, SIZES, 1) + "/s";
    if (unit === "share") return (value * 100).toFixed(1) + " %";
    return unit ? `${number(value)} ${unit}` : number(value);
  }

  const clock = (seconds) => seconds >= 3600 ? `${(seconds / 3600).toFixed(2)} h` : seconds >= 120 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(2)} s`;

  // The place of the value nearest to a time, in ascending times.
  function nearest(times, time) {
    let [low, high] = [0, times.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] < time) low = middle + 1; else high = middle;
    }
    return low > 0 && time - times[low - 1] < times[low] - time ? low - 1 : low;
  }

  function tip(data, time) {
    const found = data.lines.map(([label, times, values, steps]) => {
      if (!times.length) return null;
      const at = nearest(times, time);
      return { label, value: values[at], step: steps?.[at] ?? null, time: times[at] };
    }).filter(Boolean);
    const shown = found.slice(0, 8).map(({ label, value }) =>
      `${label ? label + ": " : ""}${value === null ? "not measured" : text(value, data.unit)}`);
    if (found.length > 8) shown.push(`and ${found.length - 8} more lines`);
    const step = found.find((each) => each.step !== null)?.step;
    return [`at ${clock(found[0]?.time ?? time)}${step === undefined ? "" : `, step ${step}`}`, ...shown].join("\n");
  }

  document.querySelectorAll(".telemetry").forEach((section) => {
    const areas = [...section.querySelectorAll(".area")];
    const hairs = areas.map((area) => area.querySelector(".hair"));
    areas.forEach((area) => {
      const source = area.closest(".plot").querySelector("script");
      let data = null;
      // Before the page's own listener, which shows what data-tip says.
      area.addEventListener("pointermove", (event) => {
        data ??= JSON.parse(source.textContent);
        const { left, width } = area.getBoundingClientRect();
        const share = Math.min(Math.max((event.clientX - left) / width, 0), 1);
        area.dataset.tip = tip(data, share * data.seconds);
        hairs.forEach((hair) => { hair.hidden = false; hair.style.left = share * 100 + "%"; });
      });
      area.addEventListener("pointerleave", () => hairs.forEach((hair) => { hair.hidden = true; }));
    });
  });
})();
