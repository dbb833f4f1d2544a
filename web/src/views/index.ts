/** Views in the order of their tabs. A view is shown if the session has the documents it needs. */

import type { ComponentType } from "preact";
import { Overview } from "./overview";

export interface View {
  name: string; // in the address
  title: string;
  needs: string[]; // documents
  Component: ComponentType;
}

export const VIEWS: View[] = [{ name: "overview", title: "Overview", needs: ["diagnosis"], Component: Overview }];
