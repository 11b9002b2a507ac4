// The page: which part of it the address names, and the snapshots from /events.
import { showAttempts, startAttempts } from "./attempts.js";
import { showParts, updateOperations } from "./operations.js";
import { chosenRuns, showRuns, startRuns, updateRuns } from "./runs.js";

const PAGES = ["runs", "attempts", "cycles", "fleet", "status", "reports"];

// #PAGE?run=NAME&run=NAME
function address() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: PAGES.includes(page) ? page : PAGES[0], runs: new URLSearchParams(query).getAll("run") };
}

function addressOf(page, runs) {
  return `#${page}${runs.length ? "?" : ""}${new URLSearchParams(runs.map((run) => ["run", run]))}`;
}

async function show() {
  const { page, runs } = address();
  for (const name of PAGES) document.getElementById(name).hidden = name !== page;
  for (const entry of document.querySelectorAll("nav a[href^='#']")) {
    entry.className = entry.getAttribute("href").split("?")[0] === `#${page}` ? "open" : "";
  }
  if (page === "runs") await showRuns(runs.length ? runs : chosenRuns());
  if (page === "attempts") await showAttempts(runs[0] ?? chosenRuns()[0]);
}

function fail(error) {
  const state = document.getElementById("state");
  state.className = "lost";
  state.textContent = error.message;
}

async function start() {
  await Promise.all([startRuns((runs) => { location.hash = addressOf("runs", runs); }), startAttempts()]);
  document.getElementById("with-finished").addEventListener("input", showParts);
  let isFirst = true;
  const take = async (snapshot) => {
    updateOperations(snapshot);
    await updateRuns(snapshot);
    if (!isFirst) return;
    isFirst = false;
    addEventListener("hashchange", () => show().catch(fail));
    await show();
  };
  const events = new EventSource("/events");
  events.onmessage = (event) => take(JSON.parse(event.data)).catch(fail);
  events.onerror = () => fail(new Error("the dashboard does not answer; trying again"));
}

start();
