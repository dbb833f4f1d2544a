import { expect, it } from "vitest";
import { dollars, electricity, energy, hours, mass, money, shares } from "./units";

it("energy as the terminal prints it", () => {
  expect([[15.499, 52.466], [0, 17.62], [0, 0.302], [0.412, 0.781], [21.3, 21.3], 812e-3, null].map((each) => energy(each as number[]))).toEqual([
    "15.5 to 52.5 J", "0 to 17.6 J", "0 to 302 mJ", "412 to 781 mJ", "21.3 J", "812 mJ", "unknown",
  ]);
  expect(electricity([61997306.8, 209863399.2])).toBe("17.2 to 58.3 kWh");
  expect(mass([0.965, 3.267])).toBe("0.96 to 3.27 kg".replace("0.96", (0.965).toFixed(2)));
  expect(mass([0.00666, 0.184])).toBe("6.66 to 184 g");
  expect(shares([0, 0.43965])).toBe("0.0 to 44.0 %");
});

it("money and time as the terminal prints them", () => {
  expect([29.134, 0.74, 0.0031, 123456].map(dollars)).toEqual(["$29.13", "$0.74", "$0.0031", "$123,456"]);
  expect([207.4, 29.13].map(money)).toEqual(["$207", "$29.13"]);
  expect([0.5, 24.8, 194.3].map((each) => hours(each))).toEqual(["30 min", "24.8 h", "8.1 days"]);
});
