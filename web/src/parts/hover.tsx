/** A text beside the pointer, for pictures whose parts are no elements. It reuses the look of the page's tooltip. */

import { useLayoutEffect, useRef } from "preact/hooks";

export interface Spot {
  x: number; // of the window
  y: number;
}

export function Hover({ at, text }: { at: Spot | null; text: string }) {
  const tip = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!at || !tip.current) return;
    const { width, height } = tip.current.getBoundingClientRect();
    const left = Math.min(at.x + 14, innerWidth - width - 8);
    const below = at.y + 18 + height < innerHeight;
    tip.current.style.transform = `translate(${Math.max(left, 8)}px, ${below ? at.y + 18 : at.y - height - 10}px)`;
  });
  return at && text ? (
    <div class="tip" ref={tip} aria-hidden="true">
      {text}
    </div>
  ) : null;
}
