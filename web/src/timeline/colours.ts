/** Colours as their channels, to be mixed and packed into pixels. */

export type Channels = [number, number, number];

export const packed = ([red, green, blue]: Channels) => (255 << 24) | (blue << 16) | (green << 8) | red;

export const mixed = (over: Channels, under: Channels, alpha: number) =>
  over.map((each, at) => Math.round(each * alpha + under[at]! * (1 - alpha))) as Channels;

/** Red, green and blue of any CSS colour, 0 to 255. */
export function channelsOf(colour: string, context: CanvasRenderingContext2D): Channels {
  const before = context.fillStyle;
  context.fillStyle = "#000";
  context.fillStyle = colour;
  const known = String(context.fillStyle);
  context.fillStyle = before;
  const hex = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(known);
  if (hex) return [1, 2, 3].map((part) => parseInt(hex[part]!, 16)) as Channels;
  const parts = known.match(/[\d.]+/g)?.map(Number) ?? [128, 128, 128];
  return [parts[0]!, parts[1]!, parts[2]!];
}

/** Black or white, whichever is easier to read on this colour. */
export function inkOn(colour: Channels): string {
  return luminance(colour) > 128 ? "#111" : "#fff";
}

export const luminance = ([red, green, blue]: Channels) => 0.299 * red + 0.587 * green + 0.114 * blue;
