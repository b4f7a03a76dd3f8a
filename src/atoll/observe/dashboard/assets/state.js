// What this page knows of the run: a snapshot, and what came since. Bounded like the syncer's own memory of it.

import { byName } from "./words.js";

const MOST = { rounds: 480, notes: 60, marks: 400, scores: 800, samples: 1200 };
const CHANGES = 40;

export class Run {
  constructor() {
    this.at = 0;
    this.began = null;
    this.now = null;
    this.of = null; // the run that all of this is about
    this.names = [];
    this.order = []; // lanes from top to bottom
    this.changes = []; // per lane [at, state], oldest first
    this.marks = [];
    this.rounds = [];
    this.notes = [];
    this.scores = [];
    this.samples = [];
    this.sample = [];
  }

  // Takes a message in; the notes that are new in it.
  take(message) {
    this.at = message.at;
    this.began = message.began;
    this.now = message.now;
    if (message.type === "snapshot") return this.#replace(message);
    for (const [lane, at, state] of message.changes ?? []) this.#change(lane, at, state);
    for (const name of Object.keys(MOST)) this.#append(name, message[name] ?? []);
    return message.notes ?? [];
  }

  #replace(message) {
    const known = new Set(this.notes.map(String));
    this.names = message.names;
    this.order = this.names.map((_, lane) => lane).sort((a, b) => (a && b ? byName(this.names[a], this.names[b]) : a - b));
    this.changes = this.names.map(() => []);
    for (const [lane, at, state] of message.changes) this.#change(lane, at, state);
    const before = this.of === message.now.run ? this.samples : [];
    this.of = message.now.run;
    for (const name of Object.keys(MOST)) this[name] = message[name];
    // A syncer that was started again has no curves of before; this page has.
    const from = this.samples[0]?.[0] ?? Infinity;
    this.samples = [...before.filter((sample) => sample[0] < from), ...this.samples];
    this.sample = message.sample;
    return known.size ? this.notes.filter((note) => !known.has(String(note))) : [];
  }

  #change(lane, at, state) {
    this.changes[lane].push([at, state]);
    if (this.changes[lane].length > CHANGES) this.changes[lane].shift();
  }

  #append(name, items) {
    if (!items.length) return;
    this[name].push(...items);
    const over = this[name].length - MOST[name];
    if (over <= 0) return;
    // Curves keep their start and get coarser; the rest forgets its oldest.
    if (name === "samples" || name === "scores") this[name] = this[name].filter((_, i) => i % 2 === 0);
    else this[name].splice(0, over);
  }

  // The state a lane was in at a moment; null before it came.
  stateAt(lane, at) {
    let state = null;
    for (const [from, next] of this.changes[lane]) {
      if (from > at) break;
      state = next;
    }
    return state;
  }

  // The state now, in which a pause that was done to it shows.
  state(lane) {
    const paused = this.marks.some(([where, at, kind, words, seconds]) =>
      where === lane && kind === "fault" && /^(syncer-)?pause/.test(words) && at + seconds > this.at);
    return paused ? "paused" : this.stateAt(lane, this.at) ?? "unknown";
  }

  behind(one) {
    return Math.max(0, this.now.round - 1 - one.version_round);
  }
}

// Whether lane i is in a hexadecimal set.
export function has(hex, i) {
  const digit = hex.length - 1 - (i >> 2);
  return digit >= 0 && (parseInt(hex[digit], 16) >> (i & 3)) % 2 === 1;
}
