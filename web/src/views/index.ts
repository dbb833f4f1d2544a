/** Views in the order of their tabs. A view is shown if the session has the documents it needs. */

import type { ComponentType } from "preact";
import { Overview } from "./overview";
import { TimelineView } from "./timeline";

export interface View {
  name: string; // in the address
  title: string;
  needs: string[]; // documents
  Component: ComponentType;
}

export const VIEWS: View[] = [
  { name: "overview", title: "Overview", needs: ["diagnosis"], Component: Overview },
  { name: "timeline", title: "Timeline", needs: ["timeline"], Component: TimelineView },
];
