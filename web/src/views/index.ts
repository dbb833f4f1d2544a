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
import { WhatIf } from "./whatif";

export interface View {
  name: string; // in the address
  title: string;
  needs: string[]; // documents
  key: string; // pressed after g, it opens the view
  Component: ComponentType;
}

export const VIEWS: View[] = [
  { name: "overview", title: "Overview", needs: ["diagnosis"], key: "o", Component: Overview },
  { name: "ranks", title: "Ranks", needs: ["ranks"], key: "x", Component: Ranks },
  { name: "timeline", title: "Timeline", needs: ["timeline"], key: "t", Component: TimelineView },
  { name: "findings", title: "Findings", needs: ["diagnosis"], key: "f", Component: Findings },
  { name: "steps", title: "Steps", needs: ["diagnosis"], key: "s", Component: Steps },
  { name: "idle", title: "Idle", needs: ["diagnosis"], key: "i", Component: Idle },
  { name: "operators", title: "Operators", needs: ["operators"], key: "a", Component: Operators },
  { name: "kernels", title: "Kernels", needs: ["kernels"], key: "k", Component: Kernels },
  { name: "lines", title: "Lines", needs: ["lines"], key: "l", Component: Lines },
  { name: "whatif", title: "What if", needs: ["whatif", "diagnosis"], key: "w", Component: WhatIf },
  { name: "modules", title: "Modules", needs: ["modules"], key: "m", Component: Modules },
  { name: "flame", title: "Flame graph", needs: ["flame"], key: "g", Component: FlameGraph },
  { name: "memory", title: "Memory", needs: ["memory", "memory-levels"], key: "y", Component: Memory },
  { name: "roofline", title: "Roofline", needs: ["roofline"], key: "r", Component: Roofline },
  { name: "input", title: "Input", needs: ["input", "loading"], key: "n", Component: Input },
  { name: "telemetry", title: "Telemetry", needs: ["telemetry"], key: "e", Component: Telemetry },
  { name: "compare", title: "Compare", needs: ["compare"], key: "c", Component: Compare },
  { name: "predict", title: "Predict", needs: ["predict"], key: "p", Component: Predict },
  { name: "plan", title: "Plan", needs: ["plan"], key: "b", Component: Plan },
  { name: "energy", title: "Energy", needs: ["energy"], key: "j", Component: Energy },
  { name: "runs", title: "Runs", needs: ["runs"], key: "z", Component: Runs },
];
