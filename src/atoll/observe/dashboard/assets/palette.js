// Every state has a colour and a pattern, so that no one needs the colour to tell it.

export const STATES = {
  training: "solid", joining: "dots", starting: "rise", away: "cross", gone: "cross",
  muted: "bars", stalled: "fall", quarantined: "grid", paused: "bars", stopped: "solid", serving: "solid",
};
const SIZE = 8;

let colours = {};
let patterns = new Map();

function read() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ground", "ink", "faint", "good", "line", "grid", "tick", "bar", ...Object.keys(STATES)];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  patterns = new Map();
}

// Calls back when the system turns from light to dark or the other way.
export function watch(changed) {
  read();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { read(); changed(); });
}

export function colour(name) {
  return colours[name] || colours.faint;
}

export function fill(context, state) {
  if ((STATES[state] ?? "solid") === "solid") return colour(state);
  if (!patterns.has(state)) patterns.set(state, context.createPattern(tile(STATES[state], colour(state)), "repeat"));
  return patterns.get(state);
}

function tile(kind, ink) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIZE;
  const c = canvas.getContext("2d");
  c.fillStyle = c.strokeStyle = ink;
  c.globalAlpha = 0.35;
  c.fillRect(0, 0, SIZE, SIZE);
  c.globalAlpha = 1;
  c.lineWidth = 2;
  const line = (...points) => { c.beginPath(); points.forEach(([x, y], i) => (i ? c.lineTo(x, y) : c.moveTo(x, y))); c.stroke(); };
  if (kind === "dots") for (const [x, y] of [[1, 1], [5, 5]]) c.fillRect(x, y, 2, 2);
  if (kind === "rise" || kind === "cross" || kind === "grid") for (const d of [-8, 0, 8]) line([d, 8], [d + 8, 0]);
  if (kind === "fall" || kind === "cross") for (const d of [-8, 0, 8]) line([d, 0], [d + 8, 8]);
  if (kind === "bars" || kind === "grid") line([3, 0], [3, 8]);
  return canvas;
}

// A canvas as wide as its place and so high, sharp on every screen; its context, cleared.
export function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = Math.floor(canvas.clientWidth);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

export function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let most = text.length;
  while (most > 1 && context.measureText(text.slice(0, most) + "…").width > width) most -= 1;
  return text.slice(0, most) + "…";
}
