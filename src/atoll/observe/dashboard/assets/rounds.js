// Who was in each of the last rounds, and why it closed. Arrow keys or a click choose a round; else it is the last.

import { colour, prepare, shorten } from "./palette.js";
import { has } from "./state.js";
import { listing } from "./words.js";

const SHOWN = 120, ROWS = 20, LABEL = 120, TOP = 30;

export class Rounds {
  constructor(canvas, words, rows) {
    Object.assign(this, { canvas, words, rows, run: null, chosen: null, cell: 8 });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("click", (event) => this.#click(event));
  }

  draw(run) {
    this.run = run;
    const lanes = run.order.filter((lane) => lane), rounds = this.#shown();
    const row = lanes.length <= 9 ? 18 : lanes.length <= 20 ? 14 : 11;
    const [c, width] = prepare(this.canvas, TOP + lanes.length * row + 4);
    this.cell = Math.max(3, Math.min(14, (width - LABEL) / SHOWN));
    c.textBaseline = "middle";
    c.font = `${row > 12 ? 12 : 10}px system-ui, sans-serif`;
    c.fillStyle = colour("faint");
    c.fillText("share of live", 0, TOP / 2);
    lanes.forEach((lane, place) => c.fillText(shorten(c, run.names[lane], LABEL - 8), 0, TOP + place * row + row / 2));
    rounds.forEach((round, i) => this.#column(c, run, round, LABEL + i * this.cell, lanes, row));
    this.#say();
    if (this.rows.closest("details").open) this.#table(run);
  }

  #shown() {
    return this.run.rounds.slice(-SHOWN);
  }

  #column(c, run, round, x, lanes, row) {
    const [number, at, , , live, , members] = round, wide = Math.max(2, this.cell - 2), high = row - 3;
    const inside = lanes.filter((lane) => has(members, lane));
    const share = Math.min(1, inside.length / Math.max(1, live)) * (TOP - 8);
    c.fillStyle = colour("grid");
    c.fillRect(x, 2, wide, TOP - 8);
    c.fillStyle = colour("bar");
    c.fillRect(x, 2 + (TOP - 8) - share, wide, share);
    lanes.forEach((lane, place) => {
      const y = TOP + place * row + 1;
      if (has(members, lane)) {
        c.fillStyle = colour("training");
        c.fillRect(x, y, wide, high);
      } else if (["away", "gone"].includes(run.stateAt(lane, at))) {
        c.fillStyle = colour("gone");
        c.fillRect(x, y + high / 2 - 1, wide, 2);
      } else if (run.stateAt(lane, at) !== null) {
        c.strokeStyle = colour("faint");
        c.lineWidth = 1;
        c.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
      }
    });
    if (number === this.chosen) {
      c.strokeStyle = colour("ink");
      c.lineWidth = 2;
      c.strokeRect(x - 1, 1, wide + 2, TOP + lanes.length * row);
    }
  }

  #say() {
    const rounds = this.#shown(), round = rounds.find((one) => one[0] === this.chosen) ?? rounds.at(-1);
    if (!round) return;
    const text = `${this.chosen === round[0] ? "Chosen" : "Last"}: ${told(this.run, round)}`;
    if (this.words.textContent !== text) this.words.textContent = text;
  }

  #key(event) {
    const rounds = this.#shown(), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (!step || !rounds.length) return;
    event.preventDefault();
    const now = rounds.findIndex((one) => one[0] === this.chosen);
    this.#choose(rounds[Math.max(0, Math.min(rounds.length - 1, (now < 0 ? rounds.length - 1 : now) + step))][0]);
  }

  #click(event) {
    const i = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left - LABEL) / this.cell);
    this.#choose(this.run && this.#shown()[i] ? this.#shown()[i][0] : null);
  }

  // A choice is read out; what follows by itself is not.
  #choose(number) {
    this.chosen = number;
    this.words.setAttribute("aria-live", number === null ? "off" : "polite");
    if (this.run) this.draw(this.run);
  }

  #table(run) {
    const rows = run.rounds.slice(-ROWS).reverse().map((round) => {
      const row = document.createElement("tr"), { count, missing } = membership(run, round);
      const cells = [round[0], round[2], round[3], `${count} of ${round[4]}`, listing(missing, 6) || "nobody", round[5]];
      for (const text of cells) row.insertCell().textContent = text;
      return row;
    });
    this.rows.replaceChildren(...rows);
  }
}

function membership(run, round) {
  const lanes = run.order.filter((lane) => lane), inside = lanes.filter((lane) => has(round[6], lane));
  const missing = lanes.filter((lane) => !has(round[6], lane) && !["away", "gone", null].includes(run.stateAt(lane, round[1])));
  return { count: inside.length, missing: missing.map((lane) => run.names[lane]) };
}

function told(run, round) {
  const { count, missing } = membership(run, round);
  const without = missing.length ? `; alive, not in it: ${listing(missing, 4)}` : "";
  return `round ${round[0]}, fragment ${round[2]}, version ${round[3]}: ${count} of ${round[4]} learners alive. ${round[5]}${without}`;
}
