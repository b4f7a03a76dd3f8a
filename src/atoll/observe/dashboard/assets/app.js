// The page's course: connect, take in what the syncer tells, draw at most twice a second, connect again when it is lost.

import { Charts } from "./charts.js";
import { Lanes, legend } from "./lanes.js";
import { watch } from "./palette.js";
import * as panels from "./panels.js";
import { Rounds } from "./rounds.js";
import { Run } from "./state.js";

const DRAW_MS = 500, AGAIN_MS = 500, AGAIN_MOST_MS = 5000;
const by = (id) => document.getElementById(id);

const run = new Run();
const lanes = new Lanes(by("lanes"), by("lane-words"), by("window"));
const rounds = new Rounds(by("matrix"), by("round-words"), by("round-rows"));
const charts = new Charts(Object.fromEntries(["loss", "shares", "pace", "traffic"].map((id) => [id, by(id)])));
const announcer = new panels.Announcer(by("said"));
let due = false, notes = -1, again = AGAIN_MS, drawn = 0;

function draw(all = false) {
  if (!run.now || document.hidden) return;
  document.body.dataset.loaded = "yes";
  due = false;
  drawn += 1;
  panels.head(run);
  panels.tiles(run);
  panels.learners(run);
  lanes.draw(run);
  rounds.draw(run);
  if (all || drawn % 2) charts.draw(run, all);
  if (all || drawn % 2) { panels.ledger(run); panels.fragments(run); }
  if (run.notes.at(-1)?.[0] !== notes) { notes = run.notes.at(-1)?.[0]; panels.notes(run); }
}

function connection(state, words) {
  document.body.dataset.connection = state;
  by("connection").textContent = words;
  by("lost").hidden = state !== "lost";
  if (state !== "lost") by("lost").textContent = "";
}

function lost(event) {
  const over = run.now?.phase === "finished" || run.now?.phase === "ending";
  connection("lost", over ? "run over" : "no connection");
  const why = over ? "The run is over and its syncer has stopped." : "The syncer does not answer: it was stopped, or died and is being started again.";
  const words = `${why} What you see is the last that is known; this page connects again by itself.`;
  if (by("lost").textContent !== words) by("lost").textContent = words;
  setTimeout(connect, again);
  again = Math.min(AGAIN_MOST_MS, 1.6 * again);
}

function connect() {
  const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/live`);
  socket.onmessage = (event) => {
    const message = JSON.parse(event.data);
    again = AGAIN_MS;
    if (document.body.dataset.connection !== "live") connection("live", "live");
    announcer.hear(run.take(message));
    due = true;
  };
  socket.onclose = lost;
}

watch(() => { legend(by("legend")); draw(true); });
legend(by("legend"));
by("window").addEventListener("change", () => draw());
by("loss-axis").addEventListener("change", (event) => { charts.lossAxis = event.target.value; draw(true); });
document.addEventListener("visibilitychange", () => draw(true));
window.addEventListener("resize", () => { due = true; });
setInterval(() => { if (due) draw(); }, DRAW_MS);
connect();
