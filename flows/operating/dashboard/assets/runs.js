// The page of runs: their list, the plots of those that are chosen, and the settings in which these differ.
import { ago, element, getJson, inAddress, lasting, replace, rounded, rows } from "./elements.js";
import { drawPanels } from "./panels.js";

const place = document.getElementById("panels");
const pages = new Map(); // run -> { changed_at, page }
let list, chosen = [], summaries = [], prefectUrl = "";

export function chosenRuns() {
  return chosen;
}

// `choose` is called with the runs that the user selects in the list.
export function startRuns(choose) {
  list = new Tabulator("#run-list", {
    index: "run", layout: "fitColumns", height: "22em", placeholder: "nothing has been trained here",
    selectableRows: true, rowHeader: false,
    // the whole text of a cell that cuts it, as an element, because a string would be read as HTML
    columnDefaults: { tooltip: (event, cell) => element("span", cell.getElement().textContent) },
    columns: [
      { title: "recipe", field: "recipe", headerFilter: "input", widthGrow: 2.1 },
      { title: "seed", field: "seed", widthGrow: 1.1, minWidth: 60 },
      { title: "stage", field: "stage", headerFilter: "input", widthGrow: 1.8 },
      { title: "state", field: "state", widthGrow: 1.8 },
      { title: "headline", field: "value", widthGrow: 2.2, formatter: (cell) => headlineOf(cell.getData()) },
      { title: "started", field: "started", widthGrow: 1.7, minWidth: 82,
        sorter: (text, otherText, row, other) => row.getData().began_at - other.getData().began_at },
      { title: "took", field: "took", widthGrow: 1.2, formatter: (cell) => lasting(cell.getValue()) },
      { field: "changed_at", visible: false }, // which sorts the list
    ],
  });
  list.on("rowClick", (event, row) => {
    const { run } = row.getData();
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) choose([run]);
    else choose(chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run]);
  });
  for (const id of ["smoothing", "logarithmic"]) document.getElementById(id).addEventListener("input", redraw);
  document.getElementById("same-width").addEventListener("input", (event) => {
    place.classList.toggle("wide", event.target.checked);
  });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return new Promise((built) => list.on("tableBuilt", built));
}

function stateOf({ state, steps, total_steps }) {
  return state === "running" && total_steps ? `step ${rounded(steps)}/${rounded(total_steps)}` : state;
}

function headlineOf({ headline, value }) {
  const name = { evaluation_average: "held out", solve_rate: "solved", loss: "loss" }[headline] ?? "";
  return name && `${name} ${rounded(value)}`;
}

// Shows the runs of a snapshot and redraws the chosen ones that have new steps.
export async function updateRuns(snapshot) {
  prefectUrl = snapshot.prefect_url;
  // a cell is drawn again only when its own field changes
  summaries = snapshot.runs.map((run) => ({
    ...run, state: stateOf(run), started: ago(run.began_at, snapshot.at),
    took: run.began_at === null ? null : run.changed_at - run.began_at,
  }));
  const known = new Set(summaries.map(({ run }) => run));
  if (list.getData().some(({ run }) => !known.has(run))) await list.setData(summaries);
  else await list.updateOrAddData(summaries);
  if (!list.getSorters().length) list.setSort("changed_at", "desc");
  await showRuns(chosen);
}

// Draws these runs, or the newest RL run when there are none.
export async function showRuns(wanted) {
  const known = wanted.filter((run) => summaries.some((one) => one.run === run));
  const newest = summaries.find(({ headline }) => headline !== "loss" && headline !== "") ?? summaries[0];
  const before = chosen;
  chosen = known.length || !newest ? known : [newest.run];
  list.deselectRow();
  list.selectRow(chosen);
  if (chosen.length) document.getElementById("attempts-link").href = `#attempts?run=${encodeURIComponent(chosen[0])}`;
  const flowRun = summaries.find(({ run }) => run === chosen[0])?.flow_run_id;
  const flowRunLink = document.getElementById("flow-run-link");
  flowRunLink.hidden = !flowRun;
  flowRunLink.href = `${prefectUrl}runs/flow-run/${encodeURIComponent(flowRun)}`;
  const changed = await Promise.all(chosen.map(load));
  if (changed.some(Boolean) || before.join() !== chosen.join()) redraw();
}

async function load(run) {
  const { changed_at } = summaries.find((one) => one.run === run);
  if (pages.get(run)?.changed_at === changed_at) return false;
  pages.set(run, { changed_at, page: await getJson(`/runs/${inAddress(run)}`) });
  return true;
}

function redraw() {
  const found = chosen.map((run) => pages.get(run)?.page).filter(Boolean);
  drawPanels(place, found, {
    smoothing: Number(document.getElementById("smoothing").value),
    logarithmic: document.getElementById("logarithmic").checked,
  });
  if (!found.length) place.append(element("p", "nothing has been trained here", "empty"));
  showSettings(found);
}

// Of one run the settings of its stage. Of several runs what differs: first in their recipes, then only in their stages.
function showSettings(found) {
  const isComparison = found.length > 1, areRecipesKept = found.every(({ recipe }) => Object.keys(recipe).length);
  const ofRecipe = isComparison && areRecipesKept ? lines(found.map(({ recipe }) => recipe)) : [];
  const isNamed = ([name]) => ofRecipe.some(([key]) => `.${key}`.endsWith(`.${name}`));
  const ofStage = lines(found.map(({ settings }) => settings)).filter((line) => !isNamed(line));
  const differing = areRecipesKept ? `${ofRecipe.length} recipe settings differ, ${ofStage.length} others` : `${ofStage.length} settings differ`;
  document.getElementById("settings-title").textContent = isComparison ? differing : `Settings (${ofStage.length})`;
  replace("settings", found.length ? rows(["setting", ...found.map(({ run }) => run)],
    [...ofRecipe, ...ofStage].map((cells) => ({ cells }))) : [], "no run is chosen");
}

// Name and value of each setting in each of the tables; of several tables only where they differ.
function lines(tables) {
  const names = [...new Set(tables.flatMap((table) => Object.keys(table)))].sort();
  const all = names.map((name) => [name, ...tables.map((table) => JSON.stringify(table[name]) ?? "not there")]);
  return tables.length > 1 ? all.filter(([, first, ...others]) => others.some((one) => one !== first)) : all;
}
