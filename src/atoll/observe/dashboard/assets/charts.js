// Curves, by plotly. One chart is drawn anew at a time, and only those on the screen.

import { colour } from "./palette.js";

const LINES = {
  loss: [["validation loss", null, "gone", "solid"], ["training, middle learner", "loss", "training", "solid"]],
  shares: [["goodput", "goodput", "training", "solid"], ["liveness", "liveness", "good", "dash"],
    ["alive now", "alive", "faint", "dot"], ["participation", "participation", "stalled", "dashdot"],
    ["merged share", "merged_share", "gone", "longdash"]],
  pace: [["effective H (steps)", "effective_h", "training", "solid"], ["H as set (steps)", null, "faint", "dash"],
    ["most rounds behind", "behind", "gone", "dot"]],
  traffic: [["in", "in_per_s", "training", "solid"], ["out", "out_per_s", "stalled", "dash"]],
};
const AXES = { loss: {}, shares: { tickformat: ".0%", range: [0, 1.05] }, pace: { rangemode: "tozero" }, traffic: { ticksuffix: "B", rangemode: "tozero" } };

export class Charts {
  constructor(places) {
    this.places = places;
    this.visible = new Set();
    this.drawn = new Set();
    this.next = 0;
    this.lossAxis = "time";
    const watcher = new IntersectionObserver((found) => found.forEach((one) =>
      this.visible[one.isIntersecting ? "add" : "delete"](one.target.id)));
    for (const place of Object.values(places)) watcher.observe(place);
  }

  // Draws the next one that can be seen; all of them after a change of colours.
  draw(run, all = false) {
    if (!window.Plotly) return this.#say("No charts: the syncer's machine has no plotly (pip install 'atoll[plots]').");
    if (all) this.drawn.clear();
    const names = Object.keys(LINES).filter((name) => this.visible.has(name) || !this.drawn.has(name));
    if (!run.samples.length) return this.#say("No figures yet: they come with the first rounds.");
    if (!names.length) return;
    const due = all ? names : [names[this.next++ % names.length]];
    for (const name of due) this.drawn.add(name);
    for (const name of due) {
      const axis = name === "loss" ? this.lossAxis : "time";
      if (this.places[name].dataset.words) { this.places[name].replaceChildren(); delete this.places[name].dataset.words; }
      const title = { time: unit(run).name, step: "the run's steps", tokens: "tokens merged" }[axis];
      window.Plotly.react(this.places[name], traces(name, run, axis), layout(name, title), { displayModeBar: false, responsive: true });
    }
  }

  #say(words) {
    for (const [name, place] of Object.entries(this.places)) if (!this.drawn.has(name)) place.textContent = place.dataset.words = words;
  }
}

function traces(name, run, axis) {
  const { seconds } = unit(run);
  const place = axis === "time" ? (at) => Math.round((1000 * (at - (run.began ?? at))) / seconds) / 1000 : (at) => done(run, axis, at);
  const column = (key) => run.samples.map((sample) => sample[run.sample.indexOf(key)]);
  const x = run.samples.map((sample) => place(sample[0]));
  const drawn = LINES[name].map(([title, key, ink, dash]) => ({
    x, y: key ? column(key) : [], name: title, type: "scatter", mode: "lines",
    line: { color: colour(ink), dash, width: 2 }, hoverinfo: "x+y+name",
  }));
  if (name === "pace") drawn[1].y = x.map(() => run.now.sync_every);
  if (name === "loss") {
    Object.assign(drawn[0], { x: run.scores.map((score) => place(score[0])), y: run.scores.map((score) => score[2]), mode: "lines+markers" });
    drawn[0].marker = { size: 6, color: colour("gone") };
    drawn.push(edge(x, column("loss_low")), { ...edge(x, column("loss_high")), fill: "tonexty", fillcolor: "rgba(61,143,198,.18)", name: "from lowest to highest", showlegend: true });
  }
  return drawn;
}

// What the run had done at a moment, by its newest sample until then; null before the first, which leaves a point out.
function done(run, axis, at) {
  let low = 0, high = run.samples.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.samples[middle][0] <= at) low = middle + 1; else high = middle;
  }
  return low ? run.samples[low - 1][run.sample.indexOf(axis)] : null;
}

function edge(x, y) {
  return { x, y, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
}

// Of the time axis.
function unit(run) {
  const long = run.at - (run.began ?? run.at);
  return long < 180 ? { name: "seconds", seconds: 1 } : long < 10800 ? { name: "minutes", seconds: 60 } : { name: "hours", seconds: 3600 };
}

function layout(name, time) {
  const axis = { gridcolor: colour("grid"), zeroline: false, linecolor: colour("line"), automargin: true, fixedrange: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 46, r: 12, t: 28, b: 34 },
    font: { color: colour("ink"), size: 12 }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } }, hovermode: "x",
    xaxis: { ...axis, title: { text: time, standoff: 4 } }, yaxis: { ...axis, ...AXES[name] },
  };
}
