import { describe, expect, it } from "vitest";
import { apportion, cell, count, duration, moment, share, sentence, short, size } from "./format";

describe("numbers are those of the terminal", () => {
  it.each([
    [0, "0 ns"], [540, "540 ns"], [8_300, "8.3 us"], [54_100_000, "54.1 ms"], [999_960_000, "1.00 s"], [1_234_000_000, "1.23 s"],
    [-1_500, "-1.5 us"], [Number.NaN, "-"], [3_600e9, "3,600.00 s"],
  ])("duration %d", (ns, text) => expect(duration(ns)).toBe(text));
  it.each([[512, "512 B"], [1536, "1.5 KiB"], [1_610_612_736, "1.50 GiB"]])("size %d", (bytes, text) => expect(size(bytes)).toBe(text));
  it.each([[0.472, "47.2 %"], [0.0001, "<0.1 %"], [-0.0001, ">-0.1 %"], [0, "0.0 %"], [12.5, "1,250.0 %"]])("share %d", (x, text) =>
    expect(share(x)).toBe(text),
  );
  it.each([[1_234_567, "1,234,567"], [53, "53"], [2.3456, "2.35"], [1234.5, "1,234"]])("count %d", (n, text) => expect(count(n)).toBe(text));
  it("moment keeps microseconds", () => expect(moment(1_234_567_890)).toBe("1,234.568 ms"));
  it("cells have the unit of their column", () => {
    expect(cell("total_ns", 1_000)).toBe("1.0 us");
    expect(cell("idle_share", 0.5)).toBe("50.0 %");
    expect(cell("bytes_allocated", 1024)).toBe("1.0 KiB");
    expect(cell("line", 1234)).toBe("1234");
    expect(cell("tensor_cores", true)).toBe("yes");
    expect(cell("precision", null)).toBe("");
  });
});

it("a text of megabytes is shortened", () => {
  expect(short("x".repeat(10_000_000)).length).toBeLessThanOrEqual(300);
  expect(short("loss")).toBe("loss");
});

it("parts add up exactly to the whole", () => {
  for (const whole of [1, 7, 174_886_166]) {
    const parts = apportion([587_982_000, 352_401_000, 46_962_000, 1, 3], whole);
    expect(parts.reduce((a, b) => a + b)).toBe(whole);
  }
  expect(apportion([], 5)).toEqual([]);
  expect(apportion([0, 0], 5)).toEqual([0, 0]);
});

it("a sentence begins with a capital letter, a name stays as it is", () => {
  expect(sentence("for 34% of the step")).toBe("For 34% of the step");
  expect(sentence("aten::mm runs")).toBe("aten::mm runs");
  expect(sentence("")).toBe("");
});
