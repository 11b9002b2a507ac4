// The pages of cycles, status and reports, and the bars of running stages.
import { ago, element, inAddress, link, replace, rows } from "./elements.js";

const MEBIBYTE = 2 ** 20;
let newest;

function stage({ part, done_ratio, progress }) {
  const bar = element("div", undefined, "bar"), filled = element("div");
  filled.style.width = `${100 * done_ratio}%`;
  bar.append(filled);
  const made = element("div");
  made.append(element("div", `${part}: ${Math.round(100 * done_ratio)} % ${progress}`), bar);
  return made;
}

function arm({ checkpoint, share, interactions, sessions }) {
  return `${checkpoint || "nothing"}: ${Math.round(100 * share)} % of sessions, ` +
    `${interactions} interactions, ${sessions} settled sessions`;
}

function canary({ line, since, control, candidate, test }, now) {
  const looks = !test ? "not tested by this machine's `ostinato up`" :
    `${test.looks_done} of ${test.looks} looks done` +
    (test.next_look_sessions === null ? "" : `, next at ${test.next_look_sessions} sessions of each arm`) +
    (test.next_look_judged_sessions === 0 ? "" : `, ${test.next_look_judged_sessions} with an edit kept or reverted`) +
    `; a worsening of ${Math.round(100 * test.detectable_difference)} points is shown with probability 0.8`;
  const from = test ? new Date(1000 * test.promoted_from).toLocaleString() : "";
  return { cells: [line, ago(since, now), arm(control), arm(candidate), looks, test ? test.last_verdict : "", from] };
}

function chain(versions, now) {
  const last = versions.at(-1);
  const size = (list) => `${(list.reduce((sum, one) => sum + one.stored_bytes, 0) / MEBIBYTE).toFixed(1)} MiB`;
  return { cells: [last.chain, `${last.version}`, `${last.kind}, ${size([last])}`, size(versions), ago(last.published_at, now)] };
}

export function updateOperations(snapshot) {
  newest = snapshot;
  const now = snapshot.at;
  const running = snapshot.parts.filter(({ state, done_ratio }) => state === "running" && done_ratio !== null);
  document.getElementById("stages").replaceChildren(...running.map(stage));
  const state = document.getElementById("state");
  state.className = snapshot.parts.some(({ fault }) => fault) ? "lost" : "";
  state.textContent = snapshot.sentence;
  document.getElementById("at").textContent = new Date(1000 * now).toLocaleTimeString();
  document.getElementById("prefect").href = snapshot.prefect_url;
  showParts();
  replace("versions", snapshot.chains.length ? rows(["chain", "version", "newest", "stored in all shown", "published"],
    snapshot.chains.map((versions) => chain(versions, now))) : [], "no weights were published here");
  replace("cycle-list", snapshot.cycles.length ? rows(["cycle", "line", "opened", "outcome", "stages"],
    snapshot.cycles.map((cycle) => ({
      cells: [cycle.cycle_id, cycle.line, ago(cycle.opened_at, now), cycle.outcome || "open",
        Object.keys(cycle.stages).join(", ")],
    }))) : [], "no cycle yet");
  replace("canary-list", snapshot.canaries.length ? rows(
    ["line", "since", "control", "candidate", "looks", "last look", "not promoted before"],
    snapshot.canaries.map((one) => canary(one, now))) : [], "no canary is open");
  replace("promotions", snapshot.promotions.length ? rows(["line", "action", "checkpoint", "when", "reason"],
    snapshot.promotions.map((row) => ({
      cells: [row.line, row.action, row.checkpoint_id, ago(row.at, now), row.reason],
    }))) : [], "nothing was promoted yet");
  replace("pages", snapshot.pages.map((page) => {
    const item = element("li");
    item.append(link(page, `/reports/${inAddress(page)}`));
    return item;
  }), "no report yet");
}

export function showParts() {
  const parts = newest.parts.filter(({ state }) => document.getElementById("with-finished").checked || state !== "finished");
  replace("parts", rows(["part", "state", "waits for", "since", "cause, progress"], parts.slice().reverse().map((part) => ({
    cells: [part.part, part.state, part.waits_for, ago(part.since, newest.at), part.cause || part.progress],
    fault: part.fault,
  }))), "");
}
