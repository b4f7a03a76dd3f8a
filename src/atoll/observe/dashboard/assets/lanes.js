// The learners as lanes in time: states as stretches, rounds joined as ticks, faults and recoveries as marks.

import { STATES, colour, fill, prepare, shorten } from "./palette.js";
import { has } from "./state.js";
import { clock } from "./words.js";

const LABEL = 190, RIGHT = 8, AXIS = 22;
const NEAR = 7;

export class Lanes {
  constructor(canvas, words, choice) {
    this.canvas = canvas;
    this.words = words;
    this.choice = choice;
    this.spots = [];
    canvas.addEventListener("mousemove", (event) => this.#point(event));
  }

  draw(run) {
    const lanes = run.order, row = lanes.length <= 9 ? 26 : lanes.length <= 20 ? 20 : lanes.length <= 40 ? 16 : 14;
    const [c, width] = prepare(this.canvas, lanes.length * row + AXIS);
    const origin = run.began ?? Math.min(run.at - 10, ...run.changes.flatMap((lane) => lane.slice(0, 1).map(([at]) => at)));
    const seconds = Number(this.choice.value) || Math.max(20, run.at - origin);
    const from = Math.max(origin, run.at - seconds), long = Math.max(20, run.at - from);
    const scale = (width - LABEL - RIGHT) / long;
    const x = (at) => LABEL + (Math.max(from, at) - from) * scale;
    this.spots = [];
    this.#axis(c, width, lanes.length * row, from - origin, long, scale);
    const ticks = thinned(run.rounds.filter((round) => round[1] >= from), scale, long);
    lanes.forEach((lane, place) => this.#lane(c, run, lane, place * row, row, x, ticks));
    for (const mark of run.marks) if (mark[1] >= from) this.#mark(c, run, mark, lanes.indexOf(mark[0]) * row, row, x);
    this.canvas.setAttribute("aria-label", `${summary(run)}. The same as a table below.`);
  }

  #axis(c, width, height, start, long, scale) {
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((s) => s * scale > 70) ?? 604800;
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (let at = Math.ceil(start / step) * step; at <= start + long; at += step) {
      const x = LABEL + (at - start) * scale;
      c.fillStyle = colour("grid");
      c.fillRect(Math.round(x), 0, 1, height);
      c.fillStyle = colour("faint");
      if (x < width - 18) c.fillText(clock(at), x, height + AXIS / 2 + 2);
    }
  }

  #lane(c, run, lane, y, row, x, ticks) {
    const state = run.state(lane), pad = row > 18 ? 4 : 2, high = row - pad;
    this.#label(c, run.names[lane], state, y + high / 2, row);
    const changes = run.changes[lane];
    changes.forEach(([at, what], i) => {
      const end = i + 1 < changes.length ? changes[i + 1][0] : run.at;
      const left = x(at), wide = x(end) - left;
      if (wide <= 0) return;
      c.fillStyle = fill(c, what);
      c.fillRect(left, y, Math.max(1, wide), high);
      if (what === "training" || what === "serving" || row < 16) return;
      c.font = `600 ${row > 18 ? 12 : 10}px system-ui, sans-serif`;
      const room = c.measureText(what).width + 8;
      if (wide < room + 44) return; // beside the marks at both ends
      c.fillStyle = colour("paper");
      c.fillRect(left + 22, y + 2, room, high - 4);
      c.fillStyle = colour(what);
      c.textAlign = "left";
      c.fillText(what, left + 26, y + high / 2 + 1);
    });
    c.fillStyle = colour("tick");
    for (const round of ticks) if (has(round[6], lane)) c.fillRect(Math.round(x(round[1])), y + high * 0.55, 1, high * 0.45);
  }

  #label(c, name, state, y, row) {
    const size = row > 18 ? 13 : 11;
    c.font = `${size}px system-ui, sans-serif`;
    c.textBaseline = "middle";
    c.textAlign = "right";
    c.fillStyle = state === "training" || state === "serving" ? colour("faint") : colour(state);
    if (state === "away" || state === "gone") c.font = `700 ${size}px system-ui, sans-serif`;
    c.fillText(state, LABEL - 10, y + 1);
    const room = LABEL - 26 - c.measureText(state).width;
    c.textAlign = "left";
    c.fillStyle = state === "away" || state === "gone" ? colour("gone") : colour("ink");
    c.fillText(shorten(c, name, room), 0, y + 1);
  }

  #mark(c, run, [lane, at, kind, words, seconds], y, row, x) {
    // A kill is followed by the exit that it causes: one mark is enough.
    if (kind === "exited" && run.marks.some((m) => m[0] === lane && m[2] === "killed" && Math.abs(m[1] - at) < 3)) return;
    const left = x(at), high = row - (row > 18 ? 4 : 2), middle = y + high / 2, r = Math.min(6, high / 2 - 1);
    if (seconds > 0) {
      c.fillStyle = colour("gone");
      c.fillRect(left, y, Math.max(2, x(Math.min(at + seconds, run.at)) - left), 3);
    }
    drawMark(c, kind, left, middle, r);
    this.spots.push([left, middle, `${clock(at - (run.began ?? at))}  ${run.names[lane]}: ${words}`]);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [mx, my] = [event.clientX - box.left, event.clientY - box.top];
    const near = this.spots.filter(([x, y]) => Math.abs(x - mx) < NEAR && Math.abs(y - my) < NEAR + 3);
    if (near.length) this.words.textContent = near.map((spot) => spot[2]).join(" · ");
  }
}

// Rounds far enough apart to be told from each other; none where most of the window is older than what is kept.
function thinned(rounds, scale, long) {
  if (rounds.length < 2) return rounds;
  const seconds = rounds.at(-1)[1] - rounds[0][1];
  if (seconds < long / 2 && rounds[0][0] > 0) return [];
  const every = Math.max(1, Math.ceil((4 * rounds.length) / (seconds * scale)));
  return rounds.filter((round) => round[0] % every === 0);
}

function drawMark(c, kind, x, y, r) {
  c.lineWidth = 2;
  c.strokeStyle = colour("paper");
  c.fillStyle = kind === "recovered" || kind === "restarted" ? colour("good") : colour("gone");
  c.beginPath();
  if (kind === "killed" || kind === "quarantined") {
    for (const [dx, dy] of [[-r, -r], [r, -r]]) { c.moveTo(x + dx, y + dy); c.lineTo(x - dx, y - dy); }
    c.lineWidth = 5;
    c.stroke();
    c.strokeStyle = colour("ink");
    c.lineWidth = 2;
    c.stroke();
    return;
  }
  if (kind === "recovered") c.arc(x, y, r, 0, 7);
  else if (kind === "restarted") { c.moveTo(x - r, y + r); c.lineTo(x + r, y + r); c.lineTo(x, y - r); c.closePath(); }
  else if (kind === "fault") { c.moveTo(x - r, y - r); c.lineTo(x + r, y - r); c.lineTo(x, y + r); c.closePath(); }
  else c.rect(x - r + 1, y - r + 1, 2 * r - 2, 2 * r - 2);
  c.stroke();
  c.fill();
}

// "64 learners: 60 training, 4 away"
export function summary(run) {
  const counts = {};
  for (const lane of run.order) if (lane) counts[run.state(lane)] = (counts[run.state(lane)] ?? 0) + 1;
  const parts = Object.entries(counts).map(([state, n]) => `${n} ${state}`);
  return `${run.order.length - 1} learners${parts.length ? ": " : ""}${parts.join(", ")}`;
}

// The states and marks with their names, drawn as the lanes draw them.
export function legend(list) {
  const marks = { killed: "killed", exited: "ended", restarted: "started again", recovered: "recovered", fault: "fault" };
  const keys = Object.keys(STATES).filter((state) => state !== "serving" && state !== "stopped");
  list.replaceChildren(...[...keys, ...Object.keys(marks)].map((key) => {
    const item = document.createElement("li"), canvas = document.createElement("canvas");
    item.append(canvas, marks[key] ?? key);
    canvas.width = 44;
    canvas.height = 24;
    const c = canvas.getContext("2d");
    c.scale(2, 2);
    if (key in marks) drawMark(c, key, 11, 6, 5);
    else { c.fillStyle = fill(c, key); c.fillRect(0, 0, 22, 12); }
    return item;
  }));
}
