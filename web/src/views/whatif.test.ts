import { expect, it } from "vitest";
import { optionWords, shellWord } from "../parts/said";
import { joined, parsedScale } from "./whatif";

it("a pattern may contain equals signs", () => {
  expect(parsedScale("gemm<N=4>=0.5")).toEqual(["gemm<N=4>", 0.5]);
});

it("joins both paths by resource, the largest share first", () => {
  const part = (kind: string, cause: string | null, share: number) => ({ kind, cause, ns: share * 100, share });
  const now = [part("host", "input", 0.6), part("compute", null, 0.4)];
  const then = [part("compute", null, 0.9), part("copy", null, 0.1)];
  expect(joined(now, then).map(([kind, , before, after]) => [kind, before?.share, after?.share])).toEqual([
    ["compute", 0.4, 0.9],
    ["host", 0.6, undefined],
    ["copy", undefined, 0.1],
  ]);
});

it("words of the command line survive a shell", () => {
  expect(["aten::mm=0.5", "*gemm*=0.5", "it's", "$(rm)"].map(shellWord)).toEqual(["aten::mm=0.5", "'*gemm*=0.5'", `'it'"'"'s'`, "'$(rm)'"]);
  expect(optionWords({ remove: "input\nzero-grad", graphs: "1" }, ["graphs"])).toEqual(["--remove", "input", "--remove", "zero-grad", "--graphs"]);
});
