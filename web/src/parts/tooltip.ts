/** One tooltip for every element with `data-tip`, shown while it is pointed at or has the focus; Escape hides it. */

let element: HTMLElement | null = null;

export function startTooltip(): void {
  addEventListener("pointerover", (event) => show(event.target));
  addEventListener("focusin", (event) => event.target instanceof Element && event.target.matches(":focus-visible") && show(event.target));
  addEventListener("focusout", hide);
  addEventListener("scroll", hide, true);
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

function show(target: EventTarget | null): void {
  const owner = target instanceof Element ? target.closest<HTMLElement>("[data-tip]") : null;
  const text = owner?.dataset.tip;
  if (!owner || !text) return hide();
  if (!element) {
    element = document.createElement("div");
    element.className = "tip";
    element.setAttribute("role", "tooltip");
  }
  element.textContent = text;
  document.body.append(element);
  const place = owner.getBoundingClientRect();
  const size = element.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left + place.width / 2 - size.width / 2), innerWidth - size.width - 8);
  const below = place.bottom + 6 + size.height < innerHeight;
  element.style.transform = `translate(${left}px, ${below ? place.bottom + 6 : place.top - size.height - 6}px)`;
}

function hide(): void {
  element?.remove();
}
