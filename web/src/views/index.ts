/** Views in the order of their tabs. A view is shown if the session has the documents it needs. */

import type { ComponentType } from "preact";
import { Findings } from "./findings";
import { Compare } from "./compare";
import { Energy } from "./energy";
import { FlameGraph } from "./flame";
import { Idle } from "./idle";
import { Input } from "./input";
import { Kernels } from "./kernels";
import { Lines } from "./lines";
import { Memory } from "./memory";
import { Modules } from "./modules";
import { Operators } from "./operators";
import { Overview } from "./overview";
import { Plan } from "./plan";
import { Predict } from "./predict";
import { Ranks } from "./ranks";
import { Roofline } from "./roofline-view";
import { Runs } from "./runs";
import { Steps } from "./steps";
import { Telemetry } from "./telemetry";
import { TimelineView } from "./timeline";
import { Watch } from "./watch";
import { WhatIf } from "./whatif";

export interface View {
  name: string; // in the address
  title: string;
  group?: string; // heading above its tabs
  needs: string[]; // documents
  key: string; // pressed after g, it opens the view
  Component: ComponentType;
}

export const VIEWS: View[] = [
  { name: "overview", title: "Overview", needs: ["diagnosis"], key: "o", Component: Overview },
  { name: "ranks", title: "Ranks", needs: ["ranks"], key: "x", Component: Ranks },
  { name: "timeline", title: "Timeline", needs: ["timeline"], key: "t", Component: TimelineView },
  { name: "findings", title: "Findings", needs: ["diagnosis"], key: "f", Component: Findings },
  { name: "steps", title: "Steps", group: "Time", needs: ["diagnosis"], key: "s", Component: Steps },
  { name: "idle", title: "Idle", group: "Time", needs: ["diagnosis"], key: "i", Component: Idle },
  { name: "operators", title: "Operators", group: "Time", needs: ["operators"], key: "a", Component: Operators },
  { name: "kernels", title: "Kernels", group: "Time", needs: ["kernels"], key: "k", Component: Kernels },
  { name: "lines", title: "Lines", group: "Time", needs: ["lines"], key: "l", Component: Lines },
  { name: "modules", title: "Modules", group: "Time", needs: ["modules"], key: "m", Component: Modules },
  { name: "flame", title: "Flame graph", group: "Time", needs: ["flame"], key: "g", Component: FlameGraph },
  { name: "roofline", title: "Roofline", group: "Time", needs: ["roofline"], key: "r", Component: Roofline },
  { name: "input", title: "Input", group: "Time", needs: ["input", "loading"], key: "n", Component: Input },
  { name: "memory", title: "Memory", group: "State", needs: ["memory", "memory-levels"], key: "y", Component: Memory },
  { name: "telemetry", title: "Telemetry", group: "State", needs: ["telemetry"], key: "e", Component: Telemetry },
  { name: "whatif", title: "What if", group: "Ask", needs: ["whatif", "diagnosis"], key: "w", Component: WhatIf },
  { name: "compare", title: "Compare", group: "Ask", needs: ["compare"], key: "c", Component: Compare },
  { name: "predict", title: "Predict", group: "Ask", needs: ["predict"], key: "p", Component: Predict },
  { name: "plan", title: "Plan", group: "Ask", needs: ["plan"], key: "b", Component: Plan },
  { name: "energy", title: "Energy", group: "Ask", needs: ["energy"], key: "j", Component: Energy },
  { name: "runs", title: "Runs", group: "Recorded", needs: ["runs"], key: "z", Component: Runs },
  { name: "watch", title: "Watch", group: "Recorded", needs: ["watch"], key: "v", Component: Watch },
];
