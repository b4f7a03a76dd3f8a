// Everything in words and numbers: tiles, the table of learners, the ledger, the fragments, what happened.

import { NONE, byName, bytes, clock, count, decimal, listing, measure, percent, span } from "./words.js";

const by = (id) => document.getElementById(id);
const FATES = { merged: "merged", dropped: "dropped", lost: "lost", rolled_back: "rolled back", filtered: "filtered", in_flight: "in flight" };
const CAUSES = { overlap: "by overlap", missed: "in missed rounds", cut: "not merged at the cut that the run began from" };
const CAUSES_OF = { dropped: ["overlap", "missed"], lost: ["cut"] };
const WAYS = { min: "less is better", max: "more is better" };
const FRAGMENTS = 256, ALARMS = 4;
const AWAY = ["away", "gone", "restarting", "done"];
const IMPORTANT = new Set(["killed", "exited", "lost", "left", "recovered", "returned", "quarantined", "alarm", "restored", "unbalanced", "low_share", "suspect", "above", "fault", "reigned", "ending", "finished"]);

// The page is changed only where a text has changed.
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function head(run) {
  const now = run.now;
  put(by("run"), `· run ${now.run}`);
  const spent = now.budgeted ? `${percent(now.progress)} · ` : "";
  document.title = `${spent}Atoll ${now.run}`;
  put(by("phase"), now.phase);
  by("progress").value = now.progress;
  by("progress").hidden = !now.budgeted;
  const left = now.phase === "training" && now.left_s !== null ? ` · ${clock(now.left_s)} left` : now.budgeted ? "" : " · no budget: it trains until its scripts end";
  put(by("progress-words"), now.phase === "waiting" ? "waiting for the first parameters" : `${spent}${clock(now.elapsed_s)} ${now.term <= 1 ? "elapsed" : "since it went on"}${left}`);
  const alarms = [now.alarm, now.store_alarm, ...now.learners.map((one) => one.alarm)].filter(Boolean);
  by("alarm").hidden = !alarms.length;
  put(by("alarm"), alarms.length ? `Alarm: ${listing(alarms, ALARMS)}` : "");
  const notice = now.notice || now.shortage;
  by("notice").hidden = !notice;
  put(by("notice"), notice || "");
}

export function tiles(run) {
  const now = run.now, last = run.samples.at(-1), of = (key) => (last ? last[run.sample.indexOf(key)] : null);
  const behind = now.learners.filter((one) => one.state === "training").map((one) => run.behind(one));
  const facts = [
    ["round", count(now.round), `${now.fragments} fragments`],
    ["step", count(now.global_step), ""],
    ["validation loss", measure(now.validation_loss), now.validation_round === null ? "" : `${now.loss_unit} at round ${count(now.validation_round)}`],
    ...Object.entries(now.metrics).map(([name, value]) => [name, measure(value), WAYS[now.directions[name]] ?? ""]),
    ["training loss", measure(of("loss")), "middle learner"],
    ["effective H", `${decimal(now.effective_h, 1)} of ${now.sync_every}`, `mean ${decimal(now.effective_h_mean, 1)}, p95 ${decimal(now.effective_h_p95, 0)}${now.narrowest ? `; ${now.narrowest}` : ""}`],
    ["overlap", `${decimal(now.overlap_steps, 1)} of ${now.overlap}`, `steps; up to ${count(now.rounds_under_way)} rounds under way`],
    ["outer step", `${decimal(now.outer_step)} (η ${now.outer_lr})`, `ρ of merged gradients ${decimal(now.rho)}`],
    ["grace window", now.synchronous ? "all live" : span(now.grace_s), `quorum ${now.quorum}`],
    ["staleness", behind.length ? count(Math.max(...behind)) : NONE, "rounds behind, most"],
    ["gap of rounds", span(now.median_gap_s), "median"],
    ["tokens per second", count(now.tokens_per_s), `${count(now.tokens)} in all`],
    ["bytes in", `${bytes(of("in_per_s"))}/s`, bytes(now.bytes_in)],
    ["bytes out", `${bytes(of("out_per_s"))}/s`, bytes(now.bytes_out)],
    ["standby", now.standby || "none", ""],
    ["store", now.store ? (now.store_rounds ? `${count(now.store_rounds)} rounds behind` : "up to date") : "none", now.store_rounds ? span(now.store_s) : ""],
    ["relays", now.relays.length ? `${now.relays.filter((one) => one.connected).length} of ${now.relays.length}` : "none", now.relays.length ? "connected" : ""],
    ["newest cut", now.cut === null ? NONE : count(now.cut), `term ${now.term}`],
  ];
  const place = by("tiles");
  const names = facts.map(([name]) => name).join("\n");
  if (place.dataset.names !== names) { place.replaceChildren(...facts.map(tile)); place.dataset.names = names; }
  facts.forEach(([, value, small], i) => {
    const [strong, beside] = place.children[i].lastElementChild.children;
    put(strong, value);
    put(beside, small);
  });
  shares(run);
}

function tile([name]) {
  const box = document.createElement("div"), title = document.createElement("dt"), value = document.createElement("dd");
  title.textContent = name;
  value.append(document.createElement("span"), document.createElement("small"));
  box.append(title, value);
  return box;
}

function shares(run) {
  const now = run.now, alive = now.learners.filter((one) => !AWAY.includes(one.state)).length;
  const share = now.expected ? alive / now.expected : null;
  const since = now.term > 1 ? `in term ${now.term}` : "so far";
  bar("alive", share, `now, ${alive} of ${now.expected} · ${percent(now.liveness)} ${since}`);
  const round = run.rounds.at(-1);
  bar("part", now.participation, round ? `of late · last round ${now.members.length} of ${round[4]}` : "");
  bar("good", now.goodput, since);
  const known = now.learners.filter((one) => one.merged_share !== null).sort((a, b) => a.merged_share - b.merged_share);
  bar("merged", now.merged_share, known.length > 1 ? `least: ${known[0].learner}, ${percent(known[0].merged_share)}` : "");
}

function bar(name, share, words) {
  put(by(`${name}-now`), percent(share));
  put(by(`${name}-words`), words);
  by(`${name}-bar`).style.width = `${100 * Math.min(1, share ?? 0)}%`;
}

export function learners(run) {
  const body = by("rows"), lanes = new Map(run.names.map((name, lane) => [name, lane]));
  const known = [...run.now.learners].sort((a, b) => byName(a.learner, b.learner));
  while (body.rows.length > known.length) body.deleteRow(-1);
  known.forEach((one, i) => {
    const row = body.rows[i] ?? learnerRow(body), lane = lanes.get(one.learner);
    const state = lane === undefined || one.state === "done" ? one.state : run.state(lane);
    const here = !AWAY.includes(state);
    const texts = [one.learner, state, one.incarnation, count(one.step), here ? count(one.tokens_per_s) : NONE,
      measure(one.loss), percent(one.merged_share), decimal(one.agreement, 2), percent(one.influence),
      here ? percent(one.round_share) : NONE, here ? ways(one) : NONE, here ? count(run.behind(one)) : NONE, one.in_last_round ? "yes" : "no"];
    texts.forEach((text, cell) => put(row.cells[cell], String(text)));
    if (row.dataset.learner !== one.learner) row.dataset.learner = one.learner;
    if (row.dataset.state !== state) row.dataset.state = state;
    const alarm = one.alarm ? "yes" : "no";
    if (row.dataset.alarm !== alarm) row.dataset.alarm = alarm;
    if (row.title !== one.alarm) row.title = one.alarm;
  });
}

function learnerRow(body) {
  const row = body.insertRow(), name = document.createElement("th");
  name.scope = "row";
  row.append(name);
  for (let i = 0; i < 12; i += 1) row.insertCell();
  return row;
}

// Megabits per second that its link carries up and down, as it measured them.
function ways(one) {
  return [one.up_rate, one.down_rate].map((rate) => (rate ? decimal((8 * rate) / 1e6, 1) : NONE)).join(" / ");
}

export function ledger(run) {
  const fates = run.now.fates, computed = fates.computed || 0;
  const bars = by("fates"), rows = by("ledger");
  if (!rows.childElementCount) {
    bars.replaceChildren(...Object.keys(FATES).map((fate) => Object.assign(document.createElement("span"), { className: `f-${fate}` })));
    rows.replaceChildren(...[...Object.keys(FATES), "computed"].map(fateRow));
  }
  Object.keys(FATES).forEach((fate, i) => { bars.children[i].style.width = `${computed ? (100 * (fates[fate] || 0)) / computed : 0}%`; });
  [...Object.keys(FATES), "computed"].forEach((fate, i) => {
    put(rows.rows[i].cells[1], computed ? count(fates[fate] || 0) : NONE);
    put(rows.rows[i].cells[2], computed ? percent((fates[fate] || 0) / computed) : "");
    put(rows.rows[i].cells[3], (CAUSES_OF[fate] ?? []).filter((cause) => cause !== "cut" || run.now.dropped_by_cause.cut).map((cause) => causeWords(run.now, cause, computed)).join(", "));
  });
}

function causeWords(now, cause, computed) {
  return computed ? `${percent((now.dropped_by_cause[cause] || 0) / computed)} ${CAUSES[cause]}` : "";
}

function fateRow(fate) {
  const row = document.createElement("tr"), name = document.createElement("th"), key = document.createElement("span");
  name.scope = "row";
  key.className = fate === "computed" ? "" : `key f-${fate}`;
  name.append(key, FATES[fate] ?? "computed, in all");
  row.append(name, ...[1, 2, 3].map(() => document.createElement("td")));
  row.lastElementChild.className = "faint";
  return row;
}

export function fragments(run) {
  const versions = run.now.versions, newest = run.rounds.at(-1)?.[2], list = by("fragments");
  const shown = versions.slice(0, FRAGMENTS);
  while (list.childElementCount > shown.length) list.lastElementChild.remove();
  while (list.childElementCount < shown.length) {
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("span"), { className: "faint", textContent: list.childElementCount }), document.createElement("span"));
    list.append(item);
  }
  shown.forEach((version, i) => {
    put(list.children[i].lastElementChild, version < 0 ? NONE : `v${version}`);
    const is = i === newest ? "yes" : "no";
    if (list.children[i].dataset.newest !== is) list.children[i].dataset.newest = is;
  });
  put(by("fragment-words"), versions.length ? `${versions.length} of them, version ${Math.min(...versions)} to ${Math.max(...versions)}` : "");
}

export function notes(run) {
  const items = run.notes.slice().reverse().map(([at, kind, text]) => {
    const item = document.createElement("li"), time = document.createElement("time"), word = document.createElement("b"), said = document.createElement("span");
    item.dataset.kind = kind;
    time.textContent = run.began && at >= run.began ? clock(at - run.began) : "before";
    word.textContent = kind;
    said.textContent = text;
    item.append(time, word, said);
    return item;
  });
  by("notes").replaceChildren(...items);
}

// Says important events to screen readers, a few at a time and not too often.
export class Announcer {
  constructor(place, everyMs = 3000) {
    Object.assign(this, { place, everyMs, waiting: [], timer: null });
  }

  hear(notes) {
    this.waiting.push(...notes.filter((note) => IMPORTANT.has(note[1])).map((note) => note[2]));
    if (this.waiting.length && this.timer === null) this.timer = setTimeout(() => this.#speak(), 200);
  }

  #speak() {
    const some = this.waiting.splice(0, 3), more = this.waiting.length;
    this.waiting = [];
    this.place.textContent = some.join(". ") + (more ? `. And ${more} more events.` : ".");
    this.timer = setTimeout(() => { this.timer = null; if (this.waiting.length) this.#speak(); }, this.everyMs);
  }
}
