// The pages of cycles, fleet, status and reports, and the bars of running stages.
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
    `; the last look shows a fall from 50 % to ${Math.max(0, Math.round(50 - 100 * test.detectable_difference))} % of all sessions with probability 0.8`;
  const from = test ? new Date(1000 * test.promoted_from).toLocaleString() : "";
  return { cells: [line, ago(since, now), arm(control), arm(candidate), looks, test ? test.last_verdict : "", from] };
}

function version({ chain, version, kind, stored_bytes, published_at }, now) {
  const size = stored_bytes < MEBIBYTE ? `${(stored_bytes / 1024).toFixed(1)} KiB` : `${(stored_bytes / MEBIBYTE).toFixed(1)} MiB`;
  return { cells: [chain, `${version}`, kind, size, ago(published_at, now)] };
}

function partRow({ part, stage, state, waits_for, since, cause, progress, fault }) {
  const names = stage ? [stage, part.slice(stage.length + 1)] : [part];
  return { cells: [...names, state, waits_for, ago(since, newest.at), cause || progress], fault };
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
  const fleet = snapshot.parts.filter(({ stage }) => stage);
  replace("fleet-parts", fleet.length ? rows(["stage", "part", "state", "waits for", "since", "cause, progress"],
    fleet.map(partRow)) : [], "no RL stage runs here");
  replace("versions", snapshot.versions.length ? rows(["chain", "newest version", "kind", "stored", "published"],
    snapshot.versions.map((one) => version(one, now))) : [], "no weights were published here");
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
  const isShown = ({ state, stage }) => !stage && (document.getElementById("with-finished").checked || state !== "finished");
  replace("parts", rows(["part", "state", "waits for", "since", "cause, progress"],
    newest.parts.filter(isShown).reverse().map(partRow)), "");
}
