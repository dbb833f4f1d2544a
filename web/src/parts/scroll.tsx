/** What may be wider than the page; a keyboard can scroll it. */

import type { ComponentChildren } from "preact";

export const Scroll = ({ label, children }: { label: string; children: ComponentChildren }) => (
  <div class="scroll" tabIndex={0} role="region" aria-label={label}>
    {children}
  </div>
);
